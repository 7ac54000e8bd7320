"""Runs beside each other: what differs in their configurations, seeds as bands, the difference with its interval.

Runs that differ in nothing but their seed are one setting. Called by tools/report.py.
"""

import math
import os
from dataclasses import fields
from pathlib import Path

import numpy as np

import config as cfg
from tools.panels import (
    Curve,
    Panel,
    column,
    evaluated,
    minutes,
    smooth,
    tasks_of,
    thousand_samples,
)

# two runs are the same setting whatever these are
OWN = (
    "run",
    "out",
    "run_id",
    "seed",
    "port",
    "nnodes",
    "master_addr",
    "master_port",
    "fresh",
    "dry_run",
    "wandb",
    "report_every",
)
MINUTES = "minutes of training"
# key of metrics.jsonl, its axis, what it is
QUANTITIES = (
    ("reward", MINUTES, "training reward"),
    ("reward", "step", "training reward"),
    ("lag_mean", "step", "lag of trained tokens, mean, versions"),
    ("ess", "step", "effective sample size"),
    ("entropy", "step", "entropy, nats"),
    ("gen_tok_s", "step", "tokens sampled / s"),
    ("gen_idle", "step", "share of the engines' places empty"),
)
POINTS = 300
# characters of what differs that still make a name
LONGEST_NAME = 60
RESAMPLES = 10000
# of Student's t, 97.5%, by degrees of freedom from 1 on
T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


class Run:
    """A run's directory, configuration, steps and evaluations."""

    def __init__(self, run_dir, steps, evals):
        self.run_dir = run_dir
        self.config = cfg.load(run_dir)
        self.steps = steps
        self.evals = evals

    def knob(self, name):
        """Its value; the path of a tiny base model without the seed."""
        value = getattr(self.config, name)
        if name == "model":
            return value.removesuffix(f"-seed{self.config.seed}")
        return value


def differing(runs):
    """{knob: [value of each run]} of the knobs that are not the same in all."""
    found = {}
    for field in fields(cfg.Config):
        values = [run.knob(field.name) for run in runs]
        if field.name not in OWN and any(value != values[0] for value in values):
            found[field.name] = values
    return found


def settings(runs):
    """{name of a setting: its runs, by seed}; named by what differs, or by the runs' names.

    Raises ValueError if two runs are the same setting and seed.
    """
    knobs = differing(runs)
    found = {}
    for i, run in enumerate(runs):
        words = [f"{name} {values[i]}" for name, values in knobs.items()]
        of_setting = found.setdefault(", ".join(words), {})
        twin = of_setting.setdefault(run.config.seed, run)
        if twin is not run:
            raise ValueError(
                f"{twin.run_dir} and {run.run_dir} are the same setting and seed: leave one out"
            )
    named = {}
    for words, by_seed in found.items():
        own = [by_seed[seed] for seed in sorted(by_seed)]
        names = [Path(run.run_dir).name for run in own]
        short = os.path.commonprefix(names).rstrip("-_.") or names[0]
        # many knobs make no name
        name = words if words and len(words) <= LONGEST_NAME else short
        named[name if name not in named else f"{name} ({names[0]})"] = own
    return named


# ---- curves


def banded(label, curves, color):
    """Curves (x, y), one a seed, as one: their mean, and a band from the lowest to the highest, where all seeds are.

    As they are, without a mean, if they have less than half of their length in common.
    """
    if len(curves) == 1:
        return [Curve(label, *curves[0], color=color)]
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    if last - first < 0.5 * max(np.ptp(x) for x, _ in curves):
        return [Curve(f"{label}, a seed", x, y, color=color) for x, y in curves]
    grid = np.linspace(first, last, POINTS)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    ends = dict(low=lines.min(0), high=lines.max(0))
    words = f"{label} ({len(curves)} seeds: mean, lowest to highest)"
    return [Curve(words, grid, lines.mean(0), color=color, **ends)]


def held_out(run, task, axis):
    """(x, scores) of a run's evaluations of a task; x: minutes of training or thousand samples."""
    at_minutes, at_samples, scores = evaluated(run.steps, run.evals, task)
    x = at_samples
    if axis == MINUTES:
        x = np.maximum(at_minutes - began(run), 0)
    return x, scores


def began(run):
    """Minutes from the start of a run's clock to that of its first step: loading is no difference between settings."""
    first = run.steps[0]
    return (first["wall_s"] - first["step_s"]) / 60


def quantity(run, key, axis):
    """(x, y) of a key of metrics.jsonl, smoothed; x: minutes of training or step."""
    x = minutes(run.steps) - began(run) if axis == MINUTES else column(run.steps, "step")
    return x, smooth(column(run.steps, key))


def one_panel(title, xlabel, by_setting):
    """by_setting: {name: [(x, y) of each run]}; runs without points are left out."""
    panel = Panel(f"{title} against {xlabel}", xlabel)
    for color, (name, curves) in enumerate(by_setting.items()):
        curves = [(x, y) for x, y in curves if len(x)]
        if curves:
            panel.curves += banded(name, curves, color)
    return panel


def panels(by_setting):
    """The same axes for all settings."""
    runs = sum(by_setting.values(), [])
    tasks = {task: None for run in runs for task in tasks_of(run.evals)}
    found = []
    for task in tasks:
        for axis in (MINUTES, "thousand samples"):
            curves = {}
            for name, own in by_setting.items():
                curves[name] = [held_out(run, task, axis) for run in own]
            found.append(one_panel(f"held-out {task}", axis, curves))
    for key, axis, title in QUANTITIES:
        curves = {}
        for name, own in by_setting.items():
            curves[name] = [quantity(run, key, axis) for run in own]
        found.append(one_panel(title, axis, curves))
    return found


# ---- the difference


def mean_until(x, y, end):
    """Mean of a curve (straight lines between points) from its first x to `end`."""
    inside = x < end
    x_inside = np.append(x[inside], end)
    y_inside = np.append(y[inside], np.interp(end, x, y))
    return np.trapezoid(y_inside, x_inside) / (end - x[0])


def measures(run, shared):
    """{what is compared: its value} of a run; shared: {task: thousand samples at which all runs were still evaluated}."""
    found = {"steps": run.steps[-1]["step"]}
    for task in tasks_of(run.evals):
        samples, scores = held_out(run, task, "thousand samples")
        found[f"held-out {task}, last"] = scores[-1]
        end = shared.get(task, 0)
        if samples[0] < end:
            words = f"held-out {task}, mean of the first {end:.1f}k samples"
            found[words] = mean_until(samples, scores, end)
    tenth = max(len(run.steps) // 10, 1)
    found["reward, last tenth"] = column(run.steps, "reward")[-tenth:].mean()
    found[MINUTES] = minutes(run.steps)[-1] - began(run)
    if len(run.steps) > 1:
        seconds = column(run.steps[1:], "step_s").sum()
        samples = 1000 * np.ptp(thousand_samples(run.steps))
        found["samples/s of the steps"] = samples / seconds
    return found


def shared_samples(runs):
    """{task: thousand samples of the earliest last evaluation}, of the tasks that all runs have."""
    found = {}
    for task in tasks_of(runs[0].evals):
        if all(task in tasks_of(run.evals) for run in runs):
            found[task] = min(held_out(run, task, "thousand samples")[0][-1] for run in runs)
    return found


def paired(ours, theirs):
    """Difference theirs - ours over seeds [S]: (mean, 95% of a paired bootstrap, 95% of a paired t test), the last two
    as (low, high), or None of a single seed.

    A bootstrap of few seeds is too narrow: of three it is their range, and holds the truth in three cases of four.
    """
    d = np.asarray(theirs, float) - np.asarray(ours, float)
    n = len(d)
    mean = float(d.mean())
    if n < 2:
        return mean, None, None
    drawn = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    low, high = np.percentile(d[drawn].mean(1), [2.5, 97.5])
    half = t_quantile(n - 1) * d.std(ddof=1) / math.sqrt(n)
    return mean, (float(low), float(high)), (mean - half, mean + half)


def t_quantile(freedom):
    """97.5% quantile of Student's t, to 1%."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    return 1.96 + 2.5 / freedom


def span(interval):
    return "one seed" if interval is None else f"{interval[0]:+.3g} to {interval[1]:+.3g}"


HEADER = (
    "measure",
    "setting",
    "its mean",
    "first's",
    "difference",
    "95%, t",
    "95%, bootstrap",
    "of each seed",
)


def differences(by_setting):
    """Rows under HEADER: every setting against the first one, over the seeds that both have."""
    (first, ours), *others = by_setting.items()
    shared = shared_samples(sum(by_setting.values(), []))
    own = {run.config.seed: measures(run, shared) for run in ours}
    rows = []
    for name, runs in others:
        theirs = {run.config.seed: measures(run, shared) for run in runs}
        seeds = sorted(own.keys() & theirs.keys())
        if not seeds:
            rows.append([f"no seed in common with {first}", name, *["-"] * 6])
            continue
        known = [found[seed] for found in (own, theirs) for seed in seeds]
        for measure in known[0]:
            if not all(measure in values for values in known):
                continue
            a = [own[seed][measure] for seed in seeds]
            b = [theirs[seed][measure] for seed in seeds]
            mean, bootstrap, t = paired(a, b)
            means = [f"{np.mean(b):.3f}", f"{np.mean(a):.3f}", f"{mean:+.3g}"]
            each = " ".join(f"{y - x:+.3g}" for x, y in zip(a, b))
            rows.append([measure, name, *means, span(t), span(bootstrap), each])
    return rows


def written(header, rows):
    """Rows in columns, as lines of text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return "\n".join(lines) + "\n"
