"""Prompts of problems: a text, or a list of messages, each a dict with `role` and `content`, a text.

Nothing here needs a tokenizer; plumbing/problems.py makes token ids of prompts.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")


def beginning(value):
    """The type of a value, and how it begins, for a message about it."""
    return f"{type(value).__name__} {str(value)[:80]!r}"


def messages_of(value, column):
    """A list of messages, each with its content as one text. Raises ValueError if the value is anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"column '{column}' must be a text or a list of messages, it is {beginning(value)}"
        )
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"message {number} of column '{column}' must be an object with a content and a role, one "
                f"of {', '.join(ROLES)}; it is {beginning(message)}"
            )
        # Parquet has every field in every message, null where it is not used.
        message = {name: x for name, x in message.items() if x is not None}
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            is_text = len(parts) == len(content) and all(isinstance(x, str) for x in parts)
            content = "".join(parts) if is_text else content
        if not isinstance(content, str) or not content.strip() or "tool_calls" in message:
            raise ValueError(
                f"message {number} of column '{column}' must have a text as its content, and no images or "
                f"tool calls; it is {beginning(message)}"
            )
        messages.append(message | dict(content=content))
    if messages[-1]["role"] in ("system", "developer"):
        raise ValueError(f"column '{column}' has no message after that of the system")
    return messages


def with_instruction(prompt, instruction):
    """A prompt, text or messages, with an instruction at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + instruction
    *before, last = prompt
    return [*before, last | dict(content=last["content"] + instruction)]


def prompt_text(prompt):
    """All that a prompt, text or messages, says, as one text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)
