"""Anthropic's Messages API in terms of OpenAI's chat completions: requests, answers and streams.

plumbing/endpoint.py serves POST /v1/messages and /v1/messages/count_tokens by means of these
functions; what a model's turn is does not depend on the API. The form of both APIs is that of
their packages (`anthropic`, `openai`). What a client sends back of an answer must become the same
message as before, because the endpoint continues the exact tokens of a conversation that it knows.
Deliberately absent: images and documents, tools that Anthropic's servers run, citations, stop
sequences, answers that continue a given text.
"""

import json

# the options of a request that become others, or that become part of the prompt
CONVERTED = {"system", "messages", "tools", "tool_choice", "stop_sequences"}
# the options without which the model would not have all of its context
REFUSED = ("mcp_servers", "container", "thread", "compaction")
# Claude Code begins its system prompt with a text of this kind, which changes with every request.
BILLING = "x-anthropic-billing-header"
# Clients leave out thoughts whose signature is empty; it signs nothing.
SIGNATURE = "unsigned"
# the values of tool_choice, and what they are in a chat completion
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
# why an answer ended
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def texts_of(content, place):
    """The texts of a content, which is one text or a list of blocks. Raises ValueError for others.

    place: the name of the content in the message of the error.
    """
    if content is None or isinstance(content, str):
        return [content or ""]
    for block in content:
        if block["type"] != "text":
            raise ValueError(f"a block of type {block['type']} in {place}: only text is supported")
    return [block["text"] for block in content]


def system_text(system):
    """The system prompt, without what says who pays."""
    texts = texts_of(system, "system")
    if texts and texts[0].startswith(BILLING):
        _, _, texts[0] = texts[0].partition("\n")
    return "".join(texts)


def chat_messages(message):
    """The messages of a chat completion for a message: results of tools are messages of their own.

    Raises ValueError for a block that is not supported.
    """
    role = message["role"]
    content = message["content"]
    if role == "system":
        # Most templates take a system message at the beginning alone.
        return [dict(role="user", content="\n".join(texts_of(content, "a system message")))]
    if isinstance(content, str):
        return [dict(role=role, content=content)]
    results = []
    texts = []
    calls = []
    thoughts = []
    for block in content:
        kind = block["type"]
        if kind == "text":
            texts.append(block["text"])
        elif kind == "tool_use" and role == "assistant":
            function = dict(name=block["name"], arguments=json.dumps(block["input"]))
            calls.append(dict(id=block["id"], type="function", function=function))
        elif kind == "tool_result" and role == "user":
            text = "\n".join(texts_of(block.get("content"), "a tool_result"))
            results.append(dict(role="tool", tool_call_id=block["tool_use_id"], content=text))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block["thinking"])
        else:
            raise ValueError(f"a block of type {kind} in a message of the {role} is not supported")
    if results and not texts:
        return results
    own = dict(role=role, content=("" if role == "assistant" else "\n").join(texts))
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        # The chat template decides whether the prompt has it.
        own["reasoning"] = "".join(thoughts)
    return [*results, own]


def chat_request(body):
    """The body of a chat completion that asks for the same.

    Options that it does not convert keep their names, so that the endpoint counts or refuses them.
    Raises LookupError, TypeError or ValueError if the request is not in the form of the API.
    """
    check(body)
    request = {name: value for name, value in body.items() if name not in CONVERTED}
    request["messages"] = []
    if body.get("system"):
        request["messages"].append(dict(role="system", content=system_text(body["system"])))
    for message in body["messages"]:
        for own in chat_messages(message):
            add(request["messages"], own)
    if body.get("stop_sequences"):
        request["stop"] = body["stop_sequences"]
    return request | tool_options(body)


def check(body):
    """Raise ValueError if the model would not have all of its context, or nothing to sample."""
    for name in REFUSED:
        if body.get(name):
            raise ValueError(f"{name} is not supported")
    if body.get("max_tokens") == 0:
        raise ValueError("max_tokens is 0: every request samples an answer")
    if body["messages"] and body["messages"][-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: no answer continues a given text")


def tool_options(body):
    """The options of a chat completion that say which tools there are, and how to choose."""
    options = {}
    tools = []
    for tool in body.get("tools") or []:
        if "input_schema" in tool:
            tools.append(chat_tool(tool))
        else:
            # Anthropic's servers know it, or run it: the endpoint counts it as an option.
            options[f"the tool {tool['name']} ({tool['type']})"] = True
    if tools:
        options["tools"] = tools
    choice = body.get("tool_choice")
    if choice and tools:
        options["tool_choice"] = CHOICES[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            options["parallel_tool_calls"] = False
    return options


def add(messages, message):
    """Append a message; one of the user after another, or of the assistant, is combined with it."""
    before = messages[-1] if messages else {}
    role = message["role"]
    if before.get("role") != role or role not in ("user", "assistant"):
        messages.append(message)
        return
    before["content"] += ("" if role == "assistant" else "\n") + message["content"]
    for name in ("reasoning", "tool_calls"):
        if name in message:
            before[name] = before.get(name, type(message[name])()) + message[name]


def chat_tool(tool):
    """A tool that has a schema, in the form of a chat completion."""
    function = dict(name=tool["name"], parameters=tool["input_schema"])
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return dict(type="function", function=function)


def answer_of(message, finish, usage, head):
    """The answer to a request: the message of a chat completion, why it ended, and its tokens.

    head: the fields `id` and `model`.
    """
    blocks = []
    calls = message.get("tool_calls") or []
    text = message.get("content") or ""
    if message.get("reasoning"):
        blocks.append(dict(type="thinking", thinking=message["reasoning"], signature=SIGNATURE))
    # Clients expect a block, and send back no block of spaces.
    if text.strip() or not calls:
        blocks.append(dict(type="text", text=text))
    for call in calls:
        blocks.append(dict(type="tool_use", id=call["id"], name=call["function"]["name"]))
        blocks[-1]["input"] = arguments_of(call)
    return head | dict(
        type="message",
        role="assistant",
        content=blocks,
        stop_reason=STOP_REASONS[finish],
        stop_sequence=None,
        usage=dict(input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"]),
    )


def arguments_of(call):
    """The arguments of a tool call as a dict; text that is no JSON object stands under "text"."""
    text = call["function"]["arguments"]
    if isinstance(text, dict):
        return text
    try:
        arguments = json.loads(text or "null")
    except ValueError:
        return dict(text=text)
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else dict(text=text)


def events_of(answer):
    """[(name, data)] of the server-sent events of an answer."""
    usage = answer["usage"]
    begun = answer | dict(content=[], stop_reason=None, usage=usage | dict(output_tokens=0))
    events = [("message_start", dict(message=begun))]
    for i, block in enumerate(answer["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty = dict(input={})
            delta = dict(type="input_json_delta", partial_json=json.dumps(block["input"]))
        else:
            empty = {kind: ""}
            delta = dict(type=f"{kind}_delta") | {kind: block[kind]}
        if kind == "thinking":
            empty["signature"] = ""
        events.append(("content_block_start", dict(index=i, content_block=block | empty)))
        events.append(("content_block_delta", dict(index=i, delta=delta)))
        if kind == "thinking":
            signature = dict(type="signature_delta", signature=block["signature"])
            events.append(("content_block_delta", dict(index=i, delta=signature)))
        events.append(("content_block_stop", dict(index=i)))
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events.append(("message_delta", dict(delta=ended, usage=usage)))
    events.append(("message_stop", {}))
    return [(name, dict(type=name) | data) for name, data in events]
