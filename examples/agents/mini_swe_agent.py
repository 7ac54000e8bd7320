"""An agent for tasks/agent.py with mini-swe-agent (pip install mini-swe-agent), which writes shell
commands. They run in a jail of the package's own (apt install bubblewrap).
"""

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor

# Otherwise the package prints a greeting among the problems.
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import litellm
from loop import main
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = """Answer with a single bash command in a block, as in this example:
```bash
ls -l
```
When all is done, the command is: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"""
THREADS = ThreadPoolExecutor(64)


def problems(split, seed):
    rng = random.Random(f"{split}{seed}")
    numbers = rng.sample(range(1000, 10000), 500)
    prompt = "Write the number {} into the file answer.txt."
    return [dict(prompt=prompt.format(number), number=number) for number in numbers]


def play(problem, base_url, api_key):
    options = dict(api_base=base_url, api_key=api_key)
    model = LitellmTextbasedModel(
        model_name="openai/policy",
        model_kwargs=options,
        cost_tracking="ignore_errors",
        action_regex=r"```bash\s*\n(.*?)\n```",
    )
    env = BubblewrapEnvironment()
    agent = DefaultAgent(
        model, env, system_template=SYSTEM, instance_template="{{task}}", step_limit=3
    )
    try:
        agent.run(problem["prompt"])
    except litellm.exceptions.ContextWindowExceededError:
        # The attempt has no tokens left: it is graded by what it has done.
        pass
    path = env.working_dir / "answer.txt"
    is_right = path.is_file() and path.read_text().strip() == str(problem["number"])
    env.cleanup()
    return float(is_right)


async def attempt(problem, base_url, api_key):
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(THREADS, play, problem, base_url, api_key)


if __name__ == "__main__":
    main(problems, attempt)
