"""A small environment for agents that run commands: a number must be written into a file.

The agents in this folder share it.

    python examples/agents/files.py out/models/files

makes a tiny model that can call the shell of Codex, but often copies a digit wrongly.
"""

import random
import sys
from pathlib import Path


def draw(rng):
    name, number = f"{rng.choice('abcdefgh')}{rng.randrange(100)}.txt", str(rng.randrange(1000))
    return dict(prompt=f"Write {number} into the file {name}.", name=name, number=number)


def problems(split, seed):
    rng = random.Random(f"{split}{seed}")
    for _ in range(100 if split == "test" else 2000):
        yield draw(rng)


def reward(problem, folder):
    """1 if the file in this folder holds the number, else 0."""
    file = Path(folder, problem["name"])
    return float(file.is_file() and file.read_text(errors="replace").strip() == problem["number"])


# ---- the tiny model

# The chance that a demonstration copies a character wrongly
SLOPPINESS = 0.07
# The text of a tool call before the number, and after the name of the file
CALL = '{"name": "exec_command", "arguments": {"cmd": "echo '
END = '"}}'
# A Jinja template. Codex begins with thousands of tokens that this tiny model cannot read. So the
# template leaves out instructions and tools, messages that begin with "<", in which Codex describes
# the machine, and what a command has printed.
TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ \
{'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>\
{% endfor %}<eos>{{ '\n' }}{% elif m.role == 'tool' %}<tool>{{ '\n' }}\
{% elif m.role == 'user' and not m.content.startswith('<') %}<user>{{ m.content }}{{ '\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
MARKS = ("<user>", "<tool>", "<assistant>", "<tool_call>", "</tool_call>", "done")
TEXTS = ("Write ", " into the file ", ".txt", " > ")
TINY = dict(words=(*MARKS, *TEXTS, CALL, END), steps=300, layers=3, chat_template=TEMPLATE)


def copied(text, rng):
    """The digits of a text as a careless person copies them."""
    is_wrong = [x.isdigit() and rng.random() < SLOPPINESS for x in text]
    return "".join(rng.choice("0123456789") if wrong else x for x, wrong in zip(text, is_wrong))


def demonstration(rng):
    problem = draw(rng)
    command = copied(f"{problem['number']} > {problem['name']}", rng)
    return [
        (f"<user>{problem['prompt']}\n<assistant>", False),
        (f"<tool_call>{CALL}{command}{END}</tool_call>", True),
        ("\n<tool>\n<assistant>", False),
        ("done", True),
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import tasks
    from tools import base_model

    tasks.__path__.append(str(Path(__file__).parent))
    base_model.make_model(["files"], sys.argv[1], 0)
