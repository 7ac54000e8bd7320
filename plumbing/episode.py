"""One attempt as an episode sees it: `await model(text)`, and an endpoint for clients of any kind (plumbing/endpoint.py).

What the engines sampled is kept as it was sampled. An attempt has one segment of tokens, or several where what was
sent does not continue what is there: other conversations, branches, a template that drops old thinking. It stays one
sample with one reward. Deliberately absent: states of the environment, which are the episode's own.
"""

import asyncio
import secrets

import numpy as np

from plumbing.samples import Transcript
from plumbing.sandbox import error_line, returned


class CutOff(Exception):
    """The attempt has no tokens left for another turn."""


class AttemptLost(Exception):
    """An attempt cannot go on, through no fault of the model's: it is left out and counted, whatever it had sampled.

    Episodes may raise it.
    """


class EngineUnavailable(AttemptLost):
    """No engine has answered, whatever was tried."""


class Attempt:
    """What an episode is given as `model`.

    actor: actor.Actor; temperature: of its samples; engine: where it had best begin; seed: of its first turn, of evaluations alone.
    turns: texts of the model's turns; finished: the last one ended by itself.
    """

    def __init__(self, actor, task, temperature, engine=None, seed=None):
        self.actor = actor
        self.task = task
        self.temperature = temperature
        self.engine = engine
        self.seed = seed
        # equal beginnings are computed once by each version, that of the attempt's start; an update in
        # the middle leaves an attempt of several turns what it has, as one of a single turn
        self.version = actor.version if actor.config.prefix_caching == "on" else None
        self.segments = []
        self.turns = []
        self.finished = False
        self.failed = self.cut_off = False
        # turns that engines have not answered, cancelled ones among them
        self.asking = 0
        # turns that were begun: seeds count them, as turns that are sampled at once must differ
        self.turns_begun = 0
        # token ids of the conversation of __call__
        self.conversation = []
        # among the actor's attempts in progress: it is when it is chosen; evaluations are not
        self.counts = self.is_counted = seed is None
        # of plumbing/endpoint.py, for clients of any kind: what was asked and answered; the turns of each request
        self.base_url = actor.endpoint.url
        self.api_key = f"sk-{secrets.token_hex(16)}"
        actor.endpoint.attempts[self.api_key] = self
        self.exchanges = []
        self.texts = []
        self.requests = {}

    async def __call__(self, text):
        """Continue the conversation with a text, the prompt first: the model's turn. Raises CutOff, EngineUnavailable."""
        prompter = self.actor.prompter
        more = prompter.reply if self.conversation else prompter.start
        prompt = self.conversation + more(text)
        answer = await self.generate(prompt)
        self.conversation = prompt + answer["tokens"]
        return prompter.decode(answer["tokens"])

    async def call(self, function, *args):
        """What a function of the task's file returns, a number or a text: called in a process of its own, with limits.

        Raises TimeoutError if it took too much, RuntimeError if it raised, TypeError if it returned something else.
        """
        reply = await self.actor.sandbox.call(self.task, function, *args)
        if "refused" in reply:
            raise TypeError(
                f"{function} returned {reply['refused']}; it must return a number or a text"
            )
        if "limit" in reply:
            raise TimeoutError(f"{function}: {reply['limit']}")
        if "error" in reply:
            raise RuntimeError(f"{function}: {reply['error']}")
        return reply["value"]

    @property
    def sampled(self):
        """How many tokens were sampled."""
        return sum(segment.sampled for segment in self.segments)

    async def generate(self, prompt, limit=None):
        """Sample a turn after these token ids, of at most `limit` tokens: the engine's answer.

        Raises CutOff, EngineUnavailable.
        Until it is there, nothing changes: a client that gives up leaves no trace.
        """
        actor = self.actor
        c = actor.config
        _, others = self.place(prompt)
        room = min(c.max_new_tokens - self.sampled, c.max_model_len - len(prompt))
        room = min(room, c.row_tokens - others - len(prompt))
        if room <= 0:
            raise self.cut()
        if limit and limit > 0:
            room = min(room, limit)
        seed = None if self.seed is None else self.seed + self.turns_begun
        self.turns_begun += 1
        salt = None if self.version is None else str(self.version)
        how = (self.temperature, room, seed, salt, self.engine)
        actor.in_progress += self.counts and not self.is_counted
        self.is_counted = False
        self.asking += 1
        try:
            answer = await actor.engines.generate(prompt, *how)
        finally:
            # its place is free while something else is awaited
            actor.in_progress -= self.counts
        self.asking -= 1
        if answer is None:
            self.failed = True
            raise EngineUnavailable("no engine has answered, see the actor's log")
        segment, others = self.place(prompt)
        if others + len(prompt) + len(answer["tokens"]) > c.row_tokens:
            # other turns were sampled meanwhile
            raise self.cut()
        self.engine = answer["engine"]
        if not segment.tokens:
            self.segments.append(segment)
        segment.append(prompt[len(segment.tokens) :])
        segment.append(answer["tokens"], answer["behavior_logprobs"], answer["versions"])
        self.turns.append(actor.prompter.decode(answer["tokens"]))
        self.finished = answer["finished"]
        return answer

    def cut(self):
        """The attempt has no room for another turn: CutOff, to be raised."""
        self.finished = False
        self.cut_off = True
        return CutOff(f"no tokens left after {self.sampled} sampled ones")

    def place(self, prompt):
        """The segment that a prompt continues, the longest of them, and how many tokens all others have.

        If there is none it begins another one, in which what an earlier one has sampled is context, trained there alone.
        """
        fits = [x for x in self.segments if x.tokens == prompt[: len(x.tokens)]]
        segment = max(fits, key=lambda x: len(x.tokens), default=Transcript())
        return segment, sum(len(x.tokens) for x in self.segments if x is not segment)

    def fields(self):
        """The per-token fields of a sample, its segments one after the other, and num_versions."""
        parts = [segment.fields() for segment in self.segments]
        for k, part in enumerate(parts):
            part["segment"] += k
        fields = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        began = [] if self.version is None else [self.version]
        sampled = fields["versions"][fields["mask"]].tolist()
        return fields | dict(num_versions=len({*sampled, *began}))

    async def play(self, problem):
        """The episode, as Sandbox.call has it: {"value": number or outcome}, or "limit", "error" or "refused" with words.

        A task with `reward` has one turn, which that function scores.
        """
        sandbox = self.actor.sandbox
        module = sandbox.tasks[self.task]
        seconds = self.actor.config.episode_timeout
        # of episodes alone: a reward function has a limit of its own
        deadline = asyncio.timeout(seconds)
        try:
            if not hasattr(module, "episode"):
                text = await self(problem["prompt"])
                return await sandbox.call(self.task, "reward", problem, text, self.finished)
            async with deadline:
                value = await module.episode(problem, self)
            return returned(value)
        except AttemptLost as e:
            self.failed = True
            return {"error": error_line(e, module.__file__)}
        except Exception as e:
            line = error_line(e, module.__file__)
            if deadline.expired() or isinstance(e, TimeoutError):
                # the time that engines take is no fault of the model's
                self.failed |= self.asking > 0
                return {"limit": f"longer than {seconds} s" if deadline.expired() else line}
            return {"value": "no_answer"} if self.cut_off else {"error": line}
        finally:
            self.actor.endpoint.forget(self)
            self.actor.in_progress -= self.is_counted
            self.is_counted = False
