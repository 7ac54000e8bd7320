"""What a run is doing, from its files alone.

    bash run.sh status [out/toy]     without a run: of the newest

Nothing here talks to a process of the run, so that it may be asked from any machine that sees the run directory.
"""

import argparse
import difflib
import json
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from plumbing import checkpoints, rundir  # noqa: E402
from plumbing.problems import held_out_scores  # noqa: E402
from plumbing.queues import read_json  # noqa: E402

OUT = Path("out").absolute()
# steps that are meant by "lately"
RECENT = 10
# steps at the beginning in which engines fill and the trainer waits for the first answers
FILLING = 5
# times the throughput: a move that brings less is not worth a restart
WORTH = 1.05
# what lasts too long: (metric, lowest and highest that is well, for how many steps in a row it is not, what to do)
ALARMS = [
    ("ess", 0.3, 1.1, 3, "lower --max_lag or --lr"),
    ("signal", 1e-9, 1.0, 10, "no group has two different rewards: look at samples.jsonl"),
    ("cut_off", 0.0, 0.95, 10, "nearly all answers are cut off: raise --max_new_tokens"),
]


def find_run(name=None, file="config.json"):
    """The directory of a run, given as such or by its name under out/; None: of the newest. Exits with a line if
    there is none that has this file.
    """
    if name:
        places = [Path(name), OUT / name]
        for place in places:
            if (place / file).exists():
                return place
        here = sorted(path.parent.name for path in OUT.glob(f"*/{file}"))
        guess = difflib.get_close_matches(Path(name).name, here, 1)
        sys.exit(
            f"{name}: there is no {file} in {places[0]}, nor in {places[1]}"
            + (f": did you mean {guess[0]}?" if guess else "")
        )
    # an evaluation (tools/evaluate.py) has no trainer
    runs = [p.parent for p in OUT.glob("*/config.json") if '"trainers": 0' not in p.read_text()]
    found = [run_dir / file for run_dir in runs if (run_dir / file).exists()]
    if not found:
        sys.exit(f"no run in {OUT} has a {file} yet: name one")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest


def being_prepared(run_dir):
    """Which start holds a run's name, and has not written its config.json yet: "process 7 on host, start 1a2b"; "" if none."""
    run_dir = Path(run_dir).resolve()
    start = rundir.holder(cfg.Config(out=str(run_dir.parent), run=run_dir.name))
    # evaluations write no start
    return start if read_json(run_dir / "config.json").get("start") not in (start, "") else ""


def say_what_is_prepared(name):
    """Print which runs are being prepared: those under out/, or the one of this name; returns their directories."""
    if name:
        places = [Path(name), OUT / name]
    else:
        places = [OUT / path.name[1:].removesuffix(".lock") for path in OUT.glob(".*.lock")]
    found = [run_dir for run_dir in places if being_prepared(run_dir)]
    for run_dir in found:
        print(
            f"{run_dir}: being prepared by {being_prepared(run_dir)}: problems are read, models are made or fetched, and "
            "all is checked; its processes are not started yet"
        )
    return found


def read(run_dir, *keys):
    """Of each key, `step`, `eval` or `mismatch`, the lines of a run's metrics.jsonl that are about it.

    The last line may be torn; it is left out.
    """
    found = {key: [] for key in keys}
    for text in Path(run_dir, "metrics.jsonl").read_text().splitlines(True):
        if text.endswith("\n"):
            line = json.loads(text)
            # a step's line has a mismatch, too
            about = "step" if "step" in line else next(iter(found.keys() & line.keys()), None)
            if about in found:
                found[about].append(line)
    return list(found.values())


def alarms(steps):
    """[(version, words)] of what has lasted too long; steps: lines of metrics.jsonl."""
    found = []
    for key, lowest, highest, too_long, words in ALARMS:
        in_a_row = 0
        for line in steps:
            in_a_row = 0 if lowest <= line[key] <= highest else in_a_row + 1
            if in_a_row == too_long:
                found.append(
                    (line["version"], f"{key} {line[key]:.3g} for {too_long} steps: {words}")
                )
    return sorted(found)


def advice(waits, empty, in_vain, serving, training, per_engine=1):
    """Who is the bottleneck, and which knob to turn, one line; "" if none would bring 5%.

    Shares: of its time that the trainer waits for data; of the engines' places that the gate leaves empty; of their
    samples that are dropped as the trainer is too slow. serving, training: GPUs of each, which their speed is taken as
    proportional to; per_engine: GPUs of one engine.
    """
    # what one GPU would do unhindered, in units of what is trained now
    engine = 1 / max((1 - empty) * (1 - in_vain), 0.01) / serving
    trainer = 1 / max(1 - waits, 0.01) / training
    total = serving + training
    splits = [serving, *range(per_engine, total, per_engine)]
    rates = {serve: min(serve * engine, (total - serve) * trainer) for serve in splits}
    best = max(rates, key=rates.get)
    gain = rates[best] / rates[serving]
    words = f"trainer waits {waits:.0%}, engine slots {empty:.0%} empty, {in_vain:.0%} of samples dropped"
    if gain >= WORTH:
        slower = "engines are" if best > serving else "trainer is"
        knobs = f"--engines {best // per_engine} --trainers {total - best}"
        return f"the {slower} the bottleneck ({words}): {knobs}, about {gain:.2f} times as fast"
    return f"{words}: raise --max_lag" if min(waits, empty) > 0.1 else ""


def advice_on(config, steps):
    """`advice` on a run's last 50 steps, from the tenth on; steps: lines of metrics.jsonl."""
    recent = steps[FILLING:][-50:]
    if len(recent) < FILLING:
        return ""
    waits = sum(line["wait_data_s"] for line in recent) / sum(line["step_s"] for line in recent)
    empty = statistics.mean(line["gen_idle"] for line in recent)
    dropped = sum(sum(line["drops"].get("buffer_full", {}).values()) for line in recent)
    sampled = dropped + sum(sum(line["problems"].values()) for line in recent)
    serving = config.engines * config.tensor_parallel
    return advice(waits, empty, dropped / sampled, serving, config.trainers, config.tensor_parallel)


class Status:
    """What the files of a run say of it."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.config = cfg.load(run_dir)
        # lines of metrics.jsonl by what they are about; of steps the last ones
        self.lines = {"step": [], "eval": []}
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            self.written_at = path.stat().st_mtime
            self.lines = dict(zip(self.lines, read(run_dir, *self.lines)))
        self.alarms = alarms(self.lines["step"])
        self.advice = advice_on(self.config, self.lines["step"])
        del self.lines["step"][:-RECENT]

    def lately(self, key):
        """Mean of a metric."""
        return statistics.mean(line[key] for line in self.lines["step"])

    def eta(self):
        """Time to the last step, at the recent pace."""
        steps = self.lines["step"]
        seconds = statistics.median(line["step_s"] for line in steps)
        return timedelta(seconds=round((self.config.steps - steps[-1]["step"]) * seconds))

    def engines(self):
        """How many engines answer, and serve which version."""
        answering = len(list((self.run_dir / "engines").glob("*.json")))
        known = read_json(self.run_dir / "queues" / "version.json")
        words = f"{answering} of {self.config.engines} answer"
        if not known:
            return words
        return f"{words}, {len(known['engines'])} serve version {known['served']}"

    def starting(self):
        """What it waits for before its first step."""
        if read_json(self.run_dir / "queues" / "version.json"):
            return "the first rollouts are sampled"
        return f"models are being loaded, {self.engines()}"

    def is_running(self):
        """Does a process of the run, on any machine, still hold its name?"""
        run_dir = self.run_dir.resolve()
        return rundir.holder(replace(self.config, out=str(run_dir.parent), run=run_dir.name)) != ""

    def state(self):
        """Running, complete, or stopped."""
        if being_prepared(self.run_dir):
            return "as an earlier start has left it"
        if self.is_running():
            return "running"
        if rundir.is_complete(self.run_dir):
            return "complete; a larger --steps extends it"
        if checkpoints.newest(self.run_dir) is None:
            return "stopped; there is no checkpoint yet, the same command starts anew"
        return "stopped; the same command continues"

    def summary(self):
        """What `run.sh status` prints."""
        steps, evals = self.lines.values()
        step = f"none of {self.config.steps} yet: {self.starting()}"
        lately = ""
        if steps:
            ago = timedelta(seconds=round(time.time() - self.written_at))
            step = f"{steps[-1]['step']} of {self.config.steps}, {ago} ago, {self.lately('step_s'):.1f} s each; eta {self.eta()}"
            means = ("reward", "lag_mean", "ess", "wait_data_s", "gen_idle")
            lately = ", ".join(f"{key} {self.lately(key):.3f}" for key in means)
        first_and_last = evals[:1] + evals[1:][-1:]
        queues = sorted((self.run_dir / "queues").glob("*/"))
        # those of --keep_steps are deeper
        waiting = {x.name: len([*x.glob("*.saf*"), *x.glob("rank*/*.saf*")]) for x in queues}
        newest = checkpoints.newest(self.run_dir)
        rows = {
            "step": step,
            "held-out": " | ".join(
                f"{held_out_scores(x)} (version {x['version']})" for x in first_and_last
            ),
            "lately": lately,
            "advice": self.advice,
            "engines": self.engines() * self.is_running(),
            "queues": ", ".join(f"{n} in {name}" for name, n in waiting.items()),
            "checkpoint": newest.name if newest else "",
            "alarms": "; ".join(f"version {version}: {words}" for version, words in self.alarms),
        }
        lines = [f"{name:<10} {words or 'none'}\n" for name, words in rows.items()]
        return f"{self.run_dir}: {self.state()}\n{''.join(lines)}"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    name = p.parse_args().run
    prepared = say_what_is_prepared(name)
    places = prepared if name else OUT.glob("*")
    if prepared and not any((run_dir / "config.json").exists() for run_dir in places):
        return
    try:
        print(Status(find_run(name)).summary(), end="")
    except cfg.ConfigError as e:
        sys.exit(f"status: {e}")


if __name__ == "__main__":
    main()
