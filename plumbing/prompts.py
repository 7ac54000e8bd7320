"""Prompts of problems. A prompt is a text, or a list of messages.

A message is a dict with two texts, `role` and `content`. Nothing here needs a tokenizer:
plumbing/problems.py turns prompts into token ids.
"""

# the roles that a message may have
ROLES = ("system", "developer", "user", "assistant", "tool")


def beginning(value):
    """The type of a value and the beginning of its text, for an error message."""
    return f"{type(value).__name__} {str(value)[:80]!r}"


def messages_of(value, column):
    """The messages of a prompt, with each content as one text.

    value: what the data has in this column. Raises ValueError if it is no list of messages.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"column '{column}' must be a text or a list of messages, it is {beginning(value)}"
        )
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"message {number} of column '{column}' must be an object with a content and a "
                f"role, one of {', '.join(ROLES)}; it is {beginning(message)}"
            )
        # In a Parquet file every message has all fields, with null for those that it does not use.
        message = {name: field for name, field in message.items() if field is not None}
        content = message.get("content")
        if isinstance(content, list):
            # a list of parts, [{"type": "text", "text": ...}, ...]
            parts = [part for part in content if isinstance(part, dict)]
            texts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
            is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
            content = "".join(texts) if is_text else content
        if isinstance(content, str) and not content.strip():
            raise ValueError(f"message {number} of column '{column}' is empty")
        if not isinstance(content, str) or message.get("tool_calls"):
            raise ValueError(
                f"message {number} of column '{column}' must have a text as its content, and no "
                f"images or tool calls; it is {beginning(message)}"
            )
        messages.append(message | dict(content=content))
    if messages[-1]["role"] in ("system", "developer"):
        raise ValueError(f"column '{column}' has no message after the one of the system")
    return messages


def with_instruction(prompt, instruction):
    """A prompt, text or messages, with an instruction at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + instruction
    *earlier, last = prompt
    return [*earlier, last | dict(content=last["content"] + instruction)]


def prompt_text(prompt):
    """A prompt as one text: the contents of its messages, one below the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)
