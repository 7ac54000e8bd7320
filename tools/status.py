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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from plumbing import checkpoints  # noqa: E402
from plumbing.hardware import is_to_be_made  # noqa: E402
from plumbing.queues import read_json  # noqa: E402

OUT = cfg.ROOT / "out"
# steps that are meant by "lately"
RECENT = 10
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


def find_run(name=None, file="config.json"):
    """The directory of a run, given as such or by its name under out/; None: of the newest. Exits with a line if
    there is none that has this file.
    """
    if name:
        places = [Path(name), OUT / name]
        for place in places:
            if (place / file).exists():
                return place
        sys.exit(f"{name}: there is no {file} in {places[0]}, nor in {places[1]}")
    # an evaluation (tools/evaluate.py) has no trainer
    found = [path.parent for path in OUT.glob(f"*/{file}") if cfg.load(path.parent).trainers]
    if not found:
        sys.exit(f"no run in {OUT} has a {file} yet: name one")
    newest = max(found, key=lambda run_dir: (run_dir / file).stat().st_mtime)
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest


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


def is_running(run_dir):
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
        # the last line may not be whole yet
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

    # ---- the last steps

    def mean(self, key):
        return statistics.mean(line[key] for line in self.steps)

    def who_waits(self):
        """Shares of the recent time."""
        waits = self.mean("wait_data_s") / self.mean("step_s")
        return f"trainer waits {waits:.0%}, engine places {self.mean('gen_idle'):.0%} empty"

    def eta(self):
        """Time to the last step, at the recent pace."""
        seconds = statistics.median(line["step_s"] for line in self.steps)
        return duration((self.config.steps - self.steps[-1]["step"]) * seconds)

    # ---- the engines

    def engines(self):
        """(how many serve which version, which have been started and serve nothing yet), as lists of words."""
        known = read_json(self.run_dir / "queues" / "version.json")
        urls = known.get("engines", [])
        count = 0
        loading = []
        for file in sorted((self.run_dir / "engines").glob("*.json")):
            entry = read_json(file)
            if not entry:
                continue
            if entry["url"] in urls and entry.get("answers", True):
                count += 1
                continue
            # it may be removed right now
            with contextlib.suppress(OSError):
                age = duration(time.time() - file.stat().st_mtime)
                loading.append(f"{file.stem} loading, {age}")
        words = f"{count} of {self.config.engines} serve version {known.get('served')}"
        return [words] if urls else [], loading

    def starting(self):
        """What it waits for before its first step."""
        if is_to_be_made(self.config.model):
            return "the tiny base model is being made"
        serving, loading = self.engines()
        if loading:
            return "; ".join(loading)
        return "the first rollouts are sampled" if serving else "models are being loaded"

    # ---- in a line, at length

    def line(self):
        """All that matters now, in a line."""
        serving, loading = self.engines()
        # a continued run has steps, and engines without weights
        if not self.steps or not serving:
            return self.starting()
        last = self.steps[-1]
        words = [
            f"step {last['step']}/{self.config.steps}, eta {self.eta()}",
            f"reward {self.mean('reward'):.3f}",
            f"lag {self.mean('lag_mean'):.1f}/{max(line['lag_max'] for line in self.steps)}",
            self.who_waits(),
        ]
        if self.evals:
            words.append(f"held-out {scores(self.evals[-1])}")
        silent = time.time() - self.stepped_at
        if silent > SLOW * self.mean("step_s") + 5 and last["step"] < self.config.steps:
            words.append(f"no step for {duration(silent)}")
        words += loading
        if self.alarms:
            words.append(f"{len(self.alarms)} alarms")
        return " | ".join(words)

    def state(self):
        """Running, complete, or stopped."""
        if is_running(self.run_dir):
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
            step = f"{self.steps[-1]['step']} of {self.config.steps}, {ago} ago, "
            step += f"{self.mean('step_s'):.1f} s each; eta {self.eta()}"
            lately = f"reward {self.mean('reward'):.3f}, lag {self.mean('lag_mean'):.2f}, "
            lately += f"ess {self.mean('ess'):.3f}; {self.who_waits()}"
        queues = []
        for folder in sorted((self.run_dir / "queues").glob("*/")):
            queues.append(f"{len(list(folder.rglob('*.safetensors')))} in {folder.name}")
        held_out = [f"{scores(line)} (version {line['version']})" for line in self.evals]
        newest = checkpoints.newest(self.run_dir)
        engines = sum(self.engines(), []) if is_running(self.run_dir) else []
        alarms = [f"version {line['version']}: {line['alarm']}" for line in self.alarms]
        return SUMMARY.format(
            run_dir=self.run_dir,
            state=self.state(),
            step=step,
            held_out=" | ".join(held_out[:1] + held_out[1:][-1:]) or "-",
            lately=lately,
            engines="; ".join(engines) or "none",
            queues=", ".join(queues) or "-",
            checkpoint=newest.name if newest else "none yet",
            alarms="; ".join(alarms) or "none",
        )


def screen(run_dir):
    """Pass on stdin, line by line, above a line that stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

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
    status = Status(find_run(a.run))
    status.look()
    print(status.summary(), end="")


if __name__ == "__main__":
    main()
