"""Guess a number from 1 to 1024 in at most 13 turns.

After each guess the game says `higher` or `lower`. It is an episode of several turns: the game's
texts are tokenised and appended, and sampled tokens are never tokenised again. The reward is
2 - i / 10 if the guess in turn i is right.

`bash run.sh guess` makes a tiny model and trains it.
"""

import random
import re

LARGEST = 1024
TURNS = 13
# an attempt with at least this reward counts as solved: the last turn's guess was right
SUCCESS = 2 - TURNS / 10
# no text can keep this task's functions busy
INSTANT = True
# chance that a guess of a demonstration is any number that is left, and not the middle
SLOPPINESS = 0.15
PROMPT = (
    f"I am thinking of a whole number from 1 to {LARGEST}. "
    f"Guess it in at most {TURNS} turns; answer with a number alone.\n"
)
HIGHER = "higher\n"
LOWER = "lower\n"
TINY = dict(words=(PROMPT, HIGHER, LOWER), steps=700, layers=3)


def problems(split, seed=0):
    """Dicts with prompt and number.

    There are few numbers, so both splits have the same: the model learns the way to a number.
    """
    rng = random.Random(f"{split}{seed}")
    count = 500 if split == "test" else 20000
    return [{"prompt": PROMPT, "number": rng.randint(1, LARGEST)} for _ in range(count)]


def guessed(text):
    """The last whole number of at most 6 digits in the text of a turn; None if there is none."""
    numbers = re.findall(r"(?<!\d)\d{1,6}(?!\d)", text)
    return int(numbers[-1]) if numbers else None


async def episode(problem, model):
    """2 - i / 10 if the guess in turn i is the number, else 0."""
    text = problem["prompt"]
    for turn in range(1, TURNS + 1):
        guess = guessed(await model(text))
        if guess is None:
            return 0.0
        if guess == problem["number"]:
            return 2 - turn / 10
        text = HIGHER if guess < problem["number"] else LOWER
    return 0.0


def demonstration(rng):
    """A game that the tiny model learns from.

    Each guess halves the numbers that are left; now and then it is any one of them.
    """
    number = rng.randint(1, LARGEST)
    low, high = 1, LARGEST
    game = [(PROMPT, False)]
    for turn in range(1, TURNS + 1):
        guess = (low + high) // 2
        if rng.random() < SLOPPINESS:
            guess = rng.randint(low, high)
        game.append((str(guess), True))
        if guess == number or turn == TURNS:
            break
        if guess < number:
            low = guess + 1
            game.append((HIGHER, False))
        else:
            high = guess - 1
            game.append((LOWER, False))
    return game
