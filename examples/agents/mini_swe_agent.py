"""An agent for tasks/agent.py: mini-swe-agent, whose commands run in bubblewrap.

Its environment needs `pip install mini-swe-agent`, and the machine `apt install bubblewrap`.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

# Otherwise mini-swe-agent prints a greeting, which would come between the lines of `main`
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import files
from litellm import ContextWindowExceededError
from loop import main
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

# mini-swe-agent waits for each answer, so every attempt in progress has a thread
THREADS = ThreadPoolExecutor(64)
MODEL = dict(model_name="openai/policy", action_regex=r"```(?:bash|sh)\n(.*?)\n?```")
TEMPLATES = dict(system_template="Answer with a ```bash block.", instance_template="{{task}}")


def work(problem, base_url, api_key):
    """Let the agent run three commands. The reward is 1 if the file then holds the number."""
    address = dict(api_base=base_url, api_key=api_key)
    model = LitellmTextbasedModel(**MODEL, model_kwargs=address, cost_tracking="ignore_errors")
    jail = BubblewrapEnvironment()
    try:
        DefaultAgent(model, jail, step_limit=3, **TEMPLATES).run(problem["prompt"])
    except ContextWindowExceededError:
        pass  # No tokens are left: what the agent has done counts
    return files.reward(problem, jail.working_dir)


async def attempt(problem, base_url, api_key):
    return await asyncio.get_running_loop().run_in_executor(
        THREADS, work, problem, base_url, api_key
    )


if __name__ == "__main__":
    main(files.problems, attempt)
