"""Fixtures and functions that the tests share: the repository on the path, the toy base model, and
one real vLLM server for all tests of a process.
"""

import dataclasses
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = str(ROOT)
# Several processes share the cores: threads that wait by spinning would starve the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The number of this process among those of pytest-xdist, whose names are "gw0", "gw1", ...
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# The port of the shared engine: each process has one. Other tests use ports from 8690 to 8999 and
# from 9400 on.
PORT = 9000 + 10 * PROCESS
# Files that take minutes, the longest first: if one of them began last, a process would wait for it
# at the end.
LONG = """
    failures agents run agent_packages ledger doctor model edits ranks evaluate nodes weights engine
    continued gpu compare gym lora start memory launch engine_flags routing wandb pace replay
""".split()


def pytest_collection_modifyitems(items):
    def order(item):
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=order)


@pytest.fixture(scope="session")
def base_model():
    """The directory of the toy base model of seed 0, which is made once in about 25 s."""
    path = ROOT / "out" / "models" / "toy-seed0"
    if not (path / "config.json").exists():
        # A process of its own makes it, as under run.sh.
        program = f"from tools import prepare; prepare.bring_model({str(path)!r}, 'toy')"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    return path


def jail_problem():
    """Why programs cannot be jailed here; "" if they can."""
    from tasks import _jail

    try:
        _jail.require_shell()
    except ValueError as e:
        return str(e)
    return ""


def resolved(*argv, gpus=0):
    """Return the Config of a command line, as run.sh resolves it."""
    import config as cfg
    from plumbing import placement

    return placement.resolve(cfg.parse([str(a) for a in argv]), gpus)


def wait_until(condition, seconds=300):
    """Wait until condition() is true, and return its value; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    result = condition()
    while not result:
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds} s"
        time.sleep(0.02)
        result = condition()
    return result


def with_knobs(config, **knobs):
    """Return a copy of a Config with these knobs changed."""
    return dataclasses.replace(config, **knobs)


def node_of(env, folder):
    """Return (node number, number of nodes) that run.sh gives tools/run.py in this environment."""
    python = Path(folder, "python")
    python.write_text('#!/bin/sh\necho "${NODE_RANK:-0} ${NNODES:-1} ${RANK:-none}"\n')
    python.chmod(0o755)
    clean = {"PATH": os.defpath, "PIPELINE_PYTHON": str(python)}
    command = ["/bin/bash", str(ROOT / "run.sh")]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, check=True)
    node, n, rank = done.stdout.split()
    # A RANK from run.sh itself would mislead the processes that the launcher starts.
    assert rank == "none"
    return int(node), int(n)


@pytest.fixture(scope="module", autouse=True)
def process_group_ends_with_the_file():
    """Destroy the process group that the tests of a file have made, if there is one.

    Otherwise the tests of the next file in this process would find it.
    """
    yield
    # A file whose tests do not import these libraries need not import them here.
    if "accelerate" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        from plumbing.ranks import Ranks

        Ranks.close()


def register(run_dir, name, url):
    """Tell a run's trainer that an engine has been started, as plumbing/supervise.py does."""
    from plumbing.queues import publish_json

    folder = Path(run_dir, "engines")
    folder.mkdir(parents=True, exist_ok=True)
    publish_json(folder / f"{name}.json", url=url, started=secrets.token_hex(4))


@pytest.fixture(scope="session")
def engine(base_model, tmp_path_factory):
    """A real vLLM server with the toy model; yields its Config."""
    from plumbing import rundir
    from plumbing.supervise import stop
    from tools.evaluate import start_engines

    out = tmp_path_factory.mktemp("engine")
    config = resolved("toy", "--run", "engine", "--out", out, "--port", PORT, "--concurrency", "64")
    config.prefix_caching = "on"
    rundir.write(config)
    # Its core must answer within 30 s, so that a test need not wait for long until it hangs.
    limited = with_knobs(config, stall_timeout=180.0, sync_timeout=30.0)
    engines = start_engines(limited, as_loaded=False)
    config.port = limited.port
    yield config
    stop(engines, 0)
