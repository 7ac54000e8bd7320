"""OpenAI's Responses API in terms of its chat completions: requests, answers and streams.

plumbing/endpoint.py serves POST /v1/responses by means of these functions; what a model's turn is
does not depend on the API. The form of both APIs is that of the package `openai`. Deliberately
absent: images and files, tools that OpenAI's servers run, conversations that they keep, answers in
the background.
"""

import secrets

# the options of a request that become others, that become part of the prompt, or that the answer
# has whatever their value
CONVERTED = {"input", "instructions", "tools", "tool_choice", "previous_response_id", "store"}
CONVERTED |= {"max_output_tokens", "include"}
# the options without which the model would not have all of its context, or the client no answer
REFUSED = ("prompt", "conversation", "background")
# the types of parts that have a text
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
# the beginnings of the names of events that send the parts of an answer's items
ARGUMENTS = "response.function_call_arguments"
OUTPUT_TEXT = "response.output_text"
REASONING = "response.reasoning_text"


def text_of(content, place, separator="\n"):
    """The text of a content, which is one text or a list of parts. Raises ValueError for others.

    place: the name of the content in the message of the error. separator: what joins the parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] not in TEXTS:
            raise ValueError(f"a part of type {part['type']} in {place}: only text is supported")
    return separator.join(part["text"] for part in content)


def chat_messages(items):
    """The messages of a chat completion for the items of an input.

    A turn of the model is several items (its reasoning, its text, its tool calls), but one message.
    Raises ValueError for an item that is not supported.
    """
    messages = []
    turn = None
    for item in items:
        kind = item.get("type", "message")
        is_own = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        # A turn has its reasoning first, then its text, then its calls.
        ended = turn is not None and (
            (kind == "reasoning" and len(turn) > 2)
            or (kind == "message" and ("tool_calls" in turn or turn["content"]))
        )
        if is_own and (turn is None or ended):
            turn = dict(role="assistant", content="")
            messages.append(turn)
        if not is_own:
            turn = None
        if kind == "message":
            place = f"a message of the {item['role']}"
            if is_own:
                turn["content"] = text_of(item["content"], place, separator="")
            else:
                messages.append(dict(role=item["role"], content=text_of(item["content"], place)))
        elif kind == "reasoning":
            # The chat template decides whether the prompt has it.
            parts = item.get("content") or item.get("summary")
            turn["reasoning"] = text_of(parts, "a reasoning item", separator="")
        elif kind == "function_call":
            function = dict(name=item["name"], arguments=item["arguments"])
            call = dict(id=item["call_id"], type="function", function=function)
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = text_of(item["output"], "a function_call_output")
            messages.append(dict(role="tool", tool_call_id=item["call_id"], content=text))
        else:
            raise ValueError(f"an item of type {kind} in the input is not supported")
    return messages


def items_of(body, earlier):
    """All items of a request's input, those of the conversation that it continues first.

    earlier: {id of an answer: all items up to its end}. Raises ValueError for an unknown id.
    """
    before = []
    previous = body.get("previous_response_id")
    if previous:
        if previous not in earlier:
            raise ValueError(f"previous_response_id {previous}: this attempt has no such answer")
        before = earlier[previous]
    given = body["input"]
    if isinstance(given, str):
        given = [dict(role="user", content=given)]
    return [*before, *given]


def chat_request(body, items):
    """The body of a chat completion that asks for the same. items: see `items_of`.

    Options that it does not convert keep their names, so that the endpoint counts or refuses them.
    Raises LookupError, TypeError or ValueError if the request is not in the form of the API.
    """
    for name in REFUSED:
        if body.get(name):
            raise ValueError(f"{name} is not supported")
    if any("logprobs" in name for name in body.get("include") or []):
        raise ValueError("include: logprobs are not supported")
    if body.get("max_output_tokens") == 0:
        raise ValueError("max_output_tokens is 0: every request samples an answer")
    request = {name: value for name, value in body.items() if name not in CONVERTED}
    request["messages"] = chat_messages(items)
    if body.get("instructions"):
        instructions = dict(role="system", content=body["instructions"])
        request["messages"].insert(0, instructions)
    if body.get("max_output_tokens"):
        request["max_tokens"] = body["max_output_tokens"]
    tools = []
    for tool in body.get("tools") or []:
        if tool["type"] == "function":
            tools.append(chat_tool(tool))
        else:
            # OpenAI's servers know it, or run it: the endpoint counts it as an option.
            request[f"the tool {tool.get('name', '')} ({tool['type']})"] = True
    choice = body.get("tool_choice")
    if tools:
        request["tools"] = tools
    if choice and tools:
        request["tool_choice"] = choice if isinstance(choice, str) else "required"
    return request


def chat_tool(tool):
    """A function in the form of a chat completion."""
    fields = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in fields if tool.get(name) is not None}
    return dict(type="function", function=function)


def answer_of(message, finish, usage, head):
    """The answer to a request: the message of a chat completion, why it ended, and its tokens.

    head: the fields that do not depend on the answer.
    """
    is_cut_off = finish == "length"
    calls = message.get("tool_calls") or []
    text = message.get("content") or ""
    output = []
    if message.get("reasoning"):
        parts = [dict(type="reasoning_text", text=message["reasoning"])]
        output.append(dict(id=new_id("rs"), type="reasoning", summary=[], content=parts))
    if text.strip() or not calls:
        parts = [dict(type="output_text", text=text, annotations=[])]
        output.append(dict(id=new_id("msg"), type="message", role="assistant", content=parts))
    for call in calls:
        output.append(dict(id=new_id("fc"), type="function_call", call_id=call["id"]))
        output[-1] |= dict(call["function"])
    for item in output:
        item["status"] = "completed"
    if is_cut_off:
        output[-1]["status"] = "incomplete"
    return head | dict(
        object="response",
        created_at=0,
        status="incomplete" if is_cut_off else "completed",
        incomplete_details=dict(reason="max_output_tokens") if is_cut_off else None,
        error=None,
        output=output,
        usage=dict(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=dict(cached_tokens=0, cache_write_tokens=0),
            output_tokens=usage["completion_tokens"],
            output_tokens_details=dict(reasoning_tokens=0),
            total_tokens=usage["total_tokens"],
        ),
    )


def new_id(kind):
    """A new name of an item."""
    return f"{kind}_{secrets.token_hex(8)}"


def events_of(answer):
    """[(name, data)] of the server-sent events of an answer."""
    begun = answer | dict(status="in_progress", output=[], usage=None, incomplete_details=None)
    events = [("response.created", dict(response=begun))]
    events.append(("response.in_progress", dict(response=begun)))
    for i, item in enumerate(answer["output"]):
        at = dict(item_id=item["id"], output_index=i)
        empty = item | dict(status="in_progress")
        if item["type"] == "function_call":
            arguments = item["arguments"]
            pieces = [
                (f"{ARGUMENTS}.delta", at | dict(delta=arguments)),
                (f"{ARGUMENTS}.done", at | dict(arguments=arguments, name=item["name"])),
            ]
            empty["arguments"] = ""
        else:
            [part] = item["content"]
            at["content_index"] = 0
            name = OUTPUT_TEXT if item["type"] == "message" else REASONING
            more = dict(logprobs=[]) if item["type"] == "message" else {}
            pieces = [
                ("response.content_part.added", at | dict(part=part | dict(text=""))),
                (f"{name}.delta", at | more | dict(delta=part["text"])),
                (f"{name}.done", at | more | dict(text=part["text"])),
                ("response.content_part.done", at | dict(part=part)),
            ]
            empty["content"] = []
        events.append(("response.output_item.added", dict(output_index=i, item=empty)))
        events += pieces
        events.append(("response.output_item.done", dict(output_index=i, item=item)))
    events.append((f"response.{answer['status']}", dict(response=answer)))
    return [
        (name, dict(type=name, sequence_number=i) | data) for i, (name, data) in enumerate(events)
    ]
