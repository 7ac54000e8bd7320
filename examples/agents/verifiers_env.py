"""An environment of the package `verifiers` (pip install verifiers): for tasks/agent.py."""

import asyncio
import functools
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import directory
import verifiers.v1 as vf
from loop import main
from openai import AsyncOpenAI
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.mcp import serve_shared

# of the plugin `__name__`, which an AgentConfig asks for
__all__ = ["InProcess"]
CLIENT = AsyncOpenAI(api_key="none")
STACK = AsyncExitStack()


class Data(vf.TaskData):
    problem: dict


class State(vf.State):
    problem: dict = {}


class Task(vf.Task[Data, State]):
    async def setup(self, trace):
        trace.state.problem = self.data.problem

    @vf.reward
    async def right(self, trace):
        return directory.reward(self.data.problem, trace.last_reply)


class Tools(vf.Toolset[vf.SharedToolsetConfig, State]):
    TOOL_PREFIX = None
    # what `python -m` runs for its server
    __module__ = Path(__file__).stem

    @vf.tool
    def lookup(self, name: str) -> str:
        """The number of a name."""
        return directory.lookup(self.state.problem, name)


class InProcess(NullHarness):
    """The loop of verifiers' null harness, which itself takes uv, the internet, and a process for each attempt."""

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, _=None):
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            tools, names, servers = await connect_mcp(config, stack)
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
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
    """The tools' server, one for all attempts, as a task that starts it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return asyncio.create_task(
        STACK.enter_async_context(serve_shared([Tools(vf.SharedToolsetConfig())]))
    )


async def attempt(problem, base_url, api_key):
    # verifiers takes a key from the environment alone
    os.environ[api_key] = api_key
    agent = vf.Agent(
        vf.AgentConfig(
            model="policy",
            client=vf.EvalClientConfig(base_url=base_url, api_key_var=api_key),
            harness={"id": __name__},
            runtime=vf.SubprocessConfig(),
            max_turns=4,
        )
    )
    try:
        trace = await agent.run(Task(Data(prompt=problem["prompt"], problem=problem)), tools=await tools())
    finally:
        del os.environ[api_key]
    if not trace.ok:
        raise RuntimeError(trace.last_error.message)
    return trace.reward


if __name__ == "__main__":
    if "VF_CONFIG" in os.environ:
        Tools.run()
    else:
        main(directory.problems, attempt)
