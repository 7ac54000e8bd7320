"""Five minutes on your machine, with your model, before you spend a week: is what a run computes what it should be?

    bash run.sh doctor [preset] [--any knob]

Two short real runs of that configuration in out/doctor-<run>: the first one is interrupted, the second one continues
it. What the stages handed on is kept (--keep_steps) and computed once more, see tools/doctor_checks.py. Prints a table, leaves
doctor.json there; exit code 1 if something FAILs, and only then its checkpoints stay. A row with a dash had nothing to
look at, or to compare with. Deliberately absent: whether anything is learnt; tasks' own correctness; engines that die.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers.utils import logging

import config as cfg
from plumbing import checkpoints, placement
from plumbing.queues import read_json
from tools import doctor_checks
from tools import doctor_reference as reference

# groups of a step, at most; steps of the first run before it is interrupted, at least, and of the second one
GROUPS, FIRST, SECOND = 8, 3, 3
# a learning rate whose steps bfloat16 does not hide
VISIBLE = 1e-4
# what differs is to be looked at, and must not end the run; what is looked at is the user's own
KNOBS = f"""--steps {reference.PLANNED} --mismatch_limit 1e9 --eval_every 0 --eval_problems 16
--save_every 1 --keep_last 0 --keep_steps {reference.PLANNED}"""
WORDS = {True: "ok", False: "FAIL", None: "-"}

logging.disable_progress_bar()


# ---- the two runs


def shorten(argv):
    """(Config, arguments of run.sh): the user's, made short. Raises ConfigError."""
    c = cfg.parse(argv, about=__doc__)
    batch_size = min(GROUPS, c.groups_per_step) * c.attempts
    words = [*argv, *f"--run doctor-{c.run} --batch_size {batch_size} {KNOBS}".split()]
    if c.dtype == "bfloat16" or (c.dtype == "auto" and placement.gpu_count()):
        # a warm-up reaches it within the first run
        words += ["--lr", str(max(c.lr, VISIBLE, VISIBLE * c.warmup_steps / FIRST))]
    return cfg.parse(words), words


@contextlib.contextmanager
def start(words):
    """run.sh with these arguments: its process. Leaving the block ends it, as Ctrl-C does."""
    process = subprocess.Popen(["bash", str(cfg.ROOT / "run.sh"), *words], start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            # it may have much to save
            process.wait(900)


def run_twice(c, words):
    """The two runs; returns the version of the interruption. RuntimeError if one does not succeed."""
    run_dir = Path(c.out, c.run)
    # of a run that may still be there
    before = read_json(run_dir / "config.json")
    deadline = time.monotonic() + 2 * c.start_timeout
    version = -1
    with start([*words, "--fresh", "True"]) as first:
        while version < FIRST:
            time.sleep(1)
            if first.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"doctor: no version {FIRST}, exit code {first.poll()}")
            if read_json(run_dir / "config.json") != before:
                version = read_json(run_dir / "queues" / "version.json").get("version", -1)
    # a run that is continued begins with empty ones; see tools/report.py
    (run_dir / "queues").rename(run_dir / "first_queues")
    continued = checkpoints.last_state(run_dir)["version"]
    for folder in checkpoints.all_of(run_dir)[1:-1]:
        for file in folder.glob("trainer/*.distcp"):
            # of a large model they fill the disk, and no check reads these
            file.unlink()
    with start([*words, "--steps", str(continued + SECOND)]) as second:
        if second.wait(2 * c.start_timeout):
            raise RuntimeError(f"doctor: the continued run ended with {second.returncode}")
    return continued


# ---- what they have left


def examine(run_dir, continued):
    """Prints the rows of all checks; returns them, as dicts. A check that breaks off has failed."""
    if not torch.cuda.is_available():
        # single sequences of small models: threads that wait for each other took 15 times as long beside other work
        torch.set_num_threads(1)
    run = reference.Recording(run_dir, continued)
    found = []
    for name, check in vars(doctor_checks).items():
        if not name.startswith("check_"):
            continue
        try:
            rows = list(check(run))
        except torch.OutOfMemoryError:
            rows = [(name, None, "one device has too little memory for it")]
        except Exception as e:
            rows = [(name, False, f"it broke off: {type(e).__name__}: {e}"[:150])]
        for row, ok, figure in rows:
            print(f"{WORDS[ok]:>4}  {row:<48}  {figure}", flush=True)
            about = " ".join(check.__doc__.split())
            found.append(dict(check=row, ok=ok, figure=figure, about=about))
    return found


def main(argv):
    # as by Ctrl-C: whoever leaves a run ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("doctor: terminated"))
    # in the background of a script SIGINT is ignored, also by the run that is interrupted by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    try:
        c, words = shorten(argv)
        run_dir = Path(c.out, c.run)
        found = examine(run_dir, run_twice(c, words))
    except (cfg.ConfigError, RuntimeError, subprocess.TimeoutExpired, KeyboardInterrupt) as e:
        sys.exit(f"{e}" or "doctor: interrupted, its run is stopped")
    failed = [row for row in found if WORDS[row["ok"]] == "FAIL"]
    for row in failed:
        print(f"FAIL {row['check']}: {row['about']}")
    if not failed:
        shutil.rmtree(run_dir / "checkpoints")
    minutes, file = (time.monotonic() - begun) / 60, run_dir / "doctor.json"
    # numpy's truth is no JSON
    saved = json.dumps(dict(findings=found, minutes=minutes), indent=1, default=bool)
    file.write_text(saved + "\n")
    print(f"doctor: {len(failed)} of {len(found)} FAIL after {minutes:.1f} min; {file}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
