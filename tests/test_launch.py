"""Engines are kept alive, or given up; run.sh stops all that it has started, however it ends."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from conftest import ROOT
from made_up_run import made_up_run
from plumbing import launch
from plumbing.queues import publish_json, read_json

# An "engine": /health answers 200; /quit CODE ends it; it starts a grandchild that leaves its process group.
ENGINE = """
import http.server, os, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/quit"):
            os._exit(int(self.path.split("/")[2]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("grandchild", child.pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def eventually(what, seconds=30):
    """Wait until what() is true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Supervised:
    """A supervisor with the engine above; its words and the engine's."""

    def __init__(self, run_dir, restarts=3, start_timeout=30, command=None):
        self.port = free_port()
        self.file = run_dir / "engines" / "engine0.json"
        self.words = run_dir / "words.txt"
        self.log = run_dir / "log.txt"
        (run_dir / "engine.py").write_text(ENGINE)
        command = command or [sys.executable, str(run_dir / "engine.py"), str(self.port)]
        arguments = [run_dir, "engine0", f"http://127.0.0.1:{self.port}", restarts, start_timeout]
        with open(self.words, "w") as words, open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "plumbing.supervise",
                    *map(str, arguments),
                    "--",
                    *command,
                ],
                cwd=ROOT,
                stdout=words,
                stderr=log,
                start_new_session=True,
            )

    def entry(self):
        return read_json(self.file)

    def get(self, path):
        import requests

        with contextlib.suppress(requests.RequestException):
            return requests.get(f"http://127.0.0.1:{self.port}{path}", timeout=5).ok

    def healthy(self, after=None):
        """Wait for an engine that is listed and answers; returns its entry. after: another one than this."""
        eventually(lambda: self.entry() and self.entry() != after and self.get("/health"))
        return self.entry()

    def grandchildren(self):
        lines = self.log.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("grandchild")]

    def engine(self):
        return psutil.Process(self.process.pid).children()[0]


@pytest.fixture
def supervised(tmp_path):
    made = []

    def start(**options):
        made.append(Supervised(tmp_path, **options))
        return made[-1]

    yield start
    for s in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(s.process.pid, signal.SIGKILL)
        s.process.wait()
        for pid in s.grandchildren():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_dead_engine_is_started_again_until_its_restarts_are_used_up(supervised):
    s = supervised(restarts=1)
    first = s.healthy()
    assert first["url"] == f"http://127.0.0.1:{s.port}"
    s.get("/quit/7")
    eventually(lambda: not s.file.exists())
    assert "engine0 died with exit code 7, restart 1 of 1" in eventually(s.words.read_text)
    assert s.healthy(after=first)["started"] != first["started"]
    assert gone(s.grandchildren()[0])
    s.engine().kill()
    assert s.process.wait(30) == 137
    assert "engine0 died with exit code 137, after 1 restarts" in s.words.read_text()
    assert not s.file.exists() and all(map(gone, s.grandchildren()))


@pytest.mark.slow
@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_started_again(supervised):
    s = supervised()
    first = s.healthy()
    time.sleep(2)
    s.engine().suspend()
    eventually(lambda: "it is killed" in s.words.read_text(), 60)
    s.healthy(after=first)
    assert "exit code 137, restart 1 of 3" in s.words.read_text()


def test_an_engine_that_never_answers_is_given_up(supervised):
    s = supervised(restarts=0, start_timeout=1, command=["sleep", "100"])
    assert s.process.wait(30) == 137
    assert "does not answer" in s.words.read_text()


def test_a_cleared_list_is_written_again_and_a_stopped_engine_is_not_in_it(supervised):
    s = supervised()
    entry = s.healthy()
    s.file.unlink()
    s.file.parent.rmdir()
    assert eventually(s.entry) == entry
    engine = s.engine()
    s.process.terminate()
    assert s.process.wait(30) == 0
    assert not s.file.exists() and gone(engine.pid) and all(map(gone, s.grandchildren()))


# ---- run.sh with processes of our own instead of a run's

# In place of python: `-m plumbing.launch - ...` goes on with a list that we made, anything else is python.
PYTHON = """#!/bin/bash
if [ "$2" = plumbing.launch ]; then exec bash run.sh --list {list}; else exec {python} "$@"; fi
"""


@contextlib.contextmanager
def launched(folder, processes, node="0", grace=25, command="exec bash run.sh toy"):
    """run.sh in a terminal of its own, with these (name, shell command): yields (process, words(), terminal)."""
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    lines = [str(run_dir), node, "", str(grace)]
    lines += [f"{name}\tenv MARK={folder} {command}" for name, command in processes]
    (folder / "list").write_text("\n".join(lines) + "\n")
    python = folder / "python"
    python.write_text(PYTHON.format(list=folder / "list", python=sys.executable))
    python.chmod(0o755)
    said = []
    env = os.environ | {"PIPELINE_PYTHON": str(python), "MARK": str(folder)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe("bash", ["bash", "-c", command], env)

    def read():
        # EIO when the last process has closed the terminal
        with contextlib.suppress(OSError):
            while True:
                said.append(os.read(terminal, 10000).decode(errors="replace"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process = psutil.Process(pid)

    def words():
        # the last words of an ended run are read a moment after its end
        if not process.is_running():
            reader.join(5)
        return "".join(said)

    try:
        yield process, words, terminal
    except BaseException:
        # what it looked like when it went wrong
        print(words())
        for p in marked(folder):
            print(p.pid, p.ppid(), p.status(), p.cmdline())
        raise
    finally:
        for p in marked(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(10)
        os.close(terminal)


def marked(folder):
    """Processes that were started in `launched`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == str(folder) and process.status() != "zombie":
                found.append(process)
    return found


def commands(folder):
    """The command lines, as lists of words, of what was started in `launched`."""
    found = []
    for process in marked(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.cmdline())
    return found


# says what it was told; the trainer takes a second to save
TRAIN = """bash -c 'trap "sleep 1; echo saved; exit 3" TERM; echo started; while :; do sleep 0.1; done'"""
OTHER = """bash -c 'trap "" TERM; sleep 1000 & wait; wait'"""


# takes its time to save
SLOW = TRAIN.replace("sleep 1", "for i in {1..7}; do sleep 1; done")


@pytest.mark.parametrize("seconds,saved", [(None, False), (5, True)])
def test_a_stop_waits_as_long_as_the_last_checkpoint_took_thrice(tmp_path, seconds, saved):
    with launched(tmp_path, [("train", SLOW)], grace=1) as (process, words, _):
        eventually(lambda: "started" in words())
        if seconds:
            (tmp_path / "run" / "queues").mkdir()
            (tmp_path / "run" / "queues" / "save_seconds").write_text(f"{seconds}\n")
        process.terminate()
        eventually(lambda: not marked(tmp_path), 40)
        log = (tmp_path / "run" / "logs" / "train.log").read_text()
    assert ("\nsaved\n" in log) == saved


@pytest.mark.slow
def test_ranks_are_told_to_save_or_end_at_once_when_one_of_them_is_dead(tmp_path):
    ranks = [("train", SLOW), ("train1", SLOW)]
    with launched(tmp_path, ranks) as (process, words, _):
        eventually(lambda: words().count("started") == 2)
        process.terminate()
        eventually(lambda: not marked(tmp_path), 40)
    for name in ("train", "train1"):
        assert "\nsaved\n" in (tmp_path / "run" / "logs" / f"{name}.log").read_text()
    # stuck in what it does together with the dead one
    stuck = [("train", OTHER), ("train1", "bash -c 'sleep 1; exit 3'")]
    with launched(tmp_path, stuck, grace=1000) as (process, words, _):
        assert process.wait(60) == 1
        assert "train1 died with exit code 3" in words()
        eventually(lambda: not marked(tmp_path), 40)


def test_on_a_terminal_a_line_stays_below_what_is_said(tmp_path):
    made_up_run(tmp_path, "run", rollouts=0)
    with launched(tmp_path, [("train", TRAIN)]) as (process, words, terminal):
        eventually(lambda: "[train] started" in words() and "step 60/270, eta" in words())
        os.write(terminal, b"\x03")
        assert process.wait(40) == 130
        assert "run.sh: interrupted, stopping; the same command continues" in words()
        assert "Traceback" not in words()
        # the line is wiped away, and the cursor is there again
        assert words().rstrip().endswith("\x1b[2K") and "\x1b[?25h" in words()


@pytest.mark.parametrize("how", ["ctrl-c", "term", "kill"])
def test_run_sh_stops_everything_however_it_ends(tmp_path, how):
    with launched(tmp_path, [("engine0", OTHER), ("train", TRAIN)]) as (process, words, terminal):
        eventually(lambda: "started" in words())
        if how == "ctrl-c":
            os.write(terminal, b"\x03")
        else:
            process.send_signal(signal.SIGTERM if how == "term" else signal.SIGKILL)
        code = process.wait(40)
        eventually(lambda: not marked(tmp_path), 40)
        word, expected = {"ctrl-c": ("interrupted", 130), "term": ("terminated", 143)}.get(
            how, ("", None)
        )
        if word:
            assert f"run.sh: {word}, stopping; the same command continues" in words()
            assert code == expected
        assert "saved" in (tmp_path / "run" / "logs" / "train.log").read_text()


def test_a_death_ends_the_run_with_its_last_words(tmp_path):
    dies = """bash -c 'echo first; echo last words >&2; exit 5'"""
    with launched(tmp_path, [("train", TRAIN), ("actor", dies)]) as (process, words, _):
        assert process.wait(40) == 1
        assert "run.sh: actor died with exit code 5; its last 20 log lines" in words()
        assert "  [actor] last words" in words()
        assert (
            "everything is stopped; there is no checkpoint yet, the same command starts anew"
            in words()
        )
        assert not marked(tmp_path)


FULL = """
import os, sys
sys.path.insert(0, {root!r})
from plumbing.log import last_words

def fill(file):
    for size in (1 << 16, 1):
        try:
            while os.write(file, b"x" * size):
                pass
        except OSError:
            pass

sys.excepthook = last_words
print("has begun", flush=True)
out = os.open({run!r} + "/logs/fill", os.O_WRONLY | os.O_CREAT)
fill(out)
# the log, too, to the end of its page
fill(2)
raise OSError(28, "no room for a checkpoint")
"""


@pytest.mark.parametrize("name", ["train", "actor"])
def test_a_full_disk_does_not_keep_the_reason_from_the_terminal(tmp_path, name):
    """The logs' own: a small file system of this process's."""
    inside = ["unshare", "-rm"]
    if subprocess.run([*inside, "true"]).returncode:
        pytest.skip("no namespaces here")
    run = str(tmp_path / "run")
    (tmp_path / "full.py").write_text(FULL.format(root=str(ROOT), run=run))
    mount = f"mount -t tmpfs -o size=64k none {run}/logs && exec bash run.sh toy"
    command = f"exec {' '.join(inside)} bash -c '{mount}'"
    dies = f"{sys.executable} {tmp_path}/full.py"
    with launched(tmp_path, [(name, dies)], command=command) as (process, words, _):
        assert process.wait(40) == 1
        assert f"[{name}] has begun" in words()
        assert f"[{name}] OSError: [Errno 28] no room for a checkpoint" in words()
        assert f"run.sh: {name} died with exit code 1" in words()


def test_logs_that_cannot_be_written_at_all_end_a_run_with_that_reason(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "train.log").symlink_to("/dev/full")
    with launched(tmp_path, [("engine0", OTHER), ("train", TRAIN)]) as (process, words, _):
        assert process.wait(40) == 1
        assert "No space left on device" in words()
        eventually(lambda: not marked(tmp_path), 40)


def test_a_run_directory_that_vanished_is_said(tmp_path):
    waits = f"""bash -c 'until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 4'"""
    with launched(tmp_path, [("preprocess", waits)]) as (process, words, _):
        eventually((tmp_path / "run" / "logs" / "preprocess.log").exists)
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "go").touch()
        assert process.wait(40) == 1
        assert "is not there any more: mount it again" in words()


def test_a_base_model_that_cannot_be_made_and_ctrl_c_meanwhile(tmp_path):
    with launched(tmp_path, [("prepare", "false"), ("train", TRAIN)]) as (process, words, _):
        assert process.wait(40) == 1
        assert "making the base model failed, see" in words() and "started" not in words()
    # as soon as anything runs: bash is then still reading its own lines
    for _ in range(3):
        with launched(tmp_path, [("prepare", "sleep 1000")]) as (process, words, terminal):
            eventually(lambda: any("sleep" in command for command in commands(tmp_path)))
            os.write(terminal, b"\x03")
            assert process.wait(40) == 130
            eventually(lambda: "run.sh: interrupted" in words() and not marked(tmp_path))


@pytest.mark.parametrize("code", [0, 1])
def test_word_from_node_0_ends_a_node_without_a_trainer(tmp_path, code):
    nodes = f"""bash -c 'sleep 1; echo "nodes: node 0 has stopped: x" >&2; exit {code}'"""
    with launched(tmp_path, [("nodes", nodes), ("engine0", OTHER)], "1") as (process, words, _):
        assert process.wait(40) == code
        assert ("run.sh: nodes: node 0 has stopped: x" in words()) == bool(code)
        assert not marked(tmp_path)


# ---- serve


@pytest.fixture
def run_dir(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    argv = ["toy", "--out", str(tmp_path), "--port", str(free_port()), "--model", str(model)]
    c = launch.cfg.parse(argv, 0)
    launch.resolve(c, 0)
    launch.open_run(c)
    return launch.write(c)


def serve(run_dir, *argv):
    """`run.sh serve`'s list: (head, [(name, command)]) or its error."""
    list_file = run_dir / "list"
    command = [sys.executable, "-m", "plumbing.launch", str(list_file), "serve", "--run", "toy"]
    done = subprocess.run(
        [*command, "--out", str(run_dir.parent), *argv], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        return done.stderr.strip()
    lines = list_file.read_text().splitlines()
    return lines[:4], [line.split("\t") for line in lines[4:]]


def test_serve_lists_supervised_engines_and_waits_for_the_end(run_dir):
    c = launch.cfg.load(str(run_dir))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", c.port + 100))
        head, processes = serve(run_dir, "--engines", "2")
    assert head == [str(run_dir), "serve", f".127.0.0.1-{c.port + 101}", "25"]
    assert [name for name, _ in processes] == ["nodes", "engine0", "engine1"]
    assert f"until_done {run_dir} {c.run_id}" in processes[0][1]
    for i, (_, command) in enumerate(processes[1:], 101):
        url = f"http://127.0.0.1:{c.port + i}"
        assert f"supervise {run_dir} serve-127.0.0.1-{c.port + i} {url} 3" in command
        assert f"PIPELINE_RUN_DIR={run_dir}" in command and f"--port {c.port + i} " in command


def test_serve_refuses_what_is_the_runs(run_dir):
    words = serve(run_dir, "--temperature", "2")
    assert words.startswith("run.sh: --temperature is the run's") and "\n" not in words
    assert "no run in" in serve(run_dir, "--run", "another")
    c = launch.cfg.load(str(run_dir))
    line = {"eval": {"toy": 1.0}, "problems": 1, "version": c.steps, "wall_s": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "is complete" in serve(run_dir)


def test_an_engine_that_serves_ends_with_the_run_or_when_another_has_its_name(run_dir):
    run_id = json.loads((run_dir / "config.json").read_text())["config"]["run_id"]
    command = [sys.executable, "-m", "plumbing.nodes", "until_done", str(run_dir), run_id]

    def start():
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    process = start()
    time.sleep(2)
    assert process.poll() is None
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=1, engines=[], done=True)
    assert process.wait(20) == 0
    (run_dir / "queues" / "version.json").unlink()
    process = start()
    time.sleep(1)
    run_dir.rename(Path(f"{run_dir}.1"))
    assert process.wait(20) == 1
    assert "is not there any more, or of another run" in process.stderr.read()
