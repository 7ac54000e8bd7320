"""Five minutes on your machine, with your model, before you spend a week: is what a run computes what it should be?

    bash run.sh doctor [preset] [--any knob]

Two short real runs of that configuration, with its engines, trainer ranks and tasks, in out/doctor-<run>: in the first
one the engines are killed, then it is interrupted; the second one continues it, with --recompute_kv. Everything that the
stages handed on is kept (--keep_steps), and computed once more by tools/plain.py: sequence by sequence, with Hugging
Face's own model. The newest checkpoint is evaluated by an engine of its own. Prints a table and leaves
out/doctor-<run>/doctor.json; exit code 1 if something FAILs.

The checks are in tools/checks.py. Deliberately absent: whether anything is learnt; tasks' own correctness.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import requests
import torch
from transformers.utils import logging

import config as cfg
from plumbing import checkpoints, launch, secret
from plumbing.queues import read_json
from tools import plain, report
from tools.checks import CHECKS, Case, Finding

# versions that the two runs make, at least; in the first one more where a version could read what an older one has
# computed: the second one's --recompute_kv would hide that
FIRST, SECOND, SHARED = 3, 3, 5
# groups of a step at most
GROUPS = 8
# seconds
LONGEST_SAVE = 900

logging.disable_progress_bar()


# ---- the two runs


class Watch:
    """A short run from outside: its processes' memory, and where it is. Leaving ends it."""

    def __init__(self, command, run_dir):
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            command,
            cwd=cfg.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self.memory = {}
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def version(self):
        return read_json(self.run_dir / "queues" / "version.json").get("version", -1)

    @property
    def ended(self):
        return self.process.poll() is not None

    def until(self, condition, seconds, what):
        """Wait. Raises RuntimeError with the run's last lines if it ends before, or that does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            self._look()
            if self.ended and not condition():
                raise self.failure(f"{what}: the run ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                self.stop()
                raise self.failure(f"{what}: not within {seconds:.0f} s")
            time.sleep(1)

    def _look(self):
        """Keep the run's lines, for when it fails, and the most memory that was taken."""
        for line in self.process.stdout.readlines():
            self.said.append(line.rstrip())
        self.memory = most_of(self.memory, memory_of(self.process.pid))

    def failure(self, what):
        """An error with the run's last lines."""
        self._look()
        last = "\n  ".join(self.said[-15:])
        return RuntimeError(f"doctor: {what}; its last lines:\n  {last}")

    def stop(self):
        """As Ctrl-C; waits as long as a run may take to save."""
        if self.ended:
            return
        os.killpg(self.process.pid, signal.SIGINT)
        deadline = time.monotonic() + LONGEST_SAVE
        while not self.ended:
            self._look()
            if time.monotonic() > deadline:
                raise self.failure(f"the run has not stopped within {LONGEST_SAVE} s of Ctrl-C")
            time.sleep(0.2)


def most_of(a, b):
    """{where: (bytes used, bytes there are)} of two: what was more."""
    found = dict(a)
    for name, (used, total) in b.items():
        found[name] = (max(used, found.get(name, (0, 0))[0]), total)
    return found


def memory_of(pid):
    """{GPU, or all processes: (bytes used, bytes there are)} now."""
    found = {}
    if launch.gpu_count():
        ask = [
            "nvidia-smi",
            f"--id={','.join(launch.gpu_names(launch.gpu_count()))}",
            "--query-gpu=index,memory.used,memory.total",
            "--format=csv,noheader,nounits",
        ]
        for line in subprocess.run(ask, capture_output=True, text=True).stdout.splitlines():
            index, used, total = (int(x) for x in line.split(","))
            found[f"GPU {index}"] = (used << 20, total << 20)
        return found
    used = 0
    # processes end while they are looked at
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            used += process.memory_info().rss
    return {"all processes": (used, psutil.virtual_memory().total)}


def engine_processes(pid):
    """{port: (process, its command line)} of the engines that a run has on this host."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        # those that end meanwhile are no engines that could be killed
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "vllm.entrypoints.openai.api_server" in words and "plumbing.supervise" not in words:
                found[int(words[words.index("--port") + 1])] = (process, words)
    return found


def samples_tokens(url, run_dir):
    """Does the engine answer a request for a token? One without the trainer's weights refuses it."""
    body = dict(token_ids=[0], sampling_params=dict(max_tokens=1))
    try:
        answer = requests.post(
            url + "/inference/v1/generate", json=body, headers=secret.header(run_dir), timeout=60
        )
    except requests.RequestException:
        return False
    return answer.ok


def kill_engines(c, run_dir, watch, processes):
    """SIGKILL to these engines, all at once, as nobody need go on meanwhile; the seconds until all sample again.

    Raises RuntimeError if there are none.
    """
    if not processes:
        raise RuntimeError("doctor: the run has no engine on this host to kill")
    files = [run_dir / "engines" / f"engine{port - c.port}.json" for port in processes]
    before = {read_json(file).get("started") for file in files}
    start = time.monotonic()
    for process, _ in processes.values():
        process.kill()

    def are_back():
        entries = [read_json(file) for file in files]
        are_new = all(entry and entry["started"] not in before for entry in entries)
        return are_new and all(samples_tokens(entry["url"], run_dir) for entry in entries)

    watch.until(are_back, 2 * c.start_timeout, "the killed engines' return")
    return time.monotonic() - start


def run_twice(c, argv):
    """The two runs; returns what was seen from outside, and the version of the interruption."""
    run_dir = Path(c.out, c.run)
    command = ["bash", "run.sh", *argv]
    with Watch([*command, "--fresh", "True"], run_dir) as first:
        first.until(lambda: first.version >= 1, 2 * c.start_timeout, "the first weights")
        processes = engine_processes(first.process.pid)
        # of each engine, as it was started
        seeds = [words[words.index("--seed") + 1] for _, words in processes.values()]
        back = kill_engines(c, run_dir, first, processes)
        # with what start-up has filled in
        c = cfg.load(str(run_dir))
        until = FIRST + SHARED * (c.prefix_caching == "on")
        first.until(lambda: first.version >= until, c.start_timeout, f"version {until}")
    continued = checkpoints.last_state(run_dir)["version"]
    steps = continued + SECOND
    with Watch([*command, "--steps", str(steps), "--recompute_kv", "True"], run_dir) as second:
        second.until(lambda: second.ended, 2 * c.start_timeout, "the end of the continued run")
    if second.process.returncode:
        raise second.failure(f"the continued run ended with {second.process.returncode}")
    memory = most_of(first.memory, second.memory)
    return dict(back=back, memory=memory, seeds=seeds), continued


def parse(words, gpus):
    return cfg.parse(words, gpus, gpu_gb=launch.gpu_memory_gb() or 80.0)


def knobs_of(argv, gpus):
    """(Config, arguments of run.sh): the user's, made short. Raises ConfigError."""
    c = parse(argv, gpus)
    groups = min(GROUPS, c.groups_per_step)
    own = dict(
        run=f"doctor-{c.run}",
        steps=10000,
        batch_size=groups * c.attempts,
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
    return parse(words, gpus), words


def examine(c, watched, continued):
    """All checks -> [Finding]. A check that breaks off has failed."""
    run_dir = Path(c.out, c.run)
    c = cfg.load(str(run_dir))
    lines, _ = report.read(run_dir)
    steps = {line["step"]: line for line in lines}
    # torch's, of loading a checkpoint in one process
    warnings.filterwarnings("ignore", module="torch")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # single sequences of small models: threads that wait for each other took 15 times as long beside other work
        torch.set_num_threads(1)
    weights = plain.Weights(c, run_dir, device)
    case = Case(c, run_dir, plain.Recording(c, run_dir, steps, weights), continued, watched)
    findings = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(f"doctor: {name} ...", flush=True)
        try:
            findings += check(case)
        except Exception as e:
            findings.append(
                Finding(
                    name, f"{type(e).__name__}: {e}"[:150], "", False, "the check itself broke off"
                )
            )
    return findings


def show(findings):
    """The table; what to do for what fails."""
    width = max(len(f.check) for f in findings)
    for f in findings:
        limit = f" (limit {f.limit})" if f.limit else ""
        print(f"{f.word:>4}  {f.check:<{width}}  {f.figure}{limit}")
    for f in findings:
        if f.ok is False:
            print(f"FAIL {f.check}: {f.advice}")


def main(argv):
    # as by Ctrl-C: whoever leaves a run ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("doctor: terminated"))
    # in the background of a script SIGINT is ignored, also by the run that is interrupted by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gpus = launch.gpu_count()
    start = time.monotonic()
    try:
        c, words = knobs_of(argv, gpus)
        print(
            f"doctor: two short runs in {Path(c.out, c.run)}, then everything is computed again",
            flush=True,
        )
        watched, continued = run_twice(c, words)
    except (cfg.ConfigError, RuntimeError) as e:
        sys.exit(f"{e}")
    except KeyboardInterrupt:
        sys.exit("doctor: interrupted, its run is stopped")
    ran = time.monotonic() - start
    findings = examine(c, watched, continued)
    seconds = time.monotonic() - start
    show(findings)
    failed = [f.check for f in findings if f.ok is False]
    path = Path(c.out, c.run, "doctor.json")
    saved = dict(findings=[dataclasses.asdict(f) for f in findings], seconds=seconds)
    path.write_text(json.dumps(saved, indent=1) + "\n")
    print(
        f"doctor: {len(failed)} of {len(findings)} FAIL after {seconds / 60:.1f} min, of which the runs "
        f"took {ran / 60:.1f}; {path}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
