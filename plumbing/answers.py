"""What an engine answers, checked against the contract before a token of it is believed.

The contract is that of vLLM's POST /inference/v1/generate: one choice with `token_ids`, a logprob of
each, `weight_versions` that cover them, and why it ended. Deliberately absent: requests, retries
(plumbing/client.py).
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, ValidationError

from plumbing.forms import first_problem

# rounding may leave a logprob so far above 0, nats
ROUNDING = 1e-3
# what vLLM sends for a logprob that is NaN or minus infinity
NO_LOGPROB = -9999.0
# an answer's JSON: so much for each token that was asked for, and for all the rest, bytes
BYTES_OF_TOKEN = 1024
BYTES_OF_REST = 1 << 20


class BadAnswer(ValueError):
    """An answer that is not believed. reason: a word to count it by."""

    def __init__(self, reason, words):
        super().__init__(f"bad answer, {reason}: {words}")
        self.reason = reason


class Token(BaseModel, strict=True):
    logprob: FiniteFloat
    # vLLM tells; the contract does not ask for it
    token_id: int | None = None


class Logprobs(BaseModel, strict=True):
    content: list[Token]


class Span(BaseModel, strict=True):
    """Tokens start .. end-1 were sampled by this version, a number as text."""

    version: Annotated[str, Field(pattern="^[0-9]{1,9}$")]
    start: NonNegativeInt
    end: NonNegativeInt


class Choice(BaseModel, strict=True):
    token_ids: Annotated[list[NonNegativeInt], Field(min_length=1)]
    logprobs: Logprobs
    weight_versions: list[Span]
    finish_reason: Literal["stop", "length"]


class Answer(BaseModel, strict=True):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


def largest_answer(max_tokens):
    """Bytes that no answer of so many tokens has a use for."""
    return BYTES_OF_REST + BYTES_OF_TOKEN * max_tokens


def need(ok, reason, words):
    """Raise BadAnswer unless ok."""
    if not ok:
        raise BadAnswer(reason, words)


def read_answer(body, max_tokens, stop, vocabulary, newest):
    """An engine's answer, bytes -> {tokens, logprobs, versions, finished}. Raises BadAnswer.

    max_tokens: as asked for; stop: token ids that end a completion; vocabulary: how many ids there
    are; newest: plumbing.doors.NewestVersion.
    """
    try:
        choice = Answer.model_validate_json(body).choices[0]
    except ValidationError as e:
        raise _not_of_the_contract(e) from None
    tokens = choice.token_ids
    length = len(tokens)
    largest = max(tokens)
    need(length <= max_tokens, "token_ids", f"{length} of {max_tokens} asked for")
    need(largest < vocabulary, "token_ids", f"id {largest}, the vocabulary has {vocabulary}")
    logprobs = _logprobs(choice)
    versions = token_versions([span.model_dump() for span in choice.weight_versions], length)
    newest_here = versions[-1]
    need(newest.reaches(newest_here), "weight_versions", f"{newest_here} is not trained yet")
    finished = choice.finish_reason == "stop"
    last = tokens[-1]
    if finished:
        need(last in stop, "finish_reason", f"stop after token {last}, which is none")
    else:
        need(length == max_tokens, "finish_reason", f"length after {length} of {max_tokens}")
    return dict(tokens=tokens, logprobs=logprobs, versions=versions, finished=finished)


def _logprobs(choice):
    """Of every token sampled; BadAnswer if they are not of these tokens, or not possible."""
    tokens = choice.token_ids
    content = choice.logprobs.content
    told = len(content)
    need(told == len(tokens), "logprobs", f"{told} of {len(tokens)} tokens")
    matches = all(x.token_id in (None, token) for x, token in zip(content, tokens))
    need(matches, "logprobs", "they are of other tokens")
    logprobs = [x.logprob for x in content]
    low = min(logprobs)
    high = max(logprobs)
    need(low > NO_LOGPROB, "logprobs", f"{low:g}")
    need(high <= ROUNDING, "logprobs", f"{high:g}")
    return [min(x, 0.0) for x in logprobs]


def token_versions(spans, length):
    """Version spans [{version, start, end}] -> version of each sampled token, int64 [length].

    Raises BadAnswer if they do not cover the tokens one after the other, or if versions go back.
    """
    versions = np.zeros(length, np.int64)
    end = 0
    before = 0
    for span in spans:
        version = int(span["version"])
        if not (end == span["start"] <= span["end"] and before <= version):
            raise BadAnswer("weight_versions", f"{span} cannot follow version {before} up to {end}")
        end = span["end"]
        before = version
        versions[span["start"] : end] = version
    if end != length:
        raise BadAnswer("weight_versions", f"they end at {end}, do not cover {length} tokens")
    return versions


def _not_of_the_contract(error):
    """BadAnswer of the first thing that pydantic found."""
    place, words = first_problem(error)
    names = [name for name in place if isinstance(name, str)]
    where = ".".join(names)
    if not names:
        return BadAnswer("json", words)
    # choices.token_ids -> token_ids
    reason = names[:2][-1]
    return BadAnswer(reason, f"{where}: {words}")
