"""Does anything grow in an hour? Memory, open files and threads of a run's processes, and the disk.

    python bench/growth.py [--steps 4000] [--quick] [--plot] [--port 9400]
    python bench/growth.py --many

Without --many a run of the toy with the real vLLM is measured once a minute. The table compares
each process after a third of the run, when its buffers have their full size, with the end, and fits
a line to its memory in between. A leak is a slope whose interval lies above 0, and which would
double the memory in a week. On the disk, only metrics, samples and logs may grow with the number
of steps.

With --many the script measures how long an operation of a queue takes that has few or many records,
and how long it takes to list few or many engines. No engine runs; the script writes their files.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench import runs
from bench.common import machine, measured, result_file, table
from plumbing.client import EngineClient
from plumbing.queues import Queue, publish_json
from plumbing.weight_group import EngineRegistry
from tools.common import read_metrics

KNOBS = dict(eval_every=50, save_every=50, trainer_threads=1)
MINUTES_A_WEEK = 7 * 24 * 60
# (records in a queue, engines) that are few, and that are many
SIZES = ((10, 1), (100_000, 1000))
# what a run writes, by its place in the directory of the run
PLACES = ("checkpoints", "queues", "logs", "metrics.jsonl", "samples.jsonl")


def name_of(process):
    """The name of a process of a run: train.py, or for example VLLM::EngineCore."""
    scripts = [Path(word).name for word in process.cmdline() if word.endswith(".py")]
    title = process.cmdline()[0] if process.cmdline() else process.name()
    if scripts:
        return scripts[-1]
    return "engine's server" if "vllm" in " ".join(process.cmdline()) else Path(title).name


def usage_of(launcher):
    """{name: [MB, open files, threads]} of run.sh's processes; processes of one name are added."""
    usage = {}
    for process in [launcher, *launcher.children(recursive=True)]:
        try:
            with process.oneshot():
                name = name_of(process)
                values = [process.memory_info().rss / 1e6, process.num_fds()]
                values.append(process.num_threads())
        except psutil.Error:
            # It has ended meanwhile.
            continue
        before = usage.get(name, [0, 0, 0])
        usage[name] = [a + b for a, b in zip(before, values)]
    return usage


def disk_of(run_dir):
    """{place: [number of files, MB]} of a run's directory."""
    files = Counter()
    sizes = Counter()
    # Files come and go meanwhile; os.walk passes over folders that have gone.
    for folder, _, names in os.walk(run_dir):
        for name in names:
            path = Path(folder, name)
            place = path.relative_to(run_dir).parts[0]
            place = place if place in PLACES else "all else"
            with contextlib.suppress(FileNotFoundError):
                sizes[place] += path.stat().st_size / 1e6
                files[place] += 1
    return {place: [files[place], sizes[place]] for place in sizes}


class Watch:
    """Looks at a run every `every` seconds. looks: [dict(minutes, usage, disk)]."""

    def __init__(self, run_dir, every):
        self.run_dir = run_dir
        self.every = every
        self.begun = time.monotonic()
        self.next = self.begun + every
        self.looks = []

    def look(self, launcher):
        now = time.monotonic()
        if now < self.next:
            return
        self.next += self.every
        usage = usage_of(psutil.Process(launcher))
        minutes = (now - self.begun) / 60
        self.looks.append(dict(minutes=minutes, usage=usage, disk=disk_of(self.run_dir)))


def measure(key, knobs, arguments):
    """A run as {looks, steps, minutes}."""
    name = "growth"
    watch = Watch(runs.WORK / "runs" / name, every=5.0 if arguments.quick else 60.0)
    run_dir = runs.run_to_its_end(name, knobs, arguments.port, look=watch.look)
    [steps] = read_metrics(run_dir, "step")
    return dict(looks=watch.looks, steps=len(steps), minutes=watch.looks[-1]["minutes"])


def slope(minutes, values):
    """(slope a minute, half of its 95% interval) by least squares."""
    x = np.array(minutes) - np.mean(minutes)
    y = np.array(values) - np.mean(values)
    rate = (x @ y) / (x @ x)
    rest = y - rate * x
    # neighbouring looks are not independent, so this interval is rather too small
    error = np.sqrt(rest @ rest / max(len(x) - 2, 1) / (x @ x))
    return float(rate), float(1.96 * error)


def print_tables(run):
    """Print what the processes need, and what is on the disk."""
    looks = run["looks"]
    late = looks[len(looks) // 3 :]
    print(f"{run['steps']} steps, {run['minutes']:.0f} minutes")
    rows = []
    counts = Counter(name for look in late for name in look["usage"])
    for name, count in counts.items():
        # Processes that are only there at the end, or for an evaluation, are left out.
        if count < max(3, len(late) / 2):
            continue
        with_it = [look for look in late if name in look["usage"]]
        minutes = [look["minutes"] for look in with_it]
        mb, files, threads = zip(*(look["usage"][name] for look in with_it))
        rate, error = slope(minutes, mb)
        is_leak = rate > error and rate * MINUTES_A_WEEK > mb[-1]
        row = [name, f"{mb[0]:.0f}, {mb[-1]:.0f}", f"{rate:+.3f} ({error:.3f})"]
        row += ["yes" if is_leak else "no", f"{files[0]:.0f}, {files[-1]:.0f}, {max(files):.0f}"]
        rows.append([*row, f"{threads[0]:.0f}, {threads[-1]:.0f}"])
    header = ["process", "MB", "MB a minute (+-)", "leak", "open files, most", "threads"]
    table(header, rows)
    rows = []
    for place in late[-1]["disk"]:
        first, last = (look["disk"].get(place, [0, 0.0]) for look in (late[0], late[-1]))
        rows.append([place, f"{first[0]}, {last[0]}", f"{first[1]:.2f}, {last[1]:.2f}"])
    table(["on the disk", "files", "MB"], rows)


# ---- many records, many engines


def milliseconds(function, times):
    """The milliseconds that a call of `function` takes, as the mean of many."""
    begun = time.perf_counter()
    for _ in range(times):
        function()
    return 1000 * (time.perf_counter() - begun) / times


def queue_costs(folder, records):
    """{what: ms} of a queue in which so many records wait."""
    queue = Queue(folder)
    record = dict(tokens=np.arange(500), step=1)
    for _ in range(records):
        queue.put(record)

    def take():
        number, _ = queue.get()
        queue.ack(number)

    return {
        "queue: put a record": milliseconds(lambda: queue.put(record), 200),
        "queue: get a record and acknowledge it": milliseconds(take, 200),
        "queue: open it": milliseconds(lambda: Queue(folder), 3),
    }


async def engine_costs(run_dir, count):
    """{what: ms} of a look at so many engines, by the trainer and by the actor."""
    (run_dir / "engines").mkdir(parents=True)
    urls = [f"http://10.0.{i // 250}.{i % 250}:8000" for i in range(count)]
    for i, url in enumerate(urls):
        publish_json(run_dir / "engines" / f"engine{i}.json", url=url, started=float(i))
    config = cfg.Config(engines=count)
    registry = EngineRegistry(config, run_dir)
    client = EngineClient(config, {1}, 64)
    client.set_engines(urls)
    return {
        "trainer: list the engines, once a second": milliseconds(registry.listed, 10),
        "actor: set the engines, once a version": milliseconds(lambda: client.set_engines(urls), 9),
        "actor: choose an engine for a request": milliseconds(client.least_loaded, 50),
    }


def measure_many(key, knobs):
    """{what: ms} with few or with many records and engines."""
    with tempfile.TemporaryDirectory() as folder:
        costs = queue_costs(Path(folder, "queue"), knobs["records"])
        costs |= asyncio.run(engine_costs(Path(folder, "run"), knobs["engines"]))
    return dict(ms=costs)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=9400)
    p.add_argument("--steps", type=int, default=4000, help="steps of the run")
    p.add_argument("--many", action="store_true", help="many records and engines instead of a run")
    arguments = p.parse_args(argv)
    if arguments.many:
        path = result_file(arguments, "growth-many")
        few_and_many = {f"{n} records, {m} engines": dict(records=n, engines=m) for n, m in SIZES}
        results = measured(path, few_and_many, None if arguments.plot else measure_many)
        print(machine())
        names = next(iter(results.values()))["ms"]
        rows = [[name, *(f"{run['ms'][name]:.3g}" for run in results.values())] for name in names]
        table(["ms", *results], rows)
        return
    steps = 80 if arguments.quick else arguments.steps
    wanted = {f"{steps} steps": KNOBS | dict(steps=steps, seed=arguments.first_seed)}
    path = result_file(arguments, "growth")
    take = None if arguments.plot else lambda key, knobs: measure(key, knobs, arguments)
    results = measured(path, wanted, take, reuse=not arguments.quick or arguments.plot)
    print(machine())
    for run in results.values():
        print_tables(run)


if __name__ == "__main__":
    main()
