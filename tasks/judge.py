"""Reward from another model, the judge, behind any OpenAI-compatible URL.

    JUDGE_URL=http://127.0.0.1:8000/v1 bash run.sh math --task judge \\
        --train_data mine.jsonl --eval_data other.jsonl

tasks/_data.py reads the data. The judge grades an answer from 0 to 10; if the data have a column
with the right answer, the judge sees it. JUDGE_KEY and JUDGE_MODEL are the judge's key and model.
It is asked at most JUDGE_BUDGET times (default: a million). If its reply has no number, the attempt
is `unparsable`, and this is counted. If the judge cannot answer (no connection, an error of its
server, a rate limit), the attempt is left out.
"""

import asyncio
import functools
import itertools
import os
import re

from openai import APIConnectionError, AsyncOpenAI, InternalServerError, RateLimitError

from plumbing.episode import AttemptLost
from plumbing.prompts import prompt_text
from tasks import _data

# seconds that the judge has for a reply, and how often it is asked for one
SECONDS = 60.0
TRIES = 3
# number of requests to the judge at the same time
PLACES = asyncio.Semaphore(64)
# an attempt with at least this reward counts as solved
SUCCESS = 0.8
# question, reference ("" if there is none), answer
REQUEST = (
    "Question: {}\n{}Answer to be judged: {}\n"
    "How good is it, from 0 to 10? Reply with the number only."
)
# numbers the requests of this process, from 1 on
CALLS = itertools.count(1)


def problems(split, seed=0, data=""):
    """Problems as tasks/_data.py reads them; an answer, if there is one, is a text.

    Raises ValueError.
    """
    if "JUDGE_URL" not in os.environ:
        raise ValueError("JUDGE_URL is not set: set it to the URL of the judge")
    return _data.problems(data, split, finish=finish)


def finish(problem):
    """Make the answer of a problem, if it has one, a text. Raises ValueError."""
    if "answer" in problem:
        problem["answer"] = _data.as_text(problem["answer"])


@functools.cache
def client():
    """The client of the judge, which all attempts share."""
    return AsyncOpenAI(
        base_url=os.environ["JUDGE_URL"],
        api_key=os.environ.get("JUDGE_KEY", "none"),
        timeout=SECONDS,
        max_retries=TRIES - 1,
    )


async def episode(problem, model):
    """The judge's grade of one answer, from 0 to 1."""
    answer = await model(problem["prompt"])
    reference = f"Reference: {problem['answer']}\n" if "answer" in problem else ""
    request = REQUEST.format(prompt_text(problem["prompt"]), reference, answer)
    if next(CALLS) > int(os.environ.get("JUDGE_BUDGET", 10**6)):
        # this ends the actor, and so the run
        raise SystemExit("actor: tasks/judge.py: JUDGE_BUDGET is spent")
    async with PLACES:
        try:
            reply = await client().chat.completions.create(
                messages=[dict(role="user", content=request)],
                model=os.environ.get("JUDGE_MODEL", "judge"),
                temperature=0,
                max_tokens=8,
            )
        # A timeout is an APIConnectionError, too. None of these errors is the model's fault.
        except (APIConnectionError, InternalServerError, RateLimitError) as e:
            raise AttemptLost(f"the judge does not answer: {e}") from None
    grade = re.search(r"\d+(\.\d+)?", reply.choices[0].message.content)[0]
    return min(float(grade), 10) / 10
