"""An environment of the package `verifiers` (pip install verifiers): for tasks/agent.py."""

import os

import directory
import openai_tools
import verifiers.v1 as vf
from loop import main

# where verifiers looks for the class of a harness whose id is a module's name
__all__ = ["Clerk"]
# every attempt has an HTTP client, which would read a file of certificates: 20 ms of CPU
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")


class Data(vf.TaskData):
    problem: dict


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        return directory.reward(self.data.problem, trace.last_reply)


class Clerk(vf.Harness[vf.HarnessConfig]):
    """An agent and its tool, here. Verifiers' own harnesses take uv and a process for each attempt."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        await openai_tools.attempt(data.problem, endpoint, secret)
        return vf.ProgramResult(0, "", "")


async def attempt(problem, base_url, api_key):
    # verifiers takes keys from there alone
    os.environ[api_key] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    how = dict(model="policy", client=client, runtime=vf.SubprocessConfig())
    agent = vf.Agent(vf.AgentConfig(harness={"id": __name__}, **how))
    try:
        trace = await agent.run(Task(Data(prompt=problem["prompt"], problem=problem)))
    finally:
        del os.environ[api_key]
    if not trace.ok:
        raise RuntimeError(trace.last_error.message)
    return trace.reward


if __name__ == "__main__":
    main(directory.problems, attempt)
