"""How OpenMP's threads should wait on a CPU: a step of a tiny model's warm-up, quiet and busy.

    python bench/threads.py [--steps 30] [--rounds 3]

OpenMP's threads wait for each other by spinning. On a machine that has other work to do the thread
that is waited for may not be running, and the others then keep its core from it. Each setting warms
the toy's base model up for a few steps (tools/base_model.py), in turn with the others, first on the
quiet machine, then beside one busy loop per core. Prints milliseconds per step, the median and
the range of all rounds; the first step is left out. Leaves bench/results/threads.json.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import ROOT, in_turn, keep, machine, median_and_range, parser, result_file, table
from plumbing.placement import SLEEP_SOON

# by name: number of threads, and the environment
SETTINGS = {
    "two threads, as by default": (2, {}),
    "one thread": (1, {}),
    "two threads, OMP_WAIT_POLICY=passive": (2, {"OMP_WAIT_POLICY": "passive"}),
    "two threads, GOMP_SPINCOUNT=2000": (2, SLEEP_SOON),
}


def warm_up(steps):
    """Warm the toy's base model up in this process; prints seconds per step without the first."""
    import torch

    from tasks import toy
    from tools import base_model

    torch.manual_seed(0)
    settings = base_model.settings([toy]) | dict(steps=steps)
    tokenizer = base_model.make_tokenizer([toy], 0)
    model = base_model.build(
        tokenizer, settings["layers"], settings["hidden"], settings["positions"]
    )
    base_model.warm_up(model, tokenizer, [toy], settings | dict(steps=1), 0)
    start = time.monotonic()
    base_model.warm_up(model, tokenizer, [toy], settings, 0)
    print((time.monotonic() - start) / steps)


def seconds_per_step(name, steps):
    """Seconds per step of a warm-up in a process of its own, under this setting."""
    threads, environment = SETTINGS[name]
    environment = environment | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--child", "--steps", str(steps)]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main():
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=30, help="steps of each warm-up")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--child", action="store_true", help="one warm-up in this process")
    arguments = p.parse_args()
    if arguments.child:
        warm_up(arguments.steps)
        return
    cores = len(os.sched_getaffinity(0))

    def contender(name):
        return lambda _: 1000 * seconds_per_step(name, arguments.steps)

    contenders = {name: contender(name) for name in SETTINGS}
    results = {"machine": machine()}
    for load in ("quiet", "busy"):
        loops = []
        if load == "busy":
            busy_loop = [sys.executable, "-c", "while True: pass"]
            loops = [subprocess.Popen(busy_loop) for _ in range(cores)]
        try:
            results[load] = in_turn(contenders, arguments.rounds)
        finally:
            for loop in loops:
                loop.kill()
    keep(result_file(arguments, "threads"), results)
    rows = []
    for name in SETTINGS:
        times = [median_and_range(results[load][name], ".0f") for load in ("quiet", "busy")]
        rows.append((name, *times))
    table(["ms per step of the warm-up", "quiet", f"beside {cores} busy loops"], rows)


if __name__ == "__main__":
    main()
