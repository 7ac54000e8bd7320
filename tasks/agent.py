"""Agents in a program of their own: any client, framework or environment that takes an OpenAI URL, unchanged.

    AGENT="python examples/agents/openai_tools.py" bash run.sh smol --task agent --tool_parser hermes

$AGENT, which may have a virtual environment of its own, is started twice: with `problems train SEED` it prints its
problems, a JSON object with "prompt" each; with `attempts` it reads {"base_url", "api_key", "problem"}, a line each,
and answers {"api_key", "reward" or "error"}, in any order (examples/agents/loop.py does that).
"""

import asyncio
import functools
import json
import os
import shlex
import subprocess


def command(*words):
    if "AGENT" not in os.environ:
        raise ValueError("AGENT is not set: which command is the agent?")
    return [*shlex.split(os.environ["AGENT"]), *words]


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
    """(the process, {key of an attempt: Future of its answer})."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24)
    process = await asyncio.create_subprocess_exec(*command("attempts"), **pipes)
    asked = {}
    process.reader = asyncio.create_task(read(process, asked))
    return process, asked


async def read(process, asked):
    async for line in process.stdout:
        answer = json.loads(line)
        # the attempt may have been given up
        if not asked[answer["api_key"]].done():
            asked[answer["api_key"]].set_result(answer)
    agent.cache_clear()
    for future in asked.values():
        if not future.done():
            future.set_result({"error": "it has ended"})


async def episode(problem, model):
    """The agent's own reward."""
    process, asked = await agent()
    question = dict(base_url=model.base_url, api_key=model.api_key, problem=problem)
    asked[model.api_key] = asyncio.get_running_loop().create_future()
    process.stdin.write(json.dumps(question).encode() + b"\n")
    answer = await asked[model.api_key]
    if "reward" not in answer:
        raise RuntimeError(f"$AGENT: {answer.get('error')}")
    return answer["reward"]
