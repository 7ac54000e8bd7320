"""Reward functions in worker processes: what they answer, what they survive."""
import asyncio
import os
import signal
import subprocess

import pytest

import config as cfg
import rewards

TASK = '''
import os, subprocess, time
def problems(split, seed=0):
    return [{"prompt": "a"}]
def reward(problem, completion, finished):
    return {"number": 0.25, "one": 1, "outcome": "no_answer", "nan": float("nan"), "word": "perhaps", "none": None}.get(completion) if completion not in ("loop", "sleep", "memory", "deep", "bug", "C", "exit", "child") else {
        "loop": lambda: loop(), "sleep": lambda: time.sleep(1000), "memory": lambda: len(bytearray(10 ** 11)), "deep": lambda: deep(), "bug": lambda: problem["absent"], "C": lambda: 3 ** 10 ** 9, "exit": lambda: os._exit(3), "child": lambda: subprocess.run(["sleep", "987"])}[completion]()
def loop():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
def deep():
    return deep()
def respond(problem, turns):
    return None if len(turns) == 2 else f"turn {len(turns)}: {turns[-1]}"
'''


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Run a coroutine on Judges of a task of the name `odd`, which does what the completion says; time limit 0.3 s of CPU."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "odd.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))  # `tasks` has no __init__.py, so directories of that name are one package
    monkeypatch.setenv("PYTHONPATH", f"{cfg.ROOT}{os.pathsep}{tmp_path}")

    def run(work, **knobs):
        async def whole():
            judges = rewards.Judges(cfg.Config(**dict(task="odd", reward_timeout=0.3, reward_workers=2) | knobs))
            await judges.start()
            try:
                return await work(judges)
            finally:
                judges.close()
                await judges.process.wait()
        return asyncio.run(asyncio.wait_for(whole(), 120))
    return run


def test_numbers_and_outcomes(judged):
    async def work(j):
        return [await j.score("odd", {"prompt": "a"}, *x) for x in (("number", True), ("one", False), ("outcome", True), ("outcome", False))]
    number, one, ended, cut = judged(work, reward_no_answer=(-0.5, -1.0))
    assert number == dict(reward=0.25, success=False, outcome="wrong") and one == dict(reward=1.0, success=True, outcome="correct")
    assert ended == dict(reward=-0.5, success=False, outcome="no_answer") and cut["reward"] == -1.0


@pytest.mark.parametrize("hostile", ["loop", "sleep", "memory", "deep", "C", "exit", "child"])
def test_a_hostile_answer_is_unparsable_and_costs_only_itself(judged, hostile):
    async def work(j):
        slow = asyncio.create_task(j.score("odd", {}, hostile, True))
        await asyncio.sleep(0)
        others = [await j.score("odd", {}, "one", True) for _ in range(20)]
        first = slow.done()
        again = [await j.score("odd", {}, hostile, True) for _ in range(3)] if hostile not in ("sleep", "child") else []
        return others, first, await slow, again, [await j.score("odd", {}, "one", True) for _ in range(4)], j.counts
    others, first, slow, again, after, counts = judged(work, reward_timeout=0.3 if hostile not in ("sleep", "child") else 0.05)
    assert all(o["success"] for o in others + after)
    assert not subprocess.run(["pgrep", "-f", "^sleep 987"], capture_output=True, text=True).stdout  # what it started died with it
    assert not first or hostile in ("memory", "deep", "exit")  # the others did not wait for it
    assert {x["outcome"] for x in [slow] + again} == {"unparsable"} and counts["limit"] == 1 + len(again) and not counts["error"]


def test_ten_megabytes_pass(judged):
    async def work(j):
        return [await j.score("maths", {"answer": "7"}, text + "\\boxed{7}", True) for text in ("x^{2}" * 2000000, "\\boxed{" * 1500000)]
    assert [x["outcome"] for x in judged(work, task="maths")] == ["correct", "correct"]


def test_hostile_mathematics_is_unparsable_and_the_worker_lives_on(judged):
    async def work(j):
        answers = ["\\boxed{\\int_0^1 e^{x^{x^x}} dx}", "\\boxed{9^{9^{9^9}}}", "\\boxed{" + "(" * 400 + "}", "\\boxed{7}"]
        return await asyncio.gather(*(j.score("maths", {"answer": "7"}, a, True) for a in answers)), j.counts
    verdicts, counts = judged(work, task="maths", reward_timeout=1.0)
    assert [v["outcome"] for v in verdicts] == ["unparsable"] * 3 + ["correct"] and counts["limit"] == 1


def test_a_faulty_task_ends_the_run_and_is_named(judged):
    async def most(j):
        for _ in range(100):
            await j.score("odd", {}, "bug", True)
    with pytest.raises(RuntimeError, match=r"tasks/odd.py: reward raises for most answers, the last time: KeyError: 'absent'"):
        judged(most)

    async def few(j):  # one answer in three: counted, and survived
        return [await j.score("odd", {}, w, True) for w in ("bug", "one", "one") * 20], j.counts
    verdicts, counts = judged(few)
    assert counts["error"] == 20 and [v["success"] for v in verdicts] == [False, True, True] * 20
    for wrong, words in (("nan", "finite number"), ("word", "returned 'perhaps'"), ("none", "returned None")):
        with pytest.raises(RuntimeError, match=words):
            judged(lambda j: j.score("odd", {}, wrong, True))


def test_dead_workers_are_named(judged):
    async def work(j):
        os.kill(j.process.pid, signal.SIGTERM)  # the parent of all workers
        await j.process.wait()
        await j.score("odd", {}, "one", True)
    with pytest.raises(RuntimeError, match="reward of task odd: (the reward workers have died|its worker process gave no answer)"):
        judged(work)


def test_who_is_cancelled_leaves_no_reply_behind(judged):
    async def work(j):
        for _ in range(6):
            t = asyncio.create_task(j.score("odd", {}, "number", True))
            await asyncio.sleep(0.0005)
            t.cancel()
        return [await j.score("odd", {}, w, True) for w in ("one", "outcome") * 10], await j.respond("odd", {}, ["x"]), await j.respond("odd", {}, ["x", "y"])
    verdicts, answer, end = judged(work)
    assert [v["outcome"] for v in verdicts] == ["correct", "no_answer"] * 10 and (answer, end) == ("turn 1: x", None)
