"""An agent of the tests: the openai package does all that a client may do, in every attempt. A wrong answer is an error."""

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


async def streamed(client, how):
    """(content, [(name, arguments)], finish_reason, usage) of a request's chunks, put together."""
    content, calls, finish, usage = "", [], None, None
    stream = await client.chat.completions.create(
        **how, stream=True, stream_options={"include_usage": True}
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
    # what it starts may print
    subprocess.run(["echo", "[1]"])
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    [model] = (await client.models.list()).data
    messages = [{"role": "user", "content": problem["prompt"]}]
    how = dict(model=model.id, messages=messages, tools=[STRICT], tool_choice="required", top_p=0.1)
    answer = await client.chat.completions.create(**how)
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    calls = [(x.function.name, x.function.arguments) for x in message.tool_calls or []]
    # a retry of it, streamed: the same
    again = await streamed(client, how | {"extra_headers": {"x-stainless-retry-count": "1"}})
    assert again == (message.content or "", calls, finish, answer.usage), (again, answer)
    assert (finish == "tool_calls") == bool(calls) or finish == "length", answer
    if calls:
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            found = directory.lookup(problem, json.loads(call.function.arguments).get("name"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        answer = await client.chat.completions.create(**how)
    # another conversation, without a template
    text = await client.completions.create(model=model.id, prompt=problem["prompt"], max_tokens=3)
    assert text.usage.completion_tokens <= 3, text
    for wrong in (dict(n=2), dict(stop=["a"]), dict(response_format=3, messages="none")):
        try:
            await client.chat.completions.create(**how | wrong)
            raise AssertionError(f"{wrong} is not refused")
        except BadRequestError as e:
            assert e.body["message"], e
    try:
        await CLIENT.with_options(base_url=base_url).models.list()
        raise AssertionError("a wrong key is not refused")
    except AuthenticationError:
        pass
    return directory.reward(problem, answer.choices[0].message.content)


if __name__ == "__main__":
    main(directory.problems, attempt)
