"""Five minutes of checks before a run of a week: does a run compute what it should?

    bash run.sh doctor [preset] [--any knob]

The doctor makes two short real runs of your configuration, on this machine and with your model, in
out/doctor-<run>: the first one is interrupted, the second one continues it. The data that the
stages exchange is kept (--keep_steps) and computed once more, see tools/doctor_checks.py. The
results are a table and doctor.json in that directory. If a check FAILs, the exit code is 1 and the
checkpoints stay. A row with a dash had no data, or the doctor knows nothing to compare its data
with. Deliberately absent: whether anything is learnt, whether tasks are correct, engines that die.
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

# highest number of groups in a step
GROUPS = 8
# least number of steps of the first run before it is interrupted
FIRST_STEPS = 3
# number of steps of the second run
SECOND_STEPS = 3
# a learning rate at which weights still change when they are rounded to bfloat16
VISIBLE_LR = 1e-4
# Knobs that keep the data and shorten evaluations. A mismatch must not end the run, because the
# doctor compares the logprobs itself. All other knobs have the user's values, but for the size of a
# batch and, in bfloat16, the learning rate (`shorten`).
KNOBS = f"""--steps {reference.PLANNED} --mismatch_limit 1e9 --eval_every 0 --eval_problems 16
--save_every 1 --keep_last 0 --keep_steps {reference.PLANNED}"""
# the words by which the table shows the result of a check
VERDICTS = {True: "ok", False: "FAIL", None: "-"}

logging.disable_progress_bar()


# ---- the two runs


def shorten(argv):
    """Return the user's configuration, made short, as (Config, arguments of run.sh).

    Raises ConfigError if the user's arguments are wrong.
    """
    c = cfg.parse(argv, about=__doc__)
    batch_size = min(GROUPS, c.groups_per_step) * c.attempts
    arguments = [*argv, *f"--run doctor-{c.run} --batch_size {batch_size} {KNOBS}".split()]
    if c.dtype == "bfloat16" or (c.dtype == "auto" and placement.gpu_count()):
        # The learning rate must reach VISIBLE_LR within the first run, in spite of the warm-up.
        lr = max(c.lr, VISIBLE_LR, VISIBLE_LR * c.warmup_steps / FIRST_STEPS)
        arguments += ["--lr", str(lr)]
    return cfg.parse(arguments), arguments


@contextlib.contextmanager
def start(arguments):
    """Start run.sh with these arguments and yield its process.

    At the end of the block the process is interrupted, as by Ctrl-C, unless it has ended.
    """
    command = ["bash", str(cfg.ROOT / "run.sh"), *arguments]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            # The trainer may have a large checkpoint to save.
            process.wait(900)


def run_twice(c, arguments):
    """Make the two runs and return the version at which the first one was interrupted.

    Raises RuntimeError if a run does not succeed, TimeoutExpired if it does not end in time.
    """
    run_dir = Path(c.out, c.run)
    # The config.json of an earlier run may still be there.
    earlier_config = read_json(run_dir / "config.json")
    seconds = 2 * c.start_timeout
    version = -1
    with start([*arguments, "--fresh", "True"]) as first:
        # Before it writes config.json, run.sh makes or fetches the model, however long that takes.
        while first.poll() is None and read_json(run_dir / "config.json") == earlier_config:
            time.sleep(1)
        deadline = time.monotonic() + seconds
        while version < FIRST_STEPS:
            time.sleep(1)
            if first.poll() is not None:
                raise RuntimeError(
                    f"doctor: the first run ended with exit code {first.returncode} before it had "
                    f"version {FIRST_STEPS}: see {run_dir}/logs"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"doctor: the first run has version {version} after {seconds:.0f} s, version "
                    f"{FIRST_STEPS} was expected: see {run_dir}/logs"
                )
            version = read_json(run_dir / "queues" / "version.json").get("version", -1)
    # A run that is continued begins with empty queues; tools/common.py reads both folders.
    (run_dir / "queues").rename(run_dir / "first_queues")
    continued = checkpoints.last_state(run_dir)["version"]
    for folder in checkpoints.all_of(run_dir)[1:-1]:
        for file in folder.glob("trainer/*.distcp"):
            # The optimizer's state of a large model fills the disk, and no check reads these files.
            file.unlink()
    with start([*arguments, "--steps", str(continued + SECOND_STEPS)]) as second:
        if second.wait(2 * c.start_timeout):
            raise RuntimeError(
                f"doctor: the continued run ended with exit code {second.returncode}: see "
                f"{run_dir}/logs"
            )
    return continued


# ---- the checks of what the runs have left


def examine(run_dir, continued):
    """Make all checks: print the rows of the table, and return them as dicts.

    A check that raises an exception has failed. continued: see `run_twice`.
    """
    if not torch.cuda.is_available():
        # The checks compute single sequences, with small models on a CPU. Beside other work several
        # threads took 15 times as long as one, because they wait for each other.
        torch.set_num_threads(1)
    run = reference.Recording(run_dir, continued)
    findings = []
    for name, check in vars(doctor_checks).items():
        if not name.startswith("check_"):
            continue
        try:
            rows = list(check(run))
        except torch.OutOfMemoryError:
            rows = [(name, None, "one device has too little memory for this check")]
        except Exception as e:
            rows = [(name, False, f"the check raised {type(e).__name__}: {e}"[:150])]
        for row_name, ok, figure in rows:
            print(f"{VERDICTS[ok]:>4}  {row_name:<48}  {figure}", flush=True)
            about = " ".join(check.__doc__.split())
            findings.append(dict(check=row_name, ok=ok, figure=figure, about=about))
    return findings


def main(argv):
    # SIGTERM leaves the block of `start`, as Ctrl-C does, and so ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("doctor: terminated"))
    # If a script started the doctor in the background, SIGINT is ignored: here, and in the run,
    # which inherits this and could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    try:
        c, arguments = shorten(argv)
        run_dir = Path(c.out, c.run)
        findings = examine(run_dir, run_twice(c, arguments))
    except (cfg.ConfigError, RuntimeError, subprocess.TimeoutExpired, KeyboardInterrupt) as e:
        sys.exit(f"{e}" or "doctor: interrupted, its run is stopped")
    failed = [finding for finding in findings if VERDICTS[finding["ok"]] == "FAIL"]
    for finding in failed:
        print(f"FAIL {finding['check']}: {finding['about']}")
    if not failed:
        shutil.rmtree(run_dir / "checkpoints")
    minutes = (time.monotonic() - begun) / 60
    file = run_dir / "doctor.json"
    # JSON does not know numpy's bool: `default` converts it.
    text = json.dumps(dict(findings=findings, minutes=minutes), indent=1, default=bool)
    file.write_text(text + "\n")
    print(f"doctor: {len(failed)} of {len(findings)} FAIL after {minutes:.1f} min; {file}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
