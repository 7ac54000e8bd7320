"""What came of a run, or of several: a table, report.png, and report.html to look closer.

    python tools/report.py [out/toy]
    python tools/report.py out/a out/b out/c ...

The first shows one run, which may be in progress (without a name: the newest); the second compares
runs, of which those that differ in their seed alone are one setting.

A comparison says what differs in the configurations, draws seeds as bands, and gives the
differences from the first setting, seed by seed, with their mean's interval; comparison.png and
comparison.html lie beside the first run.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from tools import report_comparison
from tools.common import (
    advice_on,
    alarms,
    answer_to,
    find_run,
    read_metrics,
    read_rollouts,
    right_answers,
    wilson,
)
from tools.report_panels import column, draw, run_panels, table, write_page

# means over steps, and shares of the time that steps took: starting is not among them
MEANS = ("lag_mean", "ess", "versions_2", "versions_3", "gen_tok_s", "train_tok_s", "gen_idle")
SHARES = ("pause_s", "wait_data_s", "wait_sync_s")
MOST_BYTES = 20_000_000  # of samples.jsonl, on a page: the newest rollouts
SUMMARY = """\
steps          {step}, {samples} samples in {minutes:.1f} min
{held_out}\
reward         {first:.3f} -> {last:.3f} (mean of the first, the last {window} steps)
lag            mean {lag_mean:.2f}, max {lag_max} versions; ess {ess:.3f}
versions       {versions_2:.0%} of the samples were sampled by two or more, \
{versions_3:.1%} by three or more
tokens/s       {gen_tok_s:.0f} sampled, {train_tok_s:.0f} trained
trainer waits  {wait_data_s:.0%} of the time for data, {wait_sync_s:.1%} for weight updates
engines        {gen_idle:.0%} of their slots empty, paused for weights {pause_s:.1%} of the time
mismatch       {mismatch:.1e} nats at most, {measured} times measured; dropped {dropped}
"""


def known(run_dir):
    """(steps, evaluations, mismatches) of a run; exits with a line if it has no step yet."""
    if Path(run_dir, "metrics.jsonl").exists():
        steps, *others = read_metrics(run_dir, "step", "eval", "mismatch")
        if steps:
            return steps, *others
    sys.exit(f"report: {run_dir}/metrics.jsonl has no steps yet")


# ---- in words


def with_chance(score, line):
    """A score in words; of one attempt at each of one set's problems with its 95% interval."""
    if len(line["eval"]) > 1 or line.get("answers") != line["problems"]:
        return f"{score:.3f}"
    low, high = wilson(score, line["problems"])
    return f"{score:.3f} ({low:.3f} to {high:.3f})"


def score_lines(evals):
    """Of each task that was evaluated first and last, a line of the summary."""
    first, last = evals[0], evals[-1]
    problems = f"{last['problems']} problems" + " in all sets" * (len(last["eval"]) > 1)
    for task, score in last["eval"].items():
        words = f"{with_chance(score, last)} (version {last['version']})"
        if last is not first and task in first["eval"]:
            before = with_chance(first["eval"][task], last)
            words = f"{before} (version {first['version']}) -> {words}"
        rewards = [line.get("eval_reward", {}).get(task) for line in (first, last)]
        if None not in rewards and abs(rewards[1] - score) >= 5e-4:
            problems += f" solved; mean reward {rewards[0]:.3f} -> {rewards[1]:.3f}"
        yield f"held-out {task:<5} {words}, {problems}\n"


def summary(steps, evals, mismatches):
    """The numbers a run ends with, as text."""
    last = steps[-1]
    reward = column(steps, "reward")
    # the two do not overlap
    window = max(min(5, len(steps) // 2), 1)
    mismatch = column(steps + mismatches, "mismatch")
    measured = mismatch[~np.isnan(mismatch)]
    values = {key: last[key] for key in ("step", "samples", "dropped")}
    values |= {key: column(steps, key).mean() for key in MEANS}
    seconds = column(steps, "step_s").sum()
    values |= {key: column(steps, key).sum() / seconds for key in SHARES}
    return SUMMARY.format(
        **values,
        minutes=last["wall_s"] / 60,
        held_out="".join(score_lines(evals)) if evals else "",
        first=reward[:window].mean(),
        last=reward[-window:].mean(),
        window=window,
        lag_max=max(line["lag_max"] for line in steps),
        measured=len(measured),
        mismatch=max(measured, default=np.nan),
    )


# ---- as a page


def newest_rollouts(config, run_dir):
    """The newest lines of samples.jsonl, with the problem's right answer."""
    path = Path(run_dir, "samples.jsonl")
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - MOST_BYTES, 0))
        # the first may be the rest of one
        lines = list(read_rollouts(file.readlines()[path.stat().st_size > MOST_BYTES :]))
    answers = right_answers(config) if lines else {}
    for line in lines:
        # the spans have all of the text
        line |= dict(answer=answer_to(line, answers), prompt=line["prompt"][:200], completion="")
    return lines


def drops(steps):
    """[[reason, samples, first step, last step]] of what was not trained."""
    counts = {}
    for line in steps:
        for reason, problems in line["drops"].items():
            counts.setdefault(reason, {})[line["step"]] = sum(problems.values())
    return [[reason, sum(n.values()), min(n), max(n)] for reason, n in counts.items()]


def continuations(run_dir):
    """[[step, what changed]] of a run that was stopped and went on (plumbing/rundir.Opening)."""
    path = Path(run_dir, "continued.jsonl")
    found = []
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        changed = [f"{name} ({old} -> {new})" for name, (old, new) in line["changed"].items()]
        found.append([line["step"], ", ".join(changed) or "nothing"])
    return found


def report_run(run_dir):
    """One run's table, report.png and report.html."""
    config = cfg.load(run_dir)
    steps, evals, mismatches = known(run_dir)
    lasting = alarms(steps)
    text = summary(steps, evals, mismatches)
    for version, words in lasting:
        text += f"ALARM          version {version}: {words}\n"
    text += f"advice         {advice_on(config, steps) or 'none'}\n"
    panels, more = run_panels(steps, evals, mismatches)
    tables = [
        table("Alarms", ["version", "what"], lasting),
        table("Drops", ["reason", "samples", "first step", "last step"], drops(steps)),
        table("Stopped and continued", ["from step", "what changed"], continuations(run_dir)),
        table("Configuration", ["knob", "value"], vars(config).items(), folded=True),
    ]
    page = Path(run_dir, "report.html")
    rollouts = newest_rollouts(config, run_dir)
    write_page(page, str(run_dir), text, tables, panels + more, rollouts)
    draw(page.with_suffix(".png"), str(run_dir), panels)
    print(f"{text}pictures       {page.with_suffix('.png')}, {page}")


def compare_runs(run_dirs):
    """Runs beside each other: tables, comparison.png and comparison.html."""
    runs = [report_comparison.Run(run_dir, *known(run_dir)[:2]) for run_dir in run_dirs]
    try:
        settings = report_comparison.settings(runs)
    except ValueError as e:
        sys.exit(f"report: {e}")
    text = ""
    for name, own in settings.items():
        text += f"{name}: {', '.join(str(run.run_dir) for run in own)}\n"
    knobs = [[name, *values] for name, values in report_comparison.differing(runs).items()]
    header = ["knob", *(Path(run_dir).name for run_dir in run_dirs)]
    rows = report_comparison.differences(settings)
    print(f"{text}\n{report_comparison.as_text(header, knobs)}")
    print(report_comparison.as_text(report_comparison.HEADER, rows))
    tables = [
        table("What differs", header, knobs, "nothing but the seeds"),
        table("Differences from the first", report_comparison.HEADER, rows, "there is one setting"),
    ]
    panels = report_comparison.panels(settings)
    picture = Path(run_dirs[0]).parent / "comparison.png"
    title = " against ".join(settings)
    draw(picture, title, panels)
    write_page(picture.with_suffix(".html"), title, text, tables, panels)
    print(f"pictures {picture}, {picture.with_suffix('.html')}")


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("runs", nargs="*", help="directories or names of runs; default: the newest")
    run_dirs = [find_run(run) for run in p.parse_args().runs or [None]]
    if len(run_dirs) == 1:
        report_run(run_dirs[0])
    else:
        compare_runs(run_dirs)


if __name__ == "__main__":
    main()
