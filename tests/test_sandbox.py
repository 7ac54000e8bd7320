"""Reward functions in worker processes: their values, failures, limits and ends.

The worker processes and kills are real. The task `odd` is made up for these tests.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from decimal import Decimal
from fractions import Fraction
from multiprocessing import forkserver

import numpy as np
import psutil
import pytest

import config as cfg
import tasks
from plumbing.sandbox import Sandbox, SandboxBroken, error_line, run

TASK = """
import os, time
def problems(split, seed=0):
    return [{"prompt": "a"}]
def reward(problem, completion, finished):
    if isinstance(completion, str) and completion == "bug":
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
    value = []
    for _ in range(100000):
        value = [value]
    return value
ACTS = dict(
    number=0.25,
    one=1,
    outcome="no_answer",
    word="perhaps",
    none=None,
    nan=float("nan"),
    large=1e39,
    text="x" * (20 << 20),
    loop=loop,
    deep=deep,
    nested=nested,
    object=object,
    function=lambda: nested,
    sleep=lambda: time.sleep(1000),
    memory=lambda: len(bytearray(10**11)),
    C=lambda: 3**10**9,
    exit=lambda: os._exit(3),
    killed=lambda: os.kill(os.getpid(), 9),
    output=lambda: print("much " * 10**6) or os.system("echo much >&2") or 1,
)
"""
RIGHT = dict(reward=1.0, success=True, outcome="correct")
# The package `tasks` of these tests is one with the repository's.
PACKAGE = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Make a task `odd`, which does what the completion says; yield the folder above `tasks`."""
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
    # The next test has other tasks, so it must start a server of workers of its own.
    forkserver._forkserver._stop()


async def score(sandbox, task, problem, completion, finished):
    """The verdict on an attempt of one turn."""
    reply = await sandbox.call(task, "reward", problem, completion, finished)
    return sandbox.verdict(task, reply, finished)


@pytest.fixture
def sandboxed(odd):
    """Return a function that runs a coroutine on a Sandbox with a time limit of 1 s."""
    forkserver._forkserver._stop()

    def run(work, **knobs):
        async def run_work():
            sandbox = Sandbox(cfg.Config(**dict(task="odd", reward_timeout=1.0) | knobs))
            await sandbox.start()
            try:
                return await work(sandbox)
            finally:
                sandbox.close()

        return asyncio.run(asyncio.wait_for(run_work(), 120))

    return run


def test_numbers_and_outcomes_become_rewards(sandboxed):
    async def work(s):
        attempts = (("number", True), ("one", False), ("outcome", True), ("outcome", False))
        return [await score(s, "odd", {}, *attempt) for attempt in attempts]

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
        verdicts = [await score(s, "odd", {}, "one", True) for _ in range(20)]
        assert (await slow)["outcome"] == "unparsable"
        verdicts += [await score(s, "odd", {}, "one", True) for _ in range(4)]
        assert verdicts == [RIGHT] * 24
        assert s.counts == {"verdicts": 25, "limit": 1}

    sandboxed(work)


@pytest.mark.parametrize("hostile", ["loop", "sleep", "C"])
def test_others_do_not_wait_for_a_hostile_answer(sandboxed, hostile):
    """The answer has more time than the test, and keeps its worker busy until that is ended."""

    async def work(s):
        slow = asyncio.create_task(score(s, "odd", {}, hostile, True))
        await asyncio.sleep(0)
        verdicts = [await score(s, "odd", {}, "one", True) for _ in range(20)]
        assert verdicts == [RIGHT] * 20 and not slow.done()
        slow.cancel()

    sandboxed(work, reward_timeout=1000.0)


def test_a_call_that_no_worker_takes_is_no_fault_of_the_model(sandboxed):
    """More answers that hang than the workers can end within stall_timeout"""

    async def work(s):
        call = lambda: s.call("odd", "reward", {}, "sleep", True)
        results = await asyncio.gather(*(call() for _ in range(300)), return_exceptions=True)
        failures = [result for result in results if isinstance(result, SandboxBroken)]
        assert "no worker was free for reward within --stall_timeout" in str(failures[0])
        others = [result for result in results if result not in failures]
        assert others == [{"limit": "reward took longer than --reward_timeout 1.0 s"}] * len(others)

    sandboxed(work, stall_timeout=3.0)


def test_a_pool_that_breaks_is_replaced_and_loses_no_call(sandboxed):
    """Pebble breaks a pool when a worker dies before it has reported which call it took."""

    async def work(s):
        broken = s.pool
        calls = [asyncio.create_task(score(s, "odd", {}, "one", True)) for _ in range(20)]
        await asyncio.sleep(0)
        broken._pool_manager.handle_broken_pool(BrokenProcessPool("All workers expired"))
        # The next call finds those that the pool had not passed on yet.
        assert await score(s, "odd", {}, "one", True) == RIGHT
        assert await asyncio.gather(*calls) == [RIGHT] * 20
        assert s.counts == {"verdicts": 21}
        # The broken pool's workers have ended.
        assert s.pool is not broken and not broken._pool_manager.worker_manager.workers

    sandboxed(work, reward_timeout=60.0)


@pytest.mark.parametrize(
    "failure,kind", [("bug", "error.*KeyError: 'absent'"), ("exit", "limit.*died")]
)
def test_a_task_that_fails_for_most_answers_ends_the_run_and_is_named(sandboxed, failure, kind):
    async def fail_always(s):
        for _ in range(100):
            await score(s, "odd", {}, failure, True)

    with pytest.raises(RuntimeError, match=f"tasks/odd.py: most rewards fail, now by .*{kind}"):
        sandboxed(fail_always)

    async def fail_sometimes(s):
        """One failure in three answers is counted, and does not end the run."""
        completions = (failure, "one", "one") * 20
        verdicts = [await score(s, "odd", {}, completion, True) for completion in completions]
        assert [v["success"] for v in verdicts] == [False, True, True] * 20
        assert s.counts == {"verdicts": 60, kind[:5]: 20}

    sandboxed(fail_sometimes)


NO_REWARDS = "nan word none large text nested object function".split()


@pytest.mark.parametrize("wrong", NO_REWARDS)
def test_value_that_is_no_reward_ends_the_run(sandboxed, wrong):
    with pytest.raises(RuntimeError, match="tasks/odd.py: reward returned") as e:
        sandboxed(lambda s: score(s, "odd", {}, wrong, True), reward_timeout=5.0)
    assert len(str(e.value)) < 600


NUMBERS = [
    *(0.25, 1, True, False, np.bool_(True), np.float32(0.25), np.float16(0.25), np.int64(-3)),
    *(np.array(0.25), np.array(7), np.array(True), Fraction(1, 4), Decimal("0.25")),
]


def test_a_reward_may_be_any_number(sandboxed):
    """The task `odd` returns a completion as it is, unless that is text."""

    async def work(s):
        verdicts = [await score(s, "odd", {}, value, True) for value in NUMBERS]
        verdicts.append(await score(s, "odd", {}, np.str_("correct"), True))
        return [verdict["reward"] for verdict in verdicts], s.counts

    rewards, counts = sandboxed(work, reward_timeout=20.0)
    assert rewards == [*map(float, NUMBERS), 1.0] and {type(x) for x in rewards} == {float}
    assert counts == {"verdicts": len(rewards)}


def test_a_reward_may_be_a_list_of_numbers(sandboxed):
    rows = [[1.0, 0.5], (0.25, True), np.array([0.5, -1.0]), [0.5], [np.float32(0.5), Fraction(1)]]

    async def work(s):
        return [await score(s, "odd", {}, value, True) for value in rows]

    verdicts = sandboxed(work, reward_timeout=20.0)
    expected = [[1.0, 0.5], [0.25, 1.0], [0.5, -1.0], [0.5], [0.5, 1.0]]
    assert [verdict["reward"] for verdict in verdicts] == expected
    # their sum decides
    assert [verdict["success"] for verdict in verdicts] == [True, True, False, False, True]


NO_NUMBERS = [
    (np.float32("nan"), "float nan"),
    (10**400, "int 1000.*OverflowError"),
    # Python prints no number of so many digits.
    (10**5000, "int .*cannot be printed.*OverflowError"),
    (Fraction(10**400, 3), "fractions.Fraction .*OverflowError"),
    (Decimal("1e400"), "decimal.Decimal .*1E[+]400.*OverflowError"),
    (Decimal("sNaN"), "decimal.Decimal .*sNaN"),
    (1j, "complex 1j"),
    (np.complex64(1), "numpy.complex64 .*1"),
    (np.array("1"), "numpy.ndarray array.'1'"),
    (np.array([[1, 2]]), "numpy.ndarray array.*1, 2"),
    ([1.0, None], "list .1.0, None."),
    ([[1.0]], "list ..1.0.."),
    ([1.0, float("inf")], "list .1.0, inf."),
    ([3e38, 3e38], "list .3e[+]38, 3e[+]38."),
    ([], "list .."),
    ({"reward": 1.0}, "dict {'reward': 1.0}"),
    (b"correct", "bytes b'correct'"),
    (bytearray(b"1"), "bytearray "),
    ("1.0", "str '1.0'"),
    ("", "str ''"),
]


def test_value_that_is_no_reward_is_named_with_its_type(sandboxed):
    async def work(s):
        for value, description in NO_NUMBERS:
            with pytest.raises(RuntimeError, match=f"odd.py: reward returned {description}") as e:
                await score(s, "odd", {}, value, True)
            assert len(str(e.value)) < 600 and "\n" not in str(e.value)

    sandboxed(work, reward_timeout=20.0)


FAILURES = """
import asyncio, json
def lookup(key):
    return {}[key]  # of lookup
def fails(kind):
    return globals()[kind]()  # of fails
def missing():
    return lookup("answer")
def asserted():
    assert 1 == 2  # of asserted
def library():
    json.loads("{")  # of library
def lines():
    raise ValueError("first\\n   second\\tthird\\n")  # of lines
def syntax():
    exec("1 +* 2\\n")  # of syntax
def noted():
    e = ValueError("mine")
    e.add_note("problem 7")
    raise e  # of noted
def caused():
    try:
        lookup("answer")
    except KeyError as e:
        raise RuntimeError("no answer") from e  # of caused
def handling():
    try:
        lookup("answer")
    except KeyError:
        1 / 0  # of handling
def hidden():
    try:
        lookup("answer")
    except KeyError:
        raise RuntimeError("no answer") from None  # of hidden
async def one(key):
    lookup(key)
async def several():
    async with asyncio.TaskGroup() as group:  # of several
        group.create_task(one("left"))
        group.create_task(one("right"))
def group():
    asyncio.run(several())
def circle():
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    raise a  # of circle
class Mute(Exception):
    def __str__(self):
        raise ValueError
def mute():
    raise Mute  # of mute
def long():
    raise ValueError("words " * 1000)  # of long
def leaves():
    raise SystemExit(3)  # of leaves
"""


@pytest.mark.parametrize(
    "kind,line",
    [
        ("missing", "KeyError: 'answer' at {lookup}"),
        ("asserted", "AssertionError at {asserted}"),
        # The line in the library says less than the line that called it.
        ("library", "json.decoder.JSONDecodeError: Expecting property name .* at {library}"),
        ("lines", "ValueError: first second third at {lines}"),
        ("syntax", "SyntaxError: invalid syntax .<string>, line 1. at {syntax}"),
        ("noted", "ValueError: mine problem 7 at {noted}"),
        ("caused", "RuntimeError: no answer at {caused}; caused by KeyError: 'answer' at {lookup}"),
        (
            "handling",
            "ZeroDivisionError: division by zero at {handling}; "
            "while handling KeyError: 'answer' at {lookup}",
        ),
        ("hidden", "RuntimeError: no answer at {hidden}"),
        (
            "group",
            "ExceptionGroup: unhandled errors in a TaskGroup .2 sub-exceptions. at {several} "
            r"\[KeyError: 'left' at {lookup}; KeyError: 'right' at {lookup}\]",
        ),
        ("circle", "ValueError: a at {circle}; caused by ValueError: b"),
        ("mute", "tasks.odd.Mute: .its message cannot be printed. at {mute}"),
        ("long", "ValueError: (words )+.* [.]{{3}} at {long}"),
        ("leaves", "SystemExit: 3 at {leaves}"),
    ],
)
def test_an_error_says_what_and_where_in_one_line(odd, kind, line):
    (odd / "tasks" / "odd.py").write_text(FAILURES)
    places = {}
    for number, text in enumerate(FAILURES.splitlines(), 1):
        _, marker, function = text.partition("  # of ")
        if marker:
            places[function] = f"tasks/odd.py:{number} in {function}"
    reply = run("odd", "fails", (kind,))
    assert re.fullmatch(line.format(**places), reply["error"]), reply["error"]
    assert len(reply["error"]) <= 400


def test_an_error_outside_of_the_task_says_its_last_line():
    try:
        json.loads("{")
    except ValueError as e:
        assert re.search(r" at json/decoder.py:\d+ in raw_decode$", error_line(e, "elsewhere.py"))
    assert error_line(KeyError("never raised")) == "KeyError: 'never raised'"


def test_output_of_a_reward_function_is_discarded(sandboxed, capfd):
    assert sandboxed(lambda s: score(s, "odd", {}, "output", True)) == RIGHT
    assert "much" not in "".join(capfd.readouterr())


def test_an_instant_task_needs_no_worker_and_is_checked_alike(odd, sandboxed):
    """The actor itself calls such a task."""
    with open(odd / "tasks" / "odd.py", "a") as file:
        file.write("INSTANT = True\n")

    async def work(s):
        completions = ["number", "one", "outcome", "bug", "deep", "memory"]
        verdicts = [await score(s, "odd", {}, completion, True) for completion in completions]
        assert [verdict["reward"] for verdict in verdicts] == [0.25, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert [v["outcome"] for v in verdicts[3:]] == ["unparsable"] * 3
        for wrong in NO_REWARDS:
            with pytest.raises(RuntimeError, match="tasks/odd.py: reward returned"):
                await score(s, "odd", {}, wrong, True)
        assert s.counts == dict(verdicts=6 + len(NO_REWARDS), error=1, limit=1 + 1)
        assert s.pool is None

    sandboxed(work)


def test_each_answer_gets_its_own_reward(sandboxed):
    """This also holds where a caller is gone before the answer comes."""

    async def work(s):
        for _ in range(6):
            gone = asyncio.create_task(score(s, "odd", {}, "one", True))
            await asyncio.sleep(0.0005)
            gone.cancel()
        calls = [score(s, "odd", {}, i / 100, True) for i in range(40)]
        return [verdict["reward"] for verdict in await asyncio.gather(*calls)]

    assert sandboxed(work) == [i / 100 for i in range(40)]


def test_hostile_maths_answers_are_scored_within_the_limit(sandboxed):
    async def work(s):
        texts = [f"\\boxed{{{a}}}" for a in ("(9999!)^{9999}", "9^{9^{9^9}}", "(" * 400, "7")]
        texts += [t + "\\boxed{7}" for t in ("x^{2}" * 2000000, "\\boxed{" * 1500000)]
        calls = (score(s, "maths", {"answer": "7"}, text, True) for text in texts)
        return [verdict["outcome"] for verdict in await asyncio.gather(*calls)], s.counts

    outcomes, counts = sandboxed(work, task="maths", reward_timeout=3.0)
    assert outcomes == ["unparsable"] * 3 + ["correct"] * 3
    # None of the answers reaches a limit.
    assert counts == {"verdicts": 6}


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


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_no_worker_outlives_its_sandbox(odd, ending):
    """This also holds where its program is killed while workers are busy, one of them in C."""
    (odd / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(odd / "program.py"), ending]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == f"{RIGHT}\n"
    family = psutil.Process(running.pid).children(recursive=True)
    workers = [p for p in family if p.ppid() != running.pid]
    assert len(workers) >= 2
    if ending == "close":
        assert running.stdout.readline() == "closed\n"
        # The server that forks the workers stays until the program ends.
        family = workers
    else:
        assert running.wait(30) == -9
    _, survivors = psutil.wait_procs(family, timeout=20)
    running.kill()
    running.communicate()
    assert not [p for p in survivors if p.status() != psutil.STATUS_ZOMBIE]
