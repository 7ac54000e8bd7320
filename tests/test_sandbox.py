"""Reward functions in worker processes: what they answer, what they survive, what they leave behind."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import config as cfg
from plumbing.sandbox import Sandbox

TASK = """
import os, subprocess, time
def problems(split, seed=0):
    return [{"prompt": "a"}]
def reward(problem, completion, finished):
    time.sleep(problem.get("seconds", 0))
    if isinstance(completion, str) and completion in ACTS:
        return ACTS[completion]()
    if completion == "bug":
        return problem["absent"]
    if not isinstance(completion, str):
        return completion
    return dict(number=0.25, one=1, outcome="no_answer", nan=float("nan"), word="perhaps", none=None).get(completion, completion)
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
ACTS = dict(
    loop=loop,
    sleep=lambda: time.sleep(1000),
    memory=lambda: len(bytearray(10**11)),
    deep=deep,
    C=lambda: 3**10**9,
    exit=lambda: os._exit(3),
    killed=lambda: os.kill(os.getpid(), 9),
    child=lambda: subprocess.run(["sleep", "987"]),
    orphan=lambda: [subprocess.Popen(["sleep", "987"]), loop()],
    deep_list=nested,
    digits=lambda: 10**1000000,
    many=lambda: 10**4000,
    bytes=lambda: b"x" * 20000000,
    object=object,
    infinite=lambda: float("-inf"),
    main=lambda: float(len(__import__("sys").modules["__main__"].__dict__.get("MARK", ""))),
)
def respond(problem, turns):
    if "turn" in problem:
        turn = problem["turn"]
        return ACTS[turn]() if isinstance(turn, str) and turn in ACTS else turn
    return None if len(turns) == 2 else f"turn {len(turns)}: {turns[-1]}"
"""
RIGHT = dict(reward=1.0, success=True, outcome="correct")


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """A task of the name `odd`, which does what the completion says; returns where it is."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "odd.py").write_text(TASK)
    # `tasks` has no __init__.py, so directories of that name are one package
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
    return tmp_path


@pytest.fixture
def sandboxed(odd):
    """Run a coroutine on a Sandbox; time limit 0.3 s of CPU."""

    def run(work, **knobs):
        async def whole():
            sandbox = Sandbox(cfg.Config(**dict(task="odd", reward_timeout=0.3) | knobs))
            await sandbox.start()
            try:
                return await work(sandbox)
            finally:
                sandbox.close()

        return asyncio.run(asyncio.wait_for(whole(), 120))

    return run


def sleepers():
    return subprocess.run(["pgrep", "-f", "^sleep 987"], capture_output=True, text=True).stdout


def workers():
    """Process ids of the workers."""
    return [p.pid for p in multiprocessing.active_children()]


def test_numbers_and_outcomes(sandboxed):
    async def work(s):
        asked = (("number", True), ("one", False), ("outcome", True), ("outcome", False))
        return [await s.score("odd", {"prompt": "a"}, *x) for x in asked]

    table = dict(reward_finished=(1.0, 0.0, -0.5, 0.0), reward_cut_off=(1.0, 0.0, -1.0, 0.0))
    number, one, ended, cut = sandboxed(work, **table)
    assert number == dict(reward=0.25, success=False, outcome="wrong") and one == RIGHT
    assert ended == dict(reward=-0.5, success=False, outcome="no_answer")
    assert cut == dict(reward=-1.0, success=False, outcome="no_answer")


HOSTILE = ["loop", "sleep", "memory", "deep", "C", "exit", "killed", "child", "orphan"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_answer_is_unparsable_and_costs_only_itself(sandboxed, hostile):
    waits = hostile in ("sleep", "child")

    async def work(s):
        slow = asyncio.create_task(s.score("odd", {}, hostile, True))
        await asyncio.sleep(0)
        others = [await s.score("odd", {}, "one", True) for _ in range(20)]
        first = slow.done()
        verdicts = [await slow]
        for _ in range(0 if waits else 3):
            verdicts.append(await s.score("odd", {}, hostile, True))
        after = [await s.score("odd", {}, "one", True) for _ in range(4)]
        return others + after, first, verdicts, s.counts

    others, first, verdicts, counts = sandboxed(work, reward_timeout=0.05 if waits else 0.3)
    assert others == [RIGHT] * 24
    assert not sleepers()  # what it started died with it
    # the others did not wait for it
    assert not first or hostile in ("memory", "deep", "exit", "killed")
    assert {v["outcome"] for v in verdicts} == {"unparsable"}
    assert counts["limit"] == len(verdicts) and not counts["error"]


def test_ten_megabytes_pass(sandboxed):
    async def work(s):
        texts = ("x^{2}" * 2000000, "\\boxed{" * 1500000)
        return [await s.score("maths", {"answer": "7"}, t + "\\boxed{7}", True) for t in texts]

    assert sandboxed(work, task="maths") == [RIGHT] * 2


def test_hostile_mathematics_is_unparsable_and_the_worker_lives_on(sandboxed):
    async def work(s):
        answers = ["(9999!)^{9999}", "9^{9^{9^9}}", "(" * 400, "7"]
        calls = (s.score("maths", {"answer": "7"}, f"\\boxed{{{a}}}", True) for a in answers)
        return await asyncio.gather(*calls), s.counts

    verdicts, counts = sandboxed(work, task="maths", reward_timeout=1.0)
    assert [v["outcome"] for v in verdicts] == ["unparsable"] * 3 + ["correct"]
    assert counts["limit"] == 1


def test_a_faulty_task_ends_the_run_and_is_named(sandboxed):
    async def most(s):
        for _ in range(100):
            await s.score("odd", {}, "bug", True)

    message = r"tasks/odd.py: reward raises for most answers, the last time: KeyError: 'absent'"
    with pytest.raises(RuntimeError, match=message):
        sandboxed(most)

    async def few(s):
        """One answer in three: counted, and survived."""
        words = ("bug", "one", "one") * 20
        return [await s.score("odd", {}, w, True) for w in words], s.counts

    verdicts, counts = sandboxed(few)
    assert counts["error"] == 20
    assert [v["success"] for v in verdicts] == [False, True, True] * 20


@pytest.mark.parametrize(
    "wrong, words",
    [("nan", "finite number"), ("word", "returned 'perhaps'"), ("none", "returned None")],
)
def test_what_is_no_reward_is_refused(sandboxed, wrong, words):
    with pytest.raises(RuntimeError, match=f"tasks/odd.py.*{words}"):
        sandboxed(lambda s: s.score("odd", {}, wrong, True))


LARGE = dict(
    text="x" * (20 << 20),
    lists=[[0] * 1000] * 7000,
    deep_list="deep_list",
    digits="digits",
    many="many",
    bytes="bytes",
    object="object",
    infinite="infinite",
    dictionary={str(k): k for k in range(200000)},
)


@pytest.mark.parametrize(
    "function,what",
    [*(("reward", what) for what in LARGE), *(("respond", what) for what in ("text", "digits"))],
)
def test_what_is_large_or_no_json_stays_in_the_worker_and_names_the_task(
    sandboxed, capfd, function, what
):
    async def work(s):
        if function == "reward":
            await s.score("odd", {}, LARGE[what], True)
        else:
            await s.respond("odd", {"turn": LARGE[what]}, ["x"])

    with pytest.raises(RuntimeError, match=f"tasks/odd.py.*{function}") as e:
        sandboxed(work, reward_timeout=5.0)
    assert len(str(e.value)) < 600
    said = capfd.readouterr()
    assert len(said.out + said.err) < 5000


@pytest.fixture
def instant(odd, monkeypatch):
    """The task `odd`, as one that is called in the actor itself."""
    with open(odd / "tasks" / "odd.py", "a") as file:
        file.write("INSTANT = True\n")
    monkeypatch.delitem(sys.modules, "tasks.odd", raising=False)
    yield
    # the next test's is another one
    del sys.modules["tasks.odd"]


def test_an_instant_task_needs_no_worker_and_is_checked_alike(instant, sandboxed):
    async def work(s):
        words = ["number", "one", "outcome", "bug", "deep", "memory"]
        found = [await s.score("odd", {"prompt": "a"}, word, True) for word in words]
        turns = [await s.respond("odd", {}, ["x"] * n) for n in (1, 2)]
        return found, turns, dict(s.counts), workers(), s.pool

    before = workers()
    found, turns, counts, after, pool = sandboxed(work)
    assert [verdict["reward"] for verdict in found] == [0.25, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [v["outcome"] for v in found[3:]] == ["unparsable"] * 3
    assert turns == ["turn 1: x", None]
    assert counts == dict(verdicts=6, error=1, limit=2)
    assert pool is None and after == before


@pytest.mark.parametrize("wrong", ["nan", "none", "object", "deep_list", "infinite"])
def test_what_is_no_reward_is_refused_of_an_instant_task_too(instant, sandboxed, wrong):
    with pytest.raises(RuntimeError, match="tasks/odd.py"):
        sandboxed(lambda s: s.score("odd", {}, wrong, True))


def test_an_instant_task_that_is_not_is_named(instant, sandboxed, capfd):
    async def work(s):
        return [await s.score("odd", {"seconds": 0.11}, "one", True) for _ in range(2)], s.counts

    verdicts, counts = sandboxed(work)
    assert verdicts == [RIGHT] * 2 and counts["slow"] == 2
    assert capfd.readouterr().out.count("take INSTANT out of tasks/odd.py") == 1


def test_deadlines_of_rewards_do_not_mind_the_wall_clock(sandboxed, monkeypatch):
    """Somebody sets it a day ahead, then two days back, while rewards are computed."""
    days = itertools.cycle([20000, 20001, 19999])
    monkeypatch.setattr(time, "time", lambda: 86400.0 * next(days))

    async def work(s):
        return rewards(await forty(s, 0.1)), s.counts

    found, counts = sandboxed(work, reward_timeout=1.0)
    assert found == [i / 100 for i in range(40)] and counts == {"verdicts": 40}


async def forty(s, seconds=0):
    """Each answer has its own reward, so that one that is given to another is noticed."""
    return await asyncio.gather(
        *(s.score("odd", {"seconds": seconds}, i / 100, True) for i in range(40))
    )


def rewards(verdicts):
    return [v["reward"] for v in verdicts]


@pytest.mark.parametrize("wait", [0, 0.5])
@pytest.mark.parametrize("number", [1, 16])
def test_idle_workers_may_be_killed(sandboxed, number, wait):
    """wait: before or after it is noticed."""

    async def work(s):
        await forty(s)
        for pid in workers()[:number]:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(wait)
        first = rewards(await forty(s))
        await asyncio.sleep(0.5)
        return first, rewards(await forty(s)), s.counts, len(workers()), s.workers

    first, second, counts, alive, asked = sandboxed(work)
    assert first == second == [i / 100 for i in range(40)]
    assert counts == {"verdicts": 120} and alive == asked


def test_workers_may_be_killed_while_they_work(sandboxed):
    async def work(s):
        calls = asyncio.create_task(forty(s, 0.02))
        for _ in range(4):
            await asyncio.sleep(0.21)
            os.kill(workers()[0], signal.SIGKILL)
        return rewards(await calls), rewards(await forty(s))

    assert sandboxed(work) == ([i / 100 for i in range(40)],) * 2


def test_the_server_that_workers_are_forked_from_may_be_killed(sandboxed):
    async def work(s):
        server = psutil.Process(psutil.Process(workers()[0]).ppid())
        server.kill()
        await asyncio.sleep(0.5)
        return rewards(await forty(s)), rewards(await forty(s))

    assert sandboxed(work) == ([i / 100 for i in range(40)],) * 2


def test_workers_that_do_not_come_up_are_named(sandboxed, odd):
    odd.joinpath("tasks", "odd.py").write_text(TASK + "\ndef warm_up():\n    raise ValueError(1)")
    with pytest.raises(RuntimeError, match="the reward workers do not start"):
        sandboxed(forty)


def test_who_is_cancelled_leaves_no_reply_behind(sandboxed):
    async def work(s):
        for _ in range(6):
            t = asyncio.create_task(s.score("odd", {}, "number", True))
            await asyncio.sleep(0.0005)
            t.cancel()
        verdicts = [await s.score("odd", {}, w, True) for w in ("one", "outcome") * 10]
        turns = [await s.respond("odd", {}, t) for t in (["x"], ["x", "y"])]
        return verdicts, turns

    verdicts, turns = sandboxed(work)
    assert [v["outcome"] for v in verdicts] == ["correct", "no_answer"] * 10
    assert turns == ["turn 1: x", None]


PROGRAM = """
import asyncio, os, sys, time
import config as cfg
from plumbing.sandbox import Sandbox

MARK = "this program"

async def main():
    s = Sandbox(cfg.Config(task="odd", reward_timeout=100.0))
    await s.start()
    print((await s.score("odd", {}, "main", True))["reward"], flush=True)
    calls = [asyncio.create_task(s.score("odd", {}, a, True)) for a in ("loop", "child")]
    await asyncio.sleep(1)
    if sys.argv[1] == "close":
        start = time.monotonic()
        s.close()
        print(time.monotonic() - start, flush=True)
        await asyncio.sleep(100)
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["close", "kill"])
def test_nothing_is_left_of_it(odd, way):
    """Also of one that is killed while a worker is busy and another waits for a program it started."""
    program = odd / "program.py"
    program.write_text(PROGRAM)
    environment = dict(os.environ, PYTHONPATH=f"{cfg.ROOT}{os.pathsep}{odd}")
    command = [sys.executable, str(program), way]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=odd)
    assert running.stdout.readline() == "0.0\n"  # no worker has run the program again
    family = psutil.Process(running.pid).children(recursive=True)
    if way == "close":
        assert float(running.stdout.readline()) < 3
    else:
        assert running.wait(30) == -9
    deadline = time.monotonic() + 5
    # Python's own resource tracker stays until the process ends
    while [
        p for p in left(family) if way == "kill" or "resource_tracker" not in " ".join(p.cmdline())
    ]:
        assert time.monotonic() < deadline, left(family)
        time.sleep(0.1)
    running.kill()
    running.communicate()
    assert not sleepers() and len(family) >= 4


def left(family):
    return [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
