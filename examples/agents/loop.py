"""The main loop of an agent for tasks/agent.py: `main(problems, attempt)`.

problems(split, seed) returns dicts with a "prompt"; async attempt(problem, base_url, api_key)
returns the reward. This file needs the standard library alone.
"""

import asyncio
import contextlib
import json
import os
import sys


def main(problems, attempt):
    if sys.argv[1] == "problems":
        for problem in problems(sys.argv[2], int(sys.argv[3])):
            print(json.dumps(problem))
    else:
        # Answers go to stdout. All other output, that of child processes included, goes to stderr,
        # so that it does not come between the answers
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        asyncio.run(serve(attempt, answers))


def number(value):
    """The plain number of a number type of numpy, torch or fractions; raises if it is no number."""
    return value.item() if hasattr(value, "item") else value.__float__()


async def serve(attempt, answers):
    async def answer(problem, base_url, api_key):
        try:
            reward = await attempt(problem, base_url, api_key)
            line = json.dumps({"api_key": api_key, "reward": reward}, default=number)
        except (Exception, asyncio.CancelledError) as e:
            line = json.dumps({"api_key": api_key, "error": f"{type(e).__name__}: {e}"})
        # If the actor has ended, nobody reads the answer
        with contextlib.suppress(BrokenPipeError):
            print(line, file=answers, flush=True)

    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running = set()
    async for line in reader:
        task = asyncio.create_task(answer(**json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
