"""The toy task: put letters in alphabetical order, capitals first. `qBxa=` -> `Baqx`.

A problem has 3 to 39 different letters. The demonstrations have a wrong letter now and then, so
that the tiny base model, which is trained on them, knows the game but rarely gets all of a long
answer right. The reward alone has to make it exact.

`bash run.sh toy` trains it.
"""

import math
import random
import string

LETTERS = sorted(string.ascii_letters)
# number of letters; the answer has one token more, the stop token
SHORTEST = 3
LONGEST = 39
# True: reward is fast for any text, so the actor calls it itself, without limits on time and memory
INSTANT = True
# chance of a wrong letter in demonstrations
SLOPPINESS = 0.08


def _draw(rng):
    """A random problem. Lengths are log-uniform: many problems are short, and some are long."""
    length = math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
    letters = rng.sample(LETTERS, round(length))
    text = "".join(letters)
    answer = "".join(sorted(letters))
    return {"prompt": text + "=", "answer": answer}


def problems(split, seed=0):
    """The problems of a split, "train" or "test": dicts with prompt and answer.

    No problem of "test" is among those of "train".
    """
    rng = random.Random(f"test{seed}")
    test = [_draw(rng) for _ in range(1000)]
    if split == "test":
        return test
    held_out = {p["prompt"] for p in test}
    rng = random.Random(f"train{seed}")
    train = [_draw(rng) for _ in range(20000)]
    return [p for p in train if p["prompt"] not in held_out]


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0. finished: whether the model ended by itself."""
    return float(finished and completion == problem["answer"])


def demonstration(rng):
    """One example for the tiny base model, with a wrong letter now and then.

    Returns [(text, is it learned?), ...]: the prompt is not, the answer is.
    """
    problem = _draw(rng)
    letters = problem["prompt"][:-1]
    answer = ""
    for right in problem["answer"]:
        letter = right
        if rng.random() < SLOPPINESS:
            letter = rng.choice(letters)
        answer += letter
    return [(problem["prompt"], False), (answer, True)]
