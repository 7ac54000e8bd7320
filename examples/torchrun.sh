#!/bin/bash
# A run under torchrun, where that is what a cluster starts: once on every node, as its only process there.
#
#   bash examples/torchrun.sh <nodes> <this one, from 0> <address of node 0> [preset] [--knob value ...]
#
# --out must be on a file system that all nodes share. Without a reason for torchrun, set NNODES, NODE_RANK
# and MASTER_ADDR instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run.sh setup
# torchrun is torch's, and lies beside its python
python=${PIPELINE_PYTHON:-$PWD/.venv/bin/python}
# run.sh starts the ranks itself. Told to stop, it saves: by default torchrun kills it after 30 s
exec "$python" -m torch.distributed.run \
  --nnodes "$1" --node-rank "$2" --master-addr "$3" --master-port 29400 \
  --nproc-per-node 1 --shutdown-timeout 360 --no-python \
  bash run.sh "${@:4}"
