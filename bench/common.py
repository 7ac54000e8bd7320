"""What the measurements share: the machine in words, raw results, tables, rounds in turn, figures.

Not a program. Raw numbers go to bench/results/<name>.json, figures beside them; `--out` changes it,
and what `--quick` leaves is in out/bench.
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
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

import config as cfg

ROOT = cfg.ROOT
# models, run directories and whatever else need not be kept
WORK = ROOT / "out" / "bench"


# ---- results


def parser(doc):
    """Command line of a script with this docstring: --out and --quick, to which it adds its own."""
    p = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    p.add_argument("--out", help="directory of raw numbers and figures (default: bench/results)")
    p.add_argument("--quick", action="store_true", help="does it run? Numbers go to out/bench")
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


def measured(path, wanted, measure, reuse=True):
    """{key: result} of `wanted`, {key: knobs}, in its order; each is in `path` as soon as it is there.

    What earlier calls left there is taken if its knobs are the same. measure(key, knobs) -> dict, to
    which knobs and machine are added; None: only what is there, whatever its knobs.
    """
    # as Ctrl-C: what is running is stopped; the same command does what is missing
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kept = {}
    if reuse and path.exists():
        kept = json.loads(path.read_text())
    for key, knobs in wanted.items():
        if measure is None or kept.get(key, {}).get("knobs") == knobs:
            continue
        kept[key] = dict(knobs=knobs, machine=machine()) | measure(key, knobs)
        keep(path, kept)
    return {key: kept[key] for key in wanted if key in kept}


def copy_sources(folder):
    """The sources in this folder, anew, for what changes them; it shares the models. Returns it."""
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


def machine():
    """Where, when, of which commit and by which command this is measured, as a line."""
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
    words = []
    for name, value in knobs.items():
        words += [f"--{name}", str(value)]
    return words


def table(header, rows):
    """Print rows of cells in columns: the first to the left, the others to the right."""
    cells = [[str(x) for x in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *others in cells:
        words = [first.ljust(widths[0])]
        words += [x.rjust(width) for x, width in zip(others, widths[1:])]
        print("  ".join(words), flush=True)


def median_and_range(values, form=".2f"):
    """Median and range of rounds: 1.02 (0.98-1.06)."""
    return f"{np.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def in_turn(contenders, rounds):
    """{name: function(round)} -> {name: [result of every round]}: a round runs all of them, every
    other round in the opposite order.
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
    """(figure, axes) of a row of panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (5.2 * len(titles), 5)
    figure, axes = plt.subplots(1, len(titles), figsize=size, constrained_layout=True)
    for ax, title in zip(axes, titles):
        ax.set_title(title)
        ax.grid(alpha=0.3)
    return figure, axes


def band(ax, curves, color, label):
    """Curves (x, y), one per seed: their mean, and a band from the lowest to the highest."""
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    grid = np.linspace(first, last, 200)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    ax.plot(grid, lines.mean(0), color=color, label=label)
    ax.fill_between(grid, lines.min(0), lines.max(0), color=color, alpha=0.12)
