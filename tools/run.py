"""`bash run.sh ...` once there is an environment: a run's part on this node, or engines for one that is in progress.

bash run.sh [preset] --knob value ...          from each node
bash run.sh serve --run NAME [--engines N]     from any machine that sees its directory; Ctrl-C takes them away
"""

import functools
import os
import secrets
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from plumbing import checkpoints, placement, rundir, supervise
from plumbing.queues import read_json


def train(argv) -> int:
    """`run.sh [preset] --knob value ...`: this node's part of a run; returns the exit code."""
    gpus = placement.gpu_count()
    node, n = placement.which_node()
    c = cfg.parse(argv)
    c.nnodes = n
    # of the others nothing is known, nor needed
    hosts = [f"<node {k}>" for k in range(n)]
    head = os.environ.pop("MASTER_ADDR", "")
    if n == 1 or not c.dry_run:
        hosts[node] = placement.own_address(head if n > 1 else "127.0.0.1")
    c.master_addr = hosts[0]
    placement.resolve(c, gpus)
    lock, start, opening = [], "", None
    done = "dry run, nothing is started"
    if node == 0 and c.dry_run:
        placement.prepare(c, ["train", "test"])
    elif node == 0:
        lock, start = rundir.hold(c)
        opening = begin(c, start)
        done = opening.summary
    elif not c.dry_run:
        placement.prepare(c)
        c, start = rundir.wait_for_node_0(c)
        # refused here unless this node has node 0's GPUs
        placement.resolve(c, gpus)
        done = "configuration from node 0"
    print(
        f"run.sh: {done} | task {c.task}, model {c.model} | {c.steps} steps of {c.batch_size} samples | "
        f"engines: {c.engines}, trainer ranks: {c.trainers}, GPUs: {gpus * n}, cores: {len(os.sched_getaffinity(0))} | {c.dtype}"
    )
    for k in range(n) if c.dry_run else [node]:
        processes = placement.commands(c, gpus, k, hosts[k])
        print(f"run.sh: node {k} of {n}")
        placement.show(processes, c.dry_run)
    return 0 if c.dry_run else run(c, processes, start, lock, opening)


def begin(c: cfg.Config, start: str) -> rundir.Opening:
    """Node 0: all that is to be done before processes start. What can be refused is refused before anything is touched."""
    opening = rundir.Opening(c)
    placement.prepare(c, ["train", "test"])
    if c.trainers > 1:
        claim = supervise.claim_port(c.master_addr, c.master_port)
        c.master_port = claim.getsockname()[1]
        # never closed
        claim.detach()
    opening.make()
    rundir.write(c, start)
    return opening


def run(c, commands, start, lock=(), opening=None) -> int:
    """Start these processes, wait for the run's end, stop what is left: the exit code. lock, start, opening: node 0's."""
    run_dir = Path(c.out, c.run)
    processes = []
    for name, env, command in commands:
        if "--port" in command:
            processes.append(supervise.Engine(run_dir, name, env, command, c.start_timeout))
        else:
            # if this process is killed, nobody gets the run before the trainer has saved
            files = lock if name.startswith("train") else []
            processes.append(supervise.Process(run_dir, name, env, command, files))
    is_over = functools.partial(rundir.node_0_is_done, c, start)
    ended = supervise.run(processes, c.stop_timeout, (lambda: False) if lock else is_over)
    if ended:
        supervise.say(ended_words(c, opening) * bool(lock) + ended.details)
    if lock and not ended:
        subprocess.run([sys.executable, "tools/report.py", str(run_dir)], cwd=cfg.ROOT)
    return ended.code if ended else 0


def ended_words(c, opening):
    """What becomes of a run that has ended early."""
    run_dir = Path(c.out, c.run)
    newest = checkpoints.newest(run_dir)
    first = int(opening.newest.name[5:]) if opening and opening.newest else 0
    if opening and not read_json(run_dir / "queues" / "version.json").get("version", 0) > first:
        return f"run.sh: stopped before its first step: {opening.undo()}\n"
    continues = f"continues from {newest.name}" if newest else "starts anew: there is no checkpoint"
    return f"run.sh: stopped; the same command {continues}; tools/report.py {run_dir} shows it\n"


def serve(argv) -> int:
    """Start engines and wait for the run's end; returns the exit code."""
    gpus = placement.gpu_count()
    given = cfg.parse(argv, cfg.Config())
    started, start = rundir.wait_for_node_0(given)
    # flags that are not given are the run's
    c = cfg.parse(argv, started)
    c.trainers = 0
    c.nnodes = 1
    c.teacher = ""
    c.engines = given.engines or gpus // c.tensor_parallel or 1
    # other random numbers than the run's own engines
    c.seed = secrets.randbits(30)
    cfg.require(
        len(placement.spread(c, gpus)[1]) == c.engines and (gpus or c.weight_backend == "gloo"),
        f"--engines {c.engines} x {c.tensor_parallel} GPUs: this machine has {gpus}",
    )
    host = placement.own_address(c.master_addr)
    processes = []
    for name, env, command in placement.engine_commands(c, gpus, 0, host):
        processes.append((f"serve-{host}-{os.getpid()}-{name}", env, command))
    print(f"run.sh: {c.engines} engines for {c.out}/{c.run}; Ctrl-C takes them away")
    placement.show(processes, c.dry_run)
    if not c.dry_run:
        placement.prepare(c)
    return 0 if c.dry_run else run(c, processes, start)


def main(argv):
    supervise.end_at_signals()
    try:
        sys.exit(serve(argv[1:]) if argv[:1] == ["serve"] else train(argv))
    except (cfg.ConfigError, OSError) as e:
        sys.exit(f"run.sh: {e}")
    except supervise.Ended as e:
        print(f"run.sh: {e} during the preparation, nothing was started", file=sys.stderr)
        sys.exit(e.code)


if __name__ == "__main__":
    main(sys.argv[1:])
