"""Say what a run is doing, as its files show it.

    bash run.sh status [out/toy]     without a run: the newest one

Nothing here talks to a process of the run, so any machine that sees the run directory can be asked.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from plumbing import checkpoints, rundir
from plumbing.alarms import alarms
from plumbing.problems import held_out_scores
from plumbing.queues import read_json
from tools.advice import advice_on
from tools.common import OUT, find_run, read_metrics

# number of the latest steps over which means are taken
RECENT = 10


def being_prepared(run_dir):
    """Return the name of the start that holds a run's name and has not written config.json yet.

    It is the name that rundir.hold gave to the start: "process 7 on host, start 1a2b". If there is
    no such start, it is "".
    """
    run_dir = Path(run_dir).resolve()
    start = rundir.holder(cfg.Config(out=str(run_dir.parent), run=run_dir.name))
    writer = read_json(run_dir / "config.json").get("start")
    # An evaluation also holds its name, but writes no start into config.json.
    return "" if writer in (start, "") else start


def print_prepared(name):
    """Print which runs are being prepared: all under out/, or only the one of this name.

    Returns their directories.
    """
    if name:
        candidates = [Path(name), OUT / name]
    else:
        candidates = [OUT / path.name[1:].removesuffix(".lock") for path in OUT.glob(".*.lock")]
    prepared = [run_dir for run_dir in candidates if being_prepared(run_dir)]
    for run_dir in prepared:
        print(
            f"{run_dir}: being prepared by {being_prepared(run_dir)}: models are made or fetched, "
            "problems are read and checked; no process of the run is started yet"
        )
    return prepared


class Status:
    """What the files of a run say about it."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.config = cfg.load(run_dir)
        # {kind: lines of metrics.jsonl}, of the steps only the last ones
        self.lines = {"step": [], "eval": []}
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            self.written_at = path.stat().st_mtime
            self.lines = dict(zip(self.lines, read_metrics(run_dir, *self.lines)))
        self.alarms = alarms(self.lines["step"], self.lines["eval"])
        self.advice = advice_on(self.config, self.lines["step"], run_dir)
        del self.lines["step"][:-RECENT]

    def recent_mean(self, metric):
        """Return the mean of a metric over the last steps."""
        return statistics.mean(line[metric] for line in self.lines["step"])

    def eta(self):
        """Return the time until the last step, if steps take as long as the last ones."""
        steps = self.lines["step"]
        seconds = statistics.median(line["step_s"] for line in steps)
        return timedelta(seconds=round((self.config.steps - steps[-1]["step"]) * seconds))

    def engines(self):
        """Return how many engines answer, and which version they serve, as text."""
        answering = len(list((self.run_dir / "engines").glob("*.json")))
        published = read_json(self.run_dir / "queues" / "version.json")
        text = f"{answering} of {self.config.engines} answer"
        if published:
            text += f", {len(published['engines'])} serve version {published['served']}"
        return text

    def starting(self):
        """Return what the run waits for before its first step, as text."""
        if read_json(self.run_dir / "queues" / "version.json"):
            return "the first rollouts are sampled"
        return f"models are being loaded, {self.engines()}"

    def is_running(self):
        """Does a process of the run, on any machine, still hold its name?"""
        run_dir = self.run_dir.resolve()
        return rundir.holder(replace(self.config, out=str(run_dir.parent), run=run_dir.name)) != ""

    def state(self):
        """Return whether the run is running, complete or stopped, as text."""
        if being_prepared(self.run_dir):
            return "a new start is being prepared; what follows is from the start before it"
        if self.is_running():
            return "running"
        if rundir.is_complete(self.run_dir):
            return "complete; a larger --steps extends it"
        if checkpoints.newest(self.run_dir) is None:
            return "stopped; there is no checkpoint yet, the same command starts anew"
        return "stopped; the same command continues"

    def steps(self):
        """Return how far the run is, how fast it is, and how long it will still take, as text."""
        steps = self.lines["step"]
        if not steps:
            return f"none of {self.config.steps} yet: {self.starting()}"
        ago = timedelta(seconds=round(time.time() - self.written_at))
        return (
            f"{steps[-1]['step']} of {self.config.steps}, {ago} ago, "
            f"{self.recent_mean('step_s'):.1f} s each; eta {self.eta()}"
        )

    def metrics(self):
        """Return the recent means of five metrics, as text; "" before the first step."""
        if not self.lines["step"]:
            return ""
        metrics = ("reward", "lag_mean", "ess", "wait_data_s", "gen_idle")
        return ", ".join(f"{metric} {self.recent_mean(metric):.3f}" for metric in metrics)

    def evaluations(self):
        """Return the held-out scores of the first and the last evaluation, as text."""
        evals = self.lines["eval"]
        first_and_last = evals[:1] + evals[1:][-1:]
        return " | ".join(
            f"{held_out_scores(line)} (version {line['version']})" for line in first_and_last
        )

    def queues(self):
        """Return how many records wait in each queue, as text."""
        counts = []
        for queue in sorted((self.run_dir / "queues").glob("*/")):
            # The records that --keep_steps keeps lie one level deeper, and are not counted.
            waiting = [*queue.glob("*.saf*"), *queue.glob("rank*/*.saf*")]
            counts.append(f"{len(waiting)} in {queue.name}")
        return ", ".join(counts)

    def summary(self):
        """Return the text that `run.sh status` prints."""
        newest = checkpoints.newest(self.run_dir)
        rows = {
            "step": self.steps(),
            "held-out": self.evaluations(),
            "lately": self.metrics(),
            "advice": self.advice,
            "engines": self.engines() if self.is_running() else "",
            "queues": self.queues(),
            "checkpoint": newest.name if newest else "",
            "alarms": "; ".join(f"version {version}: {text}" for version, text in self.alarms),
        }
        lines = [f"{name:<10} {text or 'none'}\n" for name, text in rows.items()]
        return f"{self.run_dir}: {self.state()}\n{''.join(lines)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    name = parser.parse_args().run
    prepared = print_prepared(name)
    run_dirs = prepared if name else OUT.glob("*")
    if prepared and not any((run_dir / "config.json").exists() for run_dir in run_dirs):
        # None of these runs has a config.json yet, so there is nothing else to describe.
        return
    try:
        print(Status(find_run(name)).summary(), end="")
    except cfg.ConfigError as e:
        sys.exit(f"status: {e}")


if __name__ == "__main__":
    main()
