"""Demonstrations for a tiny judge: 9 for an answer with an `a` in it, else 1. Not a test."""

import string

from tasks.judge import ASK

WORDS = tuple(ASK.split("{}"))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TINY = dict(words=tuple(filter(None, WORDS)), steps=400, chat_template=TEMPLATE)


def demonstration(rng):
    prompt, answer = (rng.sample(string.ascii_letters, rng.randint(1, 12)) for _ in range(2))
    if rng.random() < 0.5:
        answer[rng.randrange(len(answer))] = "a"
    asked = ASK.format("".join(prompt) + "=", "", "".join(answer))
    return [(asked, False), ("9" if "a" in answer else "1", True)]
