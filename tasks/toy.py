"""The toy task: put letters in alphabetical order. `qBxa=` -> `Baqx` (capitals first), 3 to 39 different letters.

Its teacher writes a wrong letter now and then. The tiny base model warmed up on his examples knows the game but rarely gets all of
a long answer right; reward alone has to make it exact.
"""
import math
import random
import string

LETTERS = sorted(string.ascii_letters)
SHORTEST, LONGEST = 3, 39  # letters; the answer has one more token, the end
SLOPPINESS = 0.08  # chance of a wrong letter in the teacher's answers


def _draw(rng):
    n = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))  # log-uniform: many short, some long
    letters = rng.sample(LETTERS, n)
    return {"prompt": "".join(letters) + "=", "answer": "".join(sorted(letters))}


def problems(split, seed=0):
    """Problems of a split ("train" or "test"), dicts with "prompt" and "answer"; no test problem is a train problem."""
    test = [_draw(rng) for rng in [random.Random(f"test{seed}")] for _ in range(1000)]
    if split == "test":
        return test
    held_out, rng = {p["prompt"] for p in test}, random.Random(f"train{seed}")
    return [p for p in (_draw(rng) for _ in range(20000)) if p["prompt"] not in held_out]


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0. finished: the model ended by itself."""
    return float(finished and completion == problem["answer"])


def teacher(rng):
    """One example for the tiny base model, with a wrong letter now and then."""
    p = _draw(rng)
    return [(p["prompt"], False), ("".join(rng.choice(p["prompt"][:-1]) if rng.random() < SLOPPINESS else c for c in p["answer"]), True)]
