"""Guess a number from 1 to 1024 in at most 13 turns; after each guess the game says `higher` or `lower`. A task with several turns.

`respond` is what makes it one: it is asked after every turn of the model. Its texts are tokenised and appended; what the engine sampled
is never tokenised again. Reward 2 - i / 10 for the right guess in turn i. `bash run.sh toy --task guess` trains the tiny model it makes.
"""
import random
import re

LARGEST, TURNS = 1024, 13
SUCCESS = 2 - TURNS / 10  # an attempt with this reward or more counts as solved
SLOPPINESS = 0.15  # chance that the tiny model's teacher guesses anywhere
PROMPT = f"I am thinking of a whole number from 1 to {LARGEST}. Guess it in at most {TURNS} turns; answer with a number alone.\n"
HIGHER, LOWER = "higher\n", "lower\n"
TINY = dict(words=(PROMPT, HIGHER, LOWER), steps=700, layers=3)


def problems(split, seed=0):
    """Dicts with prompt and number. The numbers are few, so test and train share them; the way to them is what is learnt."""
    rng = random.Random(f"{split}{seed}")
    return [{"prompt": PROMPT, "number": rng.randint(1, LARGEST)} for _ in range(500 if split == "test" else 20000)]


def guessed(text):
    """The whole number a turn names, last if there are several; None if there is none of at most 6 digits."""
    found = re.findall(r"(?<!\d)\d{1,6}(?!\d)", text)
    return int(found[-1]) if found else None


def respond(problem, turns):
    """What the game says to the last of the model's turns (texts); None: it is over."""
    guess = guessed(turns[-1])
    if guess == problem["number"] or guess is None or len(turns) == TURNS:
        return None
    return HIGHER if guess < problem["number"] else LOWER


def reward(problem, turns, finished):
    """2 - i / 10 if turn i named the number, else 0."""
    return 2 - len(turns) / 10 if guessed(turns[-1]) == problem["number"] else 0.0


def teacher(rng):
    """A game of the tiny model's teacher, who halves what is left, but now and then guesses anywhere in it."""
    number, low, high, game = rng.randint(1, LARGEST), 1, LARGEST, [(PROMPT, False)]
    for turn in range(TURNS):
        guess = rng.randint(low, high) if rng.random() < SLOPPINESS else (low + high) // 2
        game.append((str(guess), True))
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        game.append((HIGHER if guess < number else LOWER, False))
    return game if game[-1][1] else game[:-1]
