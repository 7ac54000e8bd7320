"""Five minutes on your machine, with your model, before you spend a week: is what a run computes what it should be?

    bash run.sh doctor [preset] [--any knob]

Two short real runs of that configuration, with its engines, trainer ranks and tasks, in out/doctor-<run>: in the first
one the engines are killed, then it is interrupted; the second one continues it. What the stages handed on is kept
(--keep_steps) and computed once more, see tools/checks.py. Prints a table and leaves out/doctor-<run>/doctor.json; exit
code 1 if something FAILs, and only then its checkpoints stay. A row with a dash had nothing that is known to compare
with. Deliberately absent: whether anything is learnt; tasks' own correctness.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from transformers.utils import logging

import config as cfg
from plumbing import checkpoints, launch
from plumbing.queues import read_json
from tools import checks, plain, report

# versions of the first run after its engines were killed, more than can be made of what is there; of the second run
FIRST, SECOND = 4, 4
# groups of a step at most
GROUPS = 8
# what differs is to be looked at, and must not end the run
KNOBS = """--steps 10000 --warmup_steps 0 --lr_schedule constant --no_signal keep --mismatch_limit 1e9
--eval_every 0 --eval_problems 4 --save_every 1 --keep_last 0 --keep_steps 10000"""

logging.disable_progress_bar()


# ---- the two runs


def shorten(argv):
    """(Config, arguments of run.sh): the user's, made short. Raises ConfigError."""
    c = cfg.parse(argv)
    # bfloat16 hides what a small step changes
    rounds = c.dtype == "bfloat16" or (c.dtype == "auto" and launch.gpu_count())
    lr = max(c.lr, 1e-4) if rounds else c.lr
    batch_size = min(GROUPS, c.groups_per_step) * c.attempts
    own = f"--run doctor-{c.run} --batch_size {batch_size} --lr {lr}"
    words = [*argv, *own.split(), *KNOBS.split()]
    return cfg.parse(words), words


@contextlib.contextmanager
def start(words):
    """run.sh with these arguments: its process. Leaving the block ends it, as Ctrl-C does."""
    command = ["bash", str(cfg.ROOT / "run.sh"), *words]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            # it may have much to save
            process.wait(900)


def remove_states(run_dir, needed):
    """Of a large model they are what fills the disk: those of versions that no check reads, the newest two left out."""
    for folder in checkpoints.all_of(run_dir)[:-2]:
        if int(folder.name[5:]) not in needed:
            for file in folder.glob("trainer/*.distcp"):
                file.unlink()


def wait_for(version, process, run_dir, seconds, needed, engines=0, before=None):
    """Until a run has made this version and so many engines serve; returns the version that it is at.

    needed: versions whose trainer's state is kept; before: config.json of a run that may still be there. RuntimeError
    if the run ends, or takes longer.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if read_json(run_dir / "config.json") != before:
            remove_states(run_dir, needed)
            now = {"version": -1, "engines": []} | read_json(run_dir / "queues" / "version.json")
            if now["version"] >= version and len(now["engines"]) >= engines:
                return now["version"]
        if process.poll() is not None:
            raise RuntimeError(f"doctor: its run ended with {process.returncode}, see above")
        time.sleep(1)
    raise RuntimeError(f"doctor: version {version} or {engines} engines missing in {seconds:.0f} s")


def engines_of(process):
    """The processes of a run that are engines on this host."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        # those that end meanwhile are no engines that could be killed
        with contextlib.suppress(psutil.NoSuchProcess):
            if "vllm.entrypoints.openai.api_server" in child.cmdline():
                found.append(child)
    return found


def run_twice(c, words):
    """The two runs; returns the version of the interruption. RuntimeError if one does not succeed."""
    run_dir = Path(c.out, c.run)
    before = read_json(run_dir / "config.json")
    with start([*words, "--fresh", "True"]) as first:
        version = wait_for(1, first, run_dir, 2 * c.start_timeout, {1}, before=before)
        processes = engines_of(first)
        if not processes:
            raise RuntimeError("doctor: the run has no engine on this host to kill")
        for process in processes:
            process.kill()
        engines = cfg.load(run_dir).engines
        wait_for(version + FIRST, first, run_dir, 2 * c.start_timeout, {1}, engines)
    continued = checkpoints.last_state(run_dir)["version"]
    last = continued + SECOND
    with start([*words, "--steps", str(last)]) as second:
        needed = {1, continued, continued + 1}
        wait_for(last, second, run_dir, 2 * c.start_timeout, needed)
        if second.wait(c.start_timeout):
            raise RuntimeError(f"doctor: the continued run ended with {second.returncode}")
    return continued


# ---- what they have left


def examine(run_dir, continued):
    """The rows of all checks, as dicts. A check that breaks off has failed."""
    [lines] = report.read(run_dir, "step")
    steps = {line["step"]: line for line in lines}
    # torch's, of loading a checkpoint in one process
    warnings.filterwarnings("ignore", module="torch")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # single sequences of small models: threads that wait for each other took 15 times as long beside other work
        torch.set_num_threads(1)
    run = plain.Recording(run_dir, steps, continued, device)
    found = []
    for name, check in vars(checks).items():
        if not name.startswith("check_"):
            continue
        print(f"doctor: {name} ...", flush=True)
        try:
            rows = check(run)
        except torch.OutOfMemoryError:
            rows = [(name, None, "one device has too little memory for it")]
        except Exception as e:
            rows = [(name, False, f"it broke off: {type(e).__name__}: {e}"[:150])]
        about = " ".join(check.__doc__.split())
        for row, ok, figure in rows:
            # numpy's truth is no JSON
            ok = None if ok is None else bool(ok)
            found.append(dict(check=row, ok=ok, figure=figure, about=about))
    return found


def main(argv):
    # as by Ctrl-C: whoever leaves a run ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("doctor: terminated"))
    # in the background of a script SIGINT is ignored, also by the run that is interrupted by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    if "--help" in argv:
        cfg.parse(argv, about=__doc__)
    try:
        c, words = shorten(argv)
        if c.model:
            c.model = os.path.expanduser(c.model)
            launch.prepare(c)
        found = examine(Path(c.out, c.run), run_twice(c, words))
    except (cfg.ConfigError, RuntimeError, subprocess.TimeoutExpired) as e:
        sys.exit(f"{e}")
    except KeyboardInterrupt:
        sys.exit("doctor: interrupted, its run is stopped")
    width = max(len(row["check"]) for row in found)
    for row in found:
        word = {True: "ok", False: "FAIL", None: "-"}[row["ok"]]
        print(f"{word:>4}  {row['check']:<{width}}  {row['figure']}")
    failed = [row for row in found if row["ok"] is False]
    for row in failed:
        print(f"FAIL {row['check']}: {row['about']}")
    if not failed:
        shutil.rmtree(Path(c.out, c.run, "checkpoints"))
    minutes = (time.monotonic() - begun) / 60
    file = Path(c.out, c.run, "doctor.json")
    file.write_text(json.dumps(dict(findings=found, minutes=minutes), indent=1) + "\n")
    print(f"doctor: {len(failed)} of {len(found)} FAIL after {minutes:.1f} min; {file}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
