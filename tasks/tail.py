"""Count down, while one letter goes forward in the alphabet and another backward: `03xb:` -> `02ya01zz00ay`.

For measurements: the problem determines the length. Counts are log-normal, 1 to 99 rounds of 4 tokens: half of
the answers have 17 tokens at most, the average is 35, the longest 397. `--train_data equal` makes them all equally
long, with the same average and the same base model. Few tokens, each in all answers: what is learnt on short ones
holds for long ones. Its demonstration repeats or leaves out a number or a letter now and then and goes on
from there; reward alone has to make the long answers right.

`bash run.sh toy --task tail --max_new_tokens 400 --max_model_len 512` trains it.
"""

import math
import random
from string import ascii_lowercase as LETTERS

# rounds: the most, median and spread of the long-tailed counts; all of the equal ones
LONGEST, MEDIAN, SIGMA, EQUAL = 99, 2.8, 1.6, 9
# no text can keep its functions busy
INSTANT = True
# chance of a mistake, per number and per letter, in demonstrations
SLOPPINESS = 0.06
TINY = dict(layers=3, steps=300, positions=512)


def _rounds(rng):
    """A long-tailed number of rounds, 1 to LONGEST."""
    while True:
        spread = math.exp(SIGMA * rng.gauss(0, 1))
        rounds = round(MEDIAN * spread)
        if 1 <= rounds <= LONGEST:
            return rounds


def _draw(rng, lengths=""):
    """A random state to start from: (number, letter, letter)."""
    rounds = EQUAL if lengths == "equal" else _rounds(rng)
    forward = rng.randrange(26)
    backward = rng.randrange(26)
    return rounds, forward, backward


def _written(number, forward, backward):
    return f"{number:02}" + LETTERS[forward] + LETTERS[backward]


def _move(rng):
    """How far a move goes: 1, unless a generator is given and has it go wrong."""
    if rng is None:
        return 1
    if rng.random() < SLOPPINESS:
        return rng.choice((0, 2))
    return 1


def _walk(state, rng=None):
    """The rounds after a state as text; rng: makes mistakes."""
    number, forward, backward = state
    text = ""
    while number > 0:
        number = max(number - _move(rng), 0)
        forward = (forward + _move(rng)) % 26
        backward = (backward - _move(rng)) % 26
        text += _written(number, forward, backward)
    return text


def problems(split, seed=0, lengths=""):
    """Dicts with prompt and answer; lengths: "" (long-tailed) or "equal".

    A fifth of all prompts is for tests, the others are for training. Raises ValueError for other lengths.
    """
    if lengths not in ("", "equal"):
        raise ValueError(f"--train_data and --eval_data may be empty or 'equal', not {lengths!r}")
    rng = random.Random(f"{split}{seed}")
    testing = split == "test"
    wanted = 500 if testing else 20000
    found = []
    while len(found) < wanted:
        state = _draw(rng, lengths)
        for_tests = sum(state) % 5 == 0
        if for_tests == testing:
            found.append({"prompt": _written(*state) + ":", "answer": _walk(state)})
    return found


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0."""
    return float(finished and completion == problem["answer"])


def demonstration(rng):
    """One example for the tiny base model, long-tailed, with a move of none or two instead of one now and then."""
    state = _draw(rng)
    return [(_written(*state) + ":", False), (_walk(state, rng), True)]
