"""Demonstrations for the tiny judge of test_agents.py: 9 for an answer that has an `a`, else 1."""

import string

from tasks.judge import REQUEST

WORDS = tuple(REQUEST.split("{}"))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TINY = dict(words=tuple(filter(None, WORDS)), steps=250, chat_template=TEMPLATE)


def demonstration(rng):
    prompt, answer = (rng.sample(string.ascii_letters, rng.randint(1, 12)) for _ in range(2))
    if rng.random() < 0.5:
        answer[rng.randrange(len(answer))] = "a"
    asked = REQUEST.format("".join(prompt) + "=", "", "".join(answer))
    return [(asked, False), ("9" if "a" in answer else "1", True)]
