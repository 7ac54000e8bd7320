"""The processes of a run on this machine are started, watched and stopped here.

An engine that dies or hangs is started again. From its first answer until its end the file
out/<run>/engines/<name>.json holds its URL: the trainer sends weights to the engines that are
listed there. Deliberately absent: which processes there are, and where they run (placement.py).
"""

import contextlib
import ctypes
import errno
import os
import re
import resource
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

# seconds that an engine may take to answer GET /health
HEALTH_TIMEOUT = 3.0
# `proxies` of our own HTTP requests: no proxy, whatever the environment says
DIRECT = {"http": ""}
# An engine hangs if so many health checks in a row get no answer, or the answer that its core
# hangs (plumbing/engine.py)
MAX_UNANSWERED = 10
# how often an engine is started again without having answered in between
RESTARTS = 2
# least number of seconds between two starts of an engine
RESTART_INTERVAL = 10.0
# seconds that a process has to end after SIGTERM; --stop_timeout says how many the trainer has
GRACE_PERIOD = 4.0
# signals that end a run
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The signals of SIGNALS that this process has received. Each of them raises Ended, too, but if the
# signal arrives while Python runs a callback (it runs some at a fork), the exception is lost.
received = []
LIBC = ctypes.CDLL(None)
# prctl's option, from linux/prctl.h
PR_SET_PDEATHSIG = 1


class Ended(Exception):
    """The run ends before its last step.

    code: the exit code of the launcher. details: the last errors of the process that died.
    is_trainer: a rank of the trainer has died, so that no checkpoint can be saved.
    """

    def __init__(self, why, code=1, details="", is_trainer=False):
        super().__init__(why)
        self.code = code
        self.details = details
        self.is_trainer = is_trainer


def say(line):
    """Print a line in a single write, as several threads print.

    The terminal may be gone, or lack a character of the line.
    """
    with contextlib.suppress(OSError, UnicodeError):
        print(f"{line}\n", end="", flush=True)


def claim_port(host, first):
    """Reserve the first free port from `first` on: a socket that is bound to it.

    While the socket is open no other run can reserve the port, but a server that we start can
    listen on it. Raises OSError if no port is free.
    """
    error = None
    for port in range(first, 65536):
        claim = socket.socket()
        try:
            claim.bind((host, port))
        except OSError as e:
            claim.close()
            if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise OSError(f"{host} is no address that this machine can use: {e}") from None
            error = e
            continue
        # It is set after bind: another claim of the port binds without this option and fails, and a
        # server binds with it.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return claim
    raise OSError(
        f"no port of {host} from {first} to 65535 is free ({error}): choose a smaller --port or "
        "--master_port"
    )


def is_healthy(url, timeout=HEALTH_TIMEOUT):
    """Does this engine answer that it is healthy?

    timeout: seconds, or a pair: seconds to connect, seconds to answer.
    """
    try:
        return requests.get(f"{url}/health", timeout=timeout, proxies=DIRECT).ok
    except requests.RequestException:
        return False


def end_with_launcher():
    """Ask Linux to send this process SIGTERM if the launcher is killed; the trainer then saves.

    It is called in each new process (preexec_fn).
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def allow_many_connections():
    """Raise the limit of open files to the highest value that this process may set.

    Each sequence in progress is a connection between the actor and an engine. Processes inherit the
    limit when they are started.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Process:
    """One process of a run, which leads a process group of its own.

    Its stdout goes to its log and to the terminal, its stderr to the log alone. files: descriptors
    of open files that it inherits.
    """

    # False: stdout goes to the log alone
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
        """Start the process, and a thread that passes on what it prints."""
        allow_many_connections()
        reading, writing = os.pipe()
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"== {time.strftime('%F %T')} {shlex.join(self.command)}\n".encode())
            # position in the log at which the output of this start begins
            self.begin = log.tell()
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=log,
                # It inherits the pipe's reading end, too: if the launcher is killed, it can still
                # print and gets no SIGPIPE
                pass_fds=[reading, *self.files],
                start_new_session=True,
                preexec_fn=end_with_launcher,
            )
        os.close(writing)
        self.thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self.thread.start()

    def _pass_on(self, reading):
        """The thread: copy each line of stdout to the log and, if is_shown, to the terminal."""
        with open(reading, "rb") as lines, open(self.log, "ab", buffering=0) as log:
            for line in lines:
                # a full disk must not end the thread, as the terminal still shows the lines
                with contextlib.suppress(OSError):
                    log.write(line)
                if self.is_shown:
                    say(f"[{self.name}] {line.decode(errors='replace').rstrip()}")

    def signal(self, number):
        """Send a signal to its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self):
        """Its exit code as a shell would give it (137 after kill -9); None while it runs.

        Once it has ended, the processes that it leaves behind are killed.
        """
        code = self.process.poll()
        if code is not None:
            self.signal(signal.SIGKILL)
        return 128 - code if code and code < 0 else code

    def last_errors(self):
        """The last three lines with errors that it has logged since this start, or, if there are
        none, its last three lines.
        """
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("nanobind: ")]
        # the line in which a stage says why it ends; libraries may print errors before it
        final = [line for line in lines if line.startswith(f"{self.name}: ")][-1:]
        error = re.compile(r"\b\w+(Error|Exception|Exit): ")
        errors = [line for line in lines if error.search(line) or line in final]
        return "\n".join(f"  [{self.name}] {line}" for line in (errors or lines)[-3:])


class Engine(Process):
    """An engine, which is started again when it dies or hangs.

    It listens on the first free port that is not below the --port of its command. start_timeout:
    seconds until an engine that has not answered yet counts as hanging.
    """

    is_shown = False

    def __init__(self, run_dir, name, env, command, start_timeout):
        host = command[command.index("--host") + 1]
        port_index = command.index("--port") + 1
        # this socket keeps the port for the engine until the run ends, restarts included
        self.claim = claim_port(host, int(command[port_index]))
        port = self.claim.getsockname()[1]
        command = list(command)
        command[port_index] = str(port)
        # vLLM does not delete the sockets that it makes: they get a directory that is deleted
        self.sockets = tempfile.TemporaryDirectory()
        env = env | {"VLLM_RPC_BASE_PATH": self.sockets.name}
        super().__init__(run_dir, name, env, command)
        self.url = f"http://{host}:{port}"
        self.file = self.run_dir / "engines" / f"{name}.json"
        self.start_timeout = start_timeout
        self.deaths = 0

    def start(self):
        """Start the engine. It is listed in out/<run>/engines when it first answers."""
        self.file.unlink(missing_ok=True)
        super().start()
        self.started = time.monotonic()
        self.next_check = self.started
        self.has_answered = False
        self.unanswered = 0

    def poll(self):
        """The exit code of its last death, once it is not started again any more; None before.

        This method also checks its health and starts it again if it is dead.
        """
        code = super().poll()
        if code is None:
            if time.monotonic() > self.next_check:
                self._check_health(time.monotonic() - self.started)
            return None
        self.file.unlink(missing_ok=True)
        if time.monotonic() > self.started + RESTART_INTERVAL:
            self.deaths += 1
            if self.deaths > RESTARTS:
                # an engine has no reason to end, even if it says that all is well (code 0)
                return code or 1
            say(f"run.sh: {self.name} died with exit code {code}, and is started again")
            say(self.last_errors())
            self.start()
        return None

    def _check_health(self, seconds):
        """List it at its first answer, and kill it if it hangs. seconds: since its start."""
        self.unanswered = 0 if is_healthy(self.url) else self.unanswered + 1
        self.next_check = time.monotonic() + 1
        if self.unanswered == 0 and not self.has_answered:
            self.has_answered = True
            self.deaths = 0
            self.file.parent.mkdir(exist_ok=True)
            # `started` tells the trainer that this is a new engine, which has no weights yet
            publish_json(self.file, url=self.url, started=secrets.token_hex(8))
            say(f"[{self.name}] answers after {seconds:.0f} s")
        may_hang = self.has_answered or seconds > self.start_timeout
        if may_hang and self.unanswered >= MAX_UNANSWERED:
            say(
                f"run.sh: {self.name} hangs ({self.url}/health has given no good answer "
                f"{self.unanswered} times in a row): it is killed"
            )
            self.process.kill()


def run(processes, stop_timeout, is_over):
    """Start the processes, wait for the end of the run, and stop the processes that are left.

    The run ends when the trainer ends with exit code 0, when is_over() is true, when a process
    dies, or at a signal. stop_timeout: seconds that the trainer has to save a checkpoint. Returns
    the reason (Ended) if the run ends before its last step, else None.
    """
    ended = None
    end_at_signals()
    try:
        for process in processes:
            check_signals()
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
        # the other stages end by themselves, and print what they have counted
        stages = [process for process in processes if not isinstance(process, Engine)]
        wait(stages, GRACE_PERIOD)
    # If a rank of the trainer has died, the others wait for it and cannot save
    stop(processes, 0 if ended and ended.is_trainer else stop_timeout)
    return ended


def end_at_signals():
    """From now on Ctrl-C, SIGTERM and SIGHUP raise Ended in this process.

    With nohup, SIGHUP is ignored, so that a run outlives its terminal, and this stays so.
    """
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise_ended)


def check_signals():
    """Raise Ended if there was a signal, whose own exception may have been lost."""
    if received:
        number = received[0]
        raise Ended("interrupted" if number == signal.SIGINT else "terminated", 128 + number)


def _raise_ended(number, frame):
    received.append(number)
    # A second signal must not break off what the first one has begun.
    if len(received) == 1:
        check_signals()


def watch(processes, is_over):
    """Wait until the trainer has ended with exit code 0, or until is_over().

    Raises Ended if a process dies, or if there was a signal.
    """
    running = list(processes)
    while not is_over():
        check_signals()
        for process in list(running):
            code = process.poll()
            if code == 0:
                running.remove(process)
                if process.name == "train":
                    return
            elif code:
                hint = " (kill -9, perhaps because memory ran out)" if code == 137 else ""
                raise Ended(
                    f"{process.name} died with exit code {code}{hint}",
                    details=f"{process.log}:\n{process.last_errors()}",
                    is_trainer=process.name.startswith("train"),
                )
        time.sleep(0.5)


def wait(processes, seconds):
    """Wait until all of these processes have ended, but at most this number of seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.process.poll() is None for p in processes):
        time.sleep(0.1)


def stop(processes, seconds):
    """End all processes: first the trainer, which has this number of seconds to save."""
    started = [process for process in processes if process.process]
    ranks = [process for process in started if process.name.startswith("train")]
    signals = [
        (ranks, signal.SIGTERM, seconds),
        (started, signal.SIGTERM, GRACE_PERIOD),
        (started, signal.SIGKILL, GRACE_PERIOD),
    ]
    for receivers, number, limit in signals:
        for process in receivers:
            process.signal(number)
        wait(receivers, limit)
    for process in started:
        # its last lines may still be in the pipe
        process.thread.join(1)
        if isinstance(process, Engine):
            process.file.unlink(missing_ok=True)
            process.claim.close()
