"""Reward functions, in processes of their own with a limit on time and memory: one hostile answer delays nobody but itself.

A pebble.ProcessPool ends what takes too long and replaces workers that die. A task that says INSTANT = True, as no text
can keep its functions busy, is spared the way to a worker: it is called in the actor itself, without limits.
Deliberately absent: a defence against the task's own code, which is trusted; an end of programs that it starts.
"""

import asyncio
import importlib
import multiprocessing
import os
import resource
import signal
import traceback
from collections import Counter, deque

import psutil
from pebble import ProcessExpired, ProcessPool

import config as cfg

# bytes of memory a call may take; the largest reward, in float32
MEMORY, LARGEST = 4 << 30, 3.4e38


class Sandbox:
    """tasks: {name: module} of the run. counts: of verdicts, and of what went wrong with them."""

    def __init__(self, config):
        self.config = config
        names = cfg.task_weights(config.task)
        self.tasks = {name: importlib.import_module(f"tasks.{name}") for name in names}
        self.counts = Counter()
        self.last = deque(maxlen=1000)
        self.pool = None

    async def start(self):
        """Start the workers, if a task wants them; they come up with the first call."""
        if all(getattr(task, "INSTANT", False) for task in self.tasks.values()):
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *(f"tasks.{name}" for name in self.tasks)])
        workers = min(max(len(os.sched_getaffinity(0)), 2), 16)
        self.pool = ProcessPool(workers, 10000, initializer=prepare, context=context)
        await asyncio.to_thread(self.pool.schedule, os.getpid)

    async def call(self, task, function, *args) -> dict:
        """{"value": ...} as the function returned it; {"error": words} if it raised, {"limit": words} if it took too much."""
        if getattr(self.tasks[task], "INSTANT", False):
            return run(task, function, args)
        seconds = self.config.reward_timeout
        try:
            call = self.pool.schedule(run, (task, function, args, 2 * seconds), timeout=seconds)
            return await asyncio.wait_for(asyncio.wrap_future(call), self.config.stall_timeout)
        except TimeoutError:
            return {"limit": f"longer than {seconds} s"}
        except ProcessExpired as e:
            return {"limit": f"its worker died, exit code {e.exitcode}"}
        except RuntimeError as e:
            raise RuntimeError(f"actor: {function} of task {task}, reward workers: {e!r}") from e

    def verdict(self, task, reply, finished) -> dict:
        """Reward, success and outcome of an attempt from what `call` of its reward, or its episode, has given: a number
        or an outcome of the reward table.

        An answer that the function could not deal with is `unparsable`, and counted: as `limit` if it took too much
        time or memory or its worker died, as `error` if it raised. Raises RuntimeError if most answers fail alike.
        """
        self.counts["verdicts"] += 1
        self.last.extend(reply)
        for kind in reply.keys() - {"value"}:
            words = f"{kind}: {reply[kind]}"
            self.counts[kind] += 1
            if self.counts[kind] in (1, 10, 100, 1000, 10000):
                print(f"actor: tasks/{task}.py: {words} (unparsable, {self.counts[kind]} so far)")
            if self.last.count(kind) > max(20, len(self.last) / 2):
                raise RuntimeError(f"actor: tasks/{task}.py: most rewards fail, now by {words}")
        value = reply.get("value", "unparsable")
        if value in cfg.OUTCOMES:
            table = self.config.reward_finished if finished else self.config.reward_cut_off
            reward = table[cfg.OUTCOMES.index(value)]
            return dict(reward=reward, success=value == "correct", outcome=value)
        if not isinstance(value, float) or not abs(value) <= LARGEST:
            must = f"it must be a finite number or one of {', '.join(cfg.OUTCOMES)}"
            raise RuntimeError(f"actor: tasks/{task}.py: reward returned {value!r:.200}; {must}")
        success = value >= getattr(self.tasks[task], "SUCCESS", 1.0)
        return dict(reward=value, success=success, outcome="correct" if success else "wrong")

    def close(self):
        """End all workers."""
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()


def last_words():
    """The place and the words of the exception that is being handled, one line."""
    return " ".join(traceback.format_exc(limit=-1).split()[4:])[-400:]


def prepare():
    """Limits of a new worker; what it prints goes nowhere."""
    # pebble's handler would have to wait for Python's next step
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    memory = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)


def run(task, function, args, alarm=0.0):
    """One call, as Sandbox.call says. alarm: seconds until the process dies, if the actor that would end it is gone."""
    signal.setitimer(signal.ITIMER_REAL, alarm)
    try:
        value = getattr(importlib.import_module(f"tasks.{task}"), function)(*args)
        if isinstance(value, (int, float)):
            value = float(value)
        # anything else need not survive the way back
        return {"value": value if isinstance(value, str | float | None) else [type(value).__name__]}
    except (MemoryError, RecursionError) as e:
        return {"limit": type(e).__name__}
    except BaseException:
        return {"error": last_words()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
