"""How much CPU time a sample costs in whole runs, of this checkout and of another one in turn.

    python bench/cost.py [--tasks toy,tail,guess,agent] [--against DIR] [--rounds 3] [--steps 60]

Runs `bash run.sh` of this checkout, and of DIR (an older commit, `git worktree add DIR COMMIT`,
with its own out/models). The milliseconds of CPU a sample are those of all processes of a run, by
stage, from step FIRST on: start-up does not count. They depend less on a neighbour's load than
samples/s do. `ratio` is the other checkout's CPU / this one's, and this one's samples/s / the
other's.
"""

import contextlib
import functools
import shutil
import sys
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench import common
from bench.common import ROOT, WORK
from bench.runs import COMMON, PIPELINE, make_model, run_to_its_end
from plumbing.queues import read_json
from tools.common import read_metrics

# Steps until caches and kernels are warm
FIRST = 8
TASKS = {
    "toy": {},
    "tail": COMMON | PIPELINE | dict(save_every=0),
    "guess": dict(task="guess", max_new_tokens=90, max_model_len=256),
    # The turns go through an OpenAI endpoint, from a client with a process of its own
    "agent": cfg.AGENT,
}
# Processes of run.sh, and the actor's client; all other processes belong to the engines
STAGES = ("actor", "preprocess", "train", "openai_tools")
PARTS = (*STAGES, "engines")


class Watch:
    """CPU seconds of a run's processes by stage, read whenever a new version is announced."""

    def __init__(self, run_dir):
        self.file = run_dir / "queues" / "version.json"
        # Stage and CPU seconds of each process, by its id
        self.parts = {}
        self.seconds = {}
        # (version, {stage: CPU seconds so far})
        self.seen = []

    def look(self, pid):
        version = read_json(self.file).get("version", 0)
        if version < FIRST or (self.seen and version == self.seen[-1][0]):
            return
        root = psutil.Process(pid)
        # Parents come before their children
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._add(process)
        total = dict.fromkeys(PARTS, 0.0)
        # Processes that have ended keep their seconds
        for pid, seconds in self.seconds.items():
            total[self.parts[pid]] += seconds
        self.seen.append((version, total))

    def _add(self, process):
        """Note a process's CPU seconds so far; a process that a stage starts is the stage's."""
        names = [Path(argument).name for argument in process.cmdline()]
        part = self.parts.get(process.ppid(), "engines")
        self.parts[process.pid] = next((x for x in STAGES if f"{x}.py" in names), part)
        self.seconds[process.pid] = sum(process.cpu_times()[:2])

    def cpu(self, steps):
        """{stage: CPU seconds a sample} from the first look to the last; steps: metrics lines."""
        (first, before), (last, after) = self.seen[0], self.seen[-1]
        samples = steps[last - 1]["samples"] - steps[first - 1]["samples"]
        return {part: (after[part] - before[part]) / samples for part in PARTS}


def measure(name, knobs, port, root=ROOT):
    """Measure a run: {stage: CPU s a sample}, samples_s, turns, shares of its steps' time."""
    run_dir = WORK / "runs" / name
    # The versions of an earlier run must not be seen
    shutil.rmtree(run_dir, ignore_errors=True)
    watch = Watch(run_dir)
    run_to_its_end(name, knobs, port, root=root, look=watch.look)
    [steps] = read_metrics(run_dir, "step")
    seconds = steps[-1]["wall_s"] - steps[FIRST - 1]["wall_s"]
    results = watch.cpu(steps)
    results["samples_s"] = (steps[-1]["samples"] - steps[FIRST - 1]["samples"]) / seconds
    results["turns"] = sum(step.get("turns", 1) for step in steps[FIRST:]) / len(steps[FIRST:])
    for key in ("wait_data_s", "wait_sync_s", "pause_s"):
        results[key] = sum(step[key] for step in steps[FIRST:]) / seconds
    return results


def of_checkout(checkout, task, arguments, turn):
    """Measure a run of a task in this checkout; turn: its seed."""
    knobs = TASKS[task] | dict(steps=arguments.steps, eval_every=0, seed=turn)
    return measure(f"cost-{task}", knobs, arguments.port, checkout)


def show(results):
    """Print a row of medians over rounds for each task and checkout."""
    rows = []
    for task, by_checkout in results.items():
        for name, rounds in by_checkout.items():
            medians = {k: float(np.median([r[k] for r in rounds])) for k in rounds[0]}
            parts = [medians[part] for part in PARTS]
            cells = [f"{1000 * x:.2f}" for x in (*parts, sum(parts))] + [f"{medians['turns']:.1f}"]
            shares = [f"{medians[k]:.2%}" for k in ("wait_data_s", "wait_sync_s", "pause_s")]
            rows.append([f"{task}, {name}", *cells, f"{medians['samples_s']:.0f}", *shares])
        if len(by_checkout) == 2:
            pairs = list(zip(by_checkout["other"], by_checkout["here"]))
            cpu = [sum(a[k] for k in PARTS) / sum(b[k] for k in PARTS) for a, b in pairs]
            speed = [b["samples_s"] / a["samples_s"] for a, b in pairs]
            ratios = [common.median_and_range(x) for x in (cpu, speed)]
            rows.append(
                [f"{task}, ratio", *[""] * len(PARTS), ratios[0], "", ratios[1], "", "", ""]
            )
    columns = [f"{part} ms" for part in (*PARTS, "all")]
    common.table(
        ["", *columns, "turns", "samples/s", "waits: data", "updates", "engines pause"], rows
    )


def main(argv=None):
    p = common.parser(__doc__)
    p.add_argument("--tasks", default="toy,tail,guess")
    p.add_argument("--against", type=Path, help="another checkout")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--port", type=int, default=8640)
    a = p.parse_args(argv)
    if a.quick:
        a.rounds = 1
        a.steps = 2 * FIRST
    checkouts = dict(here=ROOT)
    if a.against:
        checkouts["other"] = a.against.resolve()
    make_model()
    results = {}
    for task in a.tasks.split(","):
        contenders = {}
        for name, checkout in checkouts.items():
            contenders[name] = functools.partial(of_checkout, checkout, task, a)
        results[task] = common.in_turn(contenders, a.rounds)
    print(common.machine())
    show(results)
    common.keep(common.result_file(a, "cost"), dict(machine=common.machine(), tasks=results))


if __name__ == "__main__":
    main()
