"""An environment of the package `verifiers` (pip install verifiers): for tasks/agent.py."""

import asyncio
import functools
import json
import os
import sys
from contextlib import AsyncExitStack

import directory
import verifiers.v1 as vf
from loop import main
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.mcp import serve_shared

# what verifiers looks for in a module that is a harness's id
__all__ = ["Loop"]
# an attempt has three HTTP clients: each would read a file of certificates, for 20 ms
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")


class Data(vf.TaskData):
    problem: dict


class State(vf.State):
    problem: dict = {}


class Clerk(vf.Task[Data, State]):
    async def setup(self, trace):
        trace.state.problem = self.data.problem

    @vf.reward
    async def right(self, trace):
        return directory.reward(self.data.problem, trace.last_reply)


class Tools(vf.Toolset[vf.SharedToolsetConfig, State]):
    # a program of its own, `python -m verifiers_env`, which asks for the state of an attempt
    __module__ = "verifiers_env"
    TOOL_PREFIX = None

    @vf.tool
    def lookup(self, name: str) -> str:
        """The number of a name."""
        return directory.lookup(self.state.problem, name)


class Loop(vf.Harness[vf.HarnessConfig]):
    """As verifiers' "null", which takes uv, the internet, and a process for each attempt."""

    SUPPORTS_MCP, NEEDS_CONTAINER = True, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        urls = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client, AsyncExitStack() as stack:
            tools, names, servers = await connect_mcp(urls, stack)
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                message = answer.choices[0].message
                if not message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                messages.append(message)
                for call in message.tool_calls:
                    try:
                        arguments = {**json.loads(call.function.arguments)}
                        found = await call_mcp(servers, names, call.function.name, arguments)
                    except (ValueError, TypeError, LookupError) as e:
                        found = str(e)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


@functools.cache
def tools():
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return asyncio.create_task(
        STACK.enter_async_context(serve_shared([Tools(vf.SharedToolsetConfig())]))
    )

STACK = AsyncExitStack()


async def attempt(problem, base_url, api_key):
    # verifiers reads keys from there alone
    os.environ[api_key] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    how = dict(model="policy", client=client, runtime=vf.SubprocessConfig(), max_turns=4)
    agent = vf.Agent(vf.AgentConfig(harness={"id": __name__}, **how))
    task = Clerk(Data(prompt=problem["prompt"], problem=problem))
    try:
        trace = await agent.run(task, tools=await tools())
    finally:
        del os.environ[api_key]
    if not trace.ok:
        raise RuntimeError(trace.last_error.message)
    return trace.reward


if __name__ == "__main__":
    Tools.run() if "VF_CONFIG" in os.environ else main(directory.problems, attempt)
