"""report.html: one file with curves to zoom into, rollouts to leaf through, alarms and drops; nothing is fetched.

tools/page.html is the page, plotly.js (of the package plotly) draws its curves. Called by tools/report.py.
"""

import json
import math
import os
import re
from collections import Counter
from html import escape
from pathlib import Path

import numpy as np

# a page holds so many tokens of rollouts at most, the newest, looked for in so many bytes of each file; of each
# curve about so many points, of each log so many lines
MOST_TOKENS = 500_000
MOST_BYTES = 100_000_000
MOST_POINTS = 3000
MOST_EVENTS = 50
PALETTE = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf".split()
# what the logs say of engines, records and attempts that were lost
EVENT = re.compile(
    r"died with exit code|was dropped|did not reach|is refused|failed for good|is killed|told to stop|not finite"
)


# ---- curves


def numbers(values, digits=5):
    """Array -> list of floats for JSON, which knows no NaN."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values]


def chosen_points(curve):
    """Which points of a curve [N] are drawn, at most about MOST_POINTS: of each stretch the lowest and the highest, so
    that no spike is lost; of areas and bands, which lie on each other, every n-th.
    """
    n = len(curve.x)
    if n <= MOST_POINTS:
        return np.arange(n)
    if curve.style == "area" or curve.low is not None:
        return np.arange(0, n, math.ceil(n / MOST_POINTS))
    found = set()
    for stretch in np.array_split(np.arange(n), MOST_POINTS // 2):
        y = np.nan_to_num(curve.y[stretch])
        found |= {int(stretch[y.argmin()]), int(stretch[y.argmax()])}
    return np.array(sorted(found))


def colour(curve, i):
    return PALETTE[(i if curve.color is None else curve.color) % len(PALETTE)]


def traces(panel):
    """The curves of a panel (tools/panels.py), as plotly's traces."""
    found = []
    for i, curve in enumerate(panel.curves):
        own = colour(curve, i)
        points = chosen_points(curve)
        x = numbers(curve.x[points], 12)
        if curve.low is not None:
            edge = dict(x=x, mode="lines", line={"width": 0}, hoverinfo="skip", showlegend=False)
            edge |= dict(legendgroup=curve.label)
            found.append(edge | dict(y=numbers(curve.low[points])))
            found.append(
                edge | dict(y=numbers(curve.high[points]), fill="tonexty", fillcolor=own + "26")
            )
        trace = dict(x=x, y=numbers(curve.y[points]), name=curve.label, legendgroup=curve.label)
        trace |= dict(mode="lines", line=dict(color=own, width=1.5))
        if curve.style == "faint":
            trace |= dict(opacity=0.3, showlegend=False, line=dict(color=own, width=1))
        elif curve.style == "dots":
            trace["mode"] = "lines+markers"
        elif curve.style == "area":
            trace |= dict(stackgroup="one", line=dict(color=own, width=0))
        found.append(trace)
    return found


def figure(panel):
    """A panel as plotly's data and layout."""
    ends = (panel.bottom, panel.top)
    data = traces(panel)
    yaxis = dict(exponentformat="e", minexponent=5, type="log" if panel.log else "linear")
    if ends != (None, None) and not panel.log:
        yaxis["range"] = reach(data, *ends)
    layout = dict(
        title=dict(text=panel.title, font=dict(size=14)),
        margin=dict(l=55, r=10, t=36, b=75),
        yaxis=yaxis,
        hovermode="x unified",
        showlegend=sum(trace.get("showlegend", True) for trace in data) > 1,
        legend=dict(orientation="h", yref="container", y=0, yanchor="bottom", font=dict(size=11)),
    )
    return dict(data=data, layout=layout)


def reach(data, bottom, top):
    """Where an axis begins and ends of which only one may be given."""
    stacked = [trace["y"] for trace in data if "stackgroup" in trace]
    plain = [trace["y"] for trace in data if "stackgroup" not in trace]
    sums = [sum(v or 0 for v in column) for column in zip(*stacked)]
    values = [v for y in [*plain, sums] for v in y if v is not None] or [0, 1]
    low = min(values) if bottom is None else bottom
    high = 1.05 * max(values) if top is None else top
    return [low, high if high > low else low + 1]


# ---- rollouts, events


def newest_lines(path):
    """Lines of a .jsonl file, the newest first, out of its last MOST_BYTES."""
    if not path.exists():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - MOST_BYTES, 0))
        texts = file.read().split(b"\n")
    # before the first line feed that was read is a part of a line; after the last one is a torn line or nothing
    first = 1 if size > MOST_BYTES else 0
    for text in reversed(texts[first:-1]):
        yield json.loads(text)


def rollouts(run_dir):
    """The newest logged rollouts, MOST_TOKENS of them, joined with what became of them in training."""
    found = {}
    tokens = 0
    for line in newest_lines(Path(run_dir, "samples.jsonl")):
        # runs of older versions had no numbers; of a draw that was sampled again after a stop what came last counts
        number = line.get("number")
        if number is None or number in found:
            continue
        tokens += sum(len(texts) for _, texts in line["spans"])
        if tokens > MOST_TOKENS:
            break
        names = "number index task reward outcome finished spans behavior_logprobs".split()
        own = {name: line[name] for name in names}
        own |= dict(prompt=prompt_of(line), answer=shown(line["answer"]))
        found[number] = own | dict(step=None, advantage=None, log_ratios=None)
    for path in Path(run_dir).glob("trained_*.jsonl"):
        for line in newest_lines(path):
            if line["number"] in found and found[line["number"]]["step"] is None:
                found[line["number"]] |= line
    return list(found.values())


def prompt_of(line):
    """A problem's prompt as one line of text; a chat's last message."""
    prompt = line["prompt"]
    if isinstance(prompt, list):
        prompt = prompt[-1]["content"]
    return " ".join(str(prompt).split())[:200]


def shown(answer):
    return None if answer is None else str(answer)


def events(run_dir):
    """[[log, line]] of what the logs say went wrong, the last ones of each."""
    found = []
    for path in sorted(Path(run_dir, "logs").glob("*.log")):
        with open(path, errors="replace") as lines:
            own = [[path.stem, line.strip()[:300]] for line in lines if EVENT.search(line)]
        found += own[-MOST_EVENTS:]
    return found


def drops(steps):
    """[[reason, samples, first step, last step]] of what was not trained."""
    counts = Counter()
    at = {}
    for line in steps:
        for reason, problems in line["drops"].items():
            counts[reason] += sum(problems.values())
            at.setdefault(reason, []).append(line["step"])
    return [[reason, n, at[reason][0], at[reason][-1]] for reason, n in counts.most_common() if n]


# ---- the page


def table(title, header, rows, empty="none", folded=False):
    """As page.html takes it; folded: shown when one clicks on it."""
    cells = [[str(cell) for cell in row] for row in rows]
    return dict(title=title, header=header, rows=cells, empty=empty, folded=folded)


def continuations(run_dir):
    """[[step, what changed]] of a run that was stopped and went on (plumbing/launch.open_run)."""
    found = []
    for line in newest_lines(Path(run_dir, "continued.jsonl")):
        changed = [f"{name} ({old} -> {new})" for name, (old, new) in line["changed"].items()]
        found.append([line["step"], ", ".join(changed) or "nothing"])
    return found[::-1]


def configuration(run_dir):
    """[[knob, value]] of config.json, and the versions that it names."""
    known = json.loads(Path(run_dir, "config.json").read_text())
    return [*known["config"].items(), *known["versions"].items(), ["git", known["git"]]]


def write(path, title, summary, tables, found, shown_rollouts=()):
    """Write the page: words, tables, panels (tools/panels.py), rollouts."""
    # only here: half a second
    from plotly.offline import get_plotlyjs

    data = dict(
        title=title,
        summary=summary,
        tables=tables,
        panels=[figure(panel) for panel in found],
        rollouts=list(shown_rollouts),
    )
    # nothing in a rollout may end the script that it is in
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = Path(__file__).with_suffix(".html").read_text()
    parts = {"title": escape(title), "plotly": get_plotlyjs(), "data": text}
    whole = re.sub(r"\{\{(title|plotly|data)\}\}", lambda match: parts[match[1]], page)
    # who looks at the old one sees all of it, also while another process draws
    temporary = Path(path).with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(whole)
    temporary.replace(path)


def write_run(run_dir, summary, steps, alarms, found):
    """out/<run>/report.html."""
    logged = rollouts(run_dir)
    summary += (
        f"rollouts       the newest {len(logged)} that were logged are below (samples.jsonl)\n"
    )
    said = [[line["version"], line["alarm"]] for line in alarms]
    tables = [
        table("Alarms", ["version", "what"], said),
        table("Drops", ["reason", "samples", "first step", "last step"], drops(steps)),
        table("Stopped and continued", ["from step", "what changed"], continuations(run_dir)),
        table("Events in the logs", ["log", "line"], events(run_dir)),
        table("Configuration", ["knob", "value"], configuration(run_dir), folded=True),
    ]
    write(Path(run_dir, "report.html"), str(run_dir), summary, tables, found, logged)
