"""A run in a hostile world: does it end well, is every problem accounted for, is its memory flat?

    python bench/hostile.py [--minutes 20] [--real]     # the FAKE engine of tests/, or two real vLLM's
    python bench/hostile.py --quick                     # a minute and a half

All at once: 30% of the engines' answers are garbled; one of two engines is killed every minute; five foreign
files lie in each queue, and five more every other minute; the reward function hangs, takes all memory, kills
its process or raises for one answer in eight. The run works on a copy of the repository, to which a task and a
garbling middleware are added. Afterwards the ledger must balance: every problem drawn was trained or dropped
with a reason. Raw numbers: bench/results/hostile.json. Deliberately absent: several hosts, GPUs.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SHARE = 0.3
KILL_EVERY = 60.0
FILES_EVERY = 120.0
LOOK_EVERY = 5.0
PORT = 8760
BATCH = 64
ATTEMPTS = 8
# plumbing/launch.py of the copy
FLAG = "--middleware plumbing.engine.Contract "

TASK = '''"""The toy task, whose reward function meets answers that it cannot bear: one in eight."""

import os
import sys
import time
import zlib

from tasks import toy
from tasks.toy import problems, teacher


def recurse(n):
    return recurse(n + 1) + 1


def take_all_memory():
    hoard = []
    while True:
        hoard.append(bytearray(1 << 28))


def spin():
    while True:
        pass


HOSTILITIES = [
    spin,
    take_all_memory,
    lambda: time.sleep(1000),
    lambda: os._exit(3),
    lambda: os.kill(os.getpid(), 9),
    lambda: sys.exit("no"),
    lambda: recurse(0),
    lambda: 1 / 0,
]


def reward(problem, completion, finished):
    chance = zlib.crc32(completion.encode()) % 64
    # those that take their time are rare: each costs a second
    if chance < len(HOSTILITIES) and (chance > 2 or len(completion) % 8 == 0):
        HOSTILITIES[chance]()
    return toy.reward(problem, completion, finished)
'''


# ------------------------------------------------------------------------------ garbled answers


def _change(**fields):
    def garble(choice):
        choice.update(fields)

    return garble


def _longer(choice):
    choice["behavior_logprobs"].append(-0.1)


def _shorter(choice):
    choice["behavior_logprobs"].pop()


def _no_logprob(choice):
    choice["behavior_logprobs"][-1] = None


def _infinite(choice):
    choice["behavior_logprobs"][0] = 1e999


def _positive(choice):
    choice["behavior_logprobs"][0] = 3.5


def _not_a_token(choice):
    choice["token_ids"][0] = 10**9


def _a_word(choice):
    choice["token_ids"][-1] = "the"


def _a_gap(choice):
    choice["weight_versions"][-1]["end"] -= 1


def _overlap(choice):
    choice["weight_versions"].append(dict(version="0", start=0, end=1))


def _backwards(choice):
    choice["weight_versions"].reverse()
    choice["weight_versions"][0]["version"] = "-3"


def _without(name):
    def garble(choice):
        del choice[name]

    return garble


GARBLES = [
    _longer,
    _shorter,
    _no_logprob,
    _infinite,
    _positive,
    _not_a_token,
    _a_word,
    _a_gap,
    _overlap,
    _backwards,
    _change(finish_reason="abort"),
    _change(finish_reason="error"),
    _change(finish_reason=None),
    _change(token_ids=[]),
    _change(token_ids=None),
    _change(behavior_logprobs=None),
    _change(weight_versions="3"),
    _without("token_ids"),
    _without("behavior_logprobs"),
    _without("weight_versions"),
    _without("finish_reason"),
]
# whole bodies
NO_ANSWERS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"choices": []}',
    b'{"choices": [1]}',
    b"\xff\xfe",
    b"[" * 100000,
]


def garbled(body, rng):
    """The body of an answer as it is, or, for a share of them, otherwise: bytes -> bytes."""
    if rng.random() >= SHARE:
        return body
    kind = rng.randrange(len(GARBLES) + len(NO_ANSWERS))
    if kind >= len(GARBLES):
        return NO_ANSWERS[kind - len(GARBLES)]
    answer = json.loads(body)
    GARBLES[kind](answer["choices"][0])
    return json.dumps(answer).encode()


class Garbling:
    """ASGI middleware of a real engine: changes answers to /inference/v1/generate."""

    def __init__(self, app):
        self.app = app
        self.random = random.Random(0)

    async def __call__(self, scope, receive, send):
        if scope.get("path") != "/inference/v1/generate":
            await self.app(scope, receive, send)
            return
        messages = []

        async def keep(message):
            messages.append(message)

        await self.app(scope, receive, keep)
        start = messages[0]
        body = b"".join(m.get("body", b"") for m in messages[1:])
        if start["status"] == 200:
            body = garbled(body, self.random)
            length = (b"content-length", str(len(body)).encode())
            others = [(k, v) for k, v in start["headers"] if k != b"content-length"]
            start["headers"] = [*others, length]
        await send(start)
        await send({"type": "http.response.body", "body": body})


# ------------------------------------------------------------------------------ foreign files


def foreign_files(folder, rng):
    """Five of them into a queue's directory: what a shared file system and its users leave there."""
    name = rng.randrange(10**6, 10**9)
    (folder / f"{name}.txt").write_text("not a record")
    (folder / f"{name:010d}.safetensors").write_bytes(rng.randbytes(2000))
    (folder / f"{name + 1:010d}.safetensors").mkdir()
    os.mkfifo(folder / f"{name + 2:010d}.safetensors")
    # a copy of a true record, far ahead
    records = sorted(p for p in folder.glob("*.safetensors") if p.is_file() and p.stem.isdigit())
    if records:
        try:
            shutil.copy(records[0], folder / f"{name + 3:010d}.safetensors")
        # it was read meanwhile
        except FileNotFoundError:
            pass


# ------------------------------------------------------------------------------ the run


def hostile_copy(folder, model):
    """A copy of the repository with the task and the middleware; model: the base model's directory."""
    from test_edits import copy_of_the_repository

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    copy_of_the_repository(folder, model)
    ignore = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=ignore)
    (folder / "tasks" / "hostile.py").write_text(TASK)
    launch = folder / "plumbing" / "launch.py"
    text = launch.read_text()
    if FLAG not in text:
        raise SystemExit(f"bench/hostile.py: plumbing/launch.py has no '{FLAG}' any more")
    launch.write_text(text.replace(FLAG, FLAG + "--middleware bench.hostile.Garbling "))
    return folder


STAGES = {"actor.py": "actor", "preprocess.py": "preprocess", "train.py": "train"}


class Trouble:
    """What is done to a run, and seen of it, until it ends. mark: of its processes (RUN_MARK)."""

    def __init__(self, run_dir, mark, seed):
        self.run_dir = run_dir
        self.mark = mark
        self.random = random.Random(seed)
        self.kills = 0
        self.files = 0
        # {stage: [[seconds, MB]]}
        self.memory = {}

    def processes(self):
        """[(pid, command line)] of the run's processes."""
        from test_run import leftovers

        return [(int(pid), line) for pid, line in leftovers(self.mark)]

    def kill_an_engine(self):
        """kill -9 of one of the engines' server processes, in turn."""
        servers = []
        for pid, line in self.processes():
            if "api_server" in line and "supervise" not in line and "bash" not in line:
                servers.append(pid)
        if servers:
            os.kill(servers[self.kills % len(servers)], signal.SIGKILL)
            self.kills += 1

    def leave_files(self):
        queues = self.run_dir / "queues"
        for folder in (queues / "rollouts", queues / "evals", *queues.glob("batches/rank_*")):
            if folder.is_dir():
                foreign_files(folder, self.random)
                self.files += 5

    def look(self, seconds):
        from bench.common import resident_mb

        for pid, line in self.processes():
            for script, stage in STAGES.items():
                if f" {script} " in f"{line} " and "bash" not in line:
                    try:
                        self.memory.setdefault(stage, []).append([round(seconds), resident_mb(pid)])
                    except OSError:
                        continue

    def until_the_end_of(self, process, minutes):
        """Make trouble until the process has ended, or three times `minutes` are over."""
        start = time.monotonic()
        due = dict(kill=KILL_EVERY, files=0.0, look=0.0)
        while process.poll() is None:
            seconds = time.monotonic() - start
            if seconds > 180 * minutes:
                raise SystemExit(f"bench/hostile.py: the run has not ended in {seconds:.0f} s")
            began = (self.run_dir / "queues" / "version.json").exists()
            if began and seconds > due["kill"]:
                due["kill"] = seconds + KILL_EVERY
                self.kill_an_engine()
            if began and seconds > due["files"]:
                due["files"] = seconds + FILES_EVERY
                self.leave_files()
            if began and seconds > due["look"]:
                due["look"] = seconds + LOOK_EVERY
                self.look(seconds)
            time.sleep(0.2)
        return time.monotonic() - start


def growth(samples):
    """Memory at the end over memory at a third of the run, means of a sixth of it each."""
    megabytes = [mb for _, mb in samples]
    n = max(len(megabytes) // 6, 1)
    third = len(megabytes) // 3
    return (sum(megabytes[-n:]) / n) / (sum(megabytes[third : third + n]) / n)


def measure(real, minutes, steps, seed=0):
    """One run; returns what the table has."""
    from bench.common import WORK, flags
    from fake_engine import fake_vllm
    from test_run import balance, metrics
    from tools import base_model

    model = ROOT / "out" / "models" / f"toy-seed{seed}"
    base_model.make_model(["toy"], model, seed)
    tree = hostile_copy(WORK / ("hostile-real" if real else "hostile-fake"), model)
    knobs = dict(task="hostile", model=model, run="h", port=PORT, seed=seed, steps=steps)
    knobs |= dict(batch_size=BATCH, attempts=ATTEMPTS, max_lag=4, engines=2, reward_timeout=1)
    knobs |= dict(concurrency=64, eval_every=50, eval_problems=128, save_every=20)
    # a batch an eighth of the toy's: gentle steps, of groups that say something
    knobs |= dict(lr=3e-4, no_signal="drop")
    path = "" if real else str(fake_vllm(tree / "fake"))
    environment = os.environ | {"RUN_MARK": str(tree), "PIPELINE_PYTHON": sys.executable}
    environment |= {"PYTHONPATH": path} if path else {}
    environment |= {"GARBLE": "1"}
    log = tree / "terminal.txt"
    with open(log, "w") as f:
        process = subprocess.Popen(
            ["bash", "run.sh", "toy", *flags(knobs)], cwd=tree, stdout=f, stderr=f, env=environment
        )
    trouble = Trouble(tree / "out" / "h", tree, seed)
    try:
        seconds = trouble.until_the_end_of(process, minutes)
    finally:
        process.terminate()
    text = log.read_text()
    if process.returncode != 0:
        raise SystemExit(
            f"bench/hostile.py: exit code {process.returncode}, see {log}\n{text[-3000:]}"
        )
    run_dir = tree / "out" / "h"
    trained, dropped = balance(run_dir, BATCH, ATTEMPTS)
    lines, evaluations = metrics(run_dir)
    reasons = Counter()
    for line in lines:
        for reason, problems in line["drops"].items():
            reasons[reason] += sum(problems.values())
    last = re.findall(r"\[actor\] actor: done, .*", text)[-1]
    return dict(
        minutes=seconds / 60,
        exit_code=process.returncode,
        steps=len(lines),
        trained=trained.total(),
        dropped=dict(reasons),
        engines_killed=trouble.kills,
        foreign_files=trouble.files,
        actor=last,
        held_out=[evaluations[0]["eval"], evaluations[-1]["eval"]],
        mismatch=max(x["mismatch"] for x in lines if x["mismatch"] is not None),
        growth={stage: growth(samples) for stage, samples in trouble.memory.items()},
        memory=trouble.memory,
    )


def main():
    from bench.common import measured, parser, result_file, table

    p = parser(__doc__)
    p.add_argument("--minutes", type=float, default=20.0, help="about so long")
    p.add_argument("--real", action="store_true", help="two real vLLM engines")
    p.add_argument("--steps_per_minute", type=float, default=15.0)
    arguments = p.parse_args()
    minutes = 1.5 if arguments.quick else arguments.minutes
    steps = round(minutes * arguments.steps_per_minute)
    name = "real" if arguments.real else "fake"
    wanted = {name: dict(minutes=minutes, steps=steps)}

    def run(key, knobs):
        return measure(key == "real", **knobs)

    result = measured(result_file(arguments, "hostile"), wanted, run, reuse=False)[name]
    rows = [(k, v) for k, v in result.items() if k not in ("memory", "knobs", "machine")]
    table(["hostile run", name + " engine"], rows)


if __name__ == "__main__":
    main()
