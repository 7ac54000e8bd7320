"""What an answer costs in CPU: engine and actor, by task, two checkouts in turn; real vLLM, no trainer.

    python bench/cost.py [--tasks tail,toy,guess] [--against DIR] [--other KNOBS] [--rounds 3] [--seconds 20]

Every round starts an engine and the actor of each contender, this checkout and DIR (an older commit's,
`git worktree add DIR COMMIT`) or this one with other knobs (JSON), lets them get warm and counts what
arrives in queues/rollouts. Milliseconds of CPU a sample, of all processes of each: they depend less on
a neighbour's load than samples/s do. `ratio`: the other's figure / this one's, for CPU, and this one's /
the other's for samples/s. Nothing trains.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent.parent
# of the measured commit, which may be another one than this file's
CHECKOUT = Path(os.environ.get("CHECKOUT", HERE))
sys.path.insert(0, str(CHECKOUT))
from bench.actor import WARM, read
from bench.common import in_turn, keep, machine, parser, result_file, table
from bench.engines import announce_engines, make_run
from plumbing.queues import Queue
from tools.evaluate import start_engines, stop_engines

ENDLESS = dict(steps=10**7, max_lag=10**7, eval_problems=1, eval_every=0)
# as bench/compare.py has them
TAIL = dict(task="tail", attempts=4, max_new_tokens=410, max_model_len=416, concurrency=64)
# as the presets have them
TASKS = {
    "tail": TAIL,
    "toy": dict(task="toy"),
    "guess": dict(task="guess", max_new_tokens=90, max_model_len=256),
}
PARTS = ("server", "core", "actor")
FIGURES = (*PARTS, "samples_s", "tokens")


def cpu_so_far(server, actor):
    """{server, core, actor: CPU seconds} so far, those of children that have ended and been replaced among them."""
    of_kind = dict(
        server=[server],
        core=server.children(recursive=True),
        actor=[actor, *actor.children(recursive=True)],
    )
    return {name: sum(sum(p.cpu_times()[:4]) for p in of_it) for name, of_it in of_kind.items()}


def measure(task, port, seconds, knobs):
    """Of this checkout: {server, core, actor: CPU ms a sample; samples_s; tokens: sampled, a sample}.

    server: vLLM's HTTP server; core: its scheduler and workers; actor: with its reward workers.
    """
    wanted = TASKS[task] | dict(port=port, engine_threads=1) | ENDLESS | knobs
    config, run_dir = make_run(f"cost-{task}", **wanted)
    engines = start_engines(config)
    actor = None
    try:
        announce_engines(config, run_dir)
        queue = Queue(run_dir / "queues" / "rollouts")
        with open(run_dir / "logs" / "actor.log", "w") as log:
            command = [sys.executable, "actor.py", str(run_dir)]
            actor = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        found, _ = read(queue, 300, WARM)
        if found < WARM:
            raise TimeoutError(f"the actor gave {found} answers, see {log.name}")
        # the long ones of the first wave are still to come
        read(queue, 10)
        processes = psutil.Process(engines[0].pid), psutil.Process(actor.pid)
        before = cpu_so_far(*processes)
        start = time.monotonic()
        samples, tokens = read(queue, seconds)
        elapsed = time.monotonic() - start
        found = dict(samples_s=samples / elapsed, tokens=tokens / samples)
        for name, cpu in cpu_so_far(*processes).items():
            found[name] = 1000 * (cpu - before[name]) / samples
        return found
    finally:
        if actor:
            actor.kill()
            actor.wait()
        stop_engines(engines)


def of_checkout(checkout, task, knobs, arguments, _):
    """`measure` in a process whose code is this checkout's. knobs: more of them, as JSON; _: the round."""
    command = [sys.executable, __file__, "--one", task, "--port", str(arguments.port)]
    command += ["--seconds", str(arguments.seconds), "--knobs", knobs]
    asked = dict(cwd=checkout, env=os.environ | {"CHECKOUT": str(checkout)}, text=True, timeout=900)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, **asked)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--tasks", default="tail,toy,guess")
    p.add_argument("--against", type=Path, help="another checkout")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=20.0)
    p.add_argument("--port", type=int, default=8640)
    p.add_argument("--knobs", default="{}", help="JSON of more knobs")
    p.add_argument("--other", help="the same for what it is compared with")
    p.add_argument("--one", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.one:
        print(json.dumps(measure(a.one, a.port, a.seconds, json.loads(a.knobs))))
        return
    if a.quick:
        a.rounds = 1
        a.seconds = 5.0
    wanted = dict(here=(HERE, a.knobs))
    if a.against or a.other:
        wanted["other"] = ((a.against or HERE).resolve(), a.other or a.knobs)
    results = {}
    for task in a.tasks.split(","):
        contenders = {}
        for name, (path, knobs) in wanted.items():
            contenders[name] = partial(of_checkout, path, task, knobs, a)
        results[task] = in_turn(contenders, a.rounds)
    print(machine())
    show(results)
    keep(result_file(a, "cost"), dict(machine=machine(), knobs=a.knobs, tasks=results))


def show(results):
    """A row for each task and checkout; medians over rounds."""
    rows = []
    for task, by_checkout in results.items():
        medians = {}
        for name, rounds in by_checkout.items():
            medians[name] = {k: float(np.median([r[k] for r in rounds])) for k in FIGURES}
            parts = [medians[name][part] for part in PARTS]
            cells = [f"{x:.2f}" for x in (*parts, sum(parts))]
            cells += [f"{medians[name]['samples_s']:.0f}", f"{medians[name]['tokens']:.1f}"]
            rows.append([f"{task}, {name}", *cells])
        if len(by_checkout) == 2:
            pairs = list(zip(by_checkout["other"], by_checkout["here"]))
            cpu = [sum(a[k] for k in PARTS) / sum(b[k] for k in PARTS) for a, b in pairs]
            speed = [b["samples_s"] / a["samples_s"] for a, b in pairs]
            rows.append([f"{task}, ratio", "", "", "", *map(_spread, (cpu, speed)), ""])
    table(["", "server ms", "core ms", "actor ms", "all ms", "samples/s", "tokens"], rows)


def _spread(ratios):
    return f"{np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
