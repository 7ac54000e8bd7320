"""Count down, while one letter goes forward and another backward: `03xb:` -> `02ya01zz00ay`.

The task is for measurements: the problem alone determines how long the answer is. The number of
rounds is log-normal, from 1 to 99, and a round has 4 tokens. So half of the answers have at most 17
tokens, the average is 35, and the longest has 397. With `--train_data equal` all answers are
equally long, with the same average and the same base model. There are few different tokens, and all
answers use them, so the model can apply to long answers what it learns on short ones. The
demonstrations repeat or skip a number or a letter now and then and go on from there. The reward
alone has to make the long answers right.

`bash run.sh toy --task tail --max_new_tokens 400 --max_model_len 512` trains it.
"""

import math
import random
from string import ascii_lowercase as LETTERS

# long-tailed number of rounds: its maximum, and the median and sigma of its log-normal law
LONGEST = 99
MEDIAN = 2.8
SIGMA = 1.6
# number of rounds where all answers are equally long
EQUAL = 9
# no text can keep this task's functions busy
INSTANT = True
# chance of a mistake in demonstrations, for each number and each letter
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
    """A random state to start from: (number, forward letter, backward letter)."""
    rounds = EQUAL if lengths == "equal" else _rounds(rng)
    forward = rng.randrange(26)
    backward = rng.randrange(26)
    return rounds, forward, backward


def _written(number, forward, backward):
    """A state as text: (3, 23, 1) -> "03xb"."""
    return f"{number:02}" + LETTERS[forward] + LETTERS[backward]


def _move(rng):
    """The length of a move: 1, or now and then 0 or 2 if a random generator is given."""
    if rng is None:
        return 1
    if rng.random() < SLOPPINESS:
        return rng.choice((0, 2))
    return 1


def _walk(state, rng=None):
    """The rounds that follow a state, as text. rng: a random generator that makes mistakes."""
    number, forward, backward = state
    text = ""
    while number > 0:
        number = max(number - _move(rng), 0)
        forward = (forward + _move(rng)) % 26
        backward = (backward - _move(rng)) % 26
        text += _written(number, forward, backward)
    return text


def problems(split, seed=0, lengths=""):
    """Dicts with prompt and answer. lengths: "" (long-tailed) or "equal".

    A fifth of all prompts belongs to "test", the others to "train". Raises ValueError for other
    lengths.
    """
    if lengths not in ("", "equal"):
        raise ValueError(f"--train_data and --eval_data may be empty or 'equal', not {lengths!r}")
    rng = random.Random(f"{split}{seed}")
    is_test = split == "test"
    count = 500 if is_test else 20000
    drawn = []
    while len(drawn) < count:
        state = _draw(rng, lengths)
        is_held_out = sum(state) % 5 == 0
        if is_held_out == is_test:
            drawn.append({"prompt": _written(*state) + ":", "answer": _walk(state)})
    return drawn


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0."""
    return float(finished and completion == problem["answer"])


def demonstration(rng):
    """One long-tailed example for the tiny base model, with a mistake now and then."""
    state = _draw(rng)
    return [(_written(*state) + ":", False), (_walk(state, rng), True)]
