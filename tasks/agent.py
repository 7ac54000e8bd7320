"""Agents that are a program of their own, with any framework that takes an OpenAI URL.

    AGENT="/path/to/python /path/to/my_agent.py" bash run.sh smol --run mine --task agent \\
        --max_new_tokens 400 --max_model_len 2048 --row_tokens 2048

The program may have a Python environment of its own. It is started twice:

    $AGENT problems train SEED   prints its problems, one line of JSON each, with "prompt"
    $AGENT attempts              reads lines {"base_url", "api_key", "problem"}, makes an attempt
                                 for each, and prints lines {"api_key", "reward" or "error"}, in
                                 any order

examples/agents/loop.py does the reading and printing. examples/agents/openai_tools.py is the
default program.
"""

import asyncio
import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys

import config as cfg
from plumbing.episode import AttemptLost


def command(*arguments):
    """The command line of the agent's program, with these arguments."""
    example = f"{sys.executable} {cfg.ROOT}/examples/agents/openai_tools.py"
    return [*shlex.split(os.environ.get("AGENT", example)), *arguments]


@functools.cache
def problems(split, seed=0):
    """The problems that the agent prints. Raises ValueError with its last output if it fails."""
    listing = subprocess.run(
        command("problems", split, str(seed)), capture_output=True, text=True, timeout=600
    )
    if listing.returncode:
        raise ValueError(f"$AGENT: {' '.join(listing.stderr.split())[-300:]}")
    return [json.loads(line) for line in listing.stdout.splitlines()]


@functools.cache
def agent():
    """The asyncio task that starts the process which makes all attempts; see `start`.

    It is kept until the process ends (`read`); then the next attempt starts another one.
    """
    return asyncio.create_task(start())


async def start():
    """Start the process. Returns (process, {api_key of an attempt: Queue for its answer})."""
    process = await asyncio.create_subprocess_exec(
        *command("attempts"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # most bytes of a line
        limit=1 << 24,
    )
    waiting = {}
    process.reader = asyncio.create_task(read(process, waiting))
    return process, waiting


async def read(process, waiting):
    """Give each answer to its attempt until the process ends. All other lines are ignored.

    A line of more than `limit` bytes ends it, as what follows cannot be read.
    """
    try:
        async for line in process.stdout:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                answer = json.loads(line)
                waiting.pop(answer["api_key"]).put_nowait(answer)
    except ValueError as e:
        print(f"actor: tasks/agent.py: $AGENT is ended: a line is too long ({e})", flush=True)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    agent.cache_clear()
    for queue in waiting.values():
        queue.put_nowait({})
    # its children, if it has any, may keep its output open
    await process.wait()


async def episode(problem, model):
    """The reward that the agent prints for this attempt."""
    process, waiting = await agent()
    queue = asyncio.Queue()
    waiting[model.api_key] = queue
    request = dict(base_url=model.base_url, api_key=model.api_key, problem=problem)
    process.stdin.write(json.dumps(request).encode() + b"\n")
    answer = await queue.get()
    if not answer:
        # its process has ended: no fault of the model
        raise AttemptLost("$AGENT: it has ended")
    if "reward" not in answer:
        raise RuntimeError(f"$AGENT: {answer.get('error', 'its answer has no reward')}")
    return answer["reward"]
