"""Stage 1: problems -> groups of rollouts with rewards, sampled by the vLLM engines over plain HTTP.

Keeps every engine busy with `concurrency` sequences; a group, all `attempts` rollouts of one problem,
is one record in queues/rollouts. A weight update in the middle of a sequence is no event here: the
engine says afterwards which version sampled which tokens. How far ahead of the trainer groups may be
started is decided by one function, `allowed_groups`; which problem comes next by one class, `Sampler`.

Alone, with engines and a trainer running: `python actor.py out/toy`. Deliberately absent: streaming,
threads, several actors (one holds what some 240 H100s sample).
"""

import asyncio
import functools
import gc
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import config as cfg
from plumbing.checkpoints import last_state
from plumbing.client import EngineClient, reap
from plumbing.endpoint import Endpoint
from plumbing.episode import Attempt, Services, Slots
from plumbing.ledger import InFlight
from plumbing.patience import Patience, longest_wait
from plumbing.problems import Prompter, load_problems
from plumbing.queues import Queue, read_json
from plumbing.samples import join
from plumbing.sandbox import Sandbox


def allowed_groups(config, version):
    """The gate: how many groups may have been started, in all, when the trainer is at `version`.

    Pipeline: (v + max_lag + 1) steps' worth, so that with max_lag = 0 only the step being collected
    is sampled. Conventional RL with G steps per generation phase: (v // G * G + G) steps' worth.
    Never more than the run trains. It depends on v alone: updates that went by unseen lose no credit.
    """
    g = config.conventional_g
    steps = version // g * g + g if g else version + config.max_lag + 1
    return min(steps, config.steps) * config.groups_per_step


class Sampler:
    """Which problem comes next: of each task every problem once per epoch, shuffled anew.

    indices: {task: indices of the problems that it may draw}; shares: {task: share}, kept exactly in
    every 100 problems, to one percent. A curriculum is an edit of this class. `state` is kept with checkpoints.
    """

    def __init__(self, indices, shares, seed, state=None):
        self.indices = indices
        self.seed = seed
        self.orders = {}
        self.drawn = (state or {}).get("drawn", 0)
        # the tasks of 100 problems in a row, before they are shuffled
        count = {task: max(int(100 * share), 1) for task, share in shares.items()}
        by_remainder = sorted(shares, key=lambda task: count[task] - 100 * shares[task])
        for task in by_remainder[: max(100 - sum(count.values()), 0)]:
            count[task] += 1
        self.round = [task for task in count for _ in range(count[task])]

    def next(self):
        """(task, index of the problem in the task's list)."""
        round_number, place = divmod(self.drawn, len(self.round))
        self.drawn += 1
        order = self.shuffled("round", round_number, len(self.round))
        tasks = [self.round[i] for i in order[: place + 1]]
        task = tasks[-1]
        # how many problems of this task came before
        before = round_number * self.round.count(task) + tasks.count(task) - 1
        indices = self.indices[task]
        epoch, j = divmod(before, len(indices))
        return task, indices[self.shuffled(task, epoch, len(indices))[j]]

    def update(self, task, problem, rewards, successes):
        """A group is done: rewards and successes (0 or 1) of its attempts [G], G >= 1; not used here."""

    def state(self):
        """What a continued run needs, as JSON."""
        return {"drawn": self.drawn}

    def shuffled(self, what, epoch, n):
        """0 .. n-1 in the order of this epoch; the last one asked for is kept."""
        if self.orders.get(what, (None, None))[0] != epoch:
            order = list(range(n))
            random.Random(f"{self.seed}/{what}/{epoch}").shuffle(order)
            self.orders[what] = (epoch, order)
        return self.orders[what][1]


def overlong_penalty(length, config):
    """Soft over-length penalty, DAPO (arXiv 2503.14476) eq. 13: 0 up to max_new_tokens -
    overlong_buffer, then linear to -1.
    """
    if not config.overlong_buffer:
        return 0.0
    free = config.max_new_tokens - config.overlong_buffer
    # turns that were sampled at once may be longer together
    return -min(1.0, max(0.0, length - free) / config.overlong_buffer)


class Actor:
    """Everything the coroutines below share."""

    def __init__(self, config, run_dir):
        self.config = config
        self.run_dir = Path(run_dir)
        self.queues = self.run_dir / "queues"
        self.tasks = list(cfg.task_weights(config.task))
        self.prompter = Prompter(config)
        self.sandbox = Sandbox(config)
        self.engines = EngineClient(config, self.prompter.stop, self.prompter.vocabulary, run_dir)
        self.endpoint = Endpoint(self.prompter, self.engines)
        self.slots = Slots()
        self.services = Services(
            config, self.prompter, self.engines, self.endpoint, self.sandbox, self.slots
        )
        self.rollouts = Queue(self.queues / "rollouts")
        self.evals = Queue(self.queues / "evals")
        # attempts in a row of which there is nothing to train
        self.in_vain = 0
        self.version = -1

    @functools.cached_property
    def test_problems(self):
        """The held-out problems of each task: the same ones from a run's beginning to its end."""
        return load_problems(self.config, "test")

    @functools.cached_property
    def usable_test_problems(self):
        """{task: indices of the held-out problems} whose prompts the model can take."""
        return self.prompter.usable(self.test_problems)

    async def start(self):
        await self.sandbox.start()
        if any(hasattr(task, "episode") for task in self.sandbox.tasks.values()):
            await self.endpoint.start()

    async def close(self):
        await self.endpoint.close()
        await self.engines.close()
        self.sandbox.close()

    # ---- one attempt, one group

    async def attempt(self, task, problem, temperature, engine=None, seed=None):
        """One attempt at a problem, sampled and scored: a sample (plumbing/samples.py), `success` and `completion`;
        None if an engine failed it for good. engine: where it had best begin, as others like it do.
        """
        module = self.sandbox.tasks[task]
        attempt = Attempt(self.services, task, temperature, self.version, engine, seed)
        reply = await attempt.play(problem)
        self.in_vain += 1
        # without a turn there is nothing to train
        if attempt.failed or not attempt.turns:
            words = f"tasks/{task}.py: an attempt failed: {reply}"
            if self.in_vain == 1:
                print(f"actor: {words}", flush=True)
            cfg.require(self.in_vain < 100, f"{words}; so did 100 in a row, see above")
            return None
        self.in_vain = 0
        verdict = self.sandbox.verdict(task, reply, attempt.finished)
        reward = verdict["reward"] + overlong_penalty(attempt.sampled, self.config)
        return attempt.fields() | dict(
            task=self.tasks.index(task),
            temperature=temperature,
            reward=reward,
            outcome=cfg.OUTCOMES.index(verdict["outcome"]),
            finished=attempt.finished,
            success=verdict["success"],
            completion=attempt.turns if hasattr(module, "episode") else attempt.turns[0],
        )

    async def group(self, draw, task, i, problem, sampler):
        """All attempts at one problem -> one record in queues/rollouts. An attempt that failed makes
        the group smaller, and is counted.

        draw: which one of the run it is; i: index of the problem in the task's list.
        """
        c = self.config
        # all on one engine where the prompt is computed once
        engine = self.engines.least_loaded() if c.prefix_caching == "on" else None
        attempts = [self.attempt(task, problem, c.temperature, engine) for _ in range(c.attempts)]
        samples = []
        for k, sample in enumerate(await asyncio.gather(*attempts)):
            if sample is not None:
                samples.append(sample | {"problem": i, "sample_id": draw * c.attempts + k})
        failed = c.attempts - len(samples)
        if failed:
            print(f"actor: draw {draw}: {failed} of {c.attempts} attempts failed", flush=True)
        record = join(samples) | self.engines.pace
        record |= dict(run_id=c.run_id, draw=draw, failed=failed)
        await asyncio.to_thread(self.rollouts.put, record)
        if samples:
            rewards = [sample["reward"] for sample in samples]
            sampler.update(task, i, rewards, [sample["success"] for sample in samples])

    # ---- evaluation

    def held_out(self):
        """(task, set, index, problem) of the first eval_problems held-out problems of each set."""
        counts = Counter()
        for task, indices in self.usable_test_problems.items():
            for i in indices:
                problem = self.test_problems[task][i]
                source = problem.get("source", task)
                counts[source] += 1
                if counts[source] <= self.config.eval_problems:
                    yield task, source, i, problem

    def evaluate_attempt(self, task, i, problem, k):
        """Attempt k at held-out problem i: its seed is the same whichever engine samples it, at every version."""
        seed = hash((self.config.seed, i, k)) & 0x7FFFFFFF
        return self.attempt(task, problem, self.config.eval_temperature, seed=seed)

    async def evaluate(self, version):
        """Held-out problems through the same engines, while training goes on -> queues/evals."""
        c = self.config
        sources = []
        attempts = []
        for task, source, i, problem in self.held_out():
            for k in range(c.eval_attempts):
                sources.append(source)
                attempts.append(self.evaluate_attempt(task, i, problem, k))
        solved = {}
        rewards = {}
        versions = []
        for source, sample in zip(sources, await asyncio.gather(*attempts)):
            if sample is not None:
                solved.setdefault(source, []).append(sample["success"])
                rewards.setdefault(source, []).append(sample["reward"])
                versions += sample["versions"][sample["mask"]].tolist()
        record = dict(
            run_id=c.run_id,
            eval={source: float(np.mean(of_source)) for source, of_source in solved.items()},
            eval_reward={source: float(np.mean(r)) for source, r in rewards.items()},
            problems=len(attempts) // c.eval_attempts,
            answers=sum(map(len, solved.values())),
            version=version,
            wall_s=time.monotonic(),
            versions=[min(versions, default=0), max(versions, default=0)],
        )
        self.evals.put(record)

    # ---- the run

    def read_trainer(self):
        """Read where the trainer is; returns which draws are done with, None before it has begun."""
        trainer = read_json(self.queues / "version.json")
        if not trainer:
            return None
        self.version = trainer["version"]
        self.engines.set_engines(trainer["engines"])
        self.engines.measure_pace()
        return trainer["position"]

    async def wait_for_trainer(self):
        """Until the trainer has put its first weights into engines."""
        # the trainer itself gives up earlier, and knows why
        limit = longest_wait(self.config)
        deadline = time.monotonic() + limit
        while self.read_trainer() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"actor: waited {limit:.0f} s for the trainer's first version in {self.queues}"
                )
            await asyncio.sleep(0.05)

    def start_groups(self, draws, problems, started):
        """Start as many groups as the engines have places and the gate lets; returns the asyncio tasks."""
        # of groups that were dropped whole, others may be started
        dropped = read_json(self.queues / "dropped.json").get("groups", 0)
        credit = allowed_groups(self.config, self.version) + dropped - started
        chosen = []
        while self.slots.taken < self.engines.capacity and len(chosen) < credit:
            chosen.append(draws.next())
            self.slots.reserve(self.config.attempts)
        if chosen:
            draws.save()
        groups = set()
        for draw, task, i in chosen:
            work = self.group(draw, task, i, problems[task][i], draws.sampler)
            groups.add(asyncio.create_task(work))
        return groups

    async def run(self):
        c = self.config
        problems = load_problems(c, "train")
        usable = self.prompter.usable(problems)
        await self.start()
        await self.wait_for_trainer()
        state = last_state(self.run_dir)
        saved = state["sampler"].get("state")
        sampler = Sampler(usable, cfg.task_weights(c.task), c.seed, saved)
        draws = InFlight(sampler, self.queues / "sampler.json", state)
        print(
            f"actor: {len(self.engines.serving)} engines x {c.concurrency} sequences, task {c.task}, "
            f"from version {self.version}",
            flush=True,
        )
        # modules and problems stay: the garbage collector need not look at them again and again
        gc.freeze()
        evaluated = seen = self.version
        patience = Patience(c, self.run_dir)
        # groups started, in all, the trained ones of a continued run among them
        started = state["version"] * c.groups_per_step
        evaluations = {asyncio.create_task(self.evaluate(self.version))}
        groups = set()
        while self.version < c.steps:
            draws.forget(self.read_trainer())
            if self.version != seen:
                seen = self.version
                patience.start()
            patience.check(f"actor: the trainer has stayed at version {seen}")
            is_due = c.eval_every and seen // c.eval_every > evaluated // c.eval_every
            if seen >= c.steps or is_due:
                evaluated = seen
                evaluations.add(asyncio.create_task(self.evaluate(seen)))
            new = self.start_groups(draws, problems, started)
            started += len(new)
            groups = await reap(groups | new)
            evaluations = await reap(evaluations)
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        while evaluations:
            self.read_trainer()
            evaluations = await reap(evaluations)
        await self.close()
        counts = self.engines.counts + self.sandbox.counts + self.endpoint.counts
        words = ", ".join(f"{n} {what}" for what, n in counts.items())
        print(f"actor: done, {started} groups started, {words}", flush=True)


def main(run_dir):
    try:
        asyncio.run(Actor(cfg.load(run_dir), run_dir).run())
    # what the user gave us: one line, no traceback
    except cfg.ConfigError as e:
        sys.exit(f"actor: {e}")


if __name__ == "__main__":
    main(sys.argv[1])
