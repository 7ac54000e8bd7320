"""What the pictures of a run show, as numbers: report.png and report.html draw the same panels.

A panel is a title and curves over one axis. Nothing here draws.
"""

from dataclasses import dataclass, field

import numpy as np

# label -> key of metrics.jsonl, in the order in which they happen
UPDATE_PARTS = {
    "gathering": "gather_s",
    "the wire": "send_s",
    "engines getting ready": "ready_s",
    "engines paused": "pause_s",
}


@dataclass
class Curve:
    """Points of one quantity, x [N] and y [N]; not a number where there is none.

    style: line, dots (a line through marked points), faint, or area (on top of the areas before it).
    low, high [N]: a band around y, or nothing. color: number of its colour; None: the next one.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    style: str = "line"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    color: int | None = None


@dataclass
class Panel:
    """Curves over the same axis. bottom, top: where its axis begins and ends at most; None: where its curves do."""

    title: str
    xlabel: str = "step"
    curves: list[Curve] = field(default_factory=list)
    bottom: float | None = None
    top: float | None = None
    log: bool = False


def column(lines, key):
    """One value a line, as floats [lines]; null is not a number."""
    return np.array([line[key] for line in lines], dtype=float)


def minutes(lines):
    return column(lines, "wall_s") / 60


def thousand_samples(lines):
    return column(lines, "samples") / 1000


def smooth(y):
    """Mean over nine neighbours, at the ends over copies of the last one."""
    if len(y) <= 9:
        return y
    padded = np.pad(y, (4, 4), "edge")
    return np.convolve(padded, np.ones(9) / 9, "valid")


def tasks_of(evals):
    """Names of what was evaluated first."""
    return list(evals[0]["eval"]) if evals else []


def evaluated(steps, evals, task):
    """(minutes, thousand samples, scores) of a task's evaluations, each [N]."""
    # thousand samples that each version was trained on; before the first step: none
    versions = column(steps, "version")
    trained = dict(zip(versions, thousand_samples(steps)))
    trained[versions[0] - 1] = 0.0
    have = [line for line in evals if task in line["eval"] and line["version"] in trained]
    samples = np.array([trained[line["version"]] for line in have])
    scores = np.array([line["eval"][task] for line in have])
    return minutes(have), samples, scores


def reward_panels(steps, evals):
    """Training reward and held-out scores, against the time and against the samples."""
    reward = column(steps, "reward")
    top = max(1.02, reward.max())
    limits = dict(bottom=min(0, reward.min()), top=top)
    by_time = Panel("reward against minutes", "minutes", **limits)
    by_samples = Panel("reward against samples", "thousand samples", **limits)
    for panel, x in ((by_time, minutes(steps)), (by_samples, thousand_samples(steps))):
        panel.curves.append(Curve("each step", x, reward, "faint", color=0))
        panel.curves.append(Curve("training reward", x, smooth(reward), color=0))
    for number, task in enumerate(tasks_of(evals), 3):
        at_minutes, at_samples, scores = evaluated(steps, evals, task)
        label = f"held-out {task}"
        by_time.curves.append(Curve(label, at_minutes, scores, "dots", color=number))
        by_samples.curves.append(Curve(label, at_samples, scores, "dots", color=number))
    return [by_time, by_samples]


def lag_panel(steps):
    x = column(steps, "step")
    curves = [
        Curve("max", x, column(steps, "lag_max"), color=1),
        Curve("mean", x, column(steps, "lag_mean"), color=0),
    ]
    return Panel("lag of trained tokens, versions", curves=curves, bottom=0)


def ess_panel(steps):
    ess = column(steps, "ess")
    curve = Curve("effective sample size", column(steps, "step"), ess)
    return Panel("effective sample size", curves=[curve], bottom=min(0.9, ess.min()), top=1.005)


def ess_by_lag_panel(steps):
    """At which lag do the data stop helping?"""
    points = {}
    for line in steps:
        for bucket, row in line["by_lag"].items():
            point = (line["step"], row["ess"], row["tokens"])
            points.setdefault(bucket, []).append(point)
    by_bucket = {bucket: np.array(rows, float).T for bucket, rows in points.items()}
    total = sum(tokens.sum() for _, _, tokens in by_bucket.values())
    panel = Panel("effective sample size by lag", top=1.005)
    for bucket, (step, ess, tokens) in by_bucket.items():
        share = tokens.sum() / total
        label = f"lag {bucket} ({share:.0%} of tokens)"
        panel.curves.append(Curve(label, step, smooth(ess)))
    return panel


def speed_panel(steps):
    x = column(steps, "step")
    curves = [
        Curve("sampled", x, smooth(column(steps, "gen_tok_s"))),
        Curve("trained (with prompts)", x, smooth(column(steps, "train_tok_s"))),
    ]
    return Panel("tokens / s", curves=curves, bottom=0)


def trainer_panel(steps):
    """Where the trainer's time goes; it sends weights in the background, but for gathering and waiting."""
    x = column(steps, "step")
    waiting = column(steps, "wait_data_s")
    sending = column(steps, "wait_sync_s")
    rest = np.maximum(column(steps, "step_s") - waiting - sending, 0)
    parts = {"waiting for data": waiting, "sending weights": sending, "training": rest}
    curves = [Curve(label, x, smooth(y), "area") for label, y in parts.items()]
    return Panel("the trainer's seconds per step", curves=curves, bottom=0)


def update_panel(steps):
    updates = [line for line in steps if line["sync_s"]]
    x = column(updates, "step")
    panel = Panel("a weight update, ms", bottom=0)
    for label, key in UPDATE_PARTS.items():
        panel.curves.append(Curve(label, x, smooth(1000 * column(updates, key)), "area"))
    panel.curves.append(Curve("all of it", x, smooth(1000 * column(updates, "sync_s"))))
    return panel


def attribution_panel(parts):
    """What the distance between behaviour and trained policy is made of."""
    title = "KL(behaviour || trained) and its parts, nats a token, by version"
    panel = Panel(title, "version", log=True)
    for name, (versions, values) in parts.items():
        panel.curves.append(Curve(name, np.array(versions), np.array(values), "dots"))
    return panel


def waits_panel(steps):
    """Who waited for whom: shares of the time."""
    x = column(steps, "step")
    seconds = column(steps, "step_s")
    shares = {
        "trainer waits for rollouts": column(steps, "wait_data_s") / seconds,
        "trainer waits for engines to take weights": column(steps, "wait_sync_s") / seconds,
        "places of engines empty (the gate, the end)": column(steps, "gen_idle"),
        "engines paused for weights": column(steps, "pause_s") / seconds,
    }
    curves = [Curve(label, x, smooth(y)) for label, y in shares.items()]
    return Panel("who waits for whom, share of the time", curves=curves, bottom=0)


def simple_panel(steps, key, title, **limits):
    """A quantity of metrics.jsonl as it is, and its running mean."""
    x = column(steps, "step")
    y = column(steps, key)
    known = ~np.isnan(y)
    curves = [
        Curve("each step", x, y, "faint", color=0),
        Curve(key, x[known], smooth(y[known]), color=0),
    ]
    return Panel(title, curves=curves, **limits)


def with_points(found):
    """Those panels that have something to show: not everything is measured in every run."""
    return [p for p in found if any(np.isfinite(curve.y).any() for curve in p.curves)]


def main_panels(steps, evals, parts):
    """Of report.png: reward against time and samples, lag, ESS (whole and by lag), tokens/s, where the time of
    trainer and updates goes; with --attribute_every (parts) also the parts of the KL.
    """
    found = [
        *reward_panels(steps, evals),
        lag_panel(steps),
        ess_by_lag_panel(steps),
        ess_panel(steps),
        speed_panel(steps),
        trainer_panel(steps),
        update_panel(steps),
    ]
    if parts:
        found.append(attribution_panel(parts))
    return with_points(found)


def more_panels(steps):
    """Of report.html beside those: what one looks at when something is wrong."""
    found = [
        waits_panel(steps),
        simple_panel(steps, "mismatch", "mismatch, nats", log=True),
        simple_panel(steps, "kl_behavior", "KL(behaviour || trained), nats a token"),
        simple_panel(steps, "loss", "loss, per sample"),
        simple_panel(steps, "entropy", "entropy, nats"),
        simple_panel(steps, "grad_norm", "norm of the gradient before clipping"),
        simple_panel(steps, "clip_frac", "share of tokens outside the clip range"),
        simple_panel(steps, "signal", "share of samples with an advantage", bottom=0),
        simple_panel(steps, "cut_off", "share of answers cut off", bottom=0),
        Panel("learning rate", curves=[Curve("lr", column(steps, "step"), column(steps, "lr"))]),
    ]
    return with_points(found)
