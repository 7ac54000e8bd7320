#!/usr/bin/env bash
# Checks this code on one GPU in ten minutes, without the internet; bench/gpu.py has the checks.
#
#   bash bench/gpu.sh                 one table, and bench/results/gpu.json
#   bash bench/gpu.sh --only parity   some of the checks; --help lists all flags
#   bash bench/gpu.sh --rehearse      the same lines on the CPU, with tiny shapes
#
# Takes the first of python, python3 and .venv/bin/python whose torch sees a GPU.
# PIPELINE_PYTHON=/path/to/python takes that one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
sees_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
python=${PIPELINE_PYTHON:-}
for p in python python3 .venv/bin/python; do
  [ -n "$python" ] || ! sees_gpu "$p" || python=$p
done
exec "${python:-.venv/bin/python}" bench/gpu.py "$@"
