#!/bin/bash
# A run on SLURM, from the repository on a file system that all nodes share:
#
#   sbatch examples/slurm.sh    # the paper's experiment: 48 GPUs serve, 80 train
#   sbatch --nodes 2 examples/slurm.sh --engines 8 --trainers 8 --out /shared/out
#
# This was tried with a stand-in for srun, and not on a cluster.
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --time=24:00:00
# The run has 330 s to save before its time is up; --stop_timeout of `math` is 300
#SBATCH --signal=TERM@330 --requeue --open-mode=append
set -euo pipefail

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR
bash run.sh setup
code=0
# The run goes on when a node that only serves dies
srun --kill-on-bad-exit=0 bash run.sh math --engines 48 --trainers 80 "$@" || code=$?
# 143: the run was told to stop, as its time was up, and has saved; the same command continues it
[ "$code" != 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
