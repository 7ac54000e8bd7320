"""Start this node's part of a run, or add engines to a run in progress.

bash run.sh [preset] --knob value ...          on each node
bash run.sh serve --run NAME [--engines N]     on any machine that sees the run directory;
                                               Ctrl-C takes the engines away

run.sh calls this program once the Python environment is there.
"""

import contextlib
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
    """Start this node's part of a run and wait for its end; returns the exit code."""
    gpus = placement.gpu_count()
    node, node_count = placement.which_node()
    c = cfg.parse(argv)
    c.nnodes = node_count
    # The addresses of the other nodes are neither known here nor needed.
    hosts = [f"<node {k}>" for k in range(node_count)]
    head_address = os.environ.pop("MASTER_ADDR", "")
    if node_count == 1 or not c.dry_run:
        hosts[node] = placement.own_address(head_address if node_count > 1 else "127.0.0.1")
    c.master_addr = hosts[0]
    placement.resolve(c, gpus)
    lock = []
    start_id = ""
    opening = None
    summary = "dry run, nothing is started"
    if node == 0 and c.dry_run:
        placement.check_endpoint(c)
        placement.prepare(c, ["train", "test"])
        supervise.check_signals()
    elif node == 0:
        lock, start_id = rundir.hold(c)
        opening = begin(c, start_id)
        summary = opening.summary
    elif not c.dry_run:
        placement.prepare(c)
        supervise.check_signals()
        c, start_id = rundir.wait_for_node_0(c)
        # This call raises ConfigError unless this node has as many GPUs as node 0.
        placement.resolve(c, gpus)
        summary = "configuration from node 0"
    with undone_on_error(opening):
        processes = describe(c, summary, node, hosts, gpus)
    return 0 if c.dry_run else run(c, processes, start_id, lock, opening)


def describe(c, summary, node, hosts, gpus):
    """Print what is about to be started. Returns the processes of this node."""
    print(
        f"run.sh: {summary} | task {c.task}, model {c.model} | "
        f"{c.steps} steps of {c.batch_size} samples | "
        f"engines: {c.engines}, trainer ranks: {c.trainers}, GPUs: {gpus * len(hosts)}, "
        f"cores: {len(os.sched_getaffinity(0))} | {c.dtype}"
    )
    for k in range(len(hosts)) if c.dry_run else [node]:
        processes = placement.commands(c, gpus, k, hosts[k])
        print(f"run.sh: node {k} of {len(hosts)}")
        placement.show(processes, c.dry_run)
    return processes


def begin(c: cfg.Config, start_id: str) -> rundir.Opening:
    """Do on node 0 what must be done before processes start.

    What can be refused is refused before the run directory is changed.
    """
    placement.check_endpoint(c)
    placement.check_open_files(c)
    opening = rundir.Opening(c)
    placement.prepare(c, ["train", "test"])
    supervise.check_signals()
    if c.trainers > 1:
        claim = supervise.claim_port(c.master_addr, c.master_port)
        c.master_port = claim.getsockname()[1]
        # The socket stays open, so that no other run takes the port.
        claim.detach()
    opening.make()
    with undone_on_error(opening):
        rundir.write(c, start_id)
    return opening


@contextlib.contextmanager
def undone_on_error(opening):
    """Restore the run directory if this block raises anything: no process has been started yet.

    opening: None on nodes that have not changed the directory.
    """
    try:
        yield
    except BaseException:
        if opening:
            try:
                opening.undo()
            except OSError as e:
                supervise.say(f"run.sh: {opening.run_dir} could not be restored: {e}")
        raise


def run(c, commands, start_id, lock=(), opening=None) -> int:
    """Start these processes, wait for the run's end, stop what still runs; returns the exit code.

    commands: (name, environment, command) of each process. start_id: a text that names this start
    of the run. lock: on node 0 the open file that locks the run's name, in a list; see rundir.hold.
    opening: None on all other nodes.
    """
    run_dir = Path(c.out, c.run)
    with undone_on_error(opening):
        processes = [supervised(c, lock, *command) for command in commands]
    is_node_0 = bool(lock)
    # On node 0 the run ends with the trainer, on other machines it ends when node 0 is done.
    is_over = (
        (lambda: False) if is_node_0 else functools.partial(rundir.node_0_is_done, c, start_id)
    )
    ended = supervise.run(processes, c.stop_timeout, is_over)
    if ended:
        end_line = describe_end(c, opening) if is_node_0 else ""
        supervise.say(end_line + ended.details)
    elif is_node_0:
        subprocess.run([sys.executable, "tools/report.py", str(run_dir)], cwd=cfg.ROOT)
    return ended.code if ended else 0


def supervised(c, lock, name, env, command):
    """A process of a run, which is not started yet."""
    run_dir = Path(c.out, c.run)
    # placement.engine_commands names engines engine0, engine1, ..., and `serve` adds a prefix.
    if "engine" in name:
        return supervise.Engine(run_dir, name, env, command, c.start_timeout)
    # If this process is killed, the trainer still holds the lock until it has saved.
    files = lock if name.startswith("train") else []
    return supervise.Process(run_dir, name, env, command, files)


def describe_end(c, opening):
    """Return a line that says what the same command will do, after a run has ended early."""
    run_dir = Path(c.out, c.run)
    newest = checkpoints.newest(run_dir)
    first = checkpoints.version_of(opening.newest) if opening and opening.newest else 0
    version = read_json(run_dir / "queues" / "version.json").get("version", 0)
    if rundir.is_complete(run_dir):
        return f"run.sh: stopped after its last step; tools/report.py {run_dir} shows the run\n"
    # A step may be saved whose weights have not reached the engines, and so are not announced.
    if opening and version <= first and newest == opening.newest:
        return f"run.sh: stopped before its first step: {opening.undo()}\n"
    if newest is None:
        return (
            "run.sh: stopped; the same command begins a new run, as there is no checkpoint; "
            f"tools/report.py {run_dir} shows this one\n"
        )
    return (
        f"run.sh: stopped; the same command continues from {newest.name}; "
        f"tools/report.py {run_dir} shows the run\n"
    )


def serve(argv) -> int:
    """Start engines for a run in progress and wait for its end; returns the exit code."""
    gpus = placement.gpu_count()
    requested = cfg.parse(argv, cfg.Config())
    run_config, start_id = rundir.wait_for_node_0(requested)
    # Knobs that the command line does not set have the values of the run.
    c = cfg.parse(argv, run_config)
    c.trainers = 0
    c.nnodes = 1
    c.teacher = ""
    c.engines = requested.engines or gpus // c.tensor_parallel or 1
    # These engines must not draw the same random numbers as the engines of the run.
    c.seed = secrets.randbits(30)
    cfg.require(
        gpus or c.weight_backend == "gloo",
        f"{c.out}/{c.run} sends its weights from GPU to GPU (--weight_backend "
        f"{c.weight_backend}), and this machine has no GPU: serve from a machine with GPUs",
    )
    cfg.require(
        len(placement.spread(c, gpus)[1]) == c.engines,
        f"{c.engines} engines of {c.tensor_parallel} GPUs each do not fit this machine, which has "
        f"{gpus} GPUs: lower --engines, or use a larger machine",
    )
    host = placement.own_address(c.master_addr)
    # the id of a process would not do: in each container that serves it may be 1
    serve_id = secrets.token_hex(3)
    processes = []
    for name, env, command in placement.engine_commands(c, gpus, 0, host):
        processes.append((f"serve-{host}-{serve_id}-{name}", env, command))
    print(f"run.sh: {c.engines} engines for {c.out}/{c.run}; Ctrl-C takes them away")
    placement.show(processes, c.dry_run)
    if not c.dry_run:
        placement.prepare(c)
    return 0 if c.dry_run else run(c, processes, start_id)


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
