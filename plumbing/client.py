"""The actor's HTTP client of all engines: the least loaded one samples, failed requests go elsewhere.

What an engine answers (plumbing/engine.py) is checked here, once. Deliberately absent: asking engines for
their health; whoever started one kills it if it hangs, and the trainer drops it if its host has vanished.
"""

import asyncio
import random
import time
from collections import Counter

import aiohttp
import msgspec
import numpy as np

from plumbing.queues import secret_header

# a failed request is tried again this often before the attempt is given up
RETRIES = 3
# seconds that an engine gets no work after a request to it failed
BACK_OFF = 2.5


class Span(msgspec.Struct):
    """Tokens start .. end-1 were sampled by this version, a number as text."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int]
    behavior_logprobs: list[float]
    weight_versions: list[Span]
    finish_reason: str


class Answer(msgspec.Struct):
    choices: list[Choice]


def read_answer(body, max_tokens, stop, vocabulary):
    """An engine's answer, bytes -> {tokens, behavior_logprobs, versions, finished}; ValueError if it is not
    to be believed. stop: ids that end a completion; vocabulary: number of ids.
    """
    # numbers that are not finite are no JSON
    [choice] = msgspec.json.decode(body, type=Answer).choices
    tokens = choice.token_ids
    logprobs = choice.behavior_logprobs
    length = len(tokens)
    # rounding may leave a logprob above 0, and vLLM cuts off minus infinity at -9999 nats
    if not 0 < length <= max_tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise ValueError(f"tokens, {length} of {max_tokens}, ids below {vocabulary}: {tokens}")
    if len(logprobs) != length or min(logprobs) <= -9999 or max(logprobs) > 1e-3:
        raise ValueError(f"logprobs of {length} tokens: {logprobs}")
    finished = choice.finish_reason == "stop"
    is_cut_off = choice.finish_reason == "length" and length == max_tokens
    if not (tokens[-1] in stop if finished else is_cut_off):
        raise ValueError(f"finish, {choice.finish_reason} after {length} tokens, {tokens[-1]}")
    logprobs = [min(x, 0.0) for x in logprobs]
    versions = token_versions(choice.weight_versions, length)
    return dict(tokens=tokens, behavior_logprobs=logprobs, versions=versions, finished=finished)


def token_versions(spans, length):
    """Version spans -> version of each token, int64 [length]; ValueError if they have gaps or go back."""
    versions = [int(x.version) if x.version.isdecimal() else -1 for x in spans]
    ends = [0, *(span.end for span in spans)]
    follow = [span.start for span in spans] == ends[:-1] and ends == sorted(ends)
    if not follow or ends[-1] != length or [0, *versions] != sorted([0, *versions]):
        raise ValueError(f"versions, {spans} do not cover {length} tokens, in order")
    return np.repeat(versions, np.diff(ends))


async def reap(tasks):
    """Wait a moment for tasks; raises what one of them raised; returns those that go on."""
    if not tasks:
        await asyncio.sleep(0.005)
        return tasks
    done, going_on = await asyncio.wait(tasks, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return going_on


class Engines:
    """The engines of a run that serve the trainer's weights. stop, vocabulary: of `read_answer`."""

    def __init__(self, config, stop, vocabulary, run_dir=None):
        self.config = config
        self.stop = sorted(stop)
        self.vocabulary = vocabulary
        self.headers = secret_header(run_dir) if run_dir else {}
        self.serving = []
        # by url: sequences in progress; before this time no work; HTTP connections
        self.load = Counter()
        self.backs_off_until = Counter()
        self.sessions = {}
        # events that are not errors but worth a line: retried, moved, failed
        self.counts = Counter()
        # tokens sampled since the pace was measured
        self.tokens = 0
        self.measured_at = time.monotonic()
        # sampled tokens per second, share of the engines' slots that is empty: means over some 10 s
        self.pace = dict(gen_tok_s=0.0, gen_idle=0.0)

    @property
    def capacity(self):
        """Sequences that all engines together hold."""
        return len(self.serving) * self.config.concurrency

    def set_engines(self, urls):
        """These engines serve the trainer's weights now. Requests of one that does no more move."""
        for url in set(self.serving) - set(urls):
            if url in self.sessions:
                asyncio.get_running_loop().create_task(self.sessions.pop(url).close())
        self.serving = list(urls)

    def _session(self, url):
        """The HTTP connections to one engine; closing them ends its requests."""
        if url not in self.sessions:
            # a hanging engine's requests move before the run counts as stalled
            timeout = aiohttp.ClientTimeout(total=self.config.stall_timeout / 3)
            # the server closes idle connections after 5 s: close them first
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            how = dict(timeout=timeout, connector=connector)
            headers = self.headers | {"Content-Type": "application/json"}
            self.sessions[url] = aiohttp.ClientSession(headers=headers, **how)
        return self.sessions[url]

    async def close(self):
        await asyncio.gather(*(session.close() for session in self.sessions.values()))

    def least_loaded(self, most=10**9, preferred=None):
        """The engine with the fewest sequences, or the preferred one, of those that serve, are well and have
        fewer than `most`; None if there is none.
        """
        now = time.monotonic()
        well = [u for u in self.serving if self.backs_off_until[u] < now and self.load[u] < most]
        if preferred in well:
            return preferred
        return min(well, key=self.load.__getitem__, default=None)

    async def generate(self, prompt, temperature, max_tokens, seed=None, salt=None, engine=None):
        """One completion of prompt token ids: what `read_answer` returns, and its `engine`.

        salt: beginnings of prompts with the same one may be computed once (None: alone); engine: where
        they were, if it has a slot. None when all retries have failed; requests that an engine's death
        or restart broke off do not count: they move to another one.
        """
        params = dict(max_tokens=max_tokens, temperature=temperature, seed=seed)
        params |= dict(stop_token_ids=self.stop)
        body = dict(token_ids=prompt, sampling_params=params, cache_salt=salt)
        tries = 0
        while tries <= RETRIES:
            url = self.least_loaded(self.config.concurrency, engine)
            if url is None:
                # nobody tells when a slot is free, an engine comes or is well again
                await asyncio.sleep(0.3)
                continue
            self.load[url] += 1
            try:
                content = await self._post(url, "/inference/v1/generate", body)
                answer = read_answer(content, max_tokens, self.stop, self.vocabulary)
                self.tokens += len(answer["tokens"])
                return answer | dict(engine=url)
            except aiohttp.ClientConnectionError as e:
                self._note_failure("moved", url, e)
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                tries += 1
                self._note_failure("retried" if tries <= RETRIES else "failed", url, e)
            finally:
                self.load[url] -= 1
            await asyncio.sleep(min(0.5 * 2**tries, 10) * random.uniform(0.5, 1.5))
        return None

    async def ask(self, path, question):
        """vLLM's answer to a call of its own, JSON both; waits for an engine. Raises aiohttp.ClientResponseError with its words."""
        while True:
            url = self.least_loaded()
            try:
                if url:
                    return msgspec.json.decode(await self._post(url, path, question))
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as e:
                self._note_failure("moved", url, e)
            await asyncio.sleep(0.5)

    async def _post(self, url, path, body):
        """One request -> its answer, bytes. Raises what aiohttp does."""
        body = msgspec.json.encode(body)
        async with self._session(url).post(url + path, data=body) as answer:
            content = await answer.read()
        if answer.status == 200:
            return content
        words = f"{answer.status} {content[:300].decode(errors='replace')}"
        # 503: it has been started again, and has no weights yet
        if answer.status == 503:
            raise aiohttp.ClientConnectionError(words)
        how = dict(status=answer.status, message=words)
        raise aiohttp.ClientResponseError(answer.request_info, (), **how)

    def _note_failure(self, event, url, error):
        """Count an event; lines of the 1st, 2nd, 4th, 8th...: hundreds may fail at once."""
        self.backs_off_until[url] = time.monotonic() + BACK_OFF
        self.counts[event] += 1
        why = f"{type(error).__name__}: {' '.join(str(error)[:200].split())}"
        words = f"actor: request to {url} {event} ({self.counts[event]} so far): {why}"
        if self.counts[event].bit_count() == 1:
            print(words, flush=True)

    def measure_pace(self):
        """Take the time since the last measurement into `pace`."""
        now = time.monotonic()
        seconds = max(now - self.measured_at, 1e-6)
        idle = 1 - sum(self.load.values()) / max(self.capacity, 1)
        newest = dict(gen_tok_s=self.tokens / seconds, gen_idle=max(idle, 0.0))
        for name, value in newest.items():
            self.pace[name] += min(seconds / 10, 1) * (value - self.pace[name])
        self.measured_at = now
        self.tokens = 0
