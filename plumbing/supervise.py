"""The processes of a run on this machine: starts them, watches them, stops them.

An engine that dies or hangs is started again. While it runs and has begun to answer, out/<run>/engines/<name>.json
says where; the trainer admits and drops what is listed there. Deliberately absent: what is started, and where (placement.py).
"""

import contextlib
import ctypes
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import requests

from config import ROOT
from plumbing.queues import publish_json

ANSWER = 3.0  # seconds an engine has to say that it is healthy
DIRECT = {"http": ""}  # proxies of our own requests: none, whatever the environment says
HANGS = 10  # questions in a row left unanswered by an engine that hangs
RESTARTS = 2  # of an engine, without an answer in between
BETWEEN = 10.0  # seconds from one start of an engine to the next, at least
GRACE = 4.0  # seconds that processes have to end by themselves; the trainer has more
LIBC = ctypes.CDLL(None)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class Ended(Exception):
    """A run that ends before its last step; code: the launcher's own, details: what is known of it, is_trainer: a
    rank of the trainer has died.
    """

    def __init__(self, why, code=1, details="", is_trainer=False):
        super().__init__(why)
        self.code = code
        self.details = details
        self.is_trainer = is_trainer


def say(line):
    # in one write, as many threads do; the terminal may have gone
    with contextlib.suppress(OSError):
        print(f"{line}\n", end="", flush=True)


def claim_port(host, first):
    """A socket of the first free port from `first` on: no other run gets it while that is open, a server of ours can."""
    for port in range(first, 65536):
        claim = socket.socket()
        with contextlib.suppress(OSError):
            claim.bind((host, port))
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return claim
    raise OSError(f"--port {first}: no port of {host} is free from there on")


def is_healthy(url, timeout=ANSWER):
    """Does this engine answer, and well? timeout: seconds, or those to connect and those to answer."""
    try:
        return requests.get(f"{url}/health", timeout=timeout, proxies=DIRECT).ok
    except requests.RequestException:
        return False


def end_with_launcher():
    """In a new process: should the launcher be killed, it is told to end; the trainer then saves."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Process:
    """One process of a run, leader of a process group. What it prints goes to its log and the terminal, its
    stderr to the log alone. files: open files that it inherits.
    """

    is_shown = True

    def __init__(self, run_dir, name, env, command, files=()):
        self.run_dir = Path(run_dir)
        self.name = name
        self.env = env
        self.command = command
        self.files = files
        self.log = self.run_dir / "logs" / f"{name}.log"
        self.process = None

    def start(self):
        reading, writing = os.pipe()
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"== {time.strftime('%F %T')} {shlex.join(self.command)}\n".encode())
            # where its own words begin
            self.begin = log.tell()
            # the reading end, too: if the launcher is killed, last words break no pipe
            streams = dict(stdin=subprocess.DEVNULL, stdout=writing, stderr=log)
            streams["pass_fds"] = [reading, *self.files]
            group = dict(start_new_session=True, preexec_fn=end_with_launcher)
            env = os.environ | self.env
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=env, **streams, **group)
        os.close(writing)
        self.thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self.thread.start()

    def _pass_on(self, reading):
        with open(reading, "rb") as lines, open(self.log, "ab", buffering=0) as log:
            for line in lines:
                if self.is_shown:
                    say(f"[{self.name}] {line.decode(errors='replace').rstrip()}")
                # a full disk must not keep it from the terminal
                with contextlib.suppress(OSError):
                    log.write(line)

    def signal(self, number):
        """To all of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self):
        """Its exit code, as a shell has it; None while it runs. What it leaves behind ends with it."""
        code = self.process.poll()
        if code is not None:
            self.signal(signal.SIGKILL)
        return 128 - code if code and code < 0 else code

    def last_errors(self):
        """What its log says last of errors since it was started, or of anything."""
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("nanobind: ")]
        # what a stage says by itself may come after errors of libraries
        own = [x for x in lines if x.startswith(f"{self.name}: ")][-1:]
        errors = [x for x in lines if re.search(r"\b\w+(Error|Exception|Exit): ", x) or x in own]
        return "\n".join(f"  [{self.name}] {line}" for line in (errors or lines)[-3:])


class Engine(Process):
    """An engine, on the first free port from its own on, which is started again when it dies or hangs."""

    is_shown = False

    def __init__(self, run_dir, name, env, command, start_timeout):
        host = command[command.index("--host") + 1]
        k = command.index("--port") + 1
        self.claim = claim_port(host, int(command[k]))
        port = self.claim.getsockname()[1]
        # vLLM leaves its sockets where it made them
        self.sockets = tempfile.TemporaryDirectory()
        env = env | {"VLLM_RPC_BASE_PATH": self.sockets.name}
        super().__init__(run_dir, name, env, [*command[:k], str(port), *command[k + 1 :]])
        self.url = f"http://{host}:{port}"
        self.file = self.run_dir / "engines" / f"{name}.json"
        self.start_timeout = start_timeout
        self.deaths = 0

    def start(self):
        self.file.unlink(missing_ok=True)
        super().start()
        self.started = self.next_look = time.monotonic()
        self.has_answered = False
        self.failures = 0

    def poll(self):
        """The exit code of its last death, when it is given up; None before."""
        code = super().poll()
        if code is None:
            if time.monotonic() > self.next_look:
                self._check_health(time.monotonic() - self.started)
            return None
        self.file.unlink(missing_ok=True)
        if time.monotonic() > self.started + BETWEEN:
            self.deaths += 1
            if self.deaths > RESTARTS:
                return code or 1
            say(f"run.sh: {self.name} died with exit code {code}, and is started again")
            say(self.last_errors())
            self.start()
        return None

    def _check_health(self, seconds):
        """Kill it if it hangs; seconds: since its start."""
        self.failures = 0 if is_healthy(self.url) else self.failures + 1
        self.next_look = time.monotonic() + 1
        if not self.failures and not self.has_answered:
            self.has_answered = True
            self.deaths = 0
            self.file.parent.mkdir(exist_ok=True)
            # each start is an engine of its own, without weights
            publish_json(self.file, url=self.url, started=secrets.token_hex(8))
            say(f"[{self.name}] answers after {seconds:.0f} s")
        if self.failures >= HANGS and (self.has_answered or seconds > self.start_timeout):
            say(f"run.sh: {self.name} does not answer {self.url}/health: it is killed")
            self.process.kill()


def run(processes, stop_timeout, is_over):
    """Start the processes, wait until the trainer has ended well or is_over(), end those that are left.

    stop_timeout: seconds that the trainer has to save. Returns why it ended early, Ended, or None.
    """
    ended = None
    end_at_signals()
    try:
        for process in processes:
            process.start()
        watch(processes, is_over)
    except OSError as e:
        ended = Ended(f"{type(e).__name__}: {e}")
    except Ended as e:
        ended = e
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if ended:
        say(f"run.sh: {ended}, stopping")
    else:
        # the other stages end by themselves, and say last what they have counted
        wait([process for process in processes if not isinstance(process, Engine)], GRACE)
    # ranks wait for one that has died, and cannot save
    stop(processes, 0 if ended and ended.is_trainer else stop_timeout)
    return ended


def end_at_signals():
    """From now on Ctrl-C, and an order to end, raise Ended."""
    for number in SIGNALS:
        signal.signal(number, _raise_ended)


def _raise_ended(number, frame):
    raise Ended("interrupted" if number == signal.SIGINT else "terminated", 128 + number)


def watch(processes, is_over):
    """Until the trainer has ended well, or is_over(). Raises Ended if a process dies."""
    running = list(processes)
    while not is_over():
        for process in list(running):
            code = process.poll()
            if code == 0:
                running.remove(process)
                if process.name == "train":
                    return
            elif code:
                why = f"{process.name} died with exit code {code}"
                why += " (kill -9, perhaps for want of memory)" if code == 137 else ""
                details = f"{process.log}:\n{process.last_errors()}"
                raise Ended(why, details=details, is_trainer=process.name.startswith("train"))
        time.sleep(0.5)


def wait(processes, seconds):
    """Wait until all of these processes have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.process.poll() is None for p in processes):
        time.sleep(0.1)


def stop(processes, seconds):
    """End all processes: first the trainer, which saves for so many seconds."""
    started = [process for process in processes if process.process]
    ranks = [process for process in started if process.name.startswith("train")]
    orders = [(ranks, signal.SIGTERM, seconds), (started, signal.SIGTERM, GRACE)]
    for some, number, limit in (*orders, (started, signal.SIGKILL, GRACE)):
        for process in some:
            process.signal(number)
        wait(some, limit)
    for process in started:
        # its last words
        process.thread.join(1)
        if isinstance(process, Engine):
            process.file.unlink(missing_ok=True)
            process.claim.close()
