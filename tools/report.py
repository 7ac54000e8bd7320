"""Sum up a run, or compare several: tables, a picture with curves, and a page to look closer.

    python tools/report.py [out/toy]
    python tools/report.py out/a out/b out/c ...

The first command shows one run, which may be in progress; without a name it is the newest one. It
writes report.png and report.html into the run directory.

The second command compares runs. Those that differ in nothing but their seed are one setting. The
comparison says what differs in the configurations, draws the seeds of a setting as a band, and
gives the differences from the first setting: those of each seed, and their mean with its interval.
It writes comparison.png and comparison.html beside the first run directory.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from plumbing.alarms import alarms, wilson
from tools import report_comparison
from tools.advice import advice_on
from tools.common import (
    answer_to,
    find_run,
    newest_rollouts,
    read_metrics,
    right_answers,
)
from tools.report_panels import by_lag_rows, column, draw, run_panels, table, write_page

# metrics of which the summary has the mean over all steps
MEANS = ("lag_mean", "ess", "versions_2", "versions_3", "gen_tok_s", "train_tok_s", "gen_idle")
# metrics in seconds, of which the summary has the share of the time that all steps took
SHARES = ("pause_s", "wait_data_s", "wait_sync_s")
# the columns of the table of metrics by lag; from the third on they are means over tokens
BY_LAG_HEADER = "lag,share of the tokens,|log ratio|,KL(mu || pi),ESS,loss,outside the clip range"
BY_LAG_HEADER = BY_LAG_HEADER.split(",")
SUMMARY = """\
steps          {step}, {samples} samples in {minutes:.1f} min
{held_out}\
reward         {first:.3f} -> {last:.3f} (mean of the first, the last {window} steps)
answers        {first_length:.0f} -> {last_length:.0f} sampled tokens, nine tenths at most \
{length_p90} at the end; {cut_off:.1%} cut off
lag            mean {lag_mean:.2f}, max {lag_max} versions; ess {ess:.3f}
versions       {versions_2:.0%} of the samples were sampled by two or more, \
{versions_3:.1%} by three or more
tokens/s       {gen_tok_s:.0f} sampled, {train_tok_s:.0f} trained
trainer waits  {wait_data_s:.0%} of the time for data, {wait_sync_s:.1%} for weight updates
engines        {gen_idle:.0%} of their slots empty, paused for weights {pause_s:.1%} of the time
mismatch       {mismatch:.1e} nats at most, {measured} times measured; dropped {dropped}
"""


def lines_of(run_dir):
    """Return the lines of a run's metrics.jsonl: (steps, evaluations, mismatches).

    Exits with a line if the run has no step yet.
    """
    if Path(run_dir, "metrics.jsonl").exists():
        steps, evals, mismatches = read_metrics(run_dir, "step", "eval", "mismatch")
        if steps:
            return steps, evals, mismatches
    sys.exit(f"report: {run_dir}/metrics.jsonl has no steps yet")


# ---- the summary as text


def score_text(score, line):
    """Return a score of an evaluation as text, with its 95% interval if that can be computed.

    It can if there was one attempt at each problem of a single set. line: the evaluation's line of
    metrics.jsonl.
    """
    if len(line["eval"]) > 1 or line.get("answers") != line["problems"]:
        return f"{score:.3f}"
    low, high = wilson(score, line["problems"])
    return f"{score:.3f} ({low:.3f} to {high:.3f})"


def score_lines(evals):
    """Yield a line of the summary for each task: its scores in the first and last evaluation."""
    first = evals[0]
    last = evals[-1]
    problems = f"{last['problems']} problems"
    if len(last["eval"]) > 1:
        problems += " in all sets"
    for task, score in last["eval"].items():
        scores = f"{score_text(score, last)} (version {last['version']})"
        if last is not first and task in first["eval"]:
            first_score = score_text(first["eval"][task], first)
            scores = f"{first_score} (version {first['version']}) -> {scores}"
        rewards = [line.get("eval_reward", {}).get(task) for line in (first, last)]
        reward = ""
        if None not in rewards and abs(rewards[1] - score) >= 5e-4:
            reward = f" solved; mean reward {rewards[0]:.3f} -> {rewards[1]:.3f}"
        yield f"held-out {task:<5} {scores}, {problems}{reward}\n"


def summary(steps, evals, mismatches):
    """Return the text that sums up a run. The arguments are lines of metrics.jsonl."""
    last = steps[-1]
    reward = column(steps, "reward")
    # Runs of earlier versions of this code have no lengths.
    length = np.array([line.get("length_mean", np.nan) for line in steps])
    # The first and the last steps, over which rewards are averaged, overlap only in a run of one.
    window = max(min(5, len(steps) // 2), 1)
    mismatch = column(steps + mismatches, "mismatch")
    measured = mismatch[~np.isnan(mismatch)]
    seconds = column(steps, "step_s").sum()
    return SUMMARY.format(
        **{key: last[key] for key in ("step", "samples", "dropped")},
        **{key: column(steps, key).mean() for key in MEANS},
        **{key: column(steps, key).sum() / seconds for key in SHARES},
        minutes=last["wall_s"] / 60,
        held_out="".join(score_lines(evals)) if evals else "",
        first=reward[:window].mean(),
        last=reward[-window:].mean(),
        first_length=length[:window].mean(),
        last_length=length[-window:].mean(),
        length_p90=last.get("length_p90", "?"),
        cut_off=column(steps, "cut_off")[-window:].mean(),
        window=window,
        lag_max=max(line["lag_max"] for line in steps),
        measured=len(measured),
        mismatch=max(measured, default=np.nan),
    )


# ---- the report


def shown_rollouts(config, run_dir):
    """Return the newest lines of samples.jsonl as dicts, with the right answer to the problem.

    The page shows their text from the spans, so prompts are shortened and completions left out.
    """
    lines = newest_rollouts(run_dir)
    answers = right_answers(config) if lines else {}
    for line in lines:
        line["answer"] = answer_to(line, answers)
        line["prompt"] = line["prompt"][:200]
        line["completion"] = ""
    return lines


def drops(steps):
    """Return [[reason, samples, first step, last step]] of the samples that were not trained."""
    by_reason = {}
    for line in steps:
        for reason, problems in line["drops"].items():
            by_reason.setdefault(reason, {})[line["step"]] = sum(problems.values())
    rows = []
    for reason, by_step in by_reason.items():
        rows.append([reason, sum(by_step.values()), min(by_step), max(by_step)])
    return rows


def continuations(run_dir):
    """Return [[step, changed knobs]] of the times when a run was stopped and continued.

    They are read from continued.jsonl, which plumbing/rundir.Opening writes.
    """
    path = Path(run_dir, "continued.jsonl")
    rows = []
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        changed = [f"{name} ({old} -> {new})" for name, (old, new) in line["changed"].items()]
        rows.append([line["step"], ", ".join(changed) or "nothing"])
    return rows


def report_run(run_dir):
    """Print the summary of a run, and write report.png and report.html into its directory."""
    config = cfg.load(run_dir)
    steps, evals, mismatches = lines_of(run_dir)
    raised = alarms(steps, evals)
    text = summary(steps, evals, mismatches)
    for version, alarm in raised:
        text += f"ALARM          version {version}: {alarm}\n"
    text += f"advice         {advice_on(config, steps, run_dir) or 'none'}\n"
    panels, more_panels = run_panels(steps, evals, mismatches)
    tables = [
        table("Alarms", ["version", "what"], raised),
        table("By lag", BY_LAG_HEADER, by_lag_rows(steps), "not measured"),
        table("Drops", ["reason", "samples", "first step", "last step"], drops(steps)),
        table("Stopped and continued", ["from step", "what changed"], continuations(run_dir)),
        table("Configuration", ["knob", "value"], vars(config).items(), folded=True),
    ]
    page = Path(run_dir, "report.html")
    rollouts = shown_rollouts(config, run_dir)
    write_page(page, str(run_dir), text, tables, panels + more_panels, rollouts)
    draw(page.with_suffix(".png"), str(run_dir), panels)
    print(f"{text}pictures       {page.with_suffix('.png')}, {page}")


def compare_runs(run_dirs):
    """Print tables that compare runs, and write comparison.png and comparison.html.

    Exits with a line if two runs have the same setting and seed.
    """
    runs = []
    for run_dir in run_dirs:
        steps, evals, _ = lines_of(run_dir)
        runs.append(report_comparison.Run(run_dir, steps, evals))
    try:
        settings = report_comparison.settings(runs)
    except ValueError as e:
        sys.exit(f"report: {e}")
    text = ""
    for name, setting_runs in settings.items():
        text += f"{name}: {', '.join(str(run.run_dir) for run in setting_runs)}\n"
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="directories or names of runs; default: the newest")
    names = parser.parse_args().runs or [None]
    run_dirs = [find_run(name) for name in names]
    if len(run_dirs) == 1:
        report_run(run_dirs[0])
    else:
        compare_runs(run_dirs)


if __name__ == "__main__":
    main()
