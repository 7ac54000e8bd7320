"""Sums that are too long to do in the head, with a Python interpreter at hand: whatever the model writes in a
```python block is run (tasks/_jail.py), and what it printed comes back as the next message.

`--train_data` and `--eval_data`: `tool`, or `alone` without the interpreter. The answer is the last number of the last
turn. `bash run.sh smol --task python_tool --train_data tool --eval_data tool --max_new_tokens 96` trains SmolLM2.
"""

import random
import re

from tasks import _jail

# digits of the numbers; the model's turns
DIGITS, TURNS = 5, 3
ASK = {
    "alone": "What is {} + {}? Answer with the number only.",
    "tool": "Write a short Python program that prints {} + {}. Its output will be sent to you.",
}
TELL = "Output:\n{}\nAnswer with the number only."


def problems(split, seed=0, data="tool"):
    """Dicts with prompt, answer and turns. Raises ValueError where programs would not be jailed."""
    if data not in ASK:
        raise ValueError(f"data {data!r}: choose from {', '.join(ASK)}")
    if data == "tool":
        _jail.require()
    rng = random.Random(f"{split}{seed}")
    found = []
    for _ in range(500 if split == "test" else 5000):
        a, b = (rng.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
        prompt = ASK[data].format(a, b)
        found.append(dict(prompt=prompt, answer=a + b, turns=TURNS if data == "tool" else 1))
    return found


def program(text):
    """What stands in the first ```python block of a text, also of one that is not closed; None if there is none."""
    found = re.search(r"```(?:python|py)?\n(.*?)(?:```|$)", text, re.DOTALL)
    return found and found[1]


async def episode(problem, model):
    """1 if the last number of the model's last turn is right, else 0."""
    said = problem["prompt"]
    for turn in range(problem["turns"]):
        text = await model(said)
        code = program(text)
        if code is None or turn == problem["turns"] - 1:
            break
        said = TELL.format((await _jail.run_python(code)).strip()[:200])
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == problem["answer"] and code is None)
