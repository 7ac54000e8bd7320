"""What an engine answers, checked against the contract before a token of it is believed.

The contract is that of plumbing/generate.py: one choice with `token_ids`, a logprob of each,
`weight_versions` that cover them, and why it ended. Deliberately absent: requests, retries
(plumbing/client.py).
"""

import re
from typing import Annotated, Literal

import msgspec
import numpy as np

# rounding may leave a logprob so far above 0, nats
ROUNDING = 1e-3
# below this is no logprob of a token that was sampled, but some server's word for NaN, nats
NO_LOGPROB = -9999.0
# an answer's JSON: so much for each token that was asked for, and for all the rest, bytes
BYTES_OF_TOKEN = 256
BYTES_OF_REST = 1 << 20


class BadAnswer(ValueError):
    """An answer that is not believed. reason: a word to count it by."""

    def __init__(self, reason, words):
        super().__init__(f"bad answer, {reason}: {words}")
        self.reason = reason


class Span(msgspec.Struct):
    """Tokens start .. end-1 were sampled by this version, a number as text."""

    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\Z")]
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]


class Choice(msgspec.Struct):
    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    behavior_logprobs: list[float]
    weight_versions: list[Span]
    finish_reason: Literal["stop", "length"]


class Answer(msgspec.Struct):
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


class Stamped(msgspec.Struct):
    weight_versions: Annotated[list[Span], msgspec.Meta(min_length=1)]


class Prefilled(msgspec.Struct):
    """What is read of the answer to a prompt whose own logprobs are wanted."""

    choices: Annotated[list[Stamped], msgspec.Meta(min_length=1, max_length=1)]
    prompt_logprobs: list[float]


ANSWERS = msgspec.json.Decoder(Answer)
PREFILLED = msgspec.json.Decoder(Prefilled)


def largest_answer(max_tokens):
    """Bytes that no answer of so many tokens has a use for."""
    return BYTES_OF_REST + BYTES_OF_TOKEN * max_tokens


def need(ok, reason, words):
    """Raise BadAnswer unless ok."""
    if not ok:
        raise BadAnswer(reason, words)


def read_answer(body, max_tokens, stop, vocabulary):
    """An engine's answer, bytes -> {tokens, logprobs, versions, finished}. Raises BadAnswer.

    max_tokens: as asked for; stop: token ids that end a completion; vocabulary: how many ids there are.
    """
    try:
        choice = ANSWERS.decode(body).choices[0]
    except (msgspec.DecodeError, RecursionError) as e:
        raise _not_of_the_contract(e) from None
    tokens = choice.token_ids
    length = len(tokens)
    largest = max(tokens)
    need(length <= max_tokens, "token_ids", f"{length} of {max_tokens} asked for")
    need(largest < vocabulary, "token_ids", f"id {largest}, the vocabulary has {vocabulary}")
    logprobs = _logprobs(choice.behavior_logprobs, length)
    versions = token_versions(choice.weight_versions, length)
    finished = choice.finish_reason == "stop"
    last = tokens[-1]
    if finished:
        need(last in stop, "finish_reason", f"stop after token {last}, which is none")
    else:
        need(length == max_tokens, "finish_reason", f"length after {length} of {max_tokens}")
    return dict(tokens=tokens, behavior_logprobs=logprobs, versions=versions, finished=finished)


def read_prefilled(body, prompt):
    """The answer to a prompt of so many tokens, bytes -> {logprobs of all but its first, versions}. Raises BadAnswer."""
    try:
        answer = PREFILLED.decode(body)
    except (msgspec.DecodeError, RecursionError) as e:
        raise _not_of_the_contract(e) from None
    versions = token_versions(answer.choices[0].weight_versions, 1)
    return dict(logprobs=_logprobs(answer.prompt_logprobs, prompt - 1), versions=versions)


def _logprobs(logprobs, tokens):
    """Of every token; BadAnswer if they are not possible."""
    told = len(logprobs)
    need(told == tokens, "logprobs", f"{told} of {tokens} tokens")
    low = min(logprobs)
    high = max(logprobs)
    need(low > NO_LOGPROB, "logprobs", f"{low:g}")
    need(high <= ROUNDING, "logprobs", f"{high:g}")
    return [min(x, 0.0) for x in logprobs]


def token_versions(spans, length):
    """Version spans -> version of each sampled token, int64 [length].

    Raises BadAnswer if they do not cover the tokens one after the other, or if versions go back.
    """
    versions = np.zeros(length, np.int64)
    end = 0
    before = 0
    for span in spans:
        version = int(span.version)
        if not (end == span.start <= span.end and before <= version):
            raise BadAnswer("weight_versions", f"{span} cannot follow version {before} up to {end}")
        end = span.end
        before = version
        versions[span.start : end] = version
    if end != length:
        raise BadAnswer("weight_versions", f"they end at {end}, do not cover {length} tokens")
    return versions


def _not_of_the_contract(error):
    """BadAnswer of what msgspec found, counted by the field in which it did."""
    words = str(error)
    # "Expected `int`, got `str` - at `$.choices[0].token_ids[1]`"
    place = re.search(r"\$\.choices\[\S*?\]\.(\w+)", words)
    missing = re.search(r"required field `(\w+)`", words)
    found = place or missing
    if found:
        return BadAnswer(found[1], words)
    return BadAnswer("choices" if "$.choices" in words else "json", words)
