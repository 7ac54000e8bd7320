"""A little environment for agents: somebody's number is asked for, a tool knows it.

Not a program: openai_tools.py and the others here share it. Names are letters, numbers three digits.
"""

import random

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


def problems(split, seed):
    rng = random.Random(f"{split}{seed}")
    for _ in range(500 if split == "test" else 5000):
        name = "".join(rng.choices("abcdefghij", k=rng.randint(3, 8)))
        yield {"prompt": f"{name}?", "name": name, "number": str(rng.randint(100, 999))}


def lookup(problem, name):
    return problem["number"] if name == problem["name"] else "unknown"


def reward(problem, said):
    return float(said is not None and said.strip() == problem["number"])
