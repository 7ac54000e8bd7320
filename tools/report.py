"""What came of a run, or of several: a table, report.png, and report.html to look closer.

    python tools/report.py [out/toy]                 also of a run in progress; without a run: the newest
    python tools/report.py out/a out/b out/c ...     compares them; runs that differ in their seed alone are one setting

A comparison says what differs in the configurations, draws seeds as bands, and gives the differences from the first
setting, seed by seed, with the intervals of a paired bootstrap and of Student's t; comparison.png and comparison.html lie beside the first run.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from tools import comparison, page  # noqa: E402
from tools.find import run_of  # noqa: E402
from tools.panels import column, main_panels, more_panels  # noqa: E402

# means over steps, and shares of the time that steps took: starting is not among them
MEANS = ("lag_mean", "ess", "versions_2", "versions_3", "gen_tok_s", "train_tok_s", "gen_idle")
SHARES = ("pause_s", "wait_data_s", "wait_sync_s")
# times the throughput: a move that brings less is not worth a restart
WORTH = 1.05
# steps at the beginning in which engines fill and the trainer waits for the first answers
FILLING = 10
# share of the time: if both sides idle for longer, the gate is what holds them back
IDLE = 0.1
SUMMARY = """\
steps          {step}, {samples} samples in {minutes:.1f} min
{held_out}\
reward         {first:.3f} -> {last:.3f} (mean of the first, the last {window} steps)
lag            mean {lag_mean:.2f}, max {lag_max} versions; ess {ess:.3f}
versions       {versions_2:.0%} of the samples were sampled by two or more, {versions_3:.1%} by three or more
tokens/s       {gen_tok_s:.0f} sampled, {train_tok_s:.0f} trained
waits          the trainer for data {wait_data_s:.0%} of the time, for weights to be sent {wait_sync_s:.1%}
engines        {gen_idle:.0%} of their places empty, paused for weights {pause_s:.1%} of the time
mismatch       {mismatch:.1e} nats at most ({measured} steps had lag-0 samples); dropped {dropped}
"""
HELD_OUT = """\
held-out {task:<5} {before} (version {first}) -> {after} (version {last}), {problems}
"""
HELD_OUT_ONCE = """\
held-out {task:<5} {before} (version {first}), {problems}
"""


def lines_with(run_dir, *keys):
    """Of each key, `step`, `eval`, `alarm` or `attribution`, the lines of a run's metrics.jsonl that have it.

    The last line may be torn; it is left out.
    """
    path = Path(run_dir, "metrics.jsonl")
    whole = [text for text in path.read_text().splitlines(True) if text.endswith("\n")]
    lines = [json.loads(text) for text in whole]
    return [[line for line in lines if key in line] for key in keys]


def read(run_dir):
    """(step lines, evaluation lines) of a run."""
    return lines_with(run_dir, "step", "eval")


def attributions(lines):
    """{part of the distance: ([version], [KL])} of a run with --attribute_every, see plumbing/attribution.py."""
    found = {}
    for line in lines:
        for name, part in line["attribution"].items():
            if part:
                versions, values = found.setdefault(name, ([], []))
                versions.append(line["version"])
                values.append(part["kl"])
    return found


def draw_panel(ax, panel):
    """With matplotlib."""
    areas = [curve for curve in panel.curves if curve.style == "area"]
    if areas:
        labels = [curve.label for curve in areas]
        ax.stackplot(areas[0].x, [curve.y for curve in areas], labels=labels, alpha=0.8)
    for curve in panel.curves:
        color = None if curve.color is None else f"C{curve.color}"
        if curve.style == "faint":
            ax.plot(curve.x, curve.y, color=color, alpha=0.25)
        elif curve.style != "area":
            marker = "o" if curve.style == "dots" else None
            [line] = ax.plot(curve.x, curve.y, color=color, marker=marker, label=curve.label)
            if curve.low is not None:
                shade = dict(color=line.get_color(), alpha=0.15, linewidth=0)
                ax.fill_between(curve.x, curve.low, curve.high, **shade)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylim=(panel.bottom, panel.top))
    if panel.log:
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    if len(panel.curves) > 1:
        ax.legend()


def draw(path, title, found):
    """Panels in two rows, as a picture."""
    columns = (len(found) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(5 * columns, 8), constrained_layout=True)
    for ax in axes.flat[len(found) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes.flat, found):
        draw_panel(ax, panel)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def with_chance(score, line):
    """A score in words, with what chance makes of it: 95%, normal, of one attempt at each of one set's problems."""
    if len(line["eval"]) > 1 or line.get("answers") != line["problems"]:
        return f"{score:.3f}"
    half = 1.96 * (score * (1 - score) / line["problems"]) ** 0.5
    return f"{score:.3f} +-{half:.3f}"


def score_lines(evals):
    """Of each task that was evaluated first and last, a line of the summary."""
    if not evals:
        return
    first = evals[0]
    last = evals[-1]
    versions = dict(
        first=first["version"],
        last=last["version"],
        problems=f"{last['problems']} problems" + (" in all sets" if len(last["eval"]) > 1 else ""),
    )
    for task, before in first["eval"].items():
        after = last["eval"].get(task)
        before = with_chance(before, last)
        if last is first:
            yield HELD_OUT_ONCE.format(task=task, before=before, **versions)
        elif after is not None:
            after = with_chance(after, last)
            yield HELD_OUT.format(task=task, before=before, after=after, **versions)


def summary(steps, evals):
    """The numbers a run ends with, as text."""
    last = steps[-1]
    reward = column(steps, "reward")
    # the two do not overlap
    window = max(min(5, len(steps) // 2), 1)
    mismatch = column(steps, "mismatch")
    measured = mismatch[~np.isnan(mismatch)]
    values = dict(
        step=last["step"],
        samples=last["samples"],
        dropped=last["dropped"],
        minutes=last["wall_s"] / 60,
        held_out="".join(score_lines(evals)),
        first=reward[:window].mean(),
        last=reward[-window:].mean(),
        window=window,
        lag_max=max(line["lag_max"] for line in steps),
        measured=len(measured),
        mismatch=max(measured, default=np.nan),
    )
    for key in MEANS:
        values[key] = column(steps, key).mean()
    for key in SHARES:
        values[key] = column(steps, key).sum() / column(steps, "step_s").sum()
    return SUMMARY.format(**values)


def below_1(share):
    """A share that one minus it can be divided by."""
    return min(max(share, 0.0), 0.99)


def advice(waits, blocked, serving, training, per_engine=1):
    """One line of advice; "" if there is none that would bring 5%.

    waits: share of its time that the trainer waits for data. blocked: share of the engines' places
    that the gate leaves empty, averaged over time. serving, training: GPUs of each; per_engine: GPUs
    of one engine. Both sides' speed is taken as proportional to their GPUs; the slower one decides.
    """
    waits = below_1(waits)
    blocked = below_1(blocked)
    total = serving + training
    # what one GPU would do unhindered, in units of the present throughput of all
    engine_rate = 1 / (1 - blocked) / serving
    trainer_rate = 1 / (1 - waits) / training
    now = min(serving * engine_rate, training * trainer_rate)
    best = serving
    most = now
    for serve in range(per_engine, total, per_engine):
        train = total - serve
        rate = min(serve * engine_rate, train * trainer_rate)
        if rate > most:
            best = serve
            most = rate
    waiting = f"trainer waits {waits:.0%} of the time"
    empty = f"the gate keeps {blocked:.0%} of the engines' places empty"
    if most >= WORTH * now:
        reason = waiting
        way = "from training to serving"
        moved = best - serving
        if moved < 0:
            reason = empty
            way = "from serving to training"
            moved = -moved
        gpus = "GPU" if moved == 1 else "GPUs"
        split = f"({best} serve, {total - best} train)"
        gain = most / now
        return f"{reason}: move {moved} {gpus} {way} {split}, about {gain:.2f} times the throughput"
    if waits > IDLE and blocked > IDLE:
        return f"{waiting} while {empty}: raise --max_lag"
    return ""


def advice_on(config, steps):
    """`advice` on a run's last 50 steps, once there are so many beside the first ones."""
    recent = steps[FILLING:][-50:]
    if len(recent) < FILLING:
        return ""
    seconds = column(recent, "step_s").sum()
    return advice(
        column(recent, "wait_data_s").sum() / seconds,
        column(recent, "gen_idle").mean(),
        config.engines * config.tensor_parallel,
        config.trainers,
        config.tensor_parallel,
    )


def known(run_dir):
    """(steps, evaluations, alarms, attributions) of a run; exits with a line if it has no step yet."""
    if not Path(run_dir, "metrics.jsonl").exists():
        sys.exit(f"report: there is no {run_dir}/metrics.jsonl: no step is done yet")
    steps, *others = lines_with(run_dir, "step", "eval", "alarm", "attribution")
    if not steps:
        sys.exit(f"report: {run_dir}/metrics.jsonl has no steps yet")
    return steps, *others


def of_run(run_dir, quiet):
    """One run's table, report.png and report.html; quiet: report.html alone."""
    steps, evals, alarms, attributed = known(run_dir)
    text = summary(steps, evals)
    for line in alarms:
        text += f"ALARM          version {line['version']}: {line['alarm']}\n"
    text += f"advice         {advice_on(cfg.load(run_dir), steps) or 'none'}\n"
    found = main_panels(steps, evals, attributions(attributed))
    page.write_run(run_dir, text, steps, alarms, found + more_panels(steps))
    if quiet:
        return
    draw(Path(run_dir, "report.png"), str(run_dir), found)
    print(text, end="")
    print(f"pictures       {Path(run_dir, 'report.png')}, {Path(run_dir, 'report.html')}")


def of_several(run_dirs):
    """Runs beside each other: tables, comparison.png and comparison.html."""
    runs = []
    for run_dir in run_dirs:
        steps, evals, *_ = known(run_dir)
        runs.append(comparison.Run(run_dir, steps, evals))
    try:
        by_setting = comparison.settings(runs)
    except ValueError as e:
        sys.exit(f"report: {e}")
    title = " against ".join(by_setting)
    text = ""
    for name, own in by_setting.items():
        text += f"{name}: {', '.join(str(run.run_dir) for run in own)}\n"
    knobs = [[name, *values] for name, values in comparison.differing(runs).items()]
    header = ["knob", *(Path(run_dir).name for run_dir in run_dirs)]
    rows = comparison.differences(by_setting) if len(by_setting) > 1 else []
    print(
        f"{text}\n{comparison.written(header, knobs)}\n{comparison.written(comparison.HEADER, rows)}"
    )
    tables = [
        page.table("What differs", header, knobs, "nothing but the seeds"),
        page.table("Differences from the first", comparison.HEADER, rows, "there is one setting"),
    ]
    found = comparison.panels(by_setting)
    beside = Path(run_dirs[0]).parent
    draw(beside / "comparison.png", title, found)
    page.write(beside / "comparison.html", title, text, tables, found)
    print(f"pictures {beside / 'comparison.png'}, {beside / 'comparison.html'}")


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("runs", nargs="*", help="directories or names of runs; default: the newest")
    p.add_argument("--quiet", action="store_true", help="report.html alone, and no words")
    a = p.parse_args()
    found = [run_of(run) for run in a.runs or [None]]
    if len(found) == 1:
        of_run(found[0], a.quiet)
    else:
        of_several(found)


if __name__ == "__main__":
    main()
