"""Long sums, which the model may let a Python interpreter compute.

The program that the model writes in a ```python block is run (tasks/_jail.py), and its output comes
back as the next message. The answer is the last number of the last turn. `--train_data` and
`--eval_data` are `tool`, or `alone` for sums without the interpreter.

`bash run.sh smol --task python_tool --train_data tool --eval_data tool --max_new_tokens 96` trains
SmolLM2.
"""

import random
import re

from tasks import _jail

# digits of each number of a sum
DIGITS = 5
# most turns of the model
TURNS = 3
# {data: prompt}
PROMPTS = {
    "alone": "What is {} + {}? Answer with the number only.",
    "tool": "Write a short Python program that prints {} + {}. Its output will be sent to you.",
}
TOOL_MESSAGE = "Output:\n{}\nAnswer with the number only."


def problems(split, seed=0, data="tool"):
    """Dicts with prompt, answer and turns. Raises ValueError if programs would not be jailed."""
    if data not in PROMPTS:
        raise ValueError(f"data {data!r}: choose from {', '.join(PROMPTS)}")
    if data == "tool":
        _jail.require()
    rng = random.Random(f"{split}{seed}")
    drawn = []
    for _ in range(500 if split == "test" else 5000):
        a = rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)
        b = rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)
        prompt = PROMPTS[data].format(a, b)
        drawn.append(dict(prompt=prompt, answer=a + b, turns=TURNS if data == "tool" else 1))
    return drawn


def program(text):
    """The content of a text's first ```python block, which need not be closed; None without one."""
    block = re.search(r"```(?:python|py)?\n(.*?)(?:```|$)", text, re.DOTALL)
    return block[1] if block else None


async def episode(problem, model):
    """1 if the last number of the model's last turn is right, else 0."""
    message = problem["prompt"]
    for turn in range(problem["turns"]):
        text = await model(message)
        code = program(text)
        if code is None or turn == problem["turns"] - 1:
            break
        output = await _jail.run_python(code)
        message = TOOL_MESSAGE.format(output.strip()[:200])
    if code is not None:
        # the last turn is another program, and no answer
        return 0.0
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == problem["answer"])
