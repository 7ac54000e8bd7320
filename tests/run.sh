#!/usr/bin/env bash
# The tests: the set-up of run.sh, then pytest, a line a test as it goes.
#
#   bash tests/run.sh            in eight minutes: real engine, a real run end to end, a real kill
#   bash tests/run.sh --all      also the slow ones: kill matrix, hosts, ledger, resume on ranks, edits
#   bash tests/run.sh -k queue   other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# By default the first failure ends the tests. With --all every failure is worth seeing.
selection=(-x -m "not slow")
arguments=()
extra=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then selection=() extra=(smol); else arguments+=("$argument"); fi
done
bash run.sh setup "${extra[@]}"
# Two processes take a file at a time, as most of a run's start is one thread. A debugger needs `-n 0`.
# If a test makes its process crash, all tests end: otherwise pytest-xdist would start that test again and again.
exec "${PIPELINE_PYTHON:-$PWD/.venv/bin/python}" -m pytest -v -n 2 --dist loadfile --max-worker-restart 0 --no-loadscope-reorder --durations=15 --no-header "${selection[@]}" "${arguments[@]}"
