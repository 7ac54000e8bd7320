"""Functions that the measurements share: raw results, the machine's name, tables, figures.

Not a program. Raw numbers go to bench/results/<name>.json, and figures beside them. `--out` names
another directory; with `--quick` it is out/bench.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import numpy as np

import config as cfg

ROOT = cfg.ROOT
# Models, run directories and all else that need not be kept
WORK = ROOT / "out" / "bench"
# Set after an interruption: measurements in other threads end, too
INTERRUPTED = threading.Event()


# ---- results


def parser(doc):
    """The command line of a script with this docstring; the script adds its own flags."""
    p = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    p.add_argument("--out", help="directory of raw numbers and figures (default: bench/results)")
    p.add_argument(
        "--quick", action="store_true", help="a short try, whose numbers go to out/bench"
    )
    return p


def result_file(arguments, name):
    """Where raw numbers go: <out>/<name>.json."""
    default = WORK if arguments.quick else ROOT / "bench" / "results"
    path = Path(arguments.out or default, f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def keep(path, values):
    """Write a dict as JSON, a line for each of its keys."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def measured(path, wanted, measure, reuse=True, jobs=1):
    """Measure all of `wanted`, {key: knobs}; returns {key: result} in the same order.

    A result is written to the file `path` as soon as it is there. With `reuse`, a result that an
    earlier call left in the file is taken if it has the same knobs. measure(key, knobs) returns a
    dict, to which knobs and machine are added. If `measure` is None nothing is measured, and the
    file's results are taken whatever their knobs. jobs: the number of measurements at a time, each
    in a thread; above 1 only what does not depend on time may be measured.
    """
    # SIGTERM acts as Ctrl-C: it stops what is running; the same command does the rest later
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kept = {}
    if reuse and path.exists():
        kept = json.loads(path.read_text())
    missing = {k: knobs for k, knobs in wanted.items() if kept.get(k, {}).get("knobs") != knobs}
    if measure is None:
        missing = {}
    for key, result in results_of(missing, measure, jobs):
        kept[key] = dict(knobs=missing[key], machine=machine()) | result
        keep(path, kept)
    return {key: kept[key] for key in wanted if key in kept}


def results_of(wanted, measure, jobs):
    """Yield (key, measure(key, knobs)) of all of `wanted`, {key: knobs}, as they are ready."""
    if jobs == 1:
        for key, knobs in wanted.items():
            yield key, measure(key, knobs)
        return
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(measure, key, knobs): key for key, knobs in wanted.items()}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            INTERRUPTED.set()
            pool.shutdown(cancel_futures=True)
            raise


def copy_sources(folder):
    """Copy the sources, to be changed, to a folder that is emptied before; returns the folder.

    The copy shares the models in out/models.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("examples", "plumbing", "tasks", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    top = [ROOT / name for name in ("run.sh", "pyproject.toml", "requirements.txt")]
    for path in (*ROOT.glob("*.py"), *top):
        shutil.copy(path, folder)
    (folder / "out").mkdir()
    (folder / "out" / "models").symlink_to(ROOT / "out" / "models")
    return folder


def printed_lines(command, log, limit, env):
    """Run a process that prints JSON objects, one a line, whose first key is "what".

    Its messages on standard error go to the file `log`. limit: seconds after which it is killed.
    Returns (the objects, the reason of a failure or ""). What was printed before a failure is kept.
    """
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        # Its lines come as they are measured
        timer = threading.Timer(limit, process.kill)
        timer.start()
        objects = [json.loads(line) for line in process.stdout if line.startswith('{"what"')]
        timer.cancel()
    code = process.wait()
    if code < 0:
        return objects, f"ended by signal {-code}, the limit is {limit:.0f} s"
    if code:
        return objects, (log.read_text().strip().splitlines() or ["no message"])[-1]
    return objects, ""


def patched_copy(folder, *edits):
    """Copy the sources to a folder, as copy_sources does, and apply edits of tests/edits, by their
    names; returns the folder.
    """
    copy_sources(folder)
    # git must not take the copy for a part of the repository around it
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for edit in edits:
        patch = ROOT / "tests" / "edits" / f"{edit}.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=folder, env=environment, check=True)
    return folder


def machine():
    """One line: processor, versions, date, commit and command of this measurement."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    describe = ["git", "describe", "--always", "--dirty"]
    commit = "no commit"
    if shutil.which("git"):
        commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    command = shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return (
        f"{cores} cores of {processor}, torch {version('torch')}, "
        f"{time.strftime('%Y-%m-%d')}, {commit}: python {command}"
    )


def flags(knobs):
    """{"lr": 1} -> ["--lr", "1"]."""
    arguments = []
    for name, value in knobs.items():
        arguments += [f"--{name}", str(value)]
    return arguments


def table(header, rows):
    """Print rows of cells in columns, the first one aligned left and the others right."""
    cells = [[str(x) for x in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *others in cells:
        padded = [first.ljust(widths[0])]
        padded += [x.rjust(width) for x, width in zip(others, widths[1:])]
        print("  ".join(padded), flush=True)


def median_and_range(values, form=".2f"):
    """Median and range of rounds: 1.02 (0.98-1.06)."""
    return f"{np.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def in_turn(contenders, rounds):
    """{name: function(round)} -> {name: [result of every round]}.

    A round runs all functions, and every other round runs them in the opposite order.
    """
    results = {name: [] for name in contenders}
    for i in range(rounds):
        names = list(contenders)
        if i % 2:
            names.reverse()
        for name in names:
            results[name].append(contenders[name](i))
    return results


def panels(titles):
    """(figure, axes) of a row of panels with these titles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (5.2 * len(titles), 5)
    figure, [axes] = plt.subplots(
        1, len(titles), figsize=size, constrained_layout=True, squeeze=False
    )
    for ax, title in zip(axes, titles):
        ax.set_title(title)
        ax.grid(alpha=0.3)
    return figure, axes


def band(ax, curves, color, label):
    """Draw the mean of curves (x, y), one per seed, and a band from the lowest to the highest."""
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    grid = np.linspace(first, last, 200)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    ax.plot(grid, lines.mean(0), color=color, label=label)
    ax.fill_between(grid, lines.min(0), lines.max(0), color=color, alpha=0.12)
