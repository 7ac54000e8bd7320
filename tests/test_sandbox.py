"""Reward functions in worker processes: what they answer, what they survive, what they leave behind."""

import asyncio
import os
import subprocess
import sys
from multiprocessing import forkserver

import psutil
import pytest

import config as cfg
import tasks
from plumbing.sandbox import Sandbox

TASK = """
import os, time
def problems(split, seed=0):
    return [{"prompt": "a"}]
def reward(problem, completion, finished):
    if completion == "bug":
        return problem["absent"]
    act = ACTS.get(completion, completion) if isinstance(completion, str) else completion
    return act() if callable(act) else act
def loop():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
def deep():
    return deep()
def nested():
    found = []
    for _ in range(100000):
        found = [found]
    return found
ACTS = dict(number=0.25, one=1, outcome="no_answer", word="perhaps", none=None)
ACTS |= dict(nan=float("nan"), large=1e39, text="x" * (20 << 20))
ACTS |= dict(loop=loop, deep=deep, nested=nested, object=object, function=lambda: nested)
ACTS |= dict(
    sleep=lambda: time.sleep(1000),
    memory=lambda: len(bytearray(10**11)),
    C=lambda: 3**10**9,
    exit=lambda: os._exit(3),
    killed=lambda: os.kill(os.getpid(), 9),
    output=lambda: print("much " * 10**6) or os.system("echo much >&2") or 1,
)
"""
RIGHT = dict(reward=1.0, success=True, outcome="correct")
# its `tasks` is one package with ours
PACKAGE = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """A task of the name `odd`, which does what the completion says; returns where it is."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "odd.py").write_text(TASK)
    (folder / "__init__.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{cfg.ROOT}")
    monkeypatch.setattr(tasks, "__path__", [str(folder), *tasks.__path__])
    monkeypatch.delitem(sys.modules, "tasks.odd", raising=False)
    yield tmp_path
    sys.modules.pop("tasks.odd", None)
    # the next test's server of workers finds other tasks
    forkserver._forkserver._stop()


async def score(sandbox, task, problem, completion, finished):
    """The verdict on an attempt of one turn."""
    reply = await sandbox.call(task, "reward", problem, completion, finished)
    return sandbox.verdict(task, reply, finished)


@pytest.fixture
def sandboxed(odd):
    """Run a coroutine on a Sandbox; time limit 1 s."""
    forkserver._forkserver._stop()

    def run(work, **knobs):
        async def whole():
            sandbox = Sandbox(cfg.Config(**dict(task="odd", reward_timeout=1.0) | knobs))
            await sandbox.start()
            try:
                return await work(sandbox)
            finally:
                sandbox.close()

        return asyncio.run(asyncio.wait_for(whole(), 120))

    return run


def test_numbers_and_outcomes(sandboxed):
    async def work(s):
        asked = (("number", True), ("one", False), ("outcome", True), ("outcome", False))
        return [await score(s, "odd", {}, *x) for x in asked]

    table = dict(reward_finished=(1.0, 0.0, -0.5, 0.0), reward_cut_off=(1.0, 0.0, -1.0, 0.0))
    number, one, ended, cut = sandboxed(work, **table)
    assert number == dict(reward=0.25, success=False, outcome="wrong") and one == RIGHT
    assert ended == dict(reward=-0.5, success=False, outcome="no_answer")
    assert cut == dict(reward=-1.0, success=False, outcome="no_answer")


@pytest.mark.parametrize("hostile", ["loop", "sleep", "memory", "deep", "C", "exit", "killed"])
def test_a_hostile_answer_is_unparsable_and_costs_only_itself(sandboxed, hostile):
    async def work(s):
        slow = asyncio.create_task(score(s, "odd", {}, hostile, True))
        await asyncio.sleep(0)
        others = [await score(s, "odd", {}, "one", True) for _ in range(20)]
        # they did not wait for it
        assert not slow.done() or hostile in ("memory", "deep", "exit", "killed")
        assert (await slow)["outcome"] == "unparsable"
        others += [await score(s, "odd", {}, "one", True) for _ in range(4)]
        assert others == [RIGHT] * 24
        assert s.counts == {"verdicts": 25, "limit": 1}

    sandboxed(work)


@pytest.mark.parametrize(
    "way,kind", [("bug", "error.*KeyError: 'absent'"), ("exit", "limit.*died")]
)
def test_a_task_that_fails_for_most_answers_ends_the_run_and_is_named(sandboxed, way, kind):
    async def most(s):
        for _ in range(100):
            await score(s, "odd", {}, way, True)

    with pytest.raises(RuntimeError, match=f"tasks/odd.py: most rewards fail, now by .*{kind}"):
        sandboxed(most)

    async def few(s):
        """One answer in three: counted, and survived."""
        verdicts = [await score(s, "odd", {}, w, True) for w in (way, "one", "one") * 20]
        assert [v["success"] for v in verdicts] == [False, True, True] * 20
        assert s.counts == {"verdicts": 60, kind[:5]: 20}

    sandboxed(few)


NO_REWARDS = "nan word none large text nested object function".split()


@pytest.mark.parametrize("wrong", NO_REWARDS)
def test_what_is_no_reward_ends_the_run_and_is_named(sandboxed, wrong):
    with pytest.raises(RuntimeError, match="tasks/odd.py: reward returned") as e:
        sandboxed(lambda s: score(s, "odd", {}, wrong, True), reward_timeout=5.0)
    assert len(str(e.value)) < 600


def test_what_a_reward_prints_goes_nowhere(sandboxed, capfd):
    assert sandboxed(lambda s: score(s, "odd", {}, "output", True)) == RIGHT
    assert "much" not in "".join(capfd.readouterr())


def test_an_instant_task_needs_no_worker_and_is_checked_alike(odd, sandboxed):
    """It is called in the actor itself."""
    with open(odd / "tasks" / "odd.py", "a") as file:
        file.write("INSTANT = True\n")

    async def work(s):
        words = ["number", "one", "outcome", "bug", "deep", "memory"]
        found = [await score(s, "odd", {}, word, True) for word in words]
        assert [verdict["reward"] for verdict in found] == [0.25, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert [v["outcome"] for v in found[3:]] == ["unparsable"] * 3
        for wrong in NO_REWARDS:
            with pytest.raises(RuntimeError, match="tasks/odd.py: reward returned"):
                await score(s, "odd", {}, wrong, True)
        assert s.counts == dict(verdicts=6 + len(NO_REWARDS), error=1, limit=1 + 1)
        assert s.pool is None

    sandboxed(work)


def test_each_answer_gets_its_own_reward(sandboxed):
    """Also where somebody has asked and gone."""

    async def work(s):
        for _ in range(6):
            gone = asyncio.create_task(score(s, "odd", {}, "one", True))
            await asyncio.sleep(0.0005)
            gone.cancel()
        calls = [score(s, "odd", {}, i / 100, True) for i in range(40)]
        return [verdict["reward"] for verdict in await asyncio.gather(*calls)]

    assert sandboxed(work) == [i / 100 for i in range(40)]


def test_hostile_mathematics_and_ten_megabytes(sandboxed):
    async def work(s):
        texts = [f"\\boxed{{{a}}}" for a in ("(9999!)^{9999}", "9^{9^{9^9}}", "(" * 400, "7")]
        texts += [t + "\\boxed{7}" for t in ("x^{2}" * 2000000, "\\boxed{" * 1500000)]
        calls = (score(s, "maths", {"answer": "7"}, text, True) for text in texts)
        return [verdict["outcome"] for verdict in await asyncio.gather(*calls)], s.counts

    outcomes, counts = sandboxed(work, task="maths", reward_timeout=3.0)
    assert outcomes == ["unparsable"] * 3 + ["correct"] * 3
    assert counts == {"verdicts": 6, "limit": 1}


PROGRAM = """
import asyncio, os, sys
import config as cfg
from plumbing.sandbox import Sandbox

async def main():
    s = Sandbox(cfg.Config(task="odd", reward_timeout=3.0))
    await s.start()
    reply = await s.call("odd", "reward", {}, "one", True)
    print(s.verdict("odd", reply, True), flush=True)
    calls = [s.call("odd", "reward", {}, a, True) for a in ("loop", "C")]
    calls = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(1)
    if sys.argv[1] == "close":
        s.close()
        print("closed", flush=True)
        await asyncio.sleep(100)
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["close", "kill"])
def test_no_worker_outlives_it(odd, way):
    """Also where it is killed while workers are busy, one of them in C."""
    (odd / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(odd / "program.py"), way]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == f"{RIGHT}\n"
    family = psutil.Process(running.pid).children(recursive=True)
    workers = [p for p in family if p.ppid() != running.pid]
    assert len(workers) >= 2
    if way == "close":
        assert running.stdout.readline() == "closed\n"
        # the server that they are forked from stays until the program ends
        family = workers
    else:
        assert running.wait(30) == -9
    gone, left = psutil.wait_procs(family, timeout=20)
    running.kill()
    running.communicate()
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
