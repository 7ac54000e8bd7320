"""An agent for test_agents.py: in every attempt the openai package makes all kinds of requests.

An answer that is not as it should be raises AssertionError.
"""

import json
import subprocess
import sys
from pathlib import Path

from openai import AsyncOpenAI, AuthenticationError, BadRequestError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "agents"))
import directory  # noqa: E402
from loop import main  # noqa: E402

CLIENT = AsyncOpenAI(api_key="none", max_retries=0)
STRICT = {"type": "function", "function": directory.TOOL["function"] | {"strict": True}}


async def streamed(client, request):
    """Return (content, [(name, arguments)], finish_reason, usage) of a stream's joined chunks."""
    content = ""
    calls = []
    finish = None
    usage = None
    stream = await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [
                (x.function.name, x.function.arguments) for x in choice.delta.tool_calls or []
            ]
            finish = choice.finish_reason or finish
    return content, calls, finish, usage


async def attempt(problem, base_url, api_key):
    # A program that an agent starts may print
    subprocess.run(["echo", "[1]"])
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    [model] = (await client.models.list()).data
    messages = [{"role": "user", "content": problem["prompt"]}]
    request = dict(model=model.id, messages=messages, tools=[STRICT])
    request |= dict(tool_choice="required", top_p=0.1)
    answer = await client.chat.completions.create(**request)
    message = answer.choices[0].message
    finish = answer.choices[0].finish_reason
    calls = [(x.function.name, x.function.arguments) for x in message.tool_calls or []]
    # A streamed retry of the same request gets the same answer
    again = await streamed(client, request | {"extra_headers": {"x-stainless-retry-count": "1"}})
    assert again == (message.content or "", calls, finish, answer.usage), (again, answer)
    assert (finish == "tool_calls") == bool(calls) or finish == "length", answer
    text = message.content
    if calls:
        # The Responses API continues the same conversation.
        items = [*messages, {"role": "assistant", "content": message.content or ""}]
        for call in message.tool_calls:
            items.append({"type": "function_call", "call_id": call.id})
            items[-1] |= call.function.model_dump()
        for call in message.tool_calls:
            name = json.loads(call.function.arguments).get("name")
            result = directory.lookup(problem, name)
            items.append({"type": "function_call_output", "call_id": call.id, "output": result})
        tool = {"type": "function"} | directory.TOOL["function"]
        continued = await client.responses.create(model=model.id, input=items, tools=[tool])
        assert continued.output or continued.status == "incomplete", continued
        text = continued.output_text
    # A completion is a conversation of its own, without a template
    completed = client.completions.create(model=model.id, prompt=problem["prompt"], max_tokens=3)
    assert (await completed).usage.completion_tokens <= 3
    for wrong in (dict(n=2), dict(stop=["a"]), dict(response_format=3, messages="none")):
        try:
            await client.chat.completions.create(**request | wrong)
            raise AssertionError(f"{wrong} is not refused")
        except BadRequestError as e:
            assert e.body["message"], e
    try:
        await CLIENT.with_options(base_url=base_url).models.list()
        raise AssertionError("a wrong key is not refused")
    except AuthenticationError:
        pass
    return directory.reward(problem, text)


if __name__ == "__main__":
    main(directory.problems, attempt)
