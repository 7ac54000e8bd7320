"""Runs beside each other: what differs in their configurations, seeds as bands, the difference with its interval.

Runs that differ in nothing but their seed are one setting. Called by tools/report.py.
"""

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
OWN = ("run", "out", "run_id", "seed", "port", "nodes", "fresh", "dry_run", "wandb", "report_every")
# key of metrics.jsonl, its axis, what it is
QUANTITIES = (
    ("reward", "minutes", "training reward"),
    ("reward", "step", "training reward"),
    ("lag_mean", "step", "lag of trained tokens, mean, versions"),
    ("ess", "step", "effective sample size"),
    ("entropy", "step", "entropy, nats"),
    ("gen_tok_s", "step", "tokens sampled / s"),
    ("gen_idle", "step", "share of the engines' places empty"),
)
POINTS = 300
RESAMPLES = 10000


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
    """{name of a setting: its runs, by seed}; named by what differs, or by the runs' names."""
    knobs = differing(runs)
    found = {}
    for i, run in enumerate(runs):
        words = [f"{name} {values[i]}" for name, values in knobs.items()]
        found.setdefault(", ".join(words), []).append(run)
    # many knobs make no name
    named = {}
    for words, own in found.items():
        own.sort(key=lambda run: run.config.seed)
        short = os.path.commonprefix([Path(run.run_dir).name for run in own]).rstrip(
            "-_.0123456789"
        )
        name = words if words and len(words) <= 60 else short or Path(own[0].run_dir).name
        named[name if name not in named else f"{name} ({len(named)})"] = own
    return named


# ---- curves


def band(label, curves, color):
    """Curves (x, y), one a seed: their mean and, if there are several, a band from the lowest to the highest."""
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    grid = np.linspace(first, last, POINTS)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    if len(curves) == 1:
        return Curve(label, *curves[0], color=color)
    ends = dict(low=lines.min(0), high=lines.max(0))
    return Curve(f"{label} ({len(curves)} seeds)", grid, lines.mean(0), color=color, **ends)


def held_out(run, task, axis):
    """(x, scores) of a run's evaluations of a task; x: minutes or thousand samples."""
    at_minutes, at_samples, scores = evaluated(run.steps, run.evals, task)
    return (at_minutes if axis == "minutes" else at_samples), scores


def quantity(run, key, axis):
    """(x, y) of a key of metrics.jsonl, smoothed; x: minutes or step."""
    x = minutes(run.steps) if axis == "minutes" else column(run.steps, "step")
    return x, smooth(column(run.steps, key))


def one_panel(title, xlabel, by_setting):
    """by_setting: {name: [(x, y) of each run]}; runs without points are left out."""
    panel = Panel(title, xlabel)
    for color, (name, curves) in enumerate(by_setting.items()):
        curves = [(x, y) for x, y in curves if len(x)]
        if curves:
            panel.curves.append(band(name, curves, color))
    return panel


def panels(by_setting):
    """The same axes for all settings."""
    runs = sum(by_setting.values(), [])
    tasks = {task: None for run in runs for task in tasks_of(run.evals)}
    found = []
    for task in tasks:
        for axis in ("minutes", "thousand samples"):
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
    """{what is compared: its value} of a run; shared: thousand samples that all runs have."""
    found = {}
    for task in tasks_of(run.evals):
        samples, scores = held_out(run, task, "thousand samples")
        found[f"held-out {task}, last"] = scores[-1]
        if samples[0] < shared <= samples[-1]:
            words = f"held-out {task}, mean of the first {shared:.1f}k samples"
            found[words] = mean_until(samples, scores, shared)
    tenth = max(len(run.steps) // 10, 1)
    found["reward, last tenth"] = column(run.steps, "reward")[-tenth:].mean()
    found["minutes"] = minutes(run.steps)[-1]
    found["samples/s"] = 1000 * thousand_samples(run.steps)[-1] / (60 * found["minutes"])
    return found


def paired(ours, theirs):
    """(mean difference theirs - ours, low, high) over seeds [S]: a paired bootstrap, 95% of the resamples of seeds;
    no interval (None) of a single seed.
    """
    d = np.asarray(theirs, float) - np.asarray(ours, float)
    if len(d) < 2:
        return float(d.mean()), None, None
    drawn = np.random.default_rng(0).integers(len(d), size=(RESAMPLES, len(d)))
    low, high = np.percentile(d[drawn].mean(1), [2.5, 97.5])
    return float(d.mean()), float(low), float(high)


def with_interval(mean, low, high):
    """Words for what `paired` gives."""
    if low is None:
        return f"{mean:+.3g} (one seed: no interval)"
    return f"{mean:+.3g} ({low:+.3g} to {high:+.3g})"


def differences(by_setting):
    """[[measure, setting, mean of it, mean of the first setting, difference with its interval, seeds]], of the seeds
    that a setting has in common with the first.
    """
    (first, ours), *others = by_setting.items()
    all_runs = sum(by_setting.values(), [])
    shared = min(thousand_samples(run.steps)[-1] for run in all_runs)
    own = {run.config.seed: measures(run, shared) for run in ours}
    rows = []
    for name, runs in others:
        theirs = {run.config.seed: measures(run, shared) for run in runs}
        seeds = sorted(own.keys() & theirs.keys())
        if not seeds:
            rows.append(["-", name, "-", "-", f"no seed in common with {first}", 0])
            continue
        known = [found[seed] for found in (own, theirs) for seed in seeds]
        for measure in known[0]:
            if not all(measure in values for values in known):
                continue
            a = [own[seed][measure] for seed in seeds]
            b = [theirs[seed][measure] for seed in seeds]
            means = [f"{np.mean(b):.3f}", f"{np.mean(a):.3f}"]
            rows.append([measure, name, *means, with_interval(*paired(a, b)), len(seeds)])
    return rows


def written(header, rows):
    """Rows in columns, as lines of text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return "\n".join(lines) + "\n"
