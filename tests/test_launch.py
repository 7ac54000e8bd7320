"""The launcher: engines are started again or given up, and everything stops however it ends.

Processes, signals, ports and the terminal are real. The engines are FAKE HTTP servers, and short
shell programs stand in for actor and trainer.
"""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import requests

from conftest import ROOT, resolved
from plumbing import placement, rundir, supervise
from plumbing.queues import read_json
from tools import run

# A FAKE engine: /health answers 200, after /hang 503, as if its core hung; /quit/CODE ends it; it
# has a child process.
ENGINE = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    code = 200
    def do_GET(self):
        if self.path.startswith("/quit"):
            os._exit(int(self.path.split("/")[2]))
        if self.path == "/hang":
            Handler.code = 503
        self.send_response(Handler.code)
        self.end_headers()
    def log_message(self, *args):
        pass
print("child", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = "import sys; sys.exit('ValueError: no such model')"


def eventually(condition, seconds=30):
    """Wait until condition() is true, and return its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds} s"
        time.sleep(0.05)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Supervised(supervise.Engine):
    """The FAKE engine, supervised by this process."""

    def __init__(self, run_dir, program=ENGINE, start_timeout=30):
        (run_dir / "logs").mkdir()
        command = [sys.executable, "-c", program, "--host", "127.0.0.1", "--port", "9460"]
        super().__init__(run_dir, "engine0", {}, command, start_timeout)
        self.start()

    def until(self, condition):
        """Look after the engine until condition() is true."""
        eventually(lambda: self.poll() is None and condition())

    def until_healthy(self, previous=None):
        """Wait until an engine other than `previous` is listed; return its entry."""
        self.until(lambda: read_json(self.file) not in ({}, previous))
        return read_json(self.file)

    def children(self):
        lines = self.log.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("child")]


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "HEALTH_TIMEOUT", 0.5)
    monkeypatch.setattr(supervise, "MAX_UNANSWERED", 3)
    monkeypatch.setattr(supervise, "RESTART_INTERVAL", 0.0)
    engines = []

    def start(*arguments, **options):
        engines.append(Supervised(tmp_path, *arguments, **options))
        return engines[-1]

    yield start
    supervise.stop(engines, 0)


def test_a_dead_engine_is_started_again(supervised, capsys):
    engine = supervised()
    first = engine.until_healthy()
    with contextlib.suppress(requests.RequestException):
        requests.get(first["url"] + "/quit/7", timeout=5)
    engine.until(lambda: not engine.file.exists())
    second = engine.until_healthy(previous=first)
    assert second["url"] == first["url"]
    assert "engine0 died with exit code 7, and is started again" in capsys.readouterr().out
    eventually(lambda: is_gone(engine.children()[0]))
    supervise.stop([engine], 0)
    assert not engine.file.exists()
    eventually(lambda: all(map(is_gone, engine.children())))


@pytest.mark.parametrize("what", ["process", "core"])
def test_an_engine_that_hangs_is_killed_and_started_again(supervised, capsys, what):
    engine = supervised()
    first = engine.until_healthy()
    if what == "process":
        os.kill(engine.process.pid, signal.SIGSTOP)
    else:
        requests.get(first["url"] + "/hang", timeout=5)
    engine.until_healthy(previous=first)
    output = capsys.readouterr().out
    assert "it is killed" in output and "exit code 137, and is started again" in output


def test_an_engine_that_never_answers_is_given_up(supervised, capsys):
    engine = supervised(DIES)
    assert eventually(engine.poll) == 1
    assert capsys.readouterr().out.count("started again") == supervise.RESTARTS
    assert engine.last_errors() == "  [engine0] ValueError: no such model"


def test_an_engine_takes_the_next_free_port(supervised):
    with socket.create_server(("127.0.0.1", 9460)):
        with supervise.claim_port("127.0.0.1", 9460) as claim:
            claimed_port = claim.getsockname()[1]
            url = supervised().until_healthy()["url"]
            engine_port = int(url.rpartition(":")[2])
            assert len({9460, engine_port, claimed_port}) == 3
            # A port is claimed before a server listens, and a server can still take it.
            socket.create_server(("127.0.0.1", claimed_port)).close()


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OSError, match="203.0.113.9 is no address that this machine can use"):
        supervise.claim_port("203.0.113.9", 9460)


# ---- a launcher with shell programs in place of a run's processes

LAUNCH = """
import json, sys
from plumbing import placement, rundir
from tools import run
c = placement.cfg.load(sys.argv[1])
lock, start = rundir.hold(c)
rundir.write(c, start)
sys.exit(run.run(c, json.loads(sys.argv[2]), start, lock))
"""


@contextlib.contextmanager
def launched(folder, *processes, grace=25):
    """Start a launcher with these (name, shell command) in a terminal of its own.

    Yield (process, function that returns its output, terminal).
    """
    config = resolved(
        "toy", "--out", folder, "--run", "run", "--model", folder, "--stop_timeout", grace
    )
    run_dir = rundir.write(config)
    commands = [(name, {}, ["bash", "-c", command]) for name, command in processes]
    command = [sys.executable, "-c", LAUNCH, str(run_dir), json.dumps(commands)]
    chunks = []
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, os.environ | {"MARK": str(folder)})

    def read():
        # os.read raises EIO when the last process has closed the terminal.
        with contextlib.suppress(OSError):
            while True:
                chunks.append(os.read(terminal, 10000).decode(errors="replace"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process = psutil.Process(pid)

    def everything():
        # The last output of an ended run is read a moment after its end.
        if not process.is_running():
            reader.join(5)
        return "".join(chunks)

    try:
        yield process, everything, terminal
    except BaseException:
        print(everything())
        raise
    finally:
        for p in marked(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(10)
        os.close(terminal)


def marked(folder):
    """Return the processes that were started in `launched`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == str(folder) and process.status() != "zombie":
                processes.append(process)
    return processes


def log(folder, name):
    return (folder / "run" / "logs" / f"{name}.log").read_text()


# A FAKE trainer, which takes a second to save when it is told to stop
TRAIN = (
    'trap "sleep 1; echo saved; touch $MARK/saved; exit 3" TERM; '
    "echo started; while :; do sleep 0.1; done"
)
IGNORES_TERM = 'trap "" TERM; sleep 1000 & wait; wait'
# A FAKE trainer that takes seven seconds to save
SLOW = TRAIN.replace("sleep 1;", "for i in {1..7}; do sleep 1; done;")


@pytest.mark.parametrize("grace,saved", [(1, False), (15, True)])
def test_a_stop_leaves_the_trainer_stop_timeout_to_save(tmp_path, grace, saved):
    with launched(tmp_path, ("train", SLOW), grace=grace) as (process, output, _):
        eventually(lambda: "started" in output())
        process.terminate()
        eventually(lambda: not marked(tmp_path), 40)
    assert ("\nsaved\n" in log(tmp_path, "train")) == saved


def test_a_rank_that_is_dead_is_not_waited_for(tmp_path):
    ranks = [("train", IGNORES_TERM), ("train1", "sleep 1; exit 3")]
    with launched(tmp_path, *ranks, grace=1000) as (process, output, _):
        assert process.wait(60) == 1
        assert "train1 died with exit code 3" in output()
        eventually(lambda: not marked(tmp_path), 40)


@pytest.mark.parametrize("ending", ["ctrl-c", "term", "kill"])
def test_everything_stops_however_the_launcher_ends(tmp_path, ending):
    processes = [("actor", "exec sleep 1000"), ("train", TRAIN)]
    with launched(tmp_path, *processes) as (process, output, terminal):
        eventually(lambda: "started" in output())
        if ending == "ctrl-c":
            os.write(terminal, b"\x03")
        else:
            process.send_signal(signal.SIGTERM if ending == "term" else signal.SIGKILL)
        code = process.wait(40)
        config = placement.cfg.load(tmp_path / "run")
        if ending == "kill":
            assert rundir.holder(config).startswith(f"process {process.pid} on ")
        rundir.hold(config)
        assert (tmp_path / "saved").exists()
        eventually(lambda: not marked(tmp_path), 40)
    expected = {"ctrl-c": ("interrupted", 130), "term": ("terminated", 143)}
    if ending in expected:
        word, number = expected[ending]
        assert f"run.sh: {word}, stopping" in output() and code == number
        assert (
            "run.sh: stopped; the same command begins a new run, as there is no checkpoint"
            in output()
        )
        assert "\nsaved\n" in log(tmp_path, "train")


# A launcher that receives Ctrl-C while it makes a process, in a callback of the fork
CTRL_C_IN_A_FORK = """
import os, signal, sys
from pathlib import Path
from plumbing import supervise
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
process = supervise.Process(Path(sys.argv[1]), "actor", {}, ["sleep", "1000"])
sys.exit(supervise.run([process], 1, lambda: False).code)
"""


def test_a_signal_during_a_fork_is_not_lost(tmp_path):
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", CTRL_C_IN_A_FORK, str(tmp_path)]
    launcher = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    # Python drops the exception of the callback
    assert "Exception ignored in" in launcher.stderr
    assert "interrupted, stopping" in launcher.stdout and launcher.returncode == 130


# A launcher whose terminal is closed, and which is then terminated
HANGED_UP = """
import os, signal, sys
from plumbing import supervise
supervise.end_at_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
    os.kill(os.getpid(), signal.SIGTERM)
except supervise.Ended as e:
    print(e.code)
# A second signal must not break off what the first one has begun.
os.kill(os.getpid(), signal.SIGINT)
print("stops")
"""


@pytest.mark.parametrize(
    "nohup,printed", [("", "129\nstops\n"), ("nohup", "goes on\n143\nstops\n")]
)
def test_a_closed_terminal_ends_a_run_unless_nohup_started_it(nohup, printed):
    command = [*nohup.split(), sys.executable, "-c", HANGED_UP]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        # the tests themselves may have been started by nohup
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert (done.stdout, done.returncode) == (printed, 0)


def test_death_of_a_process_ends_the_run_with_its_last_error(tmp_path):
    error = "echo first; echo 'Boom: OSError: no disk' >&2; echo 'nanobind: leaked' >&2; exit 5"
    with launched(tmp_path, ("train", TRAIN), ("actor", error)) as (process, output, _):
        assert process.wait(40) == 1
        assert "run.sh: actor died with exit code 5, stopping" in output()
        assert output().rstrip().splitlines()[-1] == "  [actor] Boom: OSError: no disk"
        assert not marked(tmp_path)


# ---- serve


def test_serve_starts_engines_with_the_runs_knobs(tmp_path, monkeypatch):
    config = resolved("toy", "--out", tmp_path, "--model", tmp_path, "--max_model_len", "100")
    (tmp_path / "config.json").touch()
    _, start = rundir.hold(config)
    run_dir = rundir.write(config, start)
    calls = []
    monkeypatch.setattr(run, "run", lambda *arguments: calls.append(arguments))
    run.serve(["--run", "toy", "--out", str(tmp_path), "--engines", "2"])
    ((c, processes, joined),) = calls
    assert (c.engines, c.max_model_len, joined) == (2, 100, start)
    names = [name for name, _, _ in processes]
    [serve_id] = {re.fullmatch(r"serve-127.0.0.1-(\w+)-engine[01]", name)[1] for name in names}
    assert names == [f"serve-127.0.0.1-{serve_id}-engine{i}" for i in range(2)]
    assert all(env["PIPELINE_RUN_DIR"] == str(run_dir) for _, env, _ in processes)
    assert processes[0][2] != placement.engine_commands(config, 0)[0][2]
