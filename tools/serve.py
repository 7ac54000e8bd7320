"""Engines of this machine for a run that is in progress, on any machine that sees its directory.

bash run.sh serve --run NAME [--engines N]     Ctrl-C takes them away, the run goes on
"""

import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from plumbing import launch


def serve(argv) -> int:
    """Start engines and wait for the run's end; returns the exit code."""
    gpus = launch.gpu_count()
    given = cfg.parse(argv, cfg.Config())
    started, start = launch.wait_for_node_0(given)
    # flags that are not given are the run's
    c = cfg.parse(argv, started)
    c.trainers = 0
    c.nnodes = 1
    c.engines = given.engines or gpus // c.tensor_parallel or 1
    # other random numbers than the run's own engines
    c.seed = secrets.randbits(30)
    cfg.require(
        len(launch.spread(c, gpus)[1]) == c.engines and (gpus or c.weight_backend == "gloo"),
        f"--engines {c.engines} x {c.tensor_parallel} GPUs: this machine has {gpus}",
    )
    host = launch.own_address(c.master_addr)
    processes = []
    for name, env, command in launch.engine_commands(c, gpus, 0, host):
        processes.append((f"serve-{host}-{os.getpid()}-{name}", env, command))
    print(
        f"run.sh: {c.engines} engines for {c.out}/{c.run}; Ctrl-C takes them away, the run goes on"
    )
    launch.show(processes, c.dry_run)
    if not c.dry_run:
        launch.prepare(c)
    return 0 if c.dry_run else launch.run(c, processes, start)


if __name__ == "__main__":
    launch.main(sys.argv[1:], serve)
