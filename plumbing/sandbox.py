"""Reward functions, in processes of their own with a limit on time and memory: one hostile answer delays nobody but itself.

A pebble.ProcessPool replaces workers that die, by forks of a server that has the tasks loaded (plumbing/preload.py).
CPU time is limited by the kernel, which kills whatever a worker is doing; pebble's limit on wall-clock time ends those
that wait for something. What a reward function starts is of its worker's process group and ends with it. Answers and
rewards travel as JSON text. Deliberately absent: a defence against the task's own code, which is trusted. A task that
says INSTANT = True, as no text can keep its functions busy (an equality, a match of a plain pattern), is spared the
way to a worker, some 0.4 ms of CPU a call: it is called in the actor itself, without limits.

    python bench/rewards.py
"""

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

from pebble import ProcessExpired, ProcessPool
from pebble.pool import base_pool, process

import config as cfg

# pebble's deadlines are on the wall clock, which may be set at any time
for module in (base_pool, process):
    module.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)

MEMORY = 4 << 30  # bytes of address space a worker may use
LARGEST = 1 << 20  # characters of what a call may return, as JSON
TRIES = 5  # of a call, whoever breaks the pool meanwhile
CALLS = 10000  # a worker is replaced after so many
WALL = 30  # limit on the wall-clock time of a call, in units of config.reward_timeout
LONG = 0.1  # seconds in which a call of an INSTANT task must be over


class Sandbox:
    """Calls functions of the run's tasks in worker processes: `await start()`, `await score(...)`, `close()`.

    Attributes: tasks, {name: module}; counts, of verdicts and of what went wrong with them.
    """

    def __init__(self, config):
        self.config = config
        self.tasks = {
            name: importlib.import_module(f"tasks.{name}") for name in cfg.task_weights(config.task)
        }
        self.counts = Counter()
        self.workers = min(max(len(os.sched_getaffinity(0)), 2), 16)
        # Twice as many calls as workers, so that the next one is there when a worker ends one.
        self.slots = asyncio.Semaphore(2 * self.workers)
        self.pool = None

    async def start(self):
        """Start the workers, if a task wants them. Raises RuntimeError if they do not come up."""
        if all(map(is_instant, self.tasks.values())):
            return
        main = getattr(sys.modules["__main__"], "__file__", None) or ""
        seconds = int(self.config.start_timeout)
        wanted = {"main": os.path.abspath(main), "tasks": list(self.tasks), "seconds": seconds}
        os.environ["SANDBOX_PRELOAD"] = json.dumps(wanted)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where the server finds modules
        forkserver.set_forkserver_preload(["plumbing.preload"])
        self.pool = self._new_pool()
        try:
            first = await asyncio.to_thread(self.pool.schedule, os.getpid)
            await asyncio.wait_for(asyncio.wrap_future(first), seconds)
        except (BrokenProcessPool, ProcessExpired, TimeoutError) as e:
            why = f"{type(e).__name__} {e}"
            raise RuntimeError(f"actor: the reward workers do not start ({why}), see above") from e

    async def call(self, task, function, *args) -> dict:
        """{"value": ...} as the function returned it, {"error": words} if it raised, {"limit": words} if it took too much.

        A call whose worker died of something else than its limits is tried once more. Raises
        RuntimeError naming the task if what it returned cannot be taken.
        """
        if is_instant(self.tasks[task]):
            reply = self._at_once(task, function, args)
        else:
            reply = await self._try(task, function, args)
        if "refused" in reply:
            raise RuntimeError(f"actor: tasks/{task}.py: {function} returned {reply['refused']}")
        return reply

    def _at_once(self, task, function, args):
        """The same in this process; says so if it holds up the actor."""
        start = time.monotonic()
        # as JSON, too: the function gets its own copy, and what it returns is checked alike
        reply = json.loads(outcome(json.dumps([task, function, args])))
        seconds = time.monotonic() - start
        if seconds > LONG:
            self.counts["slow"] += 1
            if self.counts["slow"] in (1, 10, 100, 1000, 10000):
                print(
                    f"actor: {function} of task {task} took {seconds:.1f} s in which the actor stood still: "
                    f"take INSTANT out of tasks/{task}.py"
                )
        return reply

    async def _try(self, task, function, args):
        text = json.dumps([task, function, args])
        deaths = 0
        async with self.slots:
            for _ in range(TRIES):
                pool = self.pool
                try:
                    return json.loads(await self._reply(pool, text))
                except TimeoutError:
                    return {"limit": "wall-clock time"}
                except ProcessExpired as e:
                    kill_group(e.pid)
                    deaths += 1
                    if e.exitcode == -signal.SIGPROF:
                        return {"limit": "CPU time"}
                    if deaths == 2:
                        return {"limit": f"its worker died, also the second time: {e.exitcode}"}
                except BrokenProcessPool as e:
                    self._replace(pool, e)
        raise RuntimeError(f"actor: {function} of task {task}: the reward workers keep dying")

    async def score(self, task, problem, completion, finished) -> dict:
        """Reward, success and outcome of one attempt; a task returns a number or an outcome of the reward table.

        An answer that the function could not deal with is `unparsable`, and counted: as `limit` if it
        took too much time or memory, as `error` if the function raised.
        """
        reply = await self.call(task, "reward", problem, completion, finished)
        self.counts["verdicts"] += 1
        if "value" not in reply:
            self._count_failure(task, reply, completion)
        value = reply.get("value", "unparsable")
        if value in cfg.OUTCOMES:
            table = self.config.reward_finished if finished else self.config.reward_cut_off
            reward = table[cfg.OUTCOMES.index(value)]
            return dict(reward=reward, success=value == "correct", outcome=value)
        if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            allowed = f"a finite number or one of {', '.join(cfg.OUTCOMES)}"
            raise RuntimeError(
                f"actor: tasks/{task}.py: reward returned {repr(value)[:200]}; it must be {allowed}"
            )
        success = value >= getattr(self.tasks[task], "SUCCESS", 1.0)
        outcome = "correct" if success else "wrong"
        return dict(reward=float(value), success=success, outcome=outcome)

    async def respond(self, task, problem, turns):
        """The environment's answer to the model's turns; None: the episode is over, or it took too long.

        Raises RuntimeError if the function raised: an environment's error is the task's.
        """
        reply = await self.call(task, "respond", problem, turns)
        if "error" in reply:
            where = f"after {len(turns)} turns of problem {str(problem)[:200]}"
            raise RuntimeError(f"actor: tasks/{task}.py: respond {reply['error']} {where}")
        if "limit" in reply:
            self.counts["limit"] += 1
        text = reply.get("value")
        if text is not None and not isinstance(text, str):
            words = f"must return a text or None, not {repr(text)[:200]}"
            raise RuntimeError(f"actor: tasks/{task}.py: respond {words}")
        return text

    def close(self):
        """End all workers and the server they are forked from."""
        pool = self.pool
        self.pool = None
        if pool is not None:
            pool.stop()
            pool.join()
            forkserver._forkserver._stop()

    def _count_failure(self, task, reply, completion):
        self.counts["error" if "error" in reply else "limit"] += 1
        failures = self.counts["error"] + self.counts["limit"]
        if failures in (1, 10, 100, 1000, 10000):
            end = str(completion)[-200:]
            print(
                f"actor: reward of task {task} {reply}, counted as unparsable, {dict(self.counts)}; the answer ends in {end!r}"
            )
        if self.counts["error"] > max(20, self.counts["verdicts"] / 2):
            words = f"reward raises for most answers, the last time: {reply.get('error')}"
            raise RuntimeError(f"actor: tasks/{task}.py: {words}")

    def _new_pool(self):
        context = multiprocessing.get_context("forkserver")
        return ProcessPool(self.workers, CALLS, initializer=prepare, context=context)

    def _replace(self, pool, error):
        """pebble gives a pool up when an idle worker is killed: take another, unless somebody has."""
        if self.pool is None:
            raise RuntimeError("actor: a reward was asked for after the end") from error
        if self.pool is pool:
            print(f"actor: the reward workers are started again ({error})")
            self.pool = self._new_pool()
            pool.stop()
            pool.join()

    async def _reply(self, pool, text):
        """What `work` returns. Raises TimeoutError, ProcessExpired or BrokenProcessPool.

        Whoever is cancelled while waiting leaves the call to end by itself, and its reply to nobody.
        """
        timeout = WALL * self.config.reward_timeout
        longest = 2 * timeout + 60  # another call may be before it
        try:
            # pebble itself refuses a pool that has ended with a RuntimeError
            reply = asyncio.wrap_future(
                pool.schedule(work, [text, self.config.reward_timeout], timeout=timeout)
            )
        except RuntimeError as e:
            raise BrokenProcessPool(str(e)) from e
        deadline = time.monotonic() + longest
        while not reply.done():
            if not pool.active:
                raise BrokenProcessPool("the pool has ended")
            if time.monotonic() > deadline:
                raise BrokenProcessPool(f"no answer for {longest:.0f} s")
            await asyncio.wait([reply], timeout=1.0)
        return reply.result()


def is_instant(task):
    """May a task's functions (a module) run in the actor?"""
    return getattr(task, "INSTANT", False)


def kill_group(pid):
    """End what a worker has left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------ in a worker


def prepare():
    """Limits of a worker, and a process group that ends as a whole: by SIGTERM, or when the actor is gone."""
    os.setsid()
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=outlive_nobody, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def end(*_):
    os.killpg(0, signal.SIGKILL)


def outlive_nobody():
    multiprocessing.parent_process().join()
    end()


def as_json(value):
    """A reply with this value, or why it is none: what is large or no JSON does not leave the worker."""
    kind = type(value).__name__
    try:
        text = json.dumps({"value": value})
    except (TypeError, ValueError, RecursionError) as e:
        return json.dumps({"refused": f"{kind}, which is no JSON: {str(e)[:200]}"})
    if len(text) > LARGEST:
        return json.dumps({"refused": f"{kind} of {len(text)} characters, {LARGEST} may be"})
    return text


def outcome(text):
    """One call, JSON text to JSON text, as Sandbox.call says."""
    task, function, args = json.loads(text)
    module = importlib.import_module(f"tasks.{task}")
    try:
        return as_json(getattr(module, function)(*args))
    except (MemoryError, RecursionError) as e:
        return json.dumps({"limit": type(e).__name__})
    except BaseException as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        return json.dumps({"error": f"{type(e).__name__}: {str(e)[:300]} ({where})"})


def work(text, limit):
    """`outcome` in a worker; at the limit, CPU seconds, the kernel kills it: no handler could be relied on."""
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        return outcome(text)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
