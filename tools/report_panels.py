"""Draw the curves of a run, or of several, as a picture and as a page.

A panel is a title and curves over one axis. matplotlib draws the picture. The page is
tools/report_page.html with plotly.js in it, one file that fetches nothing: curves to zoom into,
tables, and rollouts to leaf through.
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

from tools.common import by_lag_means  # noqa: E402

PALETTE = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf".split()
# the panels of report.png: (title, values that the axis shows in any case, keys of metrics.jsonl)
KEYS = (
    ("lag of trained tokens, versions", (0,), "lag_mean lag_max"),
    ("effective sample size", (0.9, 1), "ess"),
    ("tokens / s", (0,), "gen_tok_s train_tok_s"),
    ("seconds of a step, and waiting in it", (0,), "step_s wait_data_s wait_sync_s save_s"),
    ("seconds of a weight update", (0,), "gather_s send_s ready_s pause_s sync_s"),
)
# the quantities of by_lag, each a panel of report.html with a curve for each bucket of lags
BY_LAG = (
    ("share of the tokens, by lag", "share"),
    ("KL(behaviour || trained), nats a token, by lag", "kl"),
    ("effective sample size, by lag", "ess"),
    ("loss, per token, by lag", "loss"),
    ("share of tokens outside the clip range, by lag", "clip_frac"),
)
# the quantities in the table of report.html, in the order of report.BY_LAG_HEADER
BY_LAG_FORMATS = dict(log_ratio=".2e", kl=".2e", ess=".3f", loss=".2e", clip_frac=".2%")
# the further panels of report.html
MORE_KEYS = (
    ("share of engine slots that are empty", (0,), "gen_idle"),
    ("KL(behaviour || trained), nats a token", (), "kl_behavior"),
    ("loss, per sample", (), "loss"),
    ("entropy, nats", (), "entropy"),
    ("sampled tokens of an attempt", (0,), "length_mean length_p90"),
    ("norm of the gradient before clipping", (), "grad_norm"),
    ("share of tokens outside the clip range", (), "clip_frac"),
    ("share of samples with an advantage", (0,), "signal"),
    ("share of answers cut off", (0,), "cut_off"),
    ("learning rate", (), "lr"),
)


@dataclass
class Curve:
    """The points of one quantity: x [N] and y [N], which is not a number where there is no value.

    style: "line", "dots" (a line through marked points) or "faint". low, high [N]: the borders of a
    band around the curve, or None.
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
        """Add a curve. color: the number of its colour in PALETTE, by default the next one."""
        number = len(self.curves) if color is None else color
        color = PALETTE[number % len(PALETTE)]
        self.curves.append(Curve(label, np.asarray(x), np.asarray(y), style, color, **band))


# ---- the panels of a run


def column(lines, key):
    """Return the values of a key in all lines, as floats [number of lines]; null becomes NaN."""
    return np.array([line[key] for line in lines], dtype=float)


def smooth(y):
    """Return the mean over nine neighbours of each value [N]; the ends are continued by copies.

    Up to nine values are returned as they are.
    """
    if len(y) <= 9:
        return y
    padded = np.pad(y, (4, 4), "edge")
    return np.convolve(padded, np.ones(9) / 9, "valid")


def evaluated(steps, evals, task):
    """Return (minutes, thousand samples, scores) of a task's evaluations, each [N]."""
    # {version: number of samples that it was trained on}, beginning before the first step
    trained = {steps[0]["version"] - 1: 0}
    for line in steps:
        trained[line["version"]] = line["samples"]
    lines = [line for line in evals if task in line["eval"] and line["version"] in trained]
    minutes = column(lines, "wall_s") / 60
    samples = np.array([trained[line["version"]] for line in lines]) / 1000
    scores = np.array([line["eval"][task] for line in lines])
    return minutes, samples, scores


def reward_panels(steps, evals):
    """Return two panels with training reward and held-out scores, over time and over samples."""
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
    """Return the panel of the mismatch between engines and trainer, of two kinds of sequences.

    They are samples of lag 0 (a value in a step's line), and sequences whose logprobs the trainer
    asked an engine for (a line of its own).
    """
    panel = Panel("mismatch, nats a token", log=True)
    panel.add("samples of lag 0", column(steps, "step"), column(steps, "mismatch"))
    measured = column(mismatches, "mismatch")
    panel.add("sequences computed by both", column(mismatches, "version"), measured, "dots")
    return panel


def plain_panel(steps, title, include, keys):
    """Return a panel of the quantities with these keys of metrics.jsonl, smoothed.

    If there is a single key, the panel shows the value of each step, too.
    """
    panel = Panel(title, include=include)
    x = column(steps, "step")
    if " " not in keys:
        panel.add("each step", x, column(steps, keys), "faint", 0)
    for color, key in enumerate(keys.split()):
        panel.add(key, x, smooth(column(steps, key)), color=color)
    return panel


def by_lag_panels(steps):
    """Return the panels of BY_LAG, if the run has tokens of several buckets of lags."""
    tables = [line.get("by_lag", {}) for line in steps]
    totals = [sum(values["tokens"] for values in table.values()) for table in tables]
    buckets = list(by_lag_means(steps))
    panels = []
    for title, name in BY_LAG if len(buckets) > 1 else ():
        panel = Panel(title, include=(0,))
        for color, bucket in enumerate(buckets):
            rows = [table.get(bucket, {}) for table in tables]
            y = [row.get(name, np.nan) for row in rows]
            if name == "share":
                y = [row.get("tokens", 0) / max(n, 1) for row, n in zip(rows, totals)]
            panel.add(f"lag {bucket}", column(steps, "step"), y, color=color)
        panels.append(panel)
    return panels


def by_lag_rows(steps):
    """Return the rows of a table: means over the tokens of each bucket of lags, as texts."""
    means = by_lag_means(steps)
    total = sum(of_lag["tokens"] for of_lag in means.values())
    return [
        [bucket, f"{of_lag['tokens'] / total:.1%}"]
        + [format(of_lag[name], form) for name, form in BY_LAG_FORMATS.items()]
        for bucket, of_lag in means.items()
    ]


def run_panels(steps, evals, mismatches):
    """Return (panels of report.png, further panels of report.html).

    The further ones are for somebody who looks for the cause of a problem.
    """
    panels = [*reward_panels(steps, evals), mismatch_panel(steps, mismatches)]
    panels += [plain_panel(steps, *panel) for panel in KEYS]
    more_panels = [plain_panel(steps, *panel) for panel in MORE_KEYS] + by_lag_panels(steps)
    return panels, more_panels


# ---- the picture


def draw_panel(ax, panel):
    """Draw a panel into axes of matplotlib."""
    for curve in panel.curves:
        if curve.style == "faint":
            ax.plot(curve.x, curve.y, color=curve.color, alpha=0.25)
            continue
        marker = "o" if curve.style == "dots" else None
        ax.plot(curve.x, curve.y, color=curve.color, marker=marker, label=curve.label)
        if curve.low is not None:
            ax.fill_between(curve.x, curve.low, curve.high, color=curve.color, alpha=0.15)
    for value in panel.include:
        # An invisible line extends the axis to this value.
        ax.axhline(value, alpha=0)
    ax.set(title=panel.title, xlabel=panel.xlabel)
    if panel.log:
        ax.set_yscale("log", nonpositive="mask")
    ax.grid(alpha=0.3)
    if len(panel.curves) > 1:
        ax.legend()


def draw(path, title, panels):
    """Write a picture with the panels in two rows."""
    columns = (len(panels) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(5 * columns, 8), constrained_layout=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes.flat, panels):
        draw_panel(ax, panel)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    plt.close(figure)


# ---- the page


def as_json(panel):
    """Return a panel as report_page.html reads it: dicts and lists.

    Points are rounded to seven digits. JSON knows neither NaN nor infinity, which become None.
    """
    curves = []
    for curve in panel.curves:
        fields = dict(vars(curve))
        for name in ("x", "y", "low", "high"):
            points = [] if fields[name] is None else fields[name]
            fields[name] = [float(f"{v:.7g}") if np.isfinite(v) else None for v in points]
        curves.append(fields)
    return vars(panel) | dict(curves=curves)


def table(title, header, rows, empty="none", folded=False):
    """Return a table as report_page.html reads it: a dict whose cells are texts.

    empty: the page shows this text if there are no rows. folded: the page shows only the title
    until somebody clicks on it.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    return dict(title=title, header=header, rows=cells, empty=empty, folded=folded)


def write_page(path, title, summary, tables, panels, rollouts=()):
    """Write the page.

    summary: a text. tables: results of `table`. panels: Panels. rollouts: lines of samples.jsonl.
    """
    # The import takes half a second, so a wrong command line is reported before.
    from plotly.offline import get_plotlyjs

    data = dict(
        title=title,
        summary=summary,
        tables=tables,
        rollouts=rollouts,
        panels=[as_json(panel) for panel in panels],
    )
    # Every "<" is escaped, so that no text of a rollout can end the script that holds the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("report_page.html").read_text()
    parts = {"title": escape(title), "plotly": get_plotlyjs(), "data": text}
    page = re.sub(r"\{\{(title|plotly|data)\}\}", lambda match: parts[match[1]], template)
    Path(path).write_text(page)
