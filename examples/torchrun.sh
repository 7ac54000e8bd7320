#!/bin/bash
# A run under torchrun, for clusters that start torchrun: once on every node, as its only process.
#
#   bash examples/torchrun.sh <nodes> <this node, from 0> <address of node 0> [preset] [--knob ...]
#
# --out must be on a file system that all nodes share. Where torchrun is not needed, set NNODES,
# NODE_RANK and MASTER_ADDR instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run.sh setup
# torchrun is part of torch, so that the python that has torch runs it
python=${PIPELINE_PYTHON:-$PWD/.venv/bin/python}
# run.sh starts the ranks itself. It saves when it is told to stop, which can take longer than the
# 30 s after which torchrun kills by default
exec "$python" -m torch.distributed.run \
  --nnodes "$1" --node-rank "$2" --master-addr "$3" --master-port 29400 \
  --nproc-per-node 1 --shutdown-timeout 360 --no-python \
  bash run.sh "${@:4}"
