"""Runs beside each other: what differs in their configurations, seeds as bands, the difference with
its interval.

Runs that differ in nothing but their seed are one setting. Called by tools/report.py.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

import config as cfg
from tools.report_panels import Panel, column, evaluated, smooth

# two runs are the same setting whatever these are
OWN = "run out run_id seed port nnodes master_addr master_port fresh dry_run wandb"
MINUTES = "minutes of training"
SAMPLES = "thousand samples"
# key of metrics.jsonl, its axis, what it is
QUANTITIES = (
    ("reward", MINUTES, "training reward"),
    ("reward", "step", "training reward"),
    ("lag_mean", "step", "lag of trained tokens, mean, versions"),
    ("ess", "step", "effective sample size"),
    ("entropy", "step", "entropy, nats"),
    ("gen_tok_s", "step", "tokens sampled / s"),
    ("gen_idle", "step", "share of engine slots empty"),
)
POINTS = 300
# characters of what differs that still make a name
LONGEST_NAME = 60
# of Student's t, 97.5%, by degrees of freedom from 1 on
T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
HEADER = ("measure", "setting", "mean", "first's mean", "difference", "95% (t)", "per seed")


@dataclass
class Run:
    """A run's directory, steps and evaluations."""

    run_dir: Path
    steps: list
    evals: list

    def __post_init__(self):
        self.config = cfg.load(self.run_dir)
        self.tasks = list(self.evals[0]["eval"]) if self.evals else []
        # minutes from its clock's start to its first step's: loading is no difference between
        # settings
        self.began = (self.steps[0]["wall_s"] - self.steps[0]["step_s"]) / 60

    def knob(self, name):
        """Its value; the path of a tiny base model without the seed."""
        value = getattr(self.config, name)
        return value.removesuffix(f"-seed{self.config.seed}") if name == "model" else value

    def points(self, key, axis):
        """(x, y) of a task's held-out scores, or of a key of metrics.jsonl, smoothed."""
        if key in self.tasks:
            minutes, samples, scores = evaluated(self.steps, self.evals, key)
            return (np.maximum(minutes - self.began, 0) if axis == MINUTES else samples), scores
        minutes = column(self.steps, "wall_s") / 60 - self.began
        x = minutes if axis == MINUTES else column(self.steps, "step")
        return x, smooth(column(self.steps, key))


def differing(runs):
    """{knob: [value of each run]} of the knobs that are not the same in all."""
    found = {}
    for field in fields(cfg.Config):
        values = [run.knob(field.name) for run in runs]
        if field.name not in OWN.split() and any(value != values[0] for value in values):
            found[field.name] = values
    return found


def settings(runs):
    """{name of a setting: its runs, by seed}; named by what differs, or by its first run.

    Raises ValueError if two runs are the same setting and seed.
    """
    knobs = differing(runs)
    by_words = {}
    for i, run in enumerate(runs):
        words = ", ".join(f"{name} {values[i]}" for name, values in knobs.items())
        by_seed = by_words.setdefault(words, {})
        twin = by_seed.setdefault(run.config.seed, run)
        if twin is not run:
            raise ValueError(
                f"{twin.run_dir} and {run.run_dir} are the same setting and seed: leave one out"
            )
    named = {}
    for words, by_seed in by_words.items():
        own = [by_seed[seed] for seed in sorted(by_seed)]
        # many knobs make no name
        is_name = 0 < len(words) <= LONGEST_NAME
        named[words if is_name else str(own[0].run_dir)] = own
    return named


# ---- curves


def add_curves(panel, label, curves, color):
    """Curves (x, y), one a seed, as one: their mean, and a band from the lowest to the highest,
    where all seeds are.

    As they are, without a mean, if they have less than half of their length in common.
    """
    first = max((x[0] for x, _ in curves), default=0)
    last = min((x[-1] for x, _ in curves), default=0)
    if len(curves) <= 1 or last - first < 0.5 * max(np.ptp(x) for x, _ in curves):
        for x, y in curves:
            panel.add(label, x, y, color=color)
        return
    grid = np.linspace(first, last, POINTS)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    words = f"{label} ({len(curves)} seeds: mean, lowest to highest)"
    panel.add(words, grid, lines.mean(0), color=color, low=lines.min(0), high=lines.max(0))


def panels(by_setting):
    """The same axes for all settings."""
    tasks = dict.fromkeys(task for runs in by_setting.values() for r in runs for task in r.tasks)
    kinds = [(task, axis, f"held-out {task}") for task in tasks for axis in (MINUTES, SAMPLES)]
    found = []
    for key, axis, title in [*kinds, *QUANTITIES]:
        panel = Panel(f"{title} against {axis}", axis)
        for color, (name, runs) in enumerate(by_setting.items()):
            have = [run for run in runs if key in run.steps[0] or key in run.tasks]
            add_curves(panel, name, [run.points(key, axis) for run in have], color)
        found.append(panel)
    return found


# ---- the difference


def mean_until(x, y, end):
    """Mean of a curve (straight lines between points) from its first x to `end`."""
    inside = x < end
    x_inside = np.append(x[inside], end)
    y_inside = np.append(y[inside], np.interp(end, x, y))
    return np.trapezoid(y_inside, x_inside) / (end - x[0])


def measures(run, shared):
    """{what is compared: its value} of a run; shared: {task: thousand samples at which all runs
    were still evaluated}.
    """
    found = {"steps": run.steps[-1]["step"]}
    for task in run.tasks:
        samples, scores = run.points(task, SAMPLES)
        found[f"held-out {task}, last"] = scores[-1]
        end = shared.get(task, 0)
        if samples[0] < end:
            words = f"held-out {task}, mean of the first {end:.1f}k samples"
            found[words] = mean_until(samples, scores, end)
    tenth = max(len(run.steps) // 10, 1)
    found["reward, last tenth"] = column(run.steps, "reward")[-tenth:].mean()
    found[MINUTES] = run.steps[-1]["wall_s"] / 60 - run.began
    if len(run.steps) > 1:
        seconds = column(run.steps[1:], "step_s").sum()
        found["samples/s of the steps"] = np.ptp(column(run.steps, "samples")) / seconds
    return found


def shared_samples(runs):
    """{task: thousand samples of the earliest last evaluation}, of the tasks that all runs have."""
    tasks = set.intersection(*(set(run.tasks) for run in runs))
    return {task: min(run.points(task, SAMPLES)[0][-1] for run in runs) for task in tasks}


def paired(ours, theirs):
    """Mean difference theirs - ours over seeds [S], and its 95% interval (low, high) by Student's
    t; None of a single seed.
    """
    d = np.asarray(theirs, float) - np.asarray(ours, float)
    mean = float(d.mean())
    if len(d) < 2:
        return mean, None
    freedom = len(d) - 1
    # beyond the table within 1%
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.5 / freedom
    half = quantile * float(d.std(ddof=1)) / len(d) ** 0.5
    return mean, (mean - half, mean + half)


def differences(by_setting):
    """Rows under HEADER: every setting against the first one, over the seeds that both have."""
    (first, ours), *others = by_setting.items()
    shared = shared_samples(sum(by_setting.values(), []))
    own = {run.config.seed: measures(run, shared) for run in ours}
    rows = []
    for name, runs in others:
        other = {run.config.seed: measures(run, shared) for run in runs}
        seeds = sorted(own.keys() & other.keys())
        if not seeds:
            rows.append([f"no seed in common with {first}", name, *["-"] * 5])
            continue
        known = [found[seed] for found in (own, other) for seed in seeds]
        for measure in [m for m in known[0] if all(m in values for values in known)]:
            a = [own[seed][measure] for seed in seeds]
            b = [other[seed][measure] for seed in seeds]
            mean, interval = paired(a, b)
            row = [measure, name, f"{np.mean(b):.3f}", f"{np.mean(a):.3f}", f"{mean:+.3g}"]
            row.append(f"{interval[0]:+.3g} to {interval[1]:+.3g}" if interval else "one seed")
            rows.append([*row, " ".join(f"{y - x:+.3g}" for x, y in zip(a, b))])
    return rows


def as_text(header, rows):
    """Rows in columns, as lines of text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return "\n".join(lines) + "\n"
