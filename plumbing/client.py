"""The actor's HTTP client of all engines.

Each request goes to the engine with the fewest requests; if it fails, another engine gets it. The
answers of the engines (plumbing/engine.py) are checked here, and nowhere else.

An engine counts as crashed when the connection of a request in progress breaks, or when the trainer
no longer lists it: it has died or hangs, or its host has vanished. Its requests move to other
engines, or wait until it has been started again. One of the requests may be the cause, and would
make one engine after the other crash. Therefore:

    A prompt that was in progress during two crashes is sent alone, to an engine that has no other
    work. If this engine crashes as well, the prompt is never sent again, and its attempts fail.
    The run ends if an engine crashes five times while no request to any engine finishes.

Deliberately absent: health checks of the engines. Whoever started an engine kills it if it hangs,
and the trainer drops it if its host has vanished.
"""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter, deque
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
# a prompt that was in progress during so many crashes of engines is sent alone
SUSPICIOUS = 2
# crashes of one engine that end the run if no request to any engine finishes in between
MAX_CRASHES = 5


class NoWeights(aiohttp.ClientConnectionError):
    """The engine has been started again, and the trainer has not sent it any weights yet."""


class Refused(aiohttp.ClientResponseError):
    """The engine answers that the request itself is wrong; any other engine would say the same."""


class KillsEngines(aiohttp.ClientResponseError):
    """The request is not sent any more: engines died of it, also one that did nothing else."""

    def __init__(self, message):
        super().__init__(None, (), status=500, message=message)

    def __str__(self):
        return self.message


@dataclass(eq=False)
class Request:
    """A request in progress.

    prompt: the token ids as JSON; for a call of vLLM's own, its path and its body. url: that of its
    engine. crashes_before: how often this engine had crashed when the request was sent; it tells
    the requests of an engine that has crashed from those of the engine that was started again.
    """

    prompt: bytes
    url: str
    crashes_before: int


class Span(msgspec.Struct):
    """The tokens start .. end-1, sampled by one version, which is a number as text."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int]
    behavior_logprobs: list[float]
    weight_versions: list[Span]
    finish_reason: str
    # see plumbing/engine.py
    experts: bytes | None = None
    experts_shape: list[int] | None = None


class Answer(msgspec.Struct):
    choices: list[Choice]


def read_answer(body, max_tokens, stop, vocabulary, context=None):
    """Read an engine's answer (bytes) -> {tokens, behavior_logprobs, versions, finished, experts}.

    stop: token ids that end an answer. vocabulary: the number of token ids. context: the number of
    the prompt's tokens whose experts are asked for, the last ones; None: `experts` is None. Raises
    ValueError that says what is wrong with the answer.
    """
    # this raises for numbers that are not finite, too: they are no JSON
    [choice] = msgspec.json.decode(body, type=Answer).choices
    tokens = choice.token_ids
    check_tokens(tokens, max_tokens, vocabulary)
    check_logprobs(choice.behavior_logprobs, len(tokens))
    check_finish(choice.finish_reason, tokens, max_tokens, stop)
    return dict(
        tokens=tokens,
        behavior_logprobs=[min(x, 0.0) for x in choice.behavior_logprobs],
        versions=token_versions(choice.weight_versions, len(tokens)),
        finished=choice.finish_reason == "stop",
        experts=None if context is None else read_experts(choice, context + len(tokens) - 1),
    )


def read_experts(choice, count):
    """An engine's answer -> the experts of `count` tokens, int16 [count, layers * k].

    Raises ValueError unless it has those of just as many tokens.
    """
    values = np.frombuffer(choice.experts or b"", "<i2")
    shape = choice.experts_shape or [0, 0]
    if shape[0] != count or shape[0] * shape[1] != len(values):
        raise ValueError(
            f"the engine returned {len(values)} choices of experts for {shape[0]} tokens, those of "
            f"{count} tokens were asked for"
        )
    return values.reshape(shape)


def check_tokens(tokens, max_tokens, vocabulary):
    """Raise ValueError unless there are 1 to max_tokens tokens, all of them in the vocabulary."""
    if not tokens:
        raise ValueError("the engine returned no tokens")
    if len(tokens) > max_tokens:
        raise ValueError(
            f"the engine returned {len(tokens)} tokens, at most {max_tokens} were asked for"
        )
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token id {token} is outside of the vocabulary of {vocabulary} ids")


def check_logprobs(logprobs, length):
    """Raise ValueError unless there is a logprob for each token, and each is above -9999."""
    if len(logprobs) != length:
        raise ValueError(f"the engine returned {len(logprobs)} logprobs for {length} tokens")
    for logprob in (min(logprobs), max(logprobs)):
        # rounding may leave a logprob above 0, and vLLM writes -9999 for minus infinity
        if not -9999 < logprob <= 1e-3:
            raise ValueError(f"a logprob is {logprob}, it must be at most 0 and above -9999")


def check_finish(finish_reason, tokens, max_tokens, stop):
    """Raise ValueError unless an answer ends with a stop token, or is as long as it may be."""
    if finish_reason == "stop":
        if tokens[-1] not in stop:
            raise ValueError(
                f"the answer is finished, but its last token {tokens[-1]} is no stop token"
            )
    elif finish_reason == "length":
        if len(tokens) < max_tokens:
            raise ValueError(
                f"the engine cut the answer off after {len(tokens)} tokens, "
                f"{max_tokens} were asked for"
            )
    else:
        raise ValueError(f"the finish reason is {finish_reason!r}, it must be 'stop' or 'length'")


def token_versions(spans, length):
    """Version spans -> the version of each token, int64 [length].

    Raises ValueError unless the spans cover all tokens in order, and no version is older than the
    one before it.
    """
    for span in spans:
        if not span.version.isdecimal():
            raise ValueError(f"the version {span.version!r} of some tokens is no number")
    versions = [int(span.version) for span in spans]
    starts = [span.start for span in spans]
    ends = [0, *(span.end for span in spans)]
    if [*starts, length] != ends or ends != sorted(ends):
        raise ValueError(f"the versions' spans do not cover the {length} tokens in order: {spans}")
    if versions != sorted(versions):
        raise ValueError(f"the versions of an answer must not go back, they are {versions}")
    return np.repeat(versions, np.diff(ends))


async def reap(tasks):
    """Wait a moment for asyncio tasks; returns those that go on, raises the error of one."""
    if not tasks:
        await asyncio.sleep(0.005)
        return tasks
    done, going_on = await asyncio.wait(tasks, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return going_on


class EngineClient:
    """The engines of a run that serve the trainer's weights.

    stop, vocabulary: see `read_answer`.
    """

    def __init__(self, config, stop, vocabulary, run_dir=None):
        self.config = config
        self.stop = sorted(stop)
        self.vocabulary = vocabulary
        self.headers = secret_header(run_dir) if run_dir else {}
        self.serving = []
        # {url: number of sequences in progress}
        self.load = Counter()
        # {url: time until which the engine gets no work}
        self.backs_off_until = Counter()
        # {url: HTTP connections}
        self.sessions = {}
        # every Request in progress
        self.in_progress = set()
        # futures of the requests that wait for a slot, the one that has waited longest first
        self.waiting = deque()
        # {url: how often the engine has crashed}: in all, and since a request to any engine has
        # finished
        self.crashes = Counter()
        self.crashes_in_a_row = Counter()
        # {prompt: number of crashes during which it was in progress}
        self.crashes_with_prompt = Counter()
        # the prompts that are never sent again
        self.killers = set()
        # held while a suspicious prompt is sent alone, to the engine `reserved`
        self.quarantine = asyncio.Lock()
        self.reserved = None
        # how often each event happened that is no error but worth a line: retried, moved, ...
        self.counts = Counter()
        # {url: its number of sequences in progress, summed over time up to `occupied_at`}, in
        # sequences x seconds
        self.occupied = Counter()
        self.occupied_at = Counter()
        # see `_note_duration`
        self.durations = np.zeros((3, 4))
        # the number of tokens sampled since the pace was measured
        self.tokens = 0
        self.measured_at = time.monotonic()
        # sampled tokens per second and the share of the engines' slots that is empty, both as means
        # over some 10 s; and `durations`
        self.pace = dict(gen_tok_s=0.0, gen_idle=0.0)

    @property
    def capacity(self):
        """The number of sequences that all engines hold together."""
        return len(self.serving) * self.config.concurrency

    def set_engines(self, urls):
        """Set the engines that serve the trainer's weights now.

        The requests of an engine that is no longer among them move to others. Raises ConfigError if
        an engine crashes again and again while no request finishes.
        """
        for url in set(self.serving) - set(urls):
            self._note_crash(url, self.crashes[url])
            if url in self.sessions:
                asyncio.get_running_loop().create_task(self.sessions.pop(url).close())
        self.serving = list(urls)
        for url, crashes in self.crashes_in_a_row.items():
            require(
                crashes < MAX_CRASHES,
                f"the engine {url} has crashed {crashes} times, each time with requests in "
                "progress, and no request has finished in between: see in the run's "
                "logs/engine*.log why it died",
            )

    def _session(self, url):
        """The HTTP connections to one engine; closing them ends its requests."""
        if url not in self.sessions:
            # a hanging engine's requests move before the run counts as stalled
            timeout = aiohttp.ClientTimeout(total=self.config.stall_timeout / 3)
            # the server closes idle connections after 5 s: close them first
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self.sessions[url] = aiohttp.ClientSession(
                headers=self.headers | {"Content-Type": "application/json"},
                timeout=timeout,
                connector=connector,
            )
        return self.sessions[url]

    async def close(self):
        """Close all HTTP connections."""
        await asyncio.gather(*(session.close() for session in self.sessions.values()))

    def least_loaded(self, max_load=math.inf, preferred=None):
        """The URL of the engine with the fewest sequences, or of the preferred engine.

        Only those engines qualify that serve, are not backing off, have fewer than max_load
        sequences, and are not reserved for a suspicious prompt. None if no engine does.
        """
        reserved = self.reserved if self.quarantine.locked() else None
        well = []
        for url in self.serving:
            if self.load[url] < max_load and not self._backs_off(url):
                well.append(url)
        if reserved in well:
            well.remove(reserved)
        if preferred in well:
            return preferred
        return min(well, key=self.load.__getitem__, default=None)

    def _backs_off(self, url):
        """Has a request to the engine failed just now?"""
        return self.backs_off_until[url] >= time.monotonic()

    async def generate(
        self,
        prompt,
        temperature,
        max_tokens,
        seed=None,
        salt=None,
        engine=None,
        experts_from=None,
    ):
        """Sample one answer to a prompt of token ids.

        Returns the result of `read_answer` with the URL of the `engine`. Returns None if all
        retries have failed, if engines refuse the prompt, or if it kills them. Requests that were
        broken off by the crash of an engine move to another one, and do not count as retries.

        salt: prompts of the same salt share the KV cache of equal beginnings; None: no sharing.
        engine: URL of the engine that gets the request if it has a free slot. experts_from: the
        first token of the prompt whose experts are asked for, with --replay_routing; None: none.
        """
        params = dict(max_tokens=max_tokens, temperature=temperature, seed=seed)
        params["stop_token_ids"] = self.stop
        if self.config.replay_routing:
            params["routed_experts_prompt_start"] = (
                len(prompt) if experts_from is None else experts_from
            )
        context = None if experts_from is None else len(prompt) - experts_from
        body = dict(token_ids=prompt, sampling_params=params, cache_salt=salt)
        key = msgspec.json.encode(prompt)
        tries = 0
        while tries <= RETRIES:
            try:
                async with self._engine_for(key, self.config.concurrency, engine) as url:
                    began = self._occupied(url)
                    content = await self._post(url, "/inference/v1/generate", body)
                    answer = read_answer(content, max_tokens, self.stop, self.vocabulary, context)
                    ended = self._occupied(url)
                self.tokens += len(answer["tokens"])
                self._note_duration(len(answer["tokens"]), *(ended - began))
                self.crashes_with_prompt.pop(key, None)
                self.crashes_in_a_row.clear()
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

    async def ask(self, path, body):
        """Send a request to a path that vLLM itself serves; returns its answer, from JSON.

        Waits for an engine. Raises aiohttp.ClientResponseError with vLLM's message, or
        KillsEngines.
        """
        key = path.encode() + b" " + msgspec.json.encode(body)
        while True:
            try:
                async with self._engine_for(key) as url:
                    answer = msgspec.json.decode(await self._post(url, path, body))
                self.crashes_with_prompt.pop(key, None)
                return answer
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as e:
                self._note("moved", url, e)
                self._back_off(url)
            await asyncio.sleep(0.5)

    async def _post(self, url, path, body):
        """Send one request; returns its answer, bytes. Raises aiohttp's errors."""
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

    # ---- the choice of an engine, and prompts that kill engines

    @contextlib.asynccontextmanager
    async def _engine_for(self, prompt, max_load=math.inf, preferred=None):
        """Wait for an engine that takes this prompt, and yield its URL.

        The request is made within this context; if its connection breaks, the engine counts as
        crashed. A suspicious prompt gets an engine to itself. Raises KillsEngines.
        """
        while prompt not in self.killers:
            if self.crashes_with_prompt[prompt] < SUSPICIOUS:
                url = self.least_loaded(max_load, preferred)
                if url is not None:
                    with self._request(prompt, url):
                        yield url
                    return
            else:
                async with self.quarantine:
                    # an attempt with the same prompt may have been sent alone meanwhile
                    if (
                        self.crashes_with_prompt[prompt] >= SUSPICIOUS
                        and prompt not in self.killers
                    ):
                        url = await self._empty_engine()
                        with self._request(prompt, url):
                            yield url
                        return
                continue
            await self._slot_becomes_free()
        raise KillsEngines("engines died of this prompt each time, also one that did nothing else")

    async def _slot_becomes_free(self):
        """Wait for a free slot, or a moment: nobody tells when an engine comes or is well again.

        A request looks every 0.3 s. If an evaluation lets thousands of requests wait, each of them
        looks less often, so that together they look 300 times a second.
        """
        freed = asyncio.get_running_loop().create_future()
        self.waiting.append(freed)
        try:
            await asyncio.wait_for(freed, max(0.3, len(self.waiting) / 300))
        except TimeoutError:
            pass
        finally:
            if freed in self.waiting:
                self.waiting.remove(freed)

    async def _empty_engine(self):
        """Wait for an engine that has nothing to do; returns its URL. It gets no other work."""
        while True:
            if self.reserved not in self.serving or self._backs_off(self.reserved):
                self.reserved = self.least_loaded()
            if self.reserved and not self.load[self.reserved]:
                return self.reserved
            await asyncio.sleep(0.1)

    @contextlib.contextmanager
    def _request(self, prompt, url):
        """Count a request to this engine as in progress within this context."""
        request = Request(prompt, url, self.crashes[url])
        self.in_progress.add(request)
        self._occupied(url)
        self.load[url] += 1
        try:
            yield
        except aiohttp.ClientConnectionError as e:
            # with these two errors the engine has not even begun the request
            if not isinstance(e, (NoWeights, aiohttp.ClientConnectorError)):
                self._note_crash(url, request.crashes_before)
            raise
        finally:
            self._occupied(url)
            self.load[url] -= 1
            self.in_progress.remove(request)
        # This line is not reached after an error: the engine then gets no work for a moment, so no
        # waiting request is called.
        self._call_next()

    def _call_next(self):
        """Tell the request that has waited longest that a slot is free."""
        while self.waiting:
            freed = self.waiting.popleft()
            # A request that is given up just now has a future that is done.
            if not freed.done():
                freed.set_result(None)
                return

    def _note_crash(self, url, crashes_before):
        """Note, once for all its requests in progress, that an engine has crashed.

        crashes_before: see Request; a crash that was noted before is not noted again.
        """
        prompts = set()
        for request in self.in_progress:
            if request.url == url and request.crashes_before == crashes_before:
                prompts.add(request.prompt)
        if self.crashes[url] != crashes_before or not prompts:
            return
        self.crashes[url] += 1
        self.crashes_in_a_row[url] += 1
        self.counts["crashes of engines"] += 1
        print(
            f"actor: {url} has crashed, or hangs, with {len(prompts)} prompts in progress",
            flush=True,
        )
        if len(prompts) == 1 and self.crashes_with_prompt[next(iter(prompts))] >= SUSPICIOUS:
            self._note_killer(*prompts, url)
        self.crashes_with_prompt.update(prompts)

    def _note_killer(self, prompt, url):
        """Note that an engine has crashed that had only this prompt, as others before it."""
        self.killers.add(prompt)
        self.counts["prompts that kill engines"] += 1
        print(
            f"actor: a prompt kills engines: {self.crashes_with_prompt[prompt] + 1} crashed while "
            f"they had it, and the last one, {url}, did nothing else: its attempts fail from now "
            f"on. Its token ids: {prompt[:500].decode(errors='replace')}",
            flush=True,
        )

    def _back_off(self, url):
        """Give this engine no work for a moment, as a request to it has failed."""
        self.backs_off_until[url] = time.monotonic() + BACK_OFF

    def _note(self, event, url, error):
        """Count an event, and print the 1st, 2nd, 4th, 8th ...: hundreds may fail at once."""
        self.counts[event] += 1
        if self.counts[event].bit_count() == 1:
            print(
                f"actor: request to {url} {event} ({self.counts[event]} so far): "
                f"{type(error).__name__}: {' '.join(str(error)[:200].split())}",
                flush=True,
            )

    # ---- the engines' pace

    def _occupied(self, url):
        """An array of two numbers: the time, and `occupied` of an engine up to this time."""
        now = time.monotonic()
        since = self.occupied_at[url] or now
        self.occupied[url] += self.load[url] * (now - since)
        self.occupied_at[url] = now
        return np.array([now, self.occupied[url]])

    def _note_duration(self, tokens, seconds, load_seconds):
        """Note how long a request took, from which the speed of the engines can be computed.

        load_seconds: the engine's number of sequences, summed over the time of the request, so that
        h = load_seconds / seconds is its mean. A request of n tokens takes about c + n (a + b h)
        seconds. `durations` has the sums over all requests of the products of (1, n, n h) with
        (1, n, n h, seconds): least squares for c, a and b need no more.
        """
        x = np.array([1.0, tokens, tokens * load_seconds / max(seconds, 1e-9), seconds])
        self.durations += np.outer(x[:3], x)

    def measure_pace(self):
        """Update `pace` with the time since the last measurement."""
        now = time.monotonic()
        seconds = max(now - self.measured_at, 1e-6)
        idle = 1 - sum(self.load.values()) / max(self.capacity, 1)
        newest = dict(gen_tok_s=self.tokens / seconds, gen_idle=max(idle, 0.0))
        for name, value in newest.items():
            self.pace[name] += min(seconds / 10, 1) * (value - self.pace[name])
        self.pace["durations"] = self.durations.tolist()
        self.measured_at = now
        self.tokens = 0
