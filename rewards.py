"""Reward functions, in processes of their own with a limit on time and memory: one hostile answer delays nobody but itself.

The actor's side is `Judges`; the other, `python rewards.py <limit> <fd,...> <task> ...`, loads the tasks once and forks a worker for each
socket. A worker that runs into its limit is killed by the kernel, whatever it is doing; its parent answers for it and forks
another, which costs some 10 ms, not the seconds that loading sympy takes. One JSON line each way; no pickle, no threads.
"""
import asyncio
import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import config as cfg

MEMORY = 4 << 30  # bytes of address space a worker may use
TABLE = ("correct", "wrong", "no_answer", "unparsable")  # outcomes a reward function may return instead of a number


class Judges:
    """Calls functions of the run's tasks in worker processes. Use: `await judges.start()`, `await judges.score(...)`, `close()`."""

    def __init__(self, config):
        self.config, self.idle, self.process = config, asyncio.Queue(), None
        self.tasks = {name: importlib.import_module(f"tasks.{name}") for name in cfg.task_weights(config.task)}
        self.counts = Counter()  # verdicts, and what went wrong with them

    async def start(self):
        pairs = [socket.socketpair() for _ in range(self.config.reward_workers)]
        fds = [far.fileno() for _, far in pairs]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).resolve()), str(self.config.reward_timeout), ",".join(map(str, fds)), *self.tasks,
            pass_fds=fds, stdin=asyncio.subprocess.DEVNULL)
        for near, far in pairs:
            far.close()
            self.idle.put_nowait(await asyncio.open_connection(sock=near, limit=1 << 24))
        self.running = set()

    async def call(self, task, function, *args):
        """{"value": ...} as the function returned it, {"limit": signal} if its worker was killed, {"error": words} if it raised."""
        call = asyncio.create_task(self._call(task, function, args))
        self.running.add(call)
        call.add_done_callback(self.running.discard)
        return await asyncio.shield(call)  # who is cancelled must not leave a reply behind in a worker's socket

    async def _call(self, task, function, args):
        worker = await self.idle.get()
        reader, writer = worker
        try:
            writer.write(json.dumps([task, function, args]).encode() + b"\n")
            await writer.drain()
            line = await asyncio.wait_for(reader.readline(), 30 * self.config.reward_timeout + 60)
        except (OSError, asyncio.TimeoutError) as e:
            raise RuntimeError(f"actor: {function} of task {task}: its worker process gave no answer ({type(e).__name__}: {e})") from e
        if not line:
            raise RuntimeError(f"actor: {function} of task {task}: the reward workers have died, see the lines above")
        self.idle.put_nowait(worker)
        return json.loads(line)

    async def score(self, name, problem, completion, finished):
        """Reward, success and outcome of one attempt; what the task returns may be a number or an outcome of the reward table.

        An answer that the function could not deal with (time, memory, an exception) is `unparsable`, and counted.
        """
        reply = await self.call(name, "reward", problem, completion, finished)
        self.counts["verdicts"] += 1
        value = reply.get("value", "unparsable")
        if "value" not in reply:
            self.counts["error" if "error" in reply else "limit"] += 1
            if self.counts["error"] + self.counts["limit"] in (1, 10, 100, 1000, 10000):
                print(f"actor: reward of task {name} {reply}, counted as unparsable, {dict(self.counts)}; the answer ends in {str(completion)[-200:]!r}", flush=True)
            if self.counts["error"] > max(20, self.counts["verdicts"] / 2):
                raise RuntimeError(f"actor: tasks/{name}.py: reward raises for most answers, the last time: {reply.get('error')}")
        if isinstance(value, str):
            if value not in TABLE:
                raise RuntimeError(f"actor: tasks/{name}.py: reward returned {value!r}; it must be a number or one of {', '.join(TABLE)}")
            return dict(reward=getattr(self.config, f"reward_{value}")[0 if finished else 1], success=value == "correct", outcome=value)
        if not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise RuntimeError(f"actor: tasks/{name}.py: reward returned {value!r}; it must be a finite number or one of {', '.join(TABLE)}")
        success = value >= getattr(self.tasks[name], "SUCCESS", 1.0)
        return dict(reward=float(value), success=success, outcome="correct" if success else "wrong")

    async def respond(self, name, problem, turns):
        """The environment's answer to the model's turns; None if the episode is over, also where it took too long. An error ends the run: it is the task's."""
        reply = await self.call(name, "respond", problem, turns)
        self.counts["limit"] += "limit" in reply
        if "error" in reply:
            raise RuntimeError(f"actor: tasks/{name}.py: respond {reply} after {len(turns)} turns of problem {str(problem)[:200]}")
        return reply.get("value")

    def close(self):
        for _ in range(self.idle.qsize()):
            self.idle.get_nowait()[1].close()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()


# ------------------------------------------------------------------------------------------------ the other side

def work(connection, tasks, limit):
    """One worker: read a line, call, answer; killed by the kernel (no handler could be relied on) when a call exceeds the limit."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    stream = connection.makefile("rwb")
    for line in stream:
        task, function, args = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit)  # seconds of CPU: a busy machine fails no answer
        signal.setitimer(signal.ITIMER_REAL, 30 * limit)  # but nobody sleeps for ever
        try:
            reply = json.dumps({"value": getattr(tasks[task], function)(*args)})
        except (RecursionError, MemoryError) as e:  # the answer's fault, like the time limit
            reply = json.dumps({"limit": type(e).__name__})
        except BaseException as e:
            reply = json.dumps({"error": f"{type(e).__name__}: {str(e)[:300]}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        stream.write(reply.encode() + b"\n")
        stream.flush()


def main(limit, fds, names):
    tasks = {name: importlib.import_module(f"tasks.{name}") for name in names}
    for task in tasks.values():
        getattr(task, "warm_up", lambda: None)()
    connections = [socket.socket(fileno=int(fd)) for fd in fds.split(",")]
    workers = {}

    def fork(connection):
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()  # what a reward function starts dies with its worker
            for other in connections:
                if other is not connection:
                    other.close()
            try:
                work(connection, tasks, limit)
                os._exit(0)
            finally:
                os._exit(1)
        workers[pid] = connection

    def end(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def stop(*_):
        for pid in workers:
            end(pid)
        os._exit(0)
    signal.signal(signal.SIGTERM, stop)
    for connection in connections:
        fork(connection)
    while workers:
        pid, status = os.wait()
        connection = workers.pop(pid)
        end(pid)
        if status:
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            with contextlib.suppress(OSError):  # the actor is gone: the next worker will see it
                connection.sendall(json.dumps({"limit": how}).encode() + b"\n")
            fork(connection)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
