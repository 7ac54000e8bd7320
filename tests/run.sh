#!/usr/bin/env bash
# All tests: the set-up of run.sh, then pytest. Extra arguments go to pytest: bash tests/run.sh -k queue
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run.sh setup
exec "${PIPELINE_PYTHON:-$PWD/.venv/bin/python}" -m pytest -q -x --durations=8 tests "$@"
