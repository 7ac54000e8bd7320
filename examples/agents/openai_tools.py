"""An agent for tasks/agent.py with the `openai` package and a tool (pip install openai)."""

import json

import directory
from loop import main
from openai import AsyncOpenAI

# All attempts share its connections
CLIENT = AsyncOpenAI(api_key="none")


async def attempt(problem, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": problem["prompt"]}]
    for _ in range(4):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[directory.TOOL]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            try:
                result = directory.lookup(problem, **json.loads(call.function.arguments))
            except (ValueError, TypeError) as e:
                result = str(e)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return directory.reward(problem, message.content)


if __name__ == "__main__":
    main(directory.problems, attempt)
