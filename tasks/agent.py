"""Agents in a program of their own: any client, framework or environment that takes an OpenAI URL, unchanged.

    AGENT="/path/to/python /path/to/my_agent.py" bash run.sh smol --task agent

$AGENT, which may have a virtual environment of its own, is started twice: with `problems train SEED` it prints its
problems, a JSON object with "prompt" each; with `attempts` it reads {"base_url", "api_key", "problem"}, a line each,
and answers {"api_key", "reward" or "error"}, in any order (examples/agents/loop.py does that). Without $AGENT it is
examples/agents/openai_tools.py, which `bash run.sh agent` trains.
"""

import asyncio
import functools
import json
import os
import shlex
import subprocess
import sys

import config as cfg


def command(*words):
    example = f"{sys.executable} {cfg.ROOT}/examples/agents/openai_tools.py"
    return [*shlex.split(os.environ.get("AGENT", example)), *words]


@functools.cache
def problems(split, seed=0):
    """What the agent says. Raises ValueError with its last words."""
    done = subprocess.run(command("problems", split, str(seed)), capture_output=True, text=True)
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
    async for line in process.stdout:
        answer = json.loads(line)
        asked.pop(answer["api_key"]).put_nowait(answer)
    agent.cache_clear()
    for queue in asked.values():
        queue.put_nowait({"error": "it has ended"})


async def episode(problem, model):
    """The agent's own reward."""
    process, asked = await agent()
    question = dict(base_url=model.base_url, api_key=model.api_key, problem=problem)
    queue = asked[model.api_key] = asyncio.Queue()
    process.stdin.write(json.dumps(question).encode() + b"\n")
    answer = await queue.get()
    if "reward" not in answer:
        raise RuntimeError(f"$AGENT: {answer.get('error')}")
    return answer["reward"]
