"""The task python_tool and its jail: what a model's programs may do, and hostile programs.

bubblewrap and the programs are real. The model of the last test is FAKE.
"""

import asyncio
import os
import shutil

import pytest

from conftest import jail_problem
from tasks import _jail, python_tool

needs_bubblewrap = pytest.mark.skipif(jail_problem() != "", reason=jail_problem())

# Memory that no limit of a process counts
MEMORY = ("shmget(0, 10**9, 0o1600)", "memfd_create(b'x', 0)", "msgget(0, 0o1600)")
# (program, text that it must have printed, text that it must not have printed)
HOSTILE = [
    ("while True: pass", "ended after 4 s", None),
    ("import time; time.sleep(100)", "ended after 4 s", None),
    ("while True: print('much' * 1000)", "muchmuch", None),
    ("bytearray(10**10)", "MemoryError", None),
    ("import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 10**7))", "Cannot allocate", None),
    ("import os; print(os.fork())", "not permitted", None),
    ("import subprocess; subprocess.run('id')", "not permitted", None),
    ("import multiprocessing as m; m.Process(target=print).start()", "Error", None),
    ("import os\nwhile True: os.posix_spawn('/usr/bin/id', ['id'], {})", "not permitted", None),
    ("import socket; socket.create_connection(('1.1.1.1', 80))", "unreachable", None),
    ("import socket; socket.create_connection(('127.0.0.1', PORT))", "refused", "mine"),
    ("print(open('/etc/passwd').read())", "FileNotFoundError", "root:"),
    ("print(open('SECRET').read())", "FileNotFoundError", "my secret"),
    ("import os; print(os.environ)", "environ", "my secret"),
    ("import os; os.kill(-1, 9)", "", None),
    ("import os; os.kill(HOST, 9)", "ProcessLookupError", None),
    ("open('/usr/lib/x', 'w')", "Read-only", None),
    ("open('x', 'wb').write(bytes(10**8))", "Error", None),
    ("for i in range(100): open(f'{i}', 'wb').write(bytes(10**6))", "No space", None),
    ("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))", "-1", None),
    ("import ctypes; print(ctypes.CDLL(None).mount(b'a', b'/', b'tmpfs', 0, 0))", "-1", None),
    (f"import ctypes; print({', '.join(f'ctypes.CDLL(None).{x}' for x in MEMORY)})", "-1 -1", None),
    ("import signal, time; signal.signal(15, lambda *_: 0)\nwhile True: 1", "ended after", None),
]


@needs_bubblewrap
def test_jail_stops_hostile_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "my secret")
    secret = tmp_path / "secret"
    secret.write_text("my secret")

    async def run():
        server = await asyncio.start_server(lambda r, w: w.write(b"mine"), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        values = {"PORT": str(port), "SECRET": str(secret), "HOST": str(os.getpid())}
        programs = []
        for program, *_ in HOSTILE:
            for name, value in values.items():
                program = program.replace(name, value)
            programs.append(program)
        # Some programs must reach their time limit, on however busy a machine; the others have more
        # time than they need
        limits = [4.0 if "ended after" in must else 120.0 for _, must, _ in HOSTILE]
        found = await asyncio.gather(*map(_jail.run_python, programs, limits))
        # The end of one program does not touch another one
        assert await _jail.run_python("print(1 + 1)", 120.0) == "2\n"
        server.close()
        return found

    for (program, must, must_not), printed in zip(HOSTILE, asyncio.run(run()), strict=True):
        assert must in printed, (program, printed)
        assert must_not is None or must_not not in printed, (program, printed)
        assert len(printed) < _jail.OUTPUT + 100


@needs_bubblewrap
def test_jailed_program_has_a_directory_and_threads():
    program = (
        "import os, threading, math\nprint(os.listdir(), math.sqrt(16))\n"
        "open('a', 'w').write('b')\n"
        "t = threading.Thread(target=lambda: print(open('a').read()))\nt.start(); t.join()"
    )
    assert asyncio.run(_jail.run_python(program, 120.0)) == "[] 4.0\nb\n"
    assert asyncio.run(_jail.run_python("import os; print(os.listdir())", 120.0)) == "[]\n"


def test_task_without_a_jail_is_refused_unless_allowed(tmp_path, monkeypatch):
    _jail.require.cache_clear()
    (tmp_path / "prlimit").symlink_to(shutil.which("prlimit"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt install bubblewrap; PIPELINE_NO_JAIL=1 runs"):
        python_tool.problems("train")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(ValueError, match="bubblewrap is not permitted here: no namespaces"):
        python_tool.problems("train")
    monkeypatch.setenv("PIPELINE_NO_JAIL", "1")
    python_tool.problems("train")
    assert asyncio.run(_jail.run_python("print(7)", 120.0)) == "7\n"


def test_python_tool_episode_by_hand(monkeypatch):
    heard = []

    def model_that_says(*turns):
        answers = iter(turns)

        async def model(text):
            heard.append(text)
            return next(answers)

        return model

    async def run_python(code):
        return {"print(1 + 2)\n": "3\n"}.get(code, "SyntaxError")

    monkeypatch.setattr(_jail, "run_python", run_python)
    problem = dict(prompt="1 + 2?", answer=3, turns=3)
    block = "Let me see:\n```python\nprint(1 + 2)\n```"
    for turns, reward in [
        ([block, "It is 3."], 1.0),
        (["3"], 1.0),
        (["4"], 0.0),
        ([block, block, "1,003"], 0.0),
        ([block, block, block], 0.0),
        (["```python\nprint(3)", "none"], 0.0),
    ]:
        assert asyncio.run(python_tool.episode(problem, model_that_says(*turns))) == reward
    assert heard[:2] == ["1 + 2?", "Output:\n3\nAnswer with the number only."]
