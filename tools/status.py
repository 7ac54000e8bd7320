"""What a run is doing, from its files alone.

    bash run.sh status [out/toy]     in some lines; without a run: of the newest
    python tools/status.py --screen out/toy     run.sh's: passes on what it reads, above a line that stays

Nothing here talks to a process of the run, so that it may be asked from any machine that sees the run directory.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from plumbing import checkpoints, launch  # noqa: E402
from plumbing.queues import read_json  # noqa: E402

OUT = cfg.ROOT / "out"
# steps that are meant by "lately"
RECENT = 10
# a step that takes so many times as long as those is worth a word
SLOW = 5


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
    found = [path for path in OUT.glob(f"*/{file}") if cfg.load(path.parent).trainers]
    if not found:
        sys.exit(f"no run in {OUT} has a {file} yet: name one")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
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


class Status:
    """Looks at a run again and again, and reads of metrics.jsonl only what is new."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.config = cfg.load(run_dir)
        self.forget()

    def forget(self):
        self.offset = 0
        # lines of metrics.jsonl by what they are about; of steps the last ones
        self.lines = {"step": [], "eval": [], "alarm": []}
        self.stepped_at = None

    def look(self):
        """Take in what is new. A continued run writes metrics.jsonl anew: then all of it."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return
        if path.stat().st_size < self.offset:
            self.forget()
        with open(path, "rb") as file:
            file.seek(self.offset)
            new = file.read()
        # the last line may not be whole yet
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in map(json.loads, whole.splitlines()):
            for about in self.lines.keys() & line.keys():
                self.lines[about].append(line)
        del self.lines["step"][:-RECENT]
        if whole:
            self.stepped_at = path.stat().st_mtime

    def mean(self, key):
        return statistics.mean(line[key] for line in self.lines["step"])

    def progress(self):
        """The newest step, and what the recent ones were like, as two texts."""
        steps = self.lines["step"]
        last = steps[-1]["step"]
        seconds = statistics.median(line["step_s"] for line in steps)
        step = f"{last}/{self.config.steps}, eta {duration((self.config.steps - last) * seconds)}"
        silent = time.time() - self.stepped_at
        if silent > SLOW * seconds + 5 and last < self.config.steps:
            step += f", no step for {duration(silent)}"
        lag = f"{self.mean('lag_mean'):.1f}/{max(line['lag_max'] for line in steps)}"
        waits = self.mean("wait_data_s") / self.mean("step_s")
        return step, (
            f"reward {self.mean('reward'):.3f} | lag {lag} | trainer waits {waits:.0%}, "
            f"engine places {self.mean('gen_idle'):.0%} empty"
        )

    def engines(self):
        """(which version is served, of which engines one waits), as words; "" if there is nothing to say."""
        known = read_json(self.run_dir / "queues" / "version.json")
        urls = known.get("engines", [])
        serving = 0
        loading = []
        for file in sorted((self.run_dir / "engines").glob("*.json")):
            entry = read_json(file)
            if entry and entry["url"] in urls and entry.get("answers", True):
                serving += 1
            elif entry:
                # it may be removed right now
                with contextlib.suppress(OSError):
                    age = duration(time.time() - file.stat().st_mtime)
                    loading.append(f"{file.stem} loading, {age}")
        words = f"{serving} of {self.config.engines} serve version {known.get('served')}"
        return words if urls else "", "; ".join(loading)

    def starting(self):
        """What it waits for before its first step."""
        if launch.is_to_be_made(self.config.model):
            return "the tiny base model is being made"
        serving, loading = self.engines()
        if serving:
            return loading or "the first rollouts are sampled"
        return loading or "models are being loaded"

    def line(self):
        """All that matters now, in a line."""
        steps, evals, alarms = self.lines.values()
        serving, loading = self.engines()
        # a continued run has steps, and engines without weights
        if not steps or not serving:
            return self.starting()
        step, lately = self.progress()
        words = [f"step {step}", lately]
        words += [f"held-out {scores(line)}" for line in evals[-1:]]
        words += [loading, f"{len(alarms)} alarms" if alarms else ""]
        return " | ".join(filter(None, words))

    def is_running(self):
        """Does a process of the run, on any machine, still hold its name?"""
        run_dir = self.run_dir.resolve()
        return launch.holder(replace(self.config, out=str(run_dir.parent), run=run_dir.name)) != ""

    def state(self):
        """Running, complete, or stopped."""
        if self.is_running():
            return "running"
        if any(line["version"] == self.config.steps for line in self.lines["eval"]):
            return "complete; a larger --steps extends it"
        if checkpoints.newest(self.run_dir):
            return "stopped; the same command continues"
        return "stopped; there is no checkpoint yet, the same command starts anew"

    def summary(self):
        """What `run.sh status` prints."""
        steps, evals, alarms = self.lines.values()
        step, lately = f"none of {self.config.steps} yet: {self.starting()}", ""
        if steps:
            step, lately = self.progress()
        first_and_last = evals[:1] + evals[1:][-1:]
        queues = sorted((self.run_dir / "queues").glob("*/"))
        waiting = {folder.name: len(list(folder.rglob("*.safetensors"))) for folder in queues}
        newest = checkpoints.newest(self.run_dir)
        rows = {
            "step": step,
            "held-out": " | ".join(f"{scores(x)} (version {x['version']})" for x in first_and_last),
            "lately": lately,
            "engines": "; ".join(filter(None, self.engines())) * self.is_running(),
            "queues": ", ".join(f"{n} in {name}" for name, n in waiting.items()),
            "checkpoint": newest.name if newest else "",
            "alarms": "; ".join(f"version {x['version']}: {x['alarm']}" for x in alarms),
        }
        lines = [f"{name:<10} {words or 'none'}\n" for name, words in rows.items()]
        return f"{self.run_dir}: {self.state()}\n{''.join(lines)}"


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
