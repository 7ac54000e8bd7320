"""An agent for tasks/agent.py: the program Codex, whose commands run in its own sandbox.

It needs `npm install -g @openai/codex` and `apt install bubblewrap`.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import files
from loop import main

# Codex keeps programs of its sandbox here, and refuses to in a directory for temporary files
HOME = Path(os.environ.get("CODEX_HOME", "~/.codex")).expanduser()
HOME.mkdir(parents=True, exist_ok=True)
FLAGS = "--ephemeral --ignore-user-config --skip-git-repo-check --sandbox workspace-write".split()
# Each attempt in progress is a process of Codex; others wait
PROCESSES = asyncio.Semaphore(2 * os.cpu_count())


async def attempt(problem, base_url, api_key):
    """Let Codex work in an empty folder. The reward is 1 if the file then holds the number."""
    provider = dict(name="run", base_url=base_url, env_key="ATTEMPT_KEY", wire_api="responses")
    options = ["--model", "policy", "--config", "model_provider=run"]
    for name, value in provider.items():
        options += ["--config", f'model_providers.run.{name}="{value}"']
    env = os.environ | {"CODEX_HOME": str(HOME), "ATTEMPT_KEY": api_key}
    async with PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            codex = await asyncio.create_subprocess_exec(
                *("codex", "exec", *FLAGS, *options, problem["prompt"]),
                cwd=folder,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                # What it prints would fill the actor's log
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            await codex.wait()
            return files.reward(problem, folder)


if __name__ == "__main__":
    main(files.problems, attempt)
