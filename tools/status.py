"""What a run is doing, from its files alone.

    bash run.sh status [out/toy]     in some lines; without a run: of the newest
    python tools/status.py --screen out/toy     run.sh's: passes on what it reads, above a line that stays

Nothing here talks to a process of the run, so that it may be asked from any machine that sees the run directory.
"""

import argparse
import contextlib
import fcntl
import json
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from plumbing import checkpoints  # noqa: E402
from plumbing.hardware import is_to_be_made  # noqa: E402
from plumbing.metrics import RECENT  # noqa: E402
from plumbing.queues import read_json  # noqa: E402
from tools.find import run_of  # noqa: E402

# a step that takes so many times as long as the recent ones is worth a word
SLOW = 5
SUMMARY = """\
{run_dir}: {state}
step       {step}
held-out   {held_out}
lately     {lately}
engines    {engines}
queues     {queues}
checkpoint {checkpoint}
alarms     {alarms}
"""


def duration(seconds):
    """95 -> "1m35s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def scores(line):
    """Of an evaluation: "toy 0.914"."""
    return " ".join(f"{name} {score:.3f}" for name, score in line["eval"].items())


def is_held(run_dir):
    """Does a process of the run, on any machine, still have its lock?"""
    run_dir = Path(run_dir).resolve()
    path = run_dir.with_name(f".{run_dir.name}.lock")
    if not path.exists():
        return False
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Status:
    """Looks at a run again and again, and reads of metrics.jsonl only what is new."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.config = cfg.load(run_dir)
        self.offset = 0
        self.steps = []
        self.evals = []
        self.alarms = []
        self.stepped_at = None

    def look(self):
        """Take in what is new. A continued run writes metrics.jsonl anew: then all of it."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return
        if path.stat().st_size < self.offset:
            self.__init__(self.run_dir)
        with open(path, "rb") as file:
            file.seek(self.offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if "step" in line:
                self.steps.append({k: line[k] for k in line if k not in ("problems", "by_lag")})
                self.stepped_at = path.stat().st_mtime
            elif "eval" in line:
                self.evals.append(line)
            elif "alarm" in line:
                self.alarms.append(line)
        del self.steps[:-RECENT]

    def mean(self, key):
        return sum(line[key] for line in self.steps) / len(self.steps)

    def who_waits(self):
        """Shares of the recent time."""
        seconds = sum(line["step_s"] for line in self.steps)
        waited = sum(line["wait_data_s"] for line in self.steps)
        return (
            f"trainer waits {waited / seconds:.0%}, engine places {self.mean('gen_idle'):.0%} empty"
        )

    def left(self):
        """Seconds to the last step, at the recent pace."""
        seconds = statistics.median(line["step_s"] for line in self.steps)
        return (self.config.steps - self.steps[-1]["step"]) * seconds

    def loading(self):
        """Engines that have been started and serve nothing yet, as words."""
        said = read_json(self.run_dir / "queues" / "version.json")
        serving = said.get("engines", [])
        words = []
        for file, entry in self.engines():
            if entry["url"] not in serving or not entry.get("answers", True):
                with contextlib.suppress(OSError):
                    seconds = time.time() - file.stat().st_mtime
                    words.append(f"{file.stem} loading, {duration(seconds)}")
        return words

    def engines(self):
        """[(file, what it says)] of the engines that have been started and have not died."""
        files = sorted((self.run_dir / "engines").glob("*.json"))
        known = [(file, read_json(file)) for file in files]
        return [(file, entry) for file, entry in known if entry]

    def serving(self):
        """How many engines serve which version, as words; [] before the first weights."""
        said = read_json(self.run_dir / "queues" / "version.json")
        if not said.get("engines"):
            return []
        alive = [entry["url"] for _, entry in self.engines() if entry.get("answers", True)]
        count = len(set(alive) & set(said["engines"]))
        return [f"{count} of {self.config.engines} serve version {said['served']}"]

    def starting(self):
        """What it waits for before its first step."""
        waits = self.loading()
        if not waits and not self.serving():
            waits = ["models are being loaded"]
        if is_to_be_made(self.config.model):
            waits = ["the tiny base model is being made"]
        return "; ".join(waits) or "the first rollouts are sampled"

    def line(self):
        """All that matters now, in a line."""
        # a continued run has steps, and engines without weights
        if not self.steps or not self.serving():
            return self.starting()
        last = self.steps[-1]
        words = [
            f"step {last['step']}/{self.config.steps}, eta {duration(self.left())}",
            f"reward {self.mean('reward'):.3f}",
            f"lag {self.mean('lag_mean'):.1f}/{max(x['lag_max'] for x in self.steps)}",
            self.who_waits(),
        ]
        if self.evals:
            words.append(f"held-out {scores(self.evals[-1])}")
        silent = time.time() - self.stepped_at
        if silent > SLOW * self.mean("step_s") + 5 and last["step"] < self.config.steps:
            words.append(f"no step for {duration(silent)}")
        words += self.loading()
        if self.alarms:
            words.append(f"{len(self.alarms)} alarms")
        return " | ".join(words)

    # ---- at length

    def state(self):
        """Running, complete, or stopped."""
        if is_held(self.run_dir):
            return "running"
        if self.evals and self.evals[-1]["version"] == self.config.steps:
            return "complete; a larger --steps extends it"
        if checkpoints.newest(self.run_dir) is None:
            return "stopped; there is no checkpoint yet, the same command starts anew"
        return "stopped; the same command continues"

    def summary(self):
        """What `run.sh status` prints."""
        step = f"none of {self.config.steps} yet: {self.starting()}"
        lately = "-"
        if self.steps:
            ago = duration(time.time() - self.stepped_at)
            last = self.steps[-1]
            step = f"{last['step']} of {self.config.steps}, {ago} ago, {self.mean('step_s'):.1f} s each; eta {duration(self.left())}"
            lately = (
                f"reward {self.mean('reward'):.3f}, lag {self.mean('lag_mean'):.2f}, ess {self.mean('ess'):.3f}; "
                f"{self.who_waits()}"
            )
        queues = {}
        for folder in sorted((self.run_dir / "queues").glob("*/")):
            queues[folder.name] = len(list(folder.rglob("*.safetensors")))
        first_and_last = self.evals[:1] + self.evals[1:][-1:]
        held_out = [f"{scores(line)} (version {line['version']})" for line in first_and_last]
        newest = checkpoints.newest(self.run_dir)
        engines = self.serving() + self.loading() if is_held(self.run_dir) else []
        return SUMMARY.format(
            run_dir=self.run_dir,
            state=self.state(),
            step=step,
            held_out=" | ".join(held_out) or "-",
            lately=lately,
            engines="; ".join(engines) or "none",
            queues=", ".join(f"{n} in {name}" for name, n in queues.items()) or "-",
            checkpoint=newest.name if newest else "none yet",
            alarms="; ".join(f"version {x['version']}: {x['alarm']}" for x in self.alarms)
            or "none",
        )


def screen(run_dir):
    """Pass on stdin, line by line, above a line that stays."""
    status = Status(run_dir)
    start = time.monotonic()

    def now():
        # a run directory out of reach for a moment: what is known stays
        with contextlib.suppress(OSError):
            status.look()
        words = f"{duration(time.monotonic() - start)} | {status.line()}"
        return Text(words, style="reverse", overflow="ellipsis", no_wrap=True)

    console = Console()
    # a process may say what is no text
    sys.stdin.reconfigure(errors="replace")
    with Live(console=console, get_renderable=now, refresh_per_second=1, transient=True):
        for line in sys.stdin:
            console.print(Text(line.rstrip("\n")), soft_wrap=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    p.add_argument("--screen", action="store_true", help="pass on stdin above a line that stays")
    a = p.parse_args()
    if a.screen:
        return screen(a.run)
    status = Status(run_of(a.run))
    status.look()
    print(status.summary(), end="")


if __name__ == "__main__":
    main()
