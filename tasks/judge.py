"""Reward from another model: any OpenAI-compatible URL says how good an answer is, from 0 to 10.

    JUDGE_URL=http://127.0.0.1:8000/v1 bash run.sh math --task judge --train_data mine.jsonl --eval_data other.jsonl

Data as tasks/_data.py reads them; a column with the answer, if there is one, is shown to the judge. $JUDGE_KEY and
$JUDGE_MODEL go to the judge, who is asked at most $JUDGE_BUDGET times (a million), AT_ONCE at a time, each time with
TRIES and SECONDS to answer. Without a number from the judge an attempt is `unparsable`, and counted.
"""

import asyncio
import functools
import itertools
import os
import re

from openai import AsyncOpenAI

from plumbing.prompts import prompt_text
from tasks import _data

SECONDS, TRIES, AT_ONCE = 60.0, 3, 64
# a grade from here on is a success
SUCCESS = 0.8
ASK = "Question: {}\n{}Answer to be judged: {}\nHow good is it, from 0 to 10? Reply with the number only."
CALLS, PLACES = itertools.count(1), asyncio.Semaphore(AT_ONCE)


def problems(split, seed=0, data=""):
    """Problems as tasks/_data.py reads them; their answer, if there is one, is a text. Raises ValueError."""
    if "JUDGE_URL" not in os.environ:
        raise ValueError("JUDGE_URL is not set: where is the judge?")
    return _data.problems(data, split, finish=finish)


def finish(problem):
    """Make the answer of a problem, if it has one, a text. Raises ValueError."""
    if "answer" in problem:
        problem["answer"] = _data.as_text(problem["answer"])


@functools.cache
def client():
    how = dict(api_key=os.environ.get("JUDGE_KEY", "none"), timeout=SECONDS, max_retries=TRIES - 1)
    return AsyncOpenAI(base_url=os.environ["JUDGE_URL"], **how)


async def episode(problem, model):
    """The judge's grade of one answer, 0 to 1."""
    answer = await model(problem["prompt"])
    known = f"Reference: {problem['answer']}\n" if "answer" in problem else ""
    question = prompt_text(problem["prompt"])
    asked = dict(role="user", content=ASK.format(question, known, answer))
    if next(CALLS) > int(os.environ.get("JUDGE_BUDGET", 10**6)):
        raise SystemExit("actor: tasks/judge.py: JUDGE_BUDGET is spent")
    how = dict(model=os.environ.get("JUDGE_MODEL", "judge"), temperature=0, max_tokens=8)
    async with PLACES:
        reply = await client().chat.completions.create(messages=[asked], **how)
    grade = re.search(r"\d+(\.\d+)?", reply.choices[0].message.content)[0]
    return min(float(grade), 10) / 10
