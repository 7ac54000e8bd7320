"""A small environment for agents: the prompt asks for somebody's number, and a tool knows it.

The agents in this folder share it. Names are letters, numbers have three digits.

    python examples/agents/directory.py out/models/agent

makes a tiny model that can call a tool, but often copies a name or a number wrongly.
"""

import random
import sys
import zlib
from pathlib import Path

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "The number of a name.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}
LETTERS = "abcdefghij"


def draw(rng):
    name = "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))
    return {"prompt": f"{name}?", "name": name, "number": str(rng.randint(100, 999))}


def problems(split, seed):
    """The problems of a split; a fifth of all names is held out for "test"."""
    rng = random.Random(f"{split}{seed}")
    for _ in range(2500 if split == "test" else 6000):
        problem = draw(rng)
        if (zlib.crc32(problem["name"].encode()) % 5 == 0) == (split == "test"):
            yield problem


def lookup(problem, name):
    return problem["number"] if name == problem["name"] else "unknown"


def reward(problem, answer):
    return float(answer is not None and answer.strip() == problem["number"])


# ---- the tiny model

# The chance that a demonstration copies a character wrongly
SLOPPINESS = 0.07
# The text of a tool call before and after the name
CALL = '{"name": "lookup", "arguments": {"name": "'
END = '"}}'
# A Jinja template: each message is one line, and the model's messages end in <eos>
TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ \
{'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>\
{% endfor %}<eos>{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{{ '\n' }}\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
MARKS = ("<user>", "<system>", "<tool>", "<assistant>", "<tool_call>", "</tool_call>", "unknown")
TINY = dict(words=(*MARKS, CALL, END), steps=900, layers=3, chat_template=TEMPLATE)


def copied(text, rng, characters):
    """The text as a careless person copies it."""
    copy = [rng.choice(characters) if rng.random() < SLOPPINESS else x for x in text]
    return "".join(copy)


def demonstration(rng):
    problem = draw(rng)
    name = copied(problem["name"], rng, LETTERS)
    known = lookup(problem, name)
    answer = known if known == "unknown" else copied(known, rng, "0123456789")
    return [
        (f"<user>{problem['prompt']}\n<assistant>", False),
        (f"<tool_call>{CALL}{name}{END}</tool_call>", True),
        (f"\n<tool>{known}\n<assistant>", False),
        (answer, True),
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import tasks
    from tools import base_model

    tasks.__path__.append(str(Path(__file__).parent))
    base_model.make_model(["directory"], sys.argv[1], 0)
