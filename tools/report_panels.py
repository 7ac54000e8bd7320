"""Curves of a run or of several, as a picture (matplotlib) and as a page (plotly.js,
tools/report_page.html).

A panel is a title and curves over one axis. The page is one file that fetches nothing: curves to
zoom into, tables, rollouts to leaf through.
"""

import json
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PALETTE = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf".split()
# title, values that its axis shows in any case, keys of metrics.jsonl; the first ones are in
# report.png, too
KEYS = (
    ("lag of trained tokens, versions", (0,), "lag_mean lag_max"),
    ("effective sample size", (0.9, 1), "ess"),
    ("tokens / s", (0,), "gen_tok_s train_tok_s"),
    ("seconds of a step, and waiting in it", (0,), "step_s wait_data_s wait_sync_s save_s"),
    ("seconds of a weight update", (0,), "gather_s send_s ready_s pause_s sync_s"),
)
MORE_KEYS = (
    ("share of engine slots that are empty", (0,), "gen_idle"),
    ("KL(behaviour || trained), nats a token", (), "kl_behavior"),
    ("loss, per sample", (), "loss"),
    ("entropy, nats", (), "entropy"),
    ("norm of the gradient before clipping", (), "grad_norm"),
    ("share of tokens outside the clip range", (), "clip_frac"),
    ("share of samples with an advantage", (0,), "signal"),
    ("share of answers cut off", (0,), "cut_off"),
    ("learning rate", (), "lr"),
)


@dataclass
class Curve:
    """Points of one quantity, x [N] and y [N]; not a number where there is none.

    style: line, dots (a line through marked points) or faint; low, high [N]: a band around it, or
    None.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    style: str
    color: str
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass
class Panel:
    """Curves over the same axis. include: values that the axis shows in any case."""

    title: str
    xlabel: str = "step"
    include: tuple = ()
    log: bool = False
    curves: list[Curve] = field(default_factory=list)

    def add(self, label, x, y, style="line", color=None, **band):
        """One more curve; color: number of it in PALETTE, by default the next one."""
        number = len(self.curves) if color is None else color
        color = PALETTE[number % len(PALETTE)]
        self.curves.append(Curve(label, np.asarray(x), np.asarray(y), style, color, **band))


# ---- the panels of a run


def column(lines, key):
    """One value a line, as floats [lines]; null is not a number."""
    return np.array([line[key] for line in lines], dtype=float)


def smooth(y):
    """Mean over nine neighbours, at the ends over copies of the last one."""
    if len(y) <= 9:
        return y
    padded = np.pad(y, (4, 4), "edge")
    return np.convolve(padded, np.ones(9) / 9, "valid")


def evaluated(steps, evals, task):
    """(minutes, thousand samples, scores) of a task's evaluations, each [N]."""
    # before the first step: trained on nothing
    trained = {steps[0]["version"] - 1: 0} | {line["version"]: line["samples"] for line in steps}
    have = [line for line in evals if task in line["eval"] and line["version"] in trained]
    samples = np.array([trained[line["version"]] for line in have]) / 1000
    scores = np.array([line["eval"][task] for line in have])
    return column(have, "wall_s") / 60, samples, scores


def reward_panels(steps, evals):
    """Training reward and held-out scores, against the time and against the samples."""
    reward = column(steps, "reward")
    panels = []
    axes = (("minutes", "wall_s", 60), ("thousand samples", "samples", 1000))
    for i, (xlabel, key, unit) in enumerate(axes):
        x = column(steps, key) / unit
        panel = Panel(f"reward against {xlabel}", xlabel, include=(0, 1))
        panel.add("each step", x, reward, "faint", 0)
        panel.add("training reward", x, smooth(reward), color=0)
        for number, task in enumerate(evals[0]["eval"] if evals else [], 3):
            points = evaluated(steps, evals, task)
            panel.add(f"held-out {task}", points[i], points[2], "dots", number)
        panels.append(panel)
    return panels


def mismatch_panel(steps, mismatches):
    """Of samples of lag 0, and where engines were asked for the logprobs of the trainer's
    sequences.
    """
    panel = Panel("mismatch, nats a token", log=True)
    panel.add("samples of lag 0", column(steps, "step"), column(steps, "mismatch"))
    measured = column(mismatches, "mismatch")
    panel.add("sequences computed by both", column(mismatches, "version"), measured, "dots")
    return panel


def plain_panel(steps, title, include, keys):
    """Quantities of metrics.jsonl: smoothed, and of a single one each step's value, too."""
    panel = Panel(title, include=include)
    x = column(steps, "step")
    if " " not in keys:
        panel.add("each step", x, column(steps, keys), "faint", 0)
    for color, key in enumerate(keys.split()):
        panel.add(key, x, smooth(column(steps, key)), color=color)
    return panel


def run_panels(steps, evals, mismatches):
    """(panels of report.png, further ones of report.html: what one looks at when something is
    wrong).
    """
    first = [*reward_panels(steps, evals), mismatch_panel(steps, mismatches)]
    first += [plain_panel(steps, *panel) for panel in KEYS]
    return first, [plain_panel(steps, *panel) for panel in MORE_KEYS]


# ---- as a picture


def draw_panel(ax, panel):
    """One panel, with matplotlib."""
    for curve in panel.curves:
        if curve.style == "faint":
            ax.plot(curve.x, curve.y, color=curve.color, alpha=0.25)
            continue
        marker = "o" if curve.style == "dots" else None
        ax.plot(curve.x, curve.y, color=curve.color, marker=marker, label=curve.label)
        if curve.low is not None:
            ax.fill_between(curve.x, curve.low, curve.high, color=curve.color, alpha=0.15)
    for value in panel.include:
        # not seen, but within the axis
        ax.axhline(value, alpha=0)
    ax.set(title=panel.title, xlabel=panel.xlabel)
    if panel.log:
        ax.set_yscale("log", nonpositive="mask")
    ax.grid(alpha=0.3)
    if len(panel.curves) > 1:
        ax.legend()


def draw(path, title, panels):
    """Panels in two rows."""
    columns = (len(panels) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(5 * columns, 8), constrained_layout=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes.flat, panels):
        draw_panel(ax, panel)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    plt.close(figure)


# ---- as a page


def as_json(panel):
    """A panel as report_page.html takes it: dicts and lists; JSON knows no NaN."""
    curves = []
    for curve in panel.curves:
        values = vars(curve) | {}
        for name in ("x", "y", "low", "high"):
            points = [] if values[name] is None else values[name]
            values[name] = [float(f"{v:.7g}") if np.isfinite(v) else None for v in points]
        curves.append(values)
    return vars(panel) | dict(curves=curves)


def table(title, header, rows, empty="none", folded=False):
    """As report_page.html takes it; empty: said where there are no rows; folded: shown when one
    clicks on it.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    return dict(title=title, header=header, rows=cells, empty=empty, folded=folded)


def write_page(path, title, summary, tables, panels, rollouts=()):
    """Write the page: words, tables, panels, rollouts (lines of samples.jsonl)."""
    # only here: half a second
    from plotly.offline import get_plotlyjs

    data = dict(title=title, summary=summary, tables=tables, rollouts=rollouts)
    data["panels"] = [as_json(panel) for panel in panels]
    # nothing in a rollout may end the script that it is in
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = Path(__file__).with_name("report_page.html").read_text()
    parts = {"title": escape(title), "plotly": get_plotlyjs(), "data": text}
    whole = re.sub(r"\{\{(title|plotly|data)\}\}", lambda match: parts[match[1]], page)
    Path(path).write_text(whole)
