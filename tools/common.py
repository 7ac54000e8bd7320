"""Functions that programs of tools/ share: find a run, and read its files."""

import difflib
import json
import sys
from collections import Counter
from pathlib import Path

from safetensors import safe_open

import config as cfg
from plumbing.problems import load_problems
from plumbing.queues import read_json, read_record
from plumbing.rundir import whole_lines

# the folder in which a run is looked for by its name
OUT = Path("out").absolute()
# The first steps say nothing about the pace of a run: the engines fill, and the trainer waits for
# the first rollouts. This is the number of these steps.
FILLING = 5
# the number of the newest steps that say how fast a run is now
NEWEST = 50
# The number of bytes of samples.jsonl that are read where its newest rollouts are enough.
MOST_BYTES = 20_000_000


# ---- a run and its files


def find_run(name=None, file="config.json"):
    """Return the directory of a run, which is given by its path or by its name under out/.

    Without a name, the newest run is taken. Exits with a line if no run has this file.
    """
    if name:
        candidates = [Path(name), OUT / name]
        for run_dir in candidates:
            if (run_dir / file).exists():
                return run_dir
        run_names = sorted(path.parent.name for path in OUT.glob(f"*/{file}"))
        similar = difflib.get_close_matches(Path(name).name, run_names, 1)
        hint = f": did you mean {similar[0]}?" if similar else ""
        sys.exit(f"{name}: there is no {file} in {candidates[0]}, nor in {candidates[1]}{hint}")
    runs = [path.parent for path in OUT.glob("*/config.json") if not is_evaluation(path)]
    files = [run_dir / file for run_dir in runs if (run_dir / file).exists()]
    if not files:
        sys.exit(f"no run in {OUT} has a {file} yet: name a run directory")
    newest = max(files, key=lambda path: path.stat().st_mtime).parent
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest


def is_evaluation(config_json):
    """Is this the config.json of an evaluation (tools/evaluate.py), which has no trainer?"""
    return read_json(config_json).get("config", {}).get("trainers") == 0


def read_metrics(run_dir, *kinds):
    """Return the lines of a run's metrics.jsonl: a list for each kind, in the order of `kinds`.

    A kind is "step", "eval" or "mismatch". The last line of the file is left out if it is not
    whole, because it is still being written.
    """
    lines = {kind: [] for kind in kinds}
    for text in whole_lines(Path(run_dir, "metrics.jsonl")):
        line = json.loads(text)
        # The line of a step may have a "mismatch", too.
        kind = "step" if "step" in line else next(iter(lines.keys() & line.keys()), None)
        if kind in lines:
            lines[kind].append(line)
    return list(lines.values())


def read_rollouts(file):
    """Yield the lines of samples.jsonl as dicts, without the last one if it is not whole."""
    for text in file:
        if text.endswith(b"\n"):
            yield json.loads(text)


def newest_rollouts(run_dir):
    """Return the newest lines of samples.jsonl as dicts: those in its last MOST_BYTES."""
    path = Path(run_dir, "samples.jsonl")
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - MOST_BYTES, 0))
        # The first line may have lost its beginning.
        return list(read_rollouts(file.readlines()[path.stat().st_size > MOST_BYTES :]))


def since_newest_start(run_dir, steps):
    """Return the steps (lines of metrics.jsonl) that a run has made since it was last continued.

    Those before may have been made with other knobs.
    """
    path = Path(run_dir, "continued.jsonl")
    if not path.exists():
        return steps
    newest = json.loads(path.read_text().splitlines()[-1])
    return [line for line in steps if line["step"] > newest["step"]]


def right_answers(config):
    """Return {task: [the "answer" of each problem, or None]} for the problems of the training set.

    If the problems cannot be read on this machine, prints a line and returns {}.
    """
    try:
        problems = load_problems(config, "train")
    except (cfg.ConfigError, OSError) as e:
        print(f"(no right answers are shown: {e})", file=sys.stderr)
        return {}
    return {task: [problem.get("answer") for problem in problems[task]] for task in problems}


def answer_to(rollout, answers):
    """Return the right answer to a rollout's problem as text, or None if it is not known.

    answers: the result of `right_answers`.
    """
    answer = answers[rollout["task"]][rollout["problem"]] if answers else None
    return None if answer is None else str(answer)


# ---- the data that --keep_steps keeps


def kept_batches(run_dir, step):
    """Return the micro-batches of the step that made version `step`, rank by rank.

    Raises FileNotFoundError if no micro-batch of the step is kept.
    """
    by_queues = {}
    for file in sorted(Path(run_dir).glob("*queues/batches/rank_*/kept/*")):
        queues = file.parents[3]
        with safe_open(file, "numpy") as record:
            header = json.loads(record.get_tensor("json").tobytes())
        # A step is not whole if its first rows are already deleted.
        if header["step"] == step - 1 and (header["row"] == 0 or queues in by_queues):
            by_queues.setdefault(queues, []).append(file)
    if not by_queues:
        raise FileNotFoundError(
            f"{run_dir}/queues: step {step}: nothing is kept of this step since the run was last "
            "continued. Set --keep_steps to at least --save_every"
        )
    # A run that was continued may have made the step twice: the last time counts.
    return [read_record(file) for file in by_queues[max(by_queues)]]


def kept_groups(run_dir):
    """Return {draw: record} of all groups that are kept."""
    files = sorted(Path(run_dir).glob("*queues/rollouts/kept/*"))
    return {record["draw"]: record for record in map(read_record, files)}


def ends_of_draws(steps):
    """Return {draw: [(step, end)]}: the steps in which samples of a draw were trained or dropped.

    end: "trained", or the reason why samples were dropped. steps: {step: line of metrics.jsonl}.
    """
    ends = {}
    for step, line in steps.items():
        for end, draws in [("trained", line["problems"]), *line["drops"].items()]:
            for draw in draws:
                ends.setdefault(int(draw), []).append((step, end))
    return ends


# ---- what the metrics say


def lowest_lag(bucket):
    """Return the lowest lag of a bucket of by_lag: "4-7" -> 4, "128+" -> 128."""
    return int(bucket.strip("+").split("-")[0])


def by_lag_means(steps):
    """Return {bucket of lags: {"tokens": their number, quantity: mean over these tokens}}.

    The buckets are in the order of their lags. The quantities are those of by_lag, over all of
    these lines of metrics.jsonl; lines of earlier versions of this code have none.
    """
    means = {}
    for line in steps:
        for bucket, values in line.get("by_lag", {}).items():
            sums = means.setdefault(bucket, Counter())
            n = values["tokens"]
            sums.update({name: n * x for name, x in values.items() if name != "tokens"})
            sums["tokens"] += n
    for sums in means.values():
        for name in sums.keys() - {"tokens"}:
            sums[name] /= sums["tokens"]
    return {bucket: means[bucket] for bucket in sorted(means, key=lowest_lag)}
