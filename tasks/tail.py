"""Count down, while one letter goes forward in the alphabet and another backward: `03xb:` -> `02ya01zz00ay`. For measurements: the problem determines the length.

Counts are log-normal, 1 to 99 rounds of 4 tokens: half of the answers have 17 tokens at most, the average is 35, the longest 397. `--train_data equal` makes them
all equally long, with the same average and the same base model. Few tokens, each in all answers: what is learnt on short ones holds for long ones. The tiny model's
teacher repeats or leaves out a number or a letter now and then and goes on from there; reward alone has to make the long answers right.
"""
import math
import random
from string import ascii_lowercase as LETTERS

LONGEST, MEDIAN, SIGMA, EQUAL = 99, 2.8, 1.6, 9  # rounds: the most, median and spread of the long-tailed counts, all of the equal ones
SLOPPINESS = 0.06  # chance of a mistake, per number and per letter, in the teacher's answers
TINY = dict(layers=3, steps=300, positions=512)


def _draw(rng, lengths=""):
    rounds = EQUAL
    while lengths != "equal" and not 1 <= (rounds := round(MEDIAN * math.exp(SIGMA * rng.gauss(0, 1)))) <= LONGEST:
        pass
    return rounds, rng.randrange(26), rng.randrange(26)


def _walk(state, mistake=lambda: 0):
    """The rounds after `state` (number, letter, letter) as text; mistake() is added to each move of one."""
    n, a, b = state
    text = ""
    while n > 0:
        n, a, b = max(n - 1 - mistake(), 0), (a + 1 + mistake()) % 26, (b - 1 - mistake()) % 26
        text += f"{n:02}{LETTERS[a]}{LETTERS[b]}"
    return text


def _prompt(state):
    return f"{state[0]:02}{LETTERS[state[1]]}{LETTERS[state[2]]}:"


def problems(split, seed=0, lengths=""):
    """Dicts with prompt and answer; lengths: "" (long-tailed) or "equal". A fifth of all prompts is for tests, the others for training."""
    if lengths not in ("", "equal"):
        raise ValueError(f"--train_data and --eval_data may be empty or 'equal', not {lengths!r}")
    rng, found = random.Random(f"{split}{seed}"), []
    while len(found) < (500 if split == "test" else 20000):
        state = _draw(rng, lengths)
        if (sum(state) % 5 == 0) == (split == "test"):
            found.append({"prompt": _prompt(state), "answer": _walk(state)})
    return found


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0."""
    return float(finished and completion == problem["answer"])


def teacher(rng):
    """One example for the tiny base model, long-tailed, with a move of none or two instead of one now and then."""
    state = _draw(rng)
    return [(_prompt(state), False), (_walk(state, lambda: rng.choice((-1, 1)) if rng.random() < SLOPPINESS else 0), True)]
