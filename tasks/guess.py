"""Guess a number from 1 to 1024 in at most 13 turns; after each guess the game says `higher` or `lower`.

An episode of several turns: the game's texts are tokenised and appended; what the engine sampled is never tokenised
again. Reward 2 - i / 10 for the right guess in turn i.

`bash run.sh guess` trains the tiny model it makes.
"""

import random
import re

LARGEST, TURNS = 1024, 13
# an attempt with this reward or more counts as solved
SUCCESS = 2 - TURNS / 10
# no text can keep its functions busy
INSTANT = True
# chance that a demonstration guesses anywhere
SLOPPINESS = 0.15
PROMPT = (
    f"I am thinking of a whole number from 1 to {LARGEST}. "
    f"Guess it in at most {TURNS} turns; answer with a number alone.\n"
)
HIGHER, LOWER = "higher\n", "lower\n"
TINY = dict(words=(PROMPT, HIGHER, LOWER), steps=700, layers=3)


def problems(split, seed=0):
    """Dicts with prompt and number. The numbers are few, so test and train share them; the way to them is what is learnt."""
    rng = random.Random(f"{split}{seed}")
    count = 500 if split == "test" else 20000
    return [{"prompt": PROMPT, "number": rng.randint(1, LARGEST)} for _ in range(count)]


def guessed(text):
    """The whole number a turn names, last if there are several; None if there is none of at most 6 digits."""
    found = re.findall(r"(?<!\d)\d{1,6}(?!\d)", text)
    return int(found[-1]) if found else None


async def episode(problem, model):
    """2 - i / 10 if turn i named the number, else 0."""
    said = problem["prompt"]
    for turn in range(1, TURNS + 1):
        guess = guessed(await model(said))
        if guess is None:
            return 0.0
        if guess == problem["number"]:
            return 2 - turn / 10
        said = HIGHER if guess < problem["number"] else LOWER
    return 0.0


def demonstration(rng):
    """A game that the tiny model learns from: it halves what is left, but now and then guesses anywhere in it."""
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
