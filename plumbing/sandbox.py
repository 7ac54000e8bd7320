"""Reward functions run in processes of their own, with limits on time and memory.

So a hostile answer delays only its own attempt. A pebble.ProcessPool ends a call that takes too
long, and replaces workers that die. A task with INSTANT = True promises that no text can keep its
functions busy: they are called in the actor itself, without limits, which is faster.

The reply to a call is a dict with a single key:

    {"value": ...}      the number, list of numbers, text or None that the function returned
    {"refused": text}   it returned something else; the text says what, and why it is refused
    {"error": text}     it raised an exception; the text is the exception in one line
    {"limit": text}     it took too much time or memory, or its process died

Deliberately absent: a defence against the task's own code, which is trusted; an end of the programs
that a task's code starts.
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

# bytes of memory that a call may take
MEMORY = 4 << 30
# the largest reward, as float32 holds it
LARGEST = 3.4e38
# A call is given up after so many pools of workers broke while it waited for its answer.
POOLS = 3
# The run ends if more than this number of the newest verdicts failed alike, and more than half.
FEW_FAILURES = 20
# most characters of an exception's message, and of the line made of an exception and its causes
MESSAGE_LENGTH = 240
LINE_LENGTH = 400
# shows a refused value in a message
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 100


class SandboxBroken(RuntimeError):
    """A function of a task was not called, and the model is not to blame."""


class Sandbox:
    """Calls the functions of the run's tasks, and makes verdicts of what they return.

    tasks: {name: module}. counts: the number of verdicts, and of those that were an error or over
    a limit.
    """

    def __init__(self, config):
        self.config = config
        names = cfg.task_weights(config.task)
        self.tasks = {name: importlib.import_module(f"tasks.{name}") for name in names}
        self.counts = Counter()
        # the key of the reply ("value", "error", ...) of the newest verdicts
        self.newest = deque(maxlen=1000)
        self.pool = None
        # futures of the calls that the pool has not answered yet
        self.calls = set()

    async def start(self):
        """Start the workers, unless all tasks are INSTANT."""
        if all(getattr(task, "INSTANT", False) for task in self.tasks.values()):
            return
        self.make_pool()
        # pebble starts its workers at the first call: this one does nothing
        await asyncio.to_thread(self.pool.schedule, os.getpid)

    def make_pool(self):
        """Make a new pool of workers, in processes that have imported the tasks already."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *(f"tasks.{name}" for name in self.tasks)])
        workers = min(max(len(os.sched_getaffinity(0)), 2), 16)
        # a worker is replaced after this number of calls, in case the functions leak memory
        max_tasks = 10000
        self.pool = ProcessPool(workers, max_tasks, initializer=prepare, context=context)
        self.calls = set()

    async def call(self, task, function, *args) -> dict:
        """Call a function of a task; returns its reply (see above). Raises SandboxBroken."""
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
                # A call that a worker has taken ends after reward_timeout by itself.
                if call.cancelled() and self.config.stall_timeout > seconds:
                    raise SandboxBroken(
                        f"no worker was free for {function} within --stall_timeout "
                        f"{self.config.stall_timeout:.0f} s"
                    ) from None
                return {"limit": f"{function} took longer than --reward_timeout {seconds} s"}
            except ProcessExpired as e:
                return {"limit": f"its worker died, exit code {e.exitcode}"}
            except RuntimeError as e:
                # pebble breaks a pool if a worker dies before it is known which call it has
                reason = e
                if pool is self.pool:
                    self.make_pool()
                    await asyncio.to_thread(pool.join)
                    # pebble has failed only the calls that had reached a worker; fail the others
                    for unanswered in [call for call in calls if not call.done()]:
                        unanswered.set_exception(e)
        raise SandboxBroken(
            f"actor: tasks/{task}.py: {function} was not called: {POOLS} pools of workers broke, "
            f"the last one by {reason!r}"
        )

    def verdict(self, task, reply, finished) -> dict:
        """{reward, success, outcome} of an attempt, from the reply of its reward or its episode.

        reward: a number, or a list of numbers, whose sum decides about the success. The value of
        the reply must be one of these, or an outcome, of which the knobs reward_finished and
        reward_cut_off make a number. If the reply is an error or a limit instead, the outcome is
        "unparsable", and this is counted. Raises RuntimeError if most attempts fail alike, or if
        the value is no reward.
        """
        [(kind, value)] = reply.items()
        self.counts["verdicts"] += 1
        self.newest.append(kind)
        if kind in ("error", "limit"):
            self.counts[kind] += 1
            failure = f"{kind}: {value}"
            if self.counts[kind] in (1, 10, 100, 1000, 10000):
                print(f"actor: tasks/{task}.py: {failure} (unparsable, {self.counts[kind]} so far)")
            if self.newest.count(kind) > max(FEW_FAILURES, len(self.newest) / 2):
                raise RuntimeError(f"actor: tasks/{task}.py: most rewards fail, now by {failure}")
            value = "unparsable"
        if kind != "refused" and value in cfg.OUTCOMES:
            table = self.config.reward_finished if finished else self.config.reward_cut_off
            reward = table[cfg.OUTCOMES.index(value)]
            return dict(reward=reward, success=value == "correct", outcome=value)
        rewards = value if isinstance(value, list) else [value]
        are_numbers = all(isinstance(x, float) and abs(x) <= LARGEST for x in rewards)
        if kind == "refused" or not are_numbers or not abs(sum(rewards)) <= LARGEST:
            function = "episode" if hasattr(self.tasks[task], "episode") else "reward"
            refused = value if kind == "refused" else shown(value)
            raise RuntimeError(
                f"actor: tasks/{task}.py: {function} returned {refused}; it must return a finite "
                f"number of at most {LARGEST}, a list of such numbers, or one of "
                f"{', '.join(cfg.OUTCOMES)}"
            )
        success = sum(rewards) >= getattr(self.tasks[task], "SUCCESS", 1.0)
        return dict(reward=value, success=success, outcome="correct" if success else "wrong")

    def close(self):
        """End all workers."""
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()


# ---- the value that a function returned


def number(value) -> float:
    """The float of a number of any library: of all that float() takes, but for text and bytes.

    Arrays and tensors of one element are numbers, and True is 1. Raises TypeError or ValueError if
    the value is no real number, such as a container, and OverflowError if it is beyond all floats.
    """
    element = value.item() if hasattr(value, "item") else value
    is_complex = isinstance(element, numbers.Complex) and not isinstance(element, numbers.Real)
    # text and bytes lack these methods, though float() takes them, too
    converts = hasattr(type(element), "__float__") or hasattr(type(element), "__index__")
    if is_complex or not converts:
        raise TypeError("no number")
    # float() gets the value, and not the element: a masked element is nan then, not what it hides
    result = float(value)
    if math.isinf(result) and element != result:
        raise OverflowError("beyond all floats")
    return result


def returned(value) -> dict:
    """The reply for the value that a function or an episode returned.

    {"value": a float, a list of floats, a text or None}, or {"refused": its type, the value, and
    the reason}. Lists, tuples and arrays of one dimension become lists; an array of one element is
    a number.
    """
    if value is None:
        return {"value": None}
    if isinstance(value, str):
        # a plain str: the value may be an enumeration or one of numpy's
        return {"value": str.__str__(value)}
    try:
        if is_list(value):
            return {"value": [number(element) for element in value]}
        return {"value": number(value)}
    except Exception as e:
        return {"refused": f"{shown(value)} ({message_of(e)})"}


def is_list(value):
    """Is a value a list or tuple, or an array of one dimension, with at least one element?"""
    is_row = getattr(value, "ndim", None) == 1 and len(value) > 1
    return is_row or (isinstance(value, (list, tuple)) and len(value) > 0)


def shown(value):
    """The type of a value and its repr, for a message: one line of at most 200 characters."""
    try:
        text = SHORT_REPR.repr(value)
    except Exception:
        # for example Python refuses to print integers with many thousands of digits
        text = "(its value cannot be printed)"
    return shortened(f"{type_name(type(value))} {text}", 200)


# ---- exceptions in one line


def error_line(error, file=None):
    """An exception and its causes in one line of at most LINE_LENGTH characters.

    `KeyError: 'answer' at tasks/mine.py:12 in reward`: its type, its message, and the last frame of
    its traceback in `file`, the task's file, or the very last frame if none is in that file. The
    exceptions of an ExceptionGroup follow its own message, in brackets.
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
    """`Type: message and notes` of an exception, one line of at most MESSAGE_LENGTH characters."""
    try:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
    except Exception:
        text = "(its message cannot be printed)"
    return shortened(f"{type_name(type(error))}: {text}", MESSAGE_LENGTH).removesuffix(":")


def place_of(error, file):
    """` at folder/file.py:line in function`, see `error_line`; "" without a traceback."""
    frames = list(traceback.walk_tb(error.__traceback__))
    in_file = [entry for entry in frames if entry[0].f_code.co_filename == file]
    if not frames:
        return ""
    frame, line = (in_file or frames)[-1]
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f" at {path}:{line} in {frame.f_code.co_name}"


def type_name(kind):
    """The name of a type, with its module unless it is one of Python's own types."""
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def shortened(text, length):
    """A text as one line, cut off after `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 4]} ..."


# ---- in the workers


def prepare():
    """Set the limits of a new worker, and send everything that it prints to /dev/null."""
    # The default action ends it at once; a Python handler would wait while C code runs.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    memory = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)


def run(task, function, args, alarm=0.0):
    """Make one call in this process; returns its reply.

    alarm: seconds after which the process dies, in case the actor that would end it is gone.
    """
    signal.setitimer(signal.ITIMER_REAL, alarm)
    name = f"tasks.{task}"
    try:
        # here and not in the actor, as other values may not survive the way back
        return returned(getattr(importlib.import_module(name), function)(*args))
    except (MemoryError, RecursionError) as e:
        return {"limit": type(e).__name__}
    except BaseException as e:
        return {"error": error_line(e, getattr(sys.modules.get(name), "__file__", None))}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
