"""The actor's HTTP client of all engines: the least loaded one samples, failed requests go elsewhere.

What an engine answers (plumbing/engine.py) is checked here, once.

An engine is lost when the connection of a request in progress breaks, or when the trainer lists it no
more: it has died or hangs, or its host has vanished. Its requests move to other engines, or wait until it
has been started again. One of them may be the cause, and would kill the next engine, and the next:

    a prompt that was in progress at two losses is sent alone, to an engine that does nothing else;
    a prompt whose engine is lost then as well kills engines: it is never sent again, and its attempts fail;
    an engine that is lost five times, and meanwhile no request finishes, ends the run.

Deliberately absent: asking engines for their health; whoever started one kills it if it hangs, and the
trainer drops it if its host has vanished.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from config import require
from plumbing.secret import secret_header

# a failed request is tried again this often before the attempt is given up
RETRIES = 3
# seconds that an engine gets no work after a request to it failed
BACK_OFF = 2.5
# a prompt that was in progress at so many losses of engines is sent alone
SUSPICIOUS = 2
# losses of one engine that end the run if no request to any engine finishes in between
MAX_LOSSES = 5


class NoWeights(aiohttp.ClientConnectionError):
    """The engine has been started again, and the trainer has not sent it any weights yet."""


class Refused(aiohttp.ClientResponseError):
    """The engine answers that the request itself is wrong, as each other engine would."""


class KillsEngines(aiohttp.ClientResponseError):
    """The request is not sent: engines died of it each time, also one that was doing nothing else."""

    def __init__(self, message):
        super().__init__(None, (), status=500, message=message)

    def __str__(self):
        return self.message


@dataclass(eq=False)
class Request:
    """A request in progress. life: how often its engine had been lost when it was sent."""

    # token ids as JSON; of a call of vLLM's own its path and its body
    prompt: bytes
    url: str
    life: int


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


class EngineClient:
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
        # each Request
        self.in_progress = set()
        # by url: how often the engine was lost, in all, and since a request to any engine finished
        self.lives = Counter()
        self.losses_in_a_row = Counter()
        # by prompt: at how many losses it was in progress; the prompts that are never sent again
        self.losses = Counter()
        self.killers = set()
        # held while a suspicious prompt is sent alone, to the engine `reserved`
        self.quarantine = asyncio.Lock()
        self.reserved = None
        # events that are not errors but worth a line: retried, moved, failed, ...
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
        """These engines serve the trainer's weights now. Requests of one that does no more move.

        Raises ConfigError if an engine is lost again and again, and no request finishes.
        """
        for url in set(self.serving) - set(urls):
            self._note_loss(url, self.lives[url])
            if url in self.sessions:
                asyncio.get_running_loop().create_task(self.sessions.pop(url).close())
        self.serving = list(urls)
        for url, losses in self.losses_in_a_row.items():
            require(
                losses < MAX_LOSSES,
                f"the engine {url} was lost {losses} times, each time with requests in progress, and no "
                "request has finished in between: see what it died of in the run's logs/engine*.log",
            )

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
        """The engine with the fewest sequences, or the preferred one, of those that serve, are well, have
        fewer than `most` and are not reserved for a suspicious prompt; None if there is none.
        """
        reserved = self.reserved if self.quarantine.locked() else None
        well = [u for u in self.serving if self._is_well(u) and self.load[u] < most]
        if reserved in well:
            well.remove(reserved)
        if preferred in well:
            return preferred
        return min(well, key=self.load.__getitem__, default=None)

    def _is_well(self, url):
        """Does it serve, and has no request to it failed just now?"""
        return url in self.serving and self.backs_off_until[url] < time.monotonic()

    async def generate(self, prompt, temperature, max_tokens, seed=None, salt=None, engine=None):
        """One completion of prompt token ids: what `read_answer` returns, and its `engine`.

        salt: beginnings of prompts with the same one may be computed once (None: alone); engine: where
        they were, if it has a slot. None when all retries have failed, if engines refuse the prompt, or
        if it kills them; requests that the loss of an engine broke off do not count: they move to another.
        """
        params = dict(max_tokens=max_tokens, temperature=temperature, seed=seed)
        params |= dict(stop_token_ids=self.stop)
        body = dict(token_ids=prompt, sampling_params=params, cache_salt=salt)
        key = msgspec.json.encode(prompt)
        tries = 0
        while tries <= RETRIES:
            try:
                async with self._place(key, self.config.concurrency, engine) as url:
                    content = await self._post(url, "/inference/v1/generate", body)
                    answer = read_answer(content, max_tokens, self.stop, self.vocabulary)
                self.tokens += len(answer["tokens"])
                self.losses.pop(key, None)
                self.losses_in_a_row.clear()
                return answer | dict(engine=url)
            except KillsEngines:
                self.counts["left out, as their prompts kill engines"] += 1
                return None
            except Refused as e:
                self._note("refused", url, e)
                return None
            except aiohttp.ClientConnectionError as e:
                self._note("moved", url, e)
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                tries += 1
                self._note("retried" if tries <= RETRIES else "failed", url, e)
            self._back_off(url)
            await asyncio.sleep(min(0.5 * 2**tries, 10) * random.uniform(0.5, 1.5))
        return None

    async def ask(self, path, question):
        """vLLM's answer to a call of its own, JSON both; waits for an engine.

        Raises aiohttp.ClientResponseError with its words, or KillsEngines.
        """
        key = path.encode() + b" " + msgspec.json.encode(question)
        while True:
            try:
                async with self._place(key) as url:
                    answer = msgspec.json.decode(await self._post(url, path, question))
                self.losses.pop(key, None)
                return answer
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as e:
                self._note("moved", url, e)
                self._back_off(url)
            await asyncio.sleep(0.5)

    async def _post(self, url, path, body):
        """One request -> its answer, bytes. Raises what aiohttp does."""
        body = msgspec.json.encode(body)
        async with self._session(url).post(url + path, data=body) as answer:
            content = await answer.read()
        if answer.status == 200:
            return content
        message = f"{answer.status} {content[:300].decode(errors='replace')}"
        if answer.status == 503:
            raise NoWeights(message)
        kind = Refused if answer.status == 400 else aiohttp.ClientResponseError
        raise kind(answer.request_info, (), status=answer.status, message=message)

    # ---- places in engines, and prompts that kill engines

    @contextlib.asynccontextmanager
    async def _place(self, prompt, most=10**9, preferred=None):
        """A place in an engine for this prompt, waited for: gives its url.

        A suspicious prompt has an engine to itself. Raises KillsEngines. If the connection of the request
        that is made inside breaks, the engine is lost.
        """
        while prompt not in self.killers:
            if self.losses[prompt] < SUSPICIOUS:
                url = self.least_loaded(most, preferred)
                if url is not None:
                    with self._request(prompt, url):
                        yield url
                    return
            else:
                async with self.quarantine:
                    # an attempt with the same prompt may have been sent alone meanwhile
                    if self.losses[prompt] >= SUSPICIOUS and prompt not in self.killers:
                        url = await self._empty_engine()
                        with self._request(prompt, url):
                            yield url
                        return
                continue
            # nobody tells when a slot is free, an engine comes or is well again
            await asyncio.sleep(0.3)
        raise KillsEngines("engines died of this prompt each time, also one that did nothing else")

    async def _empty_engine(self):
        """An engine that has nothing to do, waited for: its url. From now on it gets no other work."""
        while True:
            if not self._is_well(self.reserved):
                self.reserved = self.least_loaded()
            if self.reserved and not self.load[self.reserved]:
                return self.reserved
            await asyncio.sleep(0.1)

    @contextlib.contextmanager
    def _request(self, prompt, url):
        """A request to this engine is in progress while this is entered."""
        request = Request(prompt, url, self.lives[url])
        self.in_progress.add(request)
        self.load[url] += 1
        try:
            yield
        except aiohttp.ClientConnectionError as e:
            # these two have not come to be in progress
            if not isinstance(e, (NoWeights, aiohttp.ClientConnectorError)):
                self._note_loss(url, request.life)
            raise
        finally:
            self.load[url] -= 1
            self.in_progress.remove(request)

    def _note_loss(self, url, life):
        """An engine is lost with all requests of this life of it; noted once for all of them."""
        prompts = {x.prompt for x in self.in_progress if x.url == url and x.life == life}
        if self.lives[url] != life or not prompts:
            return
        self.lives[url] += 1
        self.losses_in_a_row[url] += 1
        self.counts["losses of engines"] += 1
        print(f"actor: {url} is lost with {len(prompts)} prompts in progress", flush=True)
        if len(prompts) == 1 and self.losses[next(iter(prompts))] >= SUSPICIOUS:
            self._note_killer(*prompts, url)
        self.losses.update(prompts)

    def _note_killer(self, prompt, url):
        """An engine was lost that had only this prompt, at which others were lost before."""
        self.killers.add(prompt)
        self.counts["prompts that kill engines"] += 1
        print(
            f"actor: a prompt kills engines: {self.losses[prompt] + 1} were lost while they had it, "
            f"and the last one, {url}, had nothing else: its attempts fail from now on. "
            f"Its token ids: {prompt[:500].decode(errors='replace')}",
            flush=True,
        )

    def _back_off(self, url):
        """A request to this engine has failed: for a moment it gets no more."""
        self.backs_off_until[url] = time.monotonic() + BACK_OFF

    def _note(self, event, url, error):
        """Count an event; lines of the 1st, 2nd, 4th, 8th...: hundreds may fail at once."""
        self.counts[event] += 1
        if self.counts[event].bit_count() == 1:
            why = f"{type(error).__name__}: {' '.join(str(error)[:200].split())}"
            print(
                f"actor: request to {url} {event} ({self.counts[event]} so far): {why}", flush=True
            )

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
