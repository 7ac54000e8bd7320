"""Five minutes on your machine, with your model, before you spend a week: is what a run computes what it should be?

    bash run.sh doctor [preset] [--any knob]

Two short real runs of that configuration, with its engines, trainer ranks and tasks, in out/doctor-<run>: in the first
one the engines are killed, then it is interrupted; the second one continues it, with --recompute_kv. Everything that the
stages handed on is kept (--keep_steps), and computed once more by tools/plain.py: sequence by sequence, with Hugging
Face's own model. The newest checkpoint is evaluated by an engine of its own. Prints a table and leaves
out/doctor-<run>/doctor.json; exit code 1 if something FAILs. A row with a dash had nothing to compare with.

The checks are in tools/checks.py. Deliberately absent: whether anything is learnt; tasks' own correctness.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from transformers.utils import logging

import config as cfg
from plumbing import checkpoints
from plumbing.hardware import gpu_count, gpu_memory_gb
from plumbing.queues import read_json
from tools import plain, report
from tools.checks import CHECKS, Finding

# versions that the two runs make, at least; in the first one more where a version could read what an older one has
# computed: the second one's --recompute_kv would hide that
FIRST, SECOND, SHARED = 4, 3, 5
# groups of a step at most
GROUPS = 8
# seconds
LONGEST_SAVE = 900

logging.disable_progress_bar()


# ---- the two runs


def knobs_of(argv):
    """(Config, arguments of run.sh): the user's, made short. Raises ConfigError."""
    gpus, gpu_gb = gpu_count(), gpu_memory_gb() or 80.0
    c = cfg.parse(argv, gpus, gpu_gb=gpu_gb)
    own = dict(
        run=f"doctor-{c.run}",
        steps=10000,
        batch_size=min(GROUPS, c.groups_per_step) * c.attempts,
        # bfloat16 hides what a small step changes
        lr=c.lr if c.dtype == "float32" or not gpus else max(c.lr, 1e-4),
        warmup_steps=0,
        lr_schedule="constant",
        no_signal="keep",
        eval_every=0,
        eval_problems=4,
        save_every=1,
        keep_last=0,
        keep_steps=10000,
        # what differs is to be looked at, and must not end the run
        mismatch_limit=1e9,
    )
    words = list(argv)
    for knob, value in own.items():
        words += [f"--{knob}", str(value)]
    return cfg.parse(words, gpus, gpu_gb=gpu_gb), words


def run_id(run_dir):
    """Which run is in this directory, None if none is."""
    return read_json(run_dir / "config.json").get("config", {}).get("run_id")


class ShortRun:
    """A run of run.sh with these arguments. Leaving the block ends it, as Ctrl-C does.

    before: id of another run, which is in its directory until it has begun.
    """

    def __init__(self, words, run_dir, before=None):
        self.run_dir = run_dir
        self.before = before
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            ["bash", "run.sh", *words],
            cwd=cfg.ROOT,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Waits as long as a run may take to save."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(LONGEST_SAVE)

    def error(self, what):
        """RuntimeError with the run's last lines."""
        self.output.seek(0)
        last = "\n  ".join(self.output.read().splitlines()[-15:])
        return RuntimeError(f"doctor: {what}; its last lines:\n  {last}")

    def wait_for(self, version, seconds, engines=0):
        """Until the run has made this version and so many engines serve. RuntimeError if it ends, or takes longer."""
        deadline = time.monotonic() + seconds
        while True:
            now = read_json(self.run_dir / "queues" / "version.json")
            begun = now and run_id(self.run_dir) != self.before
            if begun and now["version"] >= version and len(now["engines"]) >= engines:
                return now["version"]
            if self.process.poll() is not None:
                raise self.error(f"the run ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.error(f"no version {version} in {engines} engines in {seconds:.0f} s")
            time.sleep(1)

    def engines(self):
        """[(process, its command line)] of its engines on this host."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            # those that end meanwhile are no engines that could be killed
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if (
                    "vllm.entrypoints.openai.api_server" in words
                    and "plumbing.supervise" not in words
                ):
                    found.append((process, words))
        return found


def run_twice(c, words):
    """The two runs; returns (version of the interruption, seed of every engine). RuntimeError if one does not succeed."""
    run_dir = Path(c.out, c.run)
    with ShortRun([*words, "--fresh", "True"], run_dir, run_id(run_dir)) as first:
        version = first.wait_for(1, 2 * c.start_timeout)
        engines = first.engines()
        if not engines:
            raise RuntimeError("doctor: the run has no engine on this host to kill")
        for process, _ in engines:
            process.kill()
        # with what start-up has filled in
        c = cfg.load(str(run_dir))
        # without engines it would soon come to rest
        last = version + FIRST + SHARED * (c.prefix_caching == "on")
        first.wait_for(last, 2 * c.start_timeout, len(engines))
    continued = checkpoints.last_state(run_dir)["version"]
    last = continued + SECOND
    words = [*words, "--steps", str(last), "--recompute_kv", "True"]
    with ShortRun(words, run_dir) as second:
        second.wait_for(last, 2 * c.start_timeout)
        if second.process.wait(c.start_timeout):
            raise second.error(f"the continued run ended with {second.process.returncode}")
    return continued, [words[words.index("--seed") + 1] for _, words in engines]


# ---- what they have left


def examine(c, continued, seeds):
    """All checks -> [(Finding, what it finds)]. A check that breaks off has failed."""
    run_dir = Path(c.out, c.run)
    lines, _ = report.read(run_dir)
    steps = {line["step"]: line for line in lines}
    # torch's, of loading a checkpoint in one process
    warnings.filterwarnings("ignore", module="torch")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # single sequences of small models: threads that wait for each other took 15 times as long beside other work
        torch.set_num_threads(1)
    run = plain.Recording(cfg.load(str(run_dir)), run_dir, steps, continued, seeds, device)
    found = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(f"doctor: {name} ...", flush=True)
        try:
            rows = check(run)
        except torch.OutOfMemoryError:
            rows = [Finding(name, None, "one device has too little memory for it")]
        except Exception as e:
            rows = [Finding(name, False, f"it broke off: {type(e).__name__}: {e}"[:150])]
        found += [(row, " ".join(check.__doc__.split())) for row in rows]
    return found


def main(argv):
    # as by Ctrl-C: whoever leaves a run ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("doctor: terminated"))
    # in the background of a script SIGINT is ignored, also by the run that is interrupted by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        c, words = knobs_of(argv)
        where = Path(c.out, c.run)
        print(f"doctor: two short runs in {where}, then everything is computed again", flush=True)
        found = examine(c, *run_twice(c, words))
    except (cfg.ConfigError, RuntimeError, subprocess.TimeoutExpired) as e:
        sys.exit(f"{e}")
    except KeyboardInterrupt:
        sys.exit("doctor: interrupted, its run is stopped")
    width = max(len(row.check) for row, _ in found)
    for row, _ in found:
        word = {True: "ok", False: "FAIL", None: "-"}[row.ok]
        print(f"{word:>4}  {row.check:<{width}}  {row.figure}")
    failed = [(row, about) for row, about in found if row.ok is False]
    for row, about in failed:
        print(f"FAIL {row.check}: {about}")
    seconds = time.monotonic() - start
    saved = dict(findings=[row._asdict() for row, _ in found], seconds=seconds)
    (where / "doctor.json").write_text(json.dumps(saved, indent=1) + "\n")
    print(
        f"doctor: {len(failed)} of {len(found)} FAIL after {seconds / 60:.1f} min; {where}/doctor.json"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
