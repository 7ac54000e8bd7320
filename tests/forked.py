"""Runs pytest in a copy of the repository, in a process that need not import torch anew.

Each process is forked from one that has imported libraries, and no file of this project.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

LIBRARIES = ["torch", "torch.distributed.fsdp", "transformers", "aiohttp", "pytest"]
LIBRARIES += ["transformers.models.qwen2.modeling_qwen2", "torch.distributed.checkpoint"]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(LIBRARIES)


def _run(folder, arguments, log):
    """In the new process: its output goes to the file `log`, its modules come from `folder`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    tests = Path(__file__).parent
    others = [path for path in sys.path if path not in (str(tests), str(tests.parent))]
    sys.path[:] = [folder, *others]
    os.environ |= dict(PYTHONPATH=folder, PIPELINE_PYTHON=sys.executable)
    sys.exit(pytest.main(arguments))


def run_pytest(folder, arguments, seconds):
    """Run pytest in a folder; AssertionError with its output if a test fails."""
    log = Path(f"{folder}.log")
    process = context.Process(target=_run, args=(str(folder), arguments, str(log)))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"pytest {arguments}\n{log.read_text()}"
