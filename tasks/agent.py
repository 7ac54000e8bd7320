"""Agents in a program of their own: any client, framework or environment that takes an OpenAI URL, unchanged.

    AGENT="/path/to/python /path/to/my_agent.py" bash run.sh smol --task agent

$AGENT, which may have a virtual environment of its own, is started twice: with `problems train SEED` it prints its
problems, JSON with "prompt" each; with `attempts` it reads {"base_url", "api_key", "problem"}, a line each, and answers
{"api_key", "reward" or "error"}, in any order (examples/agents/loop.py does that; openai_tools.py is the default).
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


def command(*words):
    example = f"{sys.executable} {cfg.ROOT}/examples/agents/openai_tools.py"
    return [*shlex.split(os.environ.get("AGENT", example)), *words]


@functools.cache
def problems(split, seed=0):
    """Raises ValueError with the agent's last words."""
    how = dict(capture_output=True, text=True, timeout=600)
    done = subprocess.run(command("problems", split, str(seed)), **how)
    if done.returncode:
        raise ValueError(f"$AGENT: {' '.join(done.stderr.split())[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def agent():
    """The process that makes all attempts, as a task that starts it; another one if it has ended."""
    return asyncio.create_task(start())


async def start():
    """(the process, {key of an attempt: Queue of its answer})."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24)
    process = await asyncio.create_subprocess_exec(*command("attempts"), **pipes)
    asked = {}
    process.reader = asyncio.create_task(read(process, asked))
    return process, asked


async def read(process, asked):
    """Hands out answers; whatever else an agent prints, and second answers, are passed over."""
    async for line in process.stdout:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            answer = json.loads(line)
            asked.pop(answer["api_key"]).put_nowait(answer)
    agent.cache_clear()
    for queue in asked.values():
        queue.put_nowait({})


async def episode(problem, model):
    """The agent's own reward."""
    process, asked = await agent()
    question = dict(base_url=model.base_url, api_key=model.api_key, problem=problem)
    queue = asked[model.api_key] = asyncio.Queue()
    process.stdin.write(json.dumps(question).encode() + b"\n")
    answer = await queue.get()
    if "reward" not in answer:
        kind = RuntimeError if answer else AttemptLost
        raise kind(f"$AGENT: {answer.get('error', 'it has ended')}")
    return answer["reward"]
