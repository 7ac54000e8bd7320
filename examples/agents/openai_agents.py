"""An agent for tasks/agent.py with the framework openai-agents (pip install openai-agents)."""

import directory
from agents import (
    Agent,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from loop import main
from openai import AsyncOpenAI

# All attempts share its connections
CLIENT = AsyncOpenAI(api_key="none")


@function_tool
def lookup(context: RunContextWrapper[dict], name: str) -> str:
    """The number of a name."""
    return directory.lookup(context.context, name)


async def attempt(problem, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    model = OpenAIResponsesModel(model="policy", openai_client=client)
    agent = Agent(name="clerk", model=model, tools=[lookup])
    done = await Runner.run(agent, problem["prompt"], context=problem, max_turns=4)
    return directory.reward(problem, done.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    main(directory.problems, attempt)
