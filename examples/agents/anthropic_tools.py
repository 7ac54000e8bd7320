"""An agent for tasks/agent.py with the `anthropic` package and a tool (pip install anthropic)."""

import directory
from anthropic import AsyncAnthropic
from loop import main

# All attempts share its connections
CLIENT = AsyncAnthropic(api_key="none")
FUNCTION = directory.TOOL["function"]
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}


async def attempt(problem, base_url, api_key):
    # This package adds /v1 to the URL by itself
    client = CLIENT.with_options(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = [{"role": "user", "content": problem["prompt"]}]
    for _ in range(4):
        answer = await client.messages.create(
            model="policy", max_tokens=100, messages=messages, tools=[TOOL]
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for call in calls:
            try:
                result = directory.lookup(problem, **call.input)
            except TypeError as e:
                result = str(e)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": results})
    text = "".join(block.text for block in answer.content if block.type == "text")
    return directory.reward(problem, text)


if __name__ == "__main__":
    main(directory.problems, attempt)
