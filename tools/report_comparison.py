"""Compare runs: the knobs that differ, curves with a band over seeds, differences with intervals.

Runs that differ in nothing but their seed are one setting. tools/report.py calls these functions.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

import config as cfg
from tools.report_panels import Panel, column, evaluated, smooth

# knobs that may differ between runs of the same setting
IGNORED = "run out run_id seed port nnodes master_addr master_port fresh dry_run wandb".split()
# labels of axes, beside "step"
MINUTES = "minutes of training"
SAMPLES = "thousand samples"
# (key of metrics.jsonl, label of the axis, title)
QUANTITIES = (
    ("reward", MINUTES, "training reward"),
    ("reward", "step", "training reward"),
    ("lag_mean", "step", "lag of trained tokens, mean, versions"),
    ("ess", "step", "effective sample size"),
    ("entropy", "step", "entropy, nats"),
    ("gen_tok_s", "step", "tokens sampled / s"),
    ("gen_idle", "step", "share of engine slots empty"),
)
# number of points of a curve that is a mean over seeds
POINTS = 300
# A setting is named by its knobs if their text has at most this number of characters.
LONGEST_NAME = 60
# 97.5% quantiles of Student's t for 1, 2, 3, ... degrees of freedom
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
        # The minutes before the first step began, when models were loaded, are no difference
        # between settings.
        self.began = (self.steps[0]["wall_s"] - self.steps[0]["step_s"]) / 60

    def knob(self, name):
        """Return the value of a knob, without the seed in the path of a tiny base model."""
        value = getattr(self.config, name)
        return value.removesuffix(f"-seed{self.config.seed}") if name == "model" else value

    def points(self, key, axis):
        """Return (x, y) of a curve: a task's held-out scores, or a key of metrics.jsonl, smoothed.

        axis: MINUTES, or else SAMPLES for held-out scores and "step" for a key.
        """
        if key in self.tasks:
            minutes, samples, scores = evaluated(self.steps, self.evals, key)
            x = np.maximum(minutes - self.began, 0) if axis == MINUTES else samples
            return x, scores
        minutes = column(self.steps, "wall_s") / 60 - self.began
        x = minutes if axis == MINUTES else column(self.steps, "step")
        return x, smooth(column(self.steps, key))


def differing(runs):
    """Return {knob: [value of each run]} of the knobs that are not the same in all runs."""
    knobs = {}
    for field in fields(cfg.Config):
        values = [run.knob(field.name) for run in runs]
        if field.name not in IGNORED and any(value != values[0] for value in values):
            knobs[field.name] = values
    return knobs


def settings(runs):
    """Return {name of a setting: its runs, ordered by seed}.

    The name consists of the knobs that differ, or is the directory of the setting's first run.
    Raises ValueError if two runs are the same setting and seed.
    """
    knobs = differing(runs)
    by_label = {}
    for i, run in enumerate(runs):
        label = ", ".join(f"{name} {values[i]}" for name, values in knobs.items())
        by_seed = by_label.setdefault(label, {})
        twin = by_seed.setdefault(run.config.seed, run)
        if twin is not run:
            raise ValueError(
                f"{twin.run_dir} and {run.run_dir} are the same setting and seed: leave one out"
            )
    by_name = {}
    for label, by_seed in by_label.items():
        setting_runs = [by_seed[seed] for seed in sorted(by_seed)]
        is_name = 0 < len(label) <= LONGEST_NAME
        name = label if is_name else str(setting_runs[0].run_dir)
        by_name[name] = setting_runs
    return by_name


# ---- curves


def add_curves(panel, label, curves, color):
    """Add the curves (x, y) of a setting's seeds to a panel as one curve with a band.

    The curve is their mean, and the band goes from the lowest to the highest seed, over the part of
    the axis that all seeds have. If this part is shorter than half of the longest curve, the curves
    are added one by one. color: see Panel.add.
    """
    first = max((x[0] for x, _ in curves), default=0)
    last = min((x[-1] for x, _ in curves), default=0)
    if len(curves) <= 1 or last - first < 0.5 * max(np.ptp(x) for x, _ in curves):
        for x, y in curves:
            panel.add(label, x, y, color=color)
        return
    grid = np.linspace(first, last, POINTS)
    lines = np.array([np.interp(grid, x, y) for x, y in curves])
    label = f"{label} ({len(curves)} seeds: mean, lowest to highest)"
    panel.add(label, grid, lines.mean(0), color=color, low=lines.min(0), high=lines.max(0))


def panels(by_setting):
    """Return the panels of a comparison, each with the curves of all settings.

    by_setting: the result of `settings`.
    """
    all_runs = sum(by_setting.values(), [])
    tasks = dict.fromkeys(task for run in all_runs for task in run.tasks)
    scores = [(task, axis, f"held-out {task}") for task in tasks for axis in (MINUTES, SAMPLES)]
    all_panels = []
    for key, axis, title in [*scores, *QUANTITIES]:
        panel = Panel(f"{title} against {axis}", axis)
        for color, (name, runs) in enumerate(by_setting.items()):
            with_key = [run for run in runs if key in run.steps[0] or key in run.tasks]
            add_curves(panel, name, [run.points(key, axis) for run in with_key], color)
        all_panels.append(panel)
    return all_panels


# ---- the differences


def mean_until(x, y, end):
    """Return the mean of a curve, straight lines between its points, from its first x to `end`."""
    inside = x < end
    x_inside = np.append(x[inside], end)
    y_inside = np.append(y[inside], np.interp(end, x, y))
    return np.trapezoid(y_inside, x_inside) / (end - x[0])


def measures(run, shared):
    """Return the values of a run that are compared: {name: value}.

    shared: the result of `shared_samples`.
    """
    values = {"steps": run.steps[-1]["step"]}
    for task in run.tasks:
        samples, scores = run.points(task, SAMPLES)
        values[f"held-out {task}, last"] = scores[-1]
        end = shared.get(task, 0)
        if samples[0] < end:
            name = f"held-out {task}, mean of the first {end:.1f}k samples"
            values[name] = mean_until(samples, scores, end)
    tenth = max(len(run.steps) // 10, 1)
    values["reward, last tenth"] = column(run.steps, "reward")[-tenth:].mean()
    values[MINUTES] = run.steps[-1]["wall_s"] / 60 - run.began
    if len(run.steps) > 1:
        seconds = column(run.steps[1:], "step_s").sum()
        values["samples/s of the steps"] = np.ptp(column(run.steps, "samples")) / seconds
    return values


def shared_samples(runs):
    """Return {task: thousand samples up to which all runs were evaluated}.

    Only tasks that all runs have are in it.
    """
    tasks = set.intersection(*(set(run.tasks) for run in runs))
    return {task: min(run.points(task, SAMPLES)[0][-1] for run in runs) for task in tasks}


def paired(ours, theirs):
    """Return the mean of the differences theirs - ours over seeds [S], and its 95% interval.

    The interval (low, high) is that of Student's t; it is None if there is a single seed.
    """
    deltas = np.asarray(theirs, float) - np.asarray(ours, float)
    seeds = len(deltas)
    mean = float(deltas.mean())
    if seeds < 2:
        return mean, None
    freedom = seeds - 1
    if freedom <= len(T_QUANTILES):
        quantile = T_QUANTILES[freedom - 1]
    else:
        # This approximation is right within 1%.
        quantile = 1.96 + 2.5 / freedom
    half_width = quantile * float(deltas.std(ddof=1)) / seeds**0.5
    return mean, (mean - half_width, mean + half_width)


def differences(by_setting):
    """Return rows under HEADER that compare each setting with the first, over common seeds.

    by_setting: the result of `settings`.
    """
    shared = shared_samples(sum(by_setting.values(), []))
    by_seed = {}
    for name, runs in by_setting.items():
        by_seed[name] = {run.config.seed: measures(run, shared) for run in runs}
    first_name, *other_names = by_seed
    first = by_seed[first_name]
    rows = []
    for name in other_names:
        other = by_seed[name]
        seeds = sorted(first.keys() & other.keys())
        if not seeds:
            rows.append([f"no seed in common with {first_name}", name, *["-"] * 5])
            continue
        values_of_runs = [values[seed] for values in (first, other) for seed in seeds]
        for measure in values_of_runs[0]:
            if not all(measure in values for values in values_of_runs):
                continue
            ours = [first[seed][measure] for seed in seeds]
            theirs = [other[seed][measure] for seed in seeds]
            mean, interval = paired(ours, theirs)
            row = [
                measure,
                name,
                f"{np.mean(theirs):.3f}",
                f"{np.mean(ours):.3f}",
                f"{mean:+.3g}",
                f"{interval[0]:+.3g} to {interval[1]:+.3g}" if interval else "one seed",
                " ".join(f"{theirs[i] - ours[i]:+.3g}" for i in range(len(seeds))),
            ]
            rows.append(row)
    return rows


def as_text(header, rows):
    """Return rows in columns, as lines of text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return "\n".join(lines) + "\n"
