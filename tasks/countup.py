"""Count up from one number to another: `7 to 10` -> `7 8 9 10`.

The task is for chat models, which get two examples as earlier turns of a conversation. Answers have
uneven lengths: the amount of numbers is log-normal, with a median of 4 and up to 40. The first
number is at most 50, so the model need not know large ones. What it has to learn is to go on to the
end: a model of 135M parameters counts short ranges, and stops too early on long ones.

`bash run.sh countup` trains SmolLM2-135M-Instruct on it.
"""

import math
import random

# the first number is at most this
HIGHEST_START = 50
# amount of numbers: its least and largest value; the median and sigma of its log-normal law, from
# which amounts outside of these values are drawn again
SHORTEST = 2
LONGEST = 40
MEDIAN = 4
SIGMA = 1.0
# the examples that a prompt shows: (first, last)
EXAMPLES = ((3, 6), (10, 12))
# one range in so many is held out
HELD_OUT = 5
# number of held-out problems, which all differ, and of training problems, which repeat ranges
TEST_PROBLEMS = 128
TRAIN_PROBLEMS = 20000
# no text can keep this task's functions busy
INSTANT = True


def _amount(rng):
    """A log-normal amount of numbers, SHORTEST to LONGEST."""
    while True:
        amount = round(MEDIAN * math.exp(SIGMA * rng.gauss(0, 1)))
        if SHORTEST <= amount <= LONGEST:
            return amount


def _question(first, last):
    return f"{first} to {last}"


def _answer(first, last):
    return " ".join(map(str, range(first, last + 1)))


def _messages(first, last):
    """The conversation that asks for a range, with the examples before it."""
    messages = []
    for example in EXAMPLES:
        messages.append({"role": "user", "content": _question(*example)})
        messages.append({"role": "assistant", "content": _answer(*example)})
    return [*messages, {"role": "user", "content": _question(first, last)}]


def problems(split, seed=0):
    """Dicts with prompt (messages) and answer. No range of "test" is among those of "train"."""
    rng = random.Random(f"{split}{seed}")
    is_test = split == "test"
    ranges = []
    while len(ranges) < (TEST_PROBLEMS if is_test else TRAIN_PROBLEMS):
        first = rng.randint(1, HIGHEST_START)
        last = first + _amount(rng) - 1
        is_held_out = (first + last) % HELD_OUT == 0
        if is_held_out == is_test and not (is_test and (first, last) in ranges):
            ranges.append((first, last))
    return [{"prompt": _messages(*pair), "answer": _answer(*pair)} for pair in ranges]


def reward(problem, completion, finished):
    """1 for exactly the right numbers, else 0. finished: whether the model ended by itself."""
    return float(finished and completion.strip() == problem["answer"])
