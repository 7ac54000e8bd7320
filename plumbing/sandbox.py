"""Reward functions, in processes of their own with a limit on time and memory: one hostile answer delays nobody but itself.

A pebble.ProcessPool ends what takes too long and replaces workers that die. A task that says INSTANT = True, as no text
can keep its functions busy, is spared the way to a worker: it is called in the actor itself, without limits.
Deliberately absent: a defence against the task's own code, which is trusted; an end of programs that it starts.
"""

import asyncio
import importlib
import math
import multiprocessing
import numbers
import os
import reprlib
import resource
import signal
import sys
import traceback
from collections import Counter, deque
from pathlib import Path

import psutil
from pebble import ProcessExpired, ProcessPool

import config as cfg

# bytes of memory a call may take; the largest reward, in float32
MEMORY, LARGEST = 4 << 30, 3.4e38
# how many pools of workers a call may break, or see broken
POOLS = 3
# longest message of an exception, and longest line made of an exception, characters
MESSAGE_LENGTH, LINE_LENGTH = 240, 400
# how values that are refused are shown
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 100


class Sandbox:
    """tasks: {name: module} of the run. counts: of verdicts, and of what went wrong with them."""

    def __init__(self, config):
        self.config = config
        names = cfg.task_weights(config.task)
        self.tasks = {name: importlib.import_module(f"tasks.{name}") for name in names}
        self.counts = Counter()
        self.last = deque(maxlen=1000)
        self.pool = None
        # futures of what its workers have not answered
        self.calls = set()

    async def start(self):
        """Start the workers, if a task wants them; they come up with the first call."""
        if all(getattr(task, "INSTANT", False) for task in self.tasks.values()):
            return
        self.make_pool()
        await asyncio.to_thread(self.pool.schedule, os.getpid)

    def make_pool(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *(f"tasks.{name}" for name in self.tasks)])
        workers = min(max(len(os.sched_getaffinity(0)), 2), 16)
        self.pool = ProcessPool(workers, 10000, initializer=prepare, context=context)
        self.calls = set()

    async def call(self, task, function, *args) -> dict:
        """What the function returned, see `returned`; {"error": words} if it raised, {"limit": words} if it took too much."""
        if getattr(self.tasks[task], "INSTANT", False):
            return run(task, function, args)
        seconds = self.config.reward_timeout
        for _ in range(POOLS):
            pool, calls = self.pool, self.calls
            try:
                call = pool.schedule(run, (task, function, args, 2 * seconds), timeout=seconds)
                calls.add(call)
                call.add_done_callback(calls.discard)
                return await asyncio.wait_for(asyncio.wrap_future(call), self.config.stall_timeout)
            except TimeoutError:
                return {"limit": f"longer than {seconds} s"}
            except ProcessExpired as e:
                return {"limit": f"its worker died, exit code {e.exitcode}"}
            except RuntimeError as e:
                # pebble gives a pool up when a worker dies before it is known which call it has
                reason = e
                if pool is self.pool:
                    self.make_pool()
                    await asyncio.to_thread(pool.join)
                    # it has told those calls alone that it had passed on to workers
                    for unanswered in [x for x in calls if not x.done()]:
                        unanswered.set_exception(e)
        raise RuntimeError(
            f"actor: tasks/{task}.py: {function} was not called, as {POOLS} pools of workers broke, now by {reason!r}"
        )

    def verdict(self, task, reply, finished) -> dict:
        """Reward, success and outcome of an attempt from what `call` of its reward, or its episode, has given: a number
        or an outcome of the reward table.

        An answer that the function could not deal with is `unparsable`, and counted: as `limit` if it took too much
        time or memory or its worker died, as `error` if it raised. Raises RuntimeError if most answers fail alike, and
        if what was returned is no reward.
        """
        [(kind, value)] = reply.items()
        self.counts["verdicts"] += 1
        self.last.append(kind)
        if kind in ("error", "limit"):
            self.counts[kind] += 1
            failure = f"{kind}: {value}"
            if self.counts[kind] in (1, 10, 100, 1000, 10000):
                print(f"actor: tasks/{task}.py: {failure} (unparsable, {self.counts[kind]} so far)")
            if self.last.count(kind) > max(20, len(self.last) / 2):
                raise RuntimeError(f"actor: tasks/{task}.py: most rewards fail, now by {failure}")
            value = "unparsable"
        if kind != "refused" and value in cfg.OUTCOMES:
            table = self.config.reward_finished if finished else self.config.reward_cut_off
            reward = table[cfg.OUTCOMES.index(value)]
            return dict(reward=reward, success=value == "correct", outcome=value)
        if not isinstance(value, float) or not abs(value) <= LARGEST:
            function = "episode" if hasattr(self.tasks[task], "episode") else "reward"
            refused = value if kind == "refused" else shown(value)
            raise RuntimeError(
                f"actor: tasks/{task}.py: {function} returned {refused}; it must return a finite number "
                f"of at most {LARGEST}, or one of {', '.join(cfg.OUTCOMES)}"
            )
        success = value >= getattr(self.tasks[task], "SUCCESS", 1.0)
        return dict(reward=value, success=success, outcome="correct" if success else "wrong")

    def close(self):
        """End all workers."""
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()


# ---- what a function returned


def number(value) -> float:
    """The float of a number of any library: of whatever float() takes, but texts, bytes and complex numbers.

    Arrays and tensors of one element are numbers, True is 1. Raises TypeError or ValueError if the value is no
    number, such as a container, and OverflowError if it is beyond all floats.
    """
    element = value.item() if hasattr(value, "item") else value
    is_complex = isinstance(element, numbers.Complex) and not isinstance(element, numbers.Real)
    # float() takes texts and bytes, too, without these methods
    converts = hasattr(type(element), "__float__") or hasattr(type(element), "__index__")
    if is_complex or not converts:
        raise TypeError("no number")
    # not of the element: a masked one is not a number, and hides its value
    result = float(value)
    if math.isinf(result) and element != result:
        raise OverflowError("beyond all floats")
    return result


def returned(value) -> dict:
    """What a function or an episode of a task returned: {"value": a float, a text or None}.

    {"refused": words} if it is something else: its type, the value, and why it is none of them.
    """
    if value is None:
        return {"value": None}
    if isinstance(value, str):
        # numpy's texts and enumerations, as they are
        return {"value": str.__str__(value)}
    try:
        return {"value": number(value)}
    except Exception as e:
        return {"refused": f"{shown(value)} ({message_of(e)})"}


def shown(value):
    """A value for a message, on one line of at most 200 characters: its type, and what it looks like."""
    try:
        text = SHORT_REPR.repr(value)
    except Exception:
        # Python prints no whole number of more than some thousand digits
        text = "(its value cannot be printed)"
    return shortened(f"{type_name(type(value))} {text}", 200)


# ---- exceptions in one line


def error_line(error, file=None):
    """An exception in one line of at most LINE_LENGTH characters, with what it was caused by.

    `KeyError: 'answer' at tasks/mine.py:12 in reward`: type and message, then the last frame in `file`, the task's, or
    the very last one if none is there. The exceptions of a group follow its own message, in brackets.
    """
    parts = []
    seen = set()
    link = ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        parts.append(link + message_of(error) + place_of(error, file))
        if isinstance(error, BaseExceptionGroup):
            parts.append(f" [{'; '.join(error_line(e, file) for e in error.exceptions)}]")
        link = "; caused by " if error.__cause__ is not None else "; while handling "
        hidden = error.__cause__ is not None or error.__suppress_context__
        error = error.__cause__ if hidden else error.__context__
    return shortened("".join(parts), LINE_LENGTH)


def message_of(error):
    """`Type: message, its notes` of an exception, one line of at most MESSAGE_LENGTH characters."""
    try:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
    except Exception:
        text = "(its message cannot be printed)"
    return shortened(f"{type_name(type(error))}: {text}", MESSAGE_LENGTH).removesuffix(":")


def place_of(error, file):
    """` at folder/file.py:line in function`: the last frame of an exception in this file, or its last one; or nothing."""
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = [frame for frame in frames if frame[0].f_code.co_filename == file]
    if not frames:
        return ""
    frame, line = (inside or frames)[-1]
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f" at {path}:{line} in {frame.f_code.co_name}"


def type_name(kind):
    """The name of a type; of those that are not Python's own with its module."""
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def shortened(text, length):
    """A text on one line, of at most this many characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 4]} ..."


# ---- in the workers


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
    name = f"tasks.{task}"
    try:
        # anything else than a number or a text need not survive the way back
        return returned(getattr(importlib.import_module(name), function)(*args))
    except (MemoryError, RecursionError) as e:
        return {"limit": type(e).__name__}
    except BaseException as e:
        return {"error": error_line(e, getattr(sys.modules.get(name), "__file__", None))}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
