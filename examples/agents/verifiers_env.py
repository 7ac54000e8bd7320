"""An agent for tasks/agent.py in an environment of `verifiers` (pip install verifiers)."""

import os

import directory
import openai_tools
import verifiers.v1 as vf
from loop import main

# verifiers looks here for the class of a harness whose id is the name of a module
__all__ = ["Clerk"]
# Each attempt has an HTTP client, which would spend 20 ms of CPU on reading a file of certificates
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")


class Data(vf.TaskData):
    problem: dict


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        return directory.reward(self.data.problem, trace.last_reply)


class Clerk(vf.Harness[vf.HarnessConfig]):
    """An agent and its tool, in this process.

    The harnesses of verifiers itself need uv, and a process for each attempt.
    """

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        await openai_tools.attempt(data.problem, endpoint, secret)
        return vf.ProgramResult(0, "", "")


async def attempt(problem, base_url, api_key):
    # verifiers takes keys from environment variables alone
    os.environ[api_key] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    config = vf.AgentConfig(
        harness={"id": __name__},
        model="policy",
        client=client,
        runtime=vf.SubprocessConfig(),
    )
    agent = vf.Agent(config)
    try:
        trace = await agent.run(Task(Data(prompt=problem["prompt"], problem=problem)))
    finally:
        del os.environ[api_key]
    if not trace.ok:
        raise RuntimeError(trace.last_error.message)
    return trace.reward


if __name__ == "__main__":
    main(directory.problems, attempt)
