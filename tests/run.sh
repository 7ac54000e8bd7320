#!/usr/bin/env bash
# The tests: the set-up of run.sh, then pytest, a line a test as it goes.
#
#   bash tests/run.sh            in eight minutes: real engine, a real run end to end, a real kill
#   bash tests/run.sh --all      also the slow ones: kill matrix, hosts, ledger, resume on ranks, edits
#   bash tests/run.sh -k queue   other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# the default stops at the first failure; all of them are worth seeing when everything runs
which=(-x -m "not slow")
arguments=()
extra=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then which=() extra=(smol); else arguments+=("$argument"); fi
done
bash run.sh setup "${extra[@]}"
# two processes, a file at a time: most of a run's start is one thread; `-n 0` for a debugger
exec "${PIPELINE_PYTHON:-$PWD/.venv/bin/python}" -m pytest -v -n 2 --dist loadfile --no-loadscope-reorder --durations=15 --no-header "${which[@]}" "${arguments[@]}"
