"""One attempt at a problem: the object that an episode receives as `model`.

An episode calls `await model(text)`, or lets clients of any kind talk to the attempt's OpenAI
endpoint (plumbing/endpoint.py).

Tokens are kept exactly as the engines sampled them. The tokens of an attempt are one segment, or
several if a prompt does not continue the tokens so far, because the episode has several
conversations or branches, or because the chat template drops old thinking. The attempt stays one
sample. Deliberately absent: the state of an environment, which belongs to the episode.
"""

import asyncio
import contextlib
import math
import secrets
from dataclasses import dataclass

import numpy as np

from config import Config
from plumbing.client import EngineClient
from plumbing.problems import Prompter
from plumbing.samples import Transcript
from plumbing.sandbox import Sandbox, SandboxBroken, error_line, number, returned

# number of requests of one attempt that plumbing/endpoint.py works on at the same time
AT_ONCE = 32
# most requests of one attempt that are worked on or wait; more are refused
MOST_REQUESTS = 256


class CutOff(Exception):
    """The attempt has no tokens left for another turn."""


class AttemptLost(Exception):
    """The attempt cannot go on, and the model is not to blame.

    It is left out and counted, whatever it has sampled. Episodes may raise this.
    """


class EngineUnavailable(AttemptLost):
    """No engine gives an answer: all retries failed, or engines refuse the prompt or die of it."""


class TooManyRequests(Exception):
    """Too many requests of this attempt wait; clients of both APIs try again after a while."""


class RequestLimiter:
    """Works on AT_ONCE requests of an attempt at the same time. Further ones wait."""

    def __init__(self):
        self.semaphore = asyncio.Semaphore(AT_ONCE)
        # the number of requests that are worked on or wait
        self.requests = 0

    async def run(self, function, *arguments):
        """Return `await function(*arguments)`, which begins when it is its turn.

        Raises TooManyRequests if there are MOST_REQUESTS already.
        """
        if self.requests >= MOST_REQUESTS:
            raise TooManyRequests(
                f"{self.requests} requests of this attempt are in progress or wait: try again later"
            )
        self.requests += 1
        try:
            async with self.semaphore:
                return await function(*arguments)
        finally:
            self.requests -= 1


class Slots:
    """The engines' slots that attempts of training hold or have reserved. taken: their number.

    Nobody waits here for a free slot: the actor starts groups only while `taken` is below the
    engines' capacity, and the client of the engines distributes the requests.
    """

    def __init__(self):
        self.taken = 0

    def reserve(self, count):
        """Reserve slots for so many attempts that are about to start."""
        self.taken += count

    def acquire(self):
        """Take a slot for a turn that has no reserved one."""
        self.taken += 1

    def release(self):
        """Give back one slot, held or reserved."""
        self.taken -= 1


@dataclass(frozen=True)
class Services:
    """The parts of the actor that an attempt needs."""

    config: Config
    prompter: Prompter
    engines: EngineClient
    # plumbing.endpoint.Endpoint: that file imports this one
    endpoint: object
    sandbox: Sandbox
    slots: Slots


class Attempt:
    """One attempt, which an episode receives as `model`.

    version: the trainer's version at the start. engine: URL of the engine that is asked first, if
    it has a free slot. seed: the seed of the first turn, for an evaluation; None in training.
    turns: the texts of the model's turns. turn_tokens: their token ids, a list for each turn.
    finished: True if the last turn ended by itself. failed: True if it is to be left out and
    counted. logged: the numbers of `log`.
    """

    def __init__(self, services, task, temperature, version, engine=None, seed=None):
        self.services = services
        self.task = task
        self.temperature = temperature
        self.engine = engine
        self.seed = seed
        # With prefix caching, prompts that begin alike share a KV cache within one version. All
        # turns of this attempt use the version of its start: an update in the middle does not take
        # its cache away, as it does not in an attempt of a single turn.
        self.cache_version = version if services.config.prefix_caching == "on" else None
        self.segments = []
        self.turns = []
        self.turn_tokens = []
        self.logged = {}
        self.finished = False
        self.failed = False
        self.cut_off = False
        # the number of turns that no engine has answered, cancelled ones included
        self.unanswered_turns = 0
        # the number of turns that were begun; each has a seed of its own, also if they run at once
        self.turns_begun = 0
        # token ids of the conversation that __call__ continues
        self.conversation = []
        # Evaluations have a seed, are not trained, and use slots that training does not count.
        self.is_evaluation = seed is not None
        # True until a turn uses the slot that was reserved when the problem was chosen
        self.has_slot = not self.is_evaluation
        # ---- for the clients of plumbing/endpoint.py
        self.base_url = services.endpoint.url
        # the key tells the endpoint to which attempt a request belongs
        self.api_key = f"sk-{secrets.token_hex(16)}"
        # requests for turns, and requests that count tokens, have limits of their own
        self.turn_limiter = RequestLimiter()
        self.count_limiter = RequestLimiter()
        # exchanges of messages
        self.exchanges = []
        # texts that were completed
        self.texts = []
        # the turns that each request asked for
        self.requests = {}
        # {id of an answer of the Responses API: all items of the conversation up to its end}
        self.responses = {}
        services.endpoint.attempts[self.api_key] = self

    async def __call__(self, text):
        """Continue the conversation with a text, at first the prompt; returns the model's turn.

        Raises CutOff or EngineUnavailable.
        """
        prompter = self.services.prompter
        if self.conversation:
            prompt = self.conversation + prompter.reply(text)
        else:
            prompt = prompter.start(text)
        answer = await self.generate(prompt)
        self.conversation = prompt + answer["tokens"]
        return prompter.decode(answer["tokens"])

    async def call(self, function, *args):
        """Call a function of the task's file in another process, with limits.

        Returns what the function returned: a number, a list of numbers, a text or None. Raises
        TimeoutError if it took too much time or memory, RuntimeError if it raised, TypeError if it
        returned something else.
        """
        reply = await self.services.sandbox.call(self.task, function, *args)
        if "refused" in reply:
            raise TypeError(
                f"{function} returned {reply['refused']}; it must return a number, a list of "
                "numbers, a text or None"
            )
        if "limit" in reply:
            raise TimeoutError(f"{function}: {reply['limit']}")
        if "error" in reply:
            raise RuntimeError(f"{function}: {reply['error']}")
        return reply["value"]

    def log(self, **values):
        """Note numbers of the episode's own, by name; metrics.jsonl has their means over a step.

        Raises TypeError, ValueError or OverflowError if a value is no finite number.
        """
        numbers = {name: number(value) for name, value in values.items()}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}, it must be a finite number")
        self.logged |= numbers

    def token_texts(self, turn):
        """The text of each token of a turn, for rewards of tokens."""
        return [self.services.prompter.decode([token]) for token in self.turn_tokens[turn]]

    @property
    def sampled(self):
        """The number of tokens that were sampled so far."""
        return sum(segment.sampled for segment in self.segments)

    async def generate(self, prompt, limit=None):
        """Sample a turn of at most `limit` tokens after these token ids; returns the answer.

        Raises CutOff or EngineUnavailable. Segments and turns change only when the answer is
        there: a client that gives up earlier leaves no trace in them.
        """
        config = self.services.config
        room = min(
            config.max_new_tokens - self.sampled,
            config.max_model_len - len(prompt),
            self.segment_limit(self.find_segment(prompt)) - len(prompt),
        )
        if room <= 0:
            raise self.cut()
        if limit and limit > 0:
            room = min(room, limit)
        seed = None if self.seed is None else self.seed + self.turns_begun
        needs_experts = config.replay_routing and not self.is_evaluation
        experts_from = self.find_segment(prompt).known_experts if needs_experts else None
        self.turns_begun += 1
        self.unanswered_turns += 1
        with self._slot():
            answer = await self.services.engines.generate(
                prompt,
                temperature=self.temperature,
                max_tokens=room,
                seed=seed,
                salt=None if self.cache_version is None else str(self.cache_version),
                engine=self.engine,
                experts_from=experts_from,
            )
        self.unanswered_turns -= 1
        if answer is None:
            self.failed = True
            raise EngineUnavailable("no engine answers this prompt: the actor's log says why")
        segment = self.find_segment(prompt)
        # other turns of this attempt may have been sampled meanwhile
        if len(prompt) + len(answer["tokens"]) > self.segment_limit(segment):
            raise self.cut()
        self.engine = answer["engine"]
        if not segment.tokens:
            self.segments.append(segment)
        segment.append(prompt[len(segment.tokens) :])
        experts = (experts_from, answer["experts"]) if needs_experts else None
        segment.append(
            answer["tokens"],
            answer["behavior_logprobs"],
            answer["versions"],
            experts,
            turn=len(self.turns),
        )
        self.turns.append(self.services.prompter.decode(answer["tokens"]))
        self.turn_tokens.append(answer["tokens"])
        self.finished = answer["finished"]
        return answer

    @contextlib.contextmanager
    def _slot(self):
        """Hold a slot within this context, which is one request to the engines.

        The first turn uses the slot that was reserved for the attempt; turns that are sampled at
        the same time take further ones. The slot is free while the attempt awaits something else.
        """
        if self.is_evaluation:
            yield
            return
        if not self.has_slot:
            self.services.slots.acquire()
        self.has_slot = False
        try:
            yield
        finally:
            self.services.slots.release()

    def cut(self):
        """Note that the attempt has no room for another turn; returns a CutOff to raise."""
        self.finished = False
        self.cut_off = True
        return CutOff(
            f"no tokens left after {self.sampled} sampled ones: --max_new_tokens, --max_model_len "
            "or --row_tokens is reached"
        )

    def find_segment(self, prompt):
        """The longest segment that a prompt continues; without one, a new and empty segment.

        If a prompt repeats sampled tokens of another segment, they are context in the new one: they
        are trained only where they were sampled.
        """
        continued = [x for x in self.segments if x.tokens == prompt[: len(x.tokens)]]
        return max(continued, key=lambda x: len(x.tokens), default=Transcript())

    def segment_limit(self, segment):
        """The number of tokens that this segment may have, so that all fit into one row."""
        config = self.services.config
        others = [len(x.tokens) for x in self.segments if x is not segment]
        if config.rows != "padded":
            return config.row_tokens - sum(others)
        # In a padded row each segment takes as many tokens as the longest one.
        most = config.row_tokens // (len(others) + 1)
        return most if max(others, default=0) <= most else 0

    def fields(self):
        """The per-token fields of a sample, its segments one after the other, with the turn of each
        token as `turn_ids` [T], and num_versions.
        """
        parts = [segment.fields() for segment in self.segments]
        for k, part in enumerate(parts):
            part["segment"] += k
        fields = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        versions = set(fields["versions"][fields["mask"]].tolist())
        if self.cache_version is not None:
            versions.add(self.cache_version)
        return fields | {"num_versions": len(versions)}

    async def play(self, problem):
        """Play the episode; returns a reply as Sandbox.call does.

        The reply is {"value": a number, a list of numbers or an outcome}, or it has a text under
        "limit", "error" or "refused". A task that has `reward` instead of `episode` gets one turn,
        which that function scores.
        """
        sandbox = self.services.sandbox
        module = sandbox.tasks[self.task]
        seconds = self.services.config.episode_timeout
        # this limits episodes alone: the sandbox limits reward functions
        deadline = asyncio.timeout(seconds)
        try:
            if not hasattr(module, "episode"):
                text = await self(problem["prompt"])
                return await sandbox.call(self.task, "reward", problem, text, self.finished)
            async with deadline:
                value = await module.episode(problem, self)
            return returned(value)
        except (AttemptLost, SandboxBroken) as e:
            self.failed = True
            return {"error": error_line(e, module.__file__)}
        except Exception as e:
            line = error_line(e, module.__file__)
            if deadline.expired() or isinstance(e, TimeoutError):
                # the model is not to blame for the time that engines take
                self.failed |= self.unanswered_turns > 0
                if deadline.expired():
                    line = f"the episode took longer than --episode_timeout {seconds} s"
                return {"limit": line}
            return {"value": "no_answer"} if self.cut_off else {"error": line}
        finally:
            self.services.endpoint.forget(self)
            if self.has_slot:
                # the attempt has not asked an engine at all
                self.services.slots.release()
                self.has_slot = False
