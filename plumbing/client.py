"""The actor's HTTP client of all engines: the least loaded one samples, failed requests go elsewhere.

Deliberately absent: what is sampled and why (actor.py), weight updates (weights.py).
"""

import asyncio
import contextlib
import random
import time
from collections import Counter

import aiohttp
import msgspec

from plumbing.answers import BadAnswer, largest_answer, read_answer, read_prefilled

# a failed request is tried again this often, with back-off, before the attempt is given up
RETRIES = 3
# seconds that an engine gets no work after it did not answer
REST = 2.5
# seconds that an engine has to say that it is well
HEALTH_TIMEOUT = 10.0


class EngineGone(Exception):
    """The engine died, was started again or has no weights: the request did not fail, it moves."""


async def _body(answer, largest):
    """What an engine answered. BadAnswer if it is longer than `largest` bytes."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > largest:
            raise BadAnswer("too_long", f"more than {largest} bytes")
    return bytes(body)


class Engines:
    """The engines that serve the trainer's weights.

    stop: token ids that end a completion; vocabulary: how many ids there are;
    headers: of every request; who: asks, for lines on the terminal.
    """

    def __init__(self, config, stop, vocabulary, headers=None, who="actor"):
        self.who = who
        self.config = config
        self.headers = headers
        self.stop = sorted(stop)
        self.vocabulary = vocabulary
        self.serving = []
        # the version that all of them have, at least
        self.served = 0
        # by url: sequences in progress; before this time no work; time of the last answer; HTTP connections
        self.load = Counter()
        self.rest_until = Counter()
        self.answered_at = Counter()
        self.sessions = {}
        self.place_is_free = asyncio.Condition()
        # events that are not errors but worth a line: retried, moved, failed, bad answers by reason
        self.counts = Counter()
        self.next_warning = 0.0
        # sampled since the last look; tokens/s and share of the engines' places that is empty, lately
        self.tokens = 0
        self.rate = 0.0
        self.idle = 0.0
        self.last_look = time.monotonic()

    # ---- who serves

    @property
    def places(self):
        """Sequences that all engines together hold."""
        return len(self.serving) * self.config.concurrency

    def serve(self, urls, version=0):
        """These engines serve the trainer's weights of this version now. Requests of one that does no more move."""
        self.served = version
        for url in self.serving:
            if url not in urls:
                self._drop(url, "was dropped by the trainer")
        self.serving = list(urls)

    def _drop(self, url, why):
        """End the connections to an engine, so that its requests go elsewhere."""
        self.rest_until[url] = time.monotonic() + REST
        if self.load[url]:
            print(
                f"{self.who}: engine {url} {why}: its {self.load[url]} sequences start again elsewhere",
                flush=True,
            )
        session = self.sessions.pop(url, None)
        if session:
            asyncio.get_running_loop().create_task(session.close())

    async def watch(self):
        """Every 2 s: an engine that does not answer gets no work, and its requests go elsewhere."""
        while True:
            serving = list(self.serving)
            healthy = await asyncio.gather(*(self._is_healthy(url) for url in serving))
            for url, ok in zip(serving, healthy):
                # this process may be too busy to hear in time that an engine is well
                silent_s = time.monotonic() - self.answered_at[url]
                if not ok and silent_s > HEALTH_TIMEOUT:
                    self._drop(url, "does not answer")
            await asyncio.sleep(2)
            async with self.place_is_free:
                self.place_is_free.notify_all()

    async def _is_healthy(self, url):
        limit = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        try:
            async with self._session(url).get(url + "/health", timeout=limit) as answer:
                return answer.status == 200
        # RuntimeError: its connections were just closed
        except (aiohttp.ClientError, asyncio.TimeoutError, RuntimeError):
            return False

    def _session(self, url):
        """The HTTP connections to one engine; closing them ends its requests."""
        if url not in self.sessions:
            self.sessions[url] = aiohttp.ClientSession(
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=self.config.request_timeout),
                # the server closes idle connections after 5 s: close them first
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            )
        return self.sessions[url]

    async def close(self):
        sessions = list(self.sessions.values())
        await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)

    # ---- sampling

    def _free(self, failed=()):
        """Engines that serve, are well and have room for a sequence; those in `failed` only if there are no others.

        One whose every answer is an error has room all the time: it must not get every retry, too.
        """
        now = time.monotonic()
        room = self.config.concurrency
        chosen = self.serving
        if failed:
            chosen = [url for url in chosen if url not in failed] or chosen
        return [u for u in chosen if self.rest_until[u] < now and self.load[u] < room]

    def least_loaded(self):
        """The engine with the fewest sequences; None if none serves."""
        return min(self._free() or self.serving, key=self.load.__getitem__, default=None)

    @contextlib.asynccontextmanager
    async def _place(self, preferred, failed):
        """One sequence's place on this engine if it has one, else on the least loaded, on those in `failed`
        only if there are no others; waits until there is one.
        """
        async with self.place_is_free:
            free = await self.place_is_free.wait_for(lambda: self._free(failed))
            url = preferred if preferred in free else min(free, key=self.load.__getitem__)
            self.load[url] += 1
        try:
            yield url
        finally:
            self.load[url] -= 1
            async with self.place_is_free:
                self.place_is_free.notify()

    async def generate(self, prompt, temperature, max_tokens, seed=None, salt=None, engine=None):
        """One completion of prompt token ids: {tokens, logprobs, versions, finished, engine}.

        salt: beginnings of prompts with the same one may be computed once (None: alone); engine: where
        they were, if it has a place.

        Failed requests are tried again, with back-off; None when the retries are used up. Those that
        an engine's death or restart broke off do not count: they wait for an engine.
        """
        params = dict(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self.stop,
        )
        body = dict(token_ids=prompt, sampling_params=params, cache_salt=salt)

        def read(content):
            return read_answer(content, max_tokens, self.stop, self.vocabulary)

        sampled = await self._ask_until_answered(body, max_tokens, read, engine)
        if sampled:
            self.tokens += len(sampled["tokens"])
        return sampled

    async def prefill(self, tokens, engine=None):
        """A sequence as a prompt: {logprobs [T-1] of all tokens but the first, versions [1], engine}.

        By the weights that the engine has now, at temperature 1, with nothing of a KV cache from before.
        None as of `generate`.
        """
        params = dict(max_tokens=1, prompt_logprobs=0)
        body = dict(token_ids=tokens, sampling_params=params, cache_salt=None)

        def read(content):
            return read_prefilled(content, len(tokens))

        return await self._ask_until_answered(body, len(tokens), read, engine)

    async def _ask_until_answered(self, body, tokens, read, engine):
        """read(answer) | {engine}; None when the retries are used up. tokens: the answer tells of so many."""
        tries = 0
        failed = set()
        while tries <= RETRIES:
            async with self._place(engine, failed) as url:
                try:
                    served = self.served
                    answer = read(await self._ask(url, body, largest_answer(tokens)))
                    version = answer["versions"][0]
                    if version < served:
                        words = f"version {version}, all engines have {served}"
                        raise BadAnswer("old_weights", words)
                    return answer | dict(engine=url)
                except EngineGone as e:
                    self.rest_until[url] = time.monotonic() + REST
                    self._count("moved", url, e, tries)
                except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as e:
                    tries += 1
                    failed.add(url)
                    if isinstance(e, BadAnswer):
                        self.counts[f"bad_{e.reason}"] += 1
                    self._count("retried" if tries <= RETRIES else "failed", url, e, tries)
            await asyncio.sleep(min(0.5 * 2**tries, 10) * random.uniform(0.5, 1.5))
        return None

    async def _ask(self, url, body, largest):
        """One request -> its answer, bytes. Raises BadAnswer, EngineGone, and what aiohttp does."""
        try:
            async with self._session(url).post(
                url + "/inference/v1/generate",
                data=msgspec.json.encode(body),
                allow_redirects=False,
            ) as answer:
                content = await _body(answer, largest)
        except asyncio.TimeoutError:
            raise
        except aiohttp.ClientConnectionError as e:
            raise EngineGone(f"{type(e).__name__} {e}") from e
        words = content[:300].decode(errors="replace")
        if answer.status == 503:
            raise EngineGone(words)
        if answer.status != 200:
            raise ValueError(f"{answer.status} {words}")
        self.answered_at[url] = time.monotonic()
        return content

    def _count(self, event, url, error, tries):
        """Count an event, with a line now and then: hundreds of requests may fail at once."""
        self.counts[event] += 1
        if time.monotonic() > self.next_warning:
            self.next_warning = time.monotonic() + 5
            words = " ".join(str(error)[:200].split())
            print(
                f"{self.who}: request to {url} failed ({type(error).__name__}: {words}), "
                f"{tries} of {RETRIES + 1} tries used; so far {dict(self.counts)}",
                flush=True,
            )

    # ---- how busy

    def look(self):
        """Take the time since the last look into `rate` and `idle`, exponential means over 10 s."""
        now = time.monotonic()
        seconds = now - self.last_look
        self.last_look = now
        weight = min(seconds / 10, 1)
        empty = 1 - sum(self.load.values()) / max(self.places, 1)
        self.idle += weight * (max(empty, 0.0) - self.idle)
        self.rate += weight * (self.tokens / max(seconds, 1e-6) - self.rate)
        self.tokens = 0

    def pace(self):
        """gen_tok_s: sampled tokens per second; gen_idle: share of the engines' places that is empty."""
        return dict(gen_tok_s=self.rate, gen_idle=self.idle)
