"""Stage 1: problems -> groups of scored attempts, sampled from the vLLM engines over HTTP.

The actor keeps every engine busy with `concurrency` sequences. A group is all `attempts` attempts
at one problem, and one record in queues/rollouts; an attempt with its reward is a sample. Nothing
happens here when weights are updated in the middle of a sequence: the engine's answer says which
version sampled which tokens. One function, `allowed_groups`, decides how far ahead of the trainer
groups may be started; one class, `Sampler`, decides which problem comes next.

To start it alone, with engines and a trainer running: `python actor.py out/toy`. Deliberately
absent: streaming, several actors (bench/pace.py: one actor kept 32 simulated H100s busy). All work
is done in one event loop, except that records are written in a thread.
"""

import asyncio
import functools
import gc
import math
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
from plumbing.queues import Queue, publish_json, read_json
from plumbing.samples import credit, join, same_kind_of_rewards
from plumbing.sandbox import Sandbox


def allowed_groups(config, version):
    """The gate: how many groups may have been started, in all, when the trainer is at `version`.

    The pipeline may have started the groups of `version + max_lag + 1` steps; with max_lag = 0
    these are the groups of the steps trained so far and those of the next step. Conventional RL
    with G steps per generation phase may have started those of `version // G * G + G` steps. No
    more groups are started than the run trains. For each group that was dropped whole,
    `start_groups` allows one more. The result depends on the version alone, so it does not matter
    whether the actor sees every version.
    """
    g = config.conventional_g
    steps = version // g * g + g if g else version + config.max_lag + 1
    return min(steps, config.steps) * config.groups_per_step


class Sampler:
    """The order of the problems; it samples no tokens.

    Each task's problems come once per epoch, shuffled anew every time.

    indices: {task: indices of the problems that it may draw}. shares: {task: its share of all
    problems}, fractions that add up to 1 (config.task_weights). Problems are drawn in cycles of
    100, in which every task has its share, rounded to whole problems, but at least one problem.
    state: the result of `state()` when the run stopped. To write a curriculum, edit this class.
    """

    def __init__(self, indices, shares, seed, state=None):
        self.indices = indices
        self.seed = seed
        # {name: (epoch, order)}, see `shuffled`
        self.orders = {}
        # the number of problems drawn so far
        self.drawn = (state or {}).get("drawn", 0)
        # The number of a cycle's problems of each task: 100 times its share, rounded down, but at
        # least 1. What is then missing to 100 goes to the tasks that lost most by the rounding.
        count = {task: max(int(100 * share), 1) for task, share in shares.items()}
        by_remainder = sorted(shares, key=lambda task: count[task] - 100 * shares[task])
        for task in by_remainder[: max(100 - sum(count.values()), 0)]:
            count[task] += 1
        # the task of each problem of a cycle, before the cycle is shuffled
        self.cycle = [task for task in count for _ in range(count[task])]

    def next(self):
        """Draw a problem: (task, index of the problem in the task's list)."""
        cycle, position = divmod(self.drawn, len(self.cycle))
        self.drawn += 1
        order = self.shuffled("all tasks", cycle, len(self.cycle))
        # the tasks of this cycle, up to the problem that is drawn now
        tasks = [self.cycle[i] for i in order[: position + 1]]
        task = tasks[-1]
        drawn_before = cycle * self.cycle.count(task) + tasks.count(task) - 1
        indices = self.indices[task]
        epoch, position_in_epoch = divmod(drawn_before, len(indices))
        order = self.shuffled(task, epoch, len(indices))
        return task, indices[order[position_in_epoch]]

    def update(self, task, index, rewards, successes):
        """A group is done: a curriculum may learn from it.

        index: the number of its problem in the task's list, as `next` returns it. rewards,
        successes (0 or 1): one for each attempt that did not fail, at least one.
        """

    def state(self):
        """The state from which a continued run goes on, as JSON; checkpoints keep it."""
        return {"drawn": self.drawn}

    def shuffled(self, name, epoch, n):
        """The numbers 0 .. n-1 in the order of this epoch. The newest order of a name is kept."""
        if self.orders.get(name, (None, None))[0] != epoch:
            order = list(range(n))
            random.Random(f"{self.seed}/{name}/{epoch}").shuffle(order)
            self.orders[name] = (epoch, order)
        return self.orders[name][1]


def overlong_penalty(length, config):
    """Soft over-length penalty, DAPO (arXiv 2503.14476) eq. 13.

    It is 0 up to max_new_tokens - overlong_buffer tokens, then falls linearly to -1.
    """
    if not config.overlong_buffer:
        return 0.0
    free = config.max_new_tokens - config.overlong_buffer
    # turns that are sampled at the same time can exceed max_new_tokens together
    return -min(1.0, max(0.0, length - free) / config.overlong_buffer)


class Actor:
    """The state that all coroutines of the actor share."""

    def __init__(self, config, run_dir):
        self.config = config
        self.run_dir = Path(run_dir)
        self.queues = self.run_dir / "queues"
        self.tasks = list(cfg.task_weights(config.task))
        self.prompter = Prompter(config)
        self.sandbox = Sandbox(config)
        self.engines = EngineClient(config, self.prompter.stop, self.prompter.vocabulary, run_dir)
        self.endpoint = Endpoint(
            self.prompter, self.engines, config.endpoint_host, config.endpoint_port
        )
        self.slots = Slots()
        self.services = Services(
            config, self.prompter, self.engines, self.endpoint, self.sandbox, self.slots
        )
        self.rollouts = Queue(self.queues / "rollouts")
        self.evals = Queue(self.queues / "evals")
        # the number of attempts in a row that failed
        self.failures_in_a_row = 0
        # the trainer's version; -1 before its first one
        self.version = -1
        # the number of attempts that have ended in evaluations
        self.eval_attempts = 0
        # the version that the engines have; in conventional RL the trainer is ahead of it
        self.served = -1
        self.pace_published_at = -math.inf

    @functools.cached_property
    def test_problems(self):
        """{task: its held-out problems}, the same ones from a run's beginning to its end."""
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
        """Make one attempt at a problem and score it.

        Returns a sample (plumbing/samples.py) that also has `success`, `completion` and `logged`,
        or None if the attempt failed: then there is no answer that could be scored, because no
        engine answered or a tool was out of order. (A wrong answer is no failure.) engine: URL of
        the engine that is asked first. seed: see Attempt.
        """
        module = self.sandbox.tasks[task]
        attempt = Attempt(self.services, task, temperature, self.version, engine, seed)
        reply = await attempt.play(problem)
        # without a turn there is nothing to train
        if attempt.failed or not attempt.turns:
            self.failures_in_a_row += 1
            reasons = [str(reason) for name, reason in reply.items() if name != "value"]
            why = "; ".join(reasons) or "it ended before the model had made a turn"
            if self.failures_in_a_row == 1:
                print(
                    f"actor: tasks/{task}.py: an attempt failed and is left out: {why}", flush=True
                )
            cfg.require(
                self.failures_in_a_row < 100,
                f"100 attempts in a row failed, the last one in tasks/{task}.py: {why}; see the "
                "first error above and logs/engine*.log",
            )
            return None
        self.failures_in_a_row = 0
        verdict = self.sandbox.verdict(task, reply, attempt.finished)
        reward = verdict["reward"]
        penalty = overlong_penalty(attempt.sampled, self.config)
        fields = attempt.fields()
        try:
            fields |= credit(fields["turn_ids"], reward, penalty)
        except ValueError as e:
            raise RuntimeError(f"actor: tasks/{task}.py: {e}") from None
        return fields | dict(
            task=self.tasks.index(task),
            temperature=temperature,
            reward=np.sum(reward) + penalty,
            outcome=cfg.OUTCOMES.index(verdict["outcome"]),
            finished=attempt.finished,
            success=verdict["success"],
            completion=attempt.turns if hasattr(module, "episode") else attempt.turns[0],
            logged=attempt.logged,
        )

    async def group(self, draw, task, i, problem, sampler):
        """Make all attempts at one problem -> one record in queues/rollouts.

        An attempt that failed makes the group smaller, and is counted. A tree search would replace
        this method. draw: the number of the choice of this problem, counted over the whole run; it
        is the number of the group, too. i: index of the problem in the task's list.
        """
        c = self.config
        # with prefix caching one engine gets all attempts: it computes their prompt only once
        engine = self.engines.least_loaded() if c.prefix_caching == "on" else None
        attempts = [self.attempt(task, problem, c.temperature, engine) for _ in range(c.attempts)]
        samples = []
        for k, sample in enumerate(await asyncio.gather(*attempts)):
            if sample is not None:
                samples.append(sample | {"problem": i, "sample_id": draw * c.attempts + k})
        failed = c.attempts - len(samples)
        if failed:
            print(f"actor: draw {draw}: {failed} of {c.attempts} attempts failed", flush=True)
        cfg.require(
            same_kind_of_rewards(samples),
            f"tasks/{task}.py: problem {i}: some attempts returned one reward for each turn, and "
            "others one for each token, which cannot be compared: return the same kind",
        )
        record = join(samples) | dict(run_id=c.run_id, draw=draw, failed=failed)
        record["logged"] = [sample["logged"] for sample in samples]
        await asyncio.to_thread(self.rollouts.put, record)
        if samples:
            rewards = [sample["reward"] for sample in samples]
            successes = [sample["success"] for sample in samples]
            sampler.update(task, i, rewards, successes)

    # ---- evaluation

    def held_out(self):
        """Yield (task, set, index, problem) of the first eval_problems problems of each set."""
        counts = Counter()
        for task, indices in self.usable_test_problems.items():
            for i in indices:
                problem = self.test_problems[task][i]
                source = problem.get("source", task)
                counts[source] += 1
                if counts[source] <= self.config.eval_problems:
                    yield task, source, i, problem

    async def evaluate_attempt(self, task, i, problem, k):
        """Make attempt k at held-out problem i, with the same seed on every engine and version."""
        seed = hash((self.config.seed, i, k)) & 0x7FFFFFFF
        sample = await self.attempt(task, problem, self.config.eval_temperature, seed=seed)
        self.eval_attempts += 1
        return sample

    async def evaluate(self, version):
        """Score held-out problems on the engines while training goes on -> queues/evals."""
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
            eval={source: float(np.mean(values)) for source, values in solved.items()},
            eval_reward={source: float(np.mean(values)) for source, values in rewards.items()},
            problems=len(attempts) // c.eval_attempts,
            answers=sum(map(len, solved.values())),
            version=version,
            versions=[min(versions, default=0), max(versions, default=0)],
        )
        self.evals.put(record)
        failed = len(attempts) - record["answers"]
        if failed:
            print(
                f"actor: evaluation of version {version}: {failed} of {len(attempts)} attempts "
                "failed and are not in its scores",
                flush=True,
            )

    # ---- the run

    def follow_trainer(self):
        """Take over the trainer's version and its engines from its files, and publish the pace.

        Returns the draws that the trainer is done with, as {"next": n, "ahead": [...]}: all below n
        and those of the list. Returns None if they cannot be read now, for example before the
        trainer has put its first weights into engines.
        """
        trainer = read_json(self.queues / "version.json")
        if not trainer:
            return None
        self.version = trainer["version"]
        self.served = trainer["served"]
        self.engines.set_engines(trainer["engines"])
        self.publish_pace()
        return read_json(self.queues / "position.json") or None

    def publish_pace(self):
        """Publish the engines' pace, for the trainer's metrics, at most once a second.

        `eval_attempts`, their number so far, tells a long evaluation from one that hangs.
        """
        self.engines.measure_pace()
        now = time.monotonic()
        if now - self.pace_published_at >= 1:
            pace = self.engines.pace | {"eval_attempts": self.eval_attempts}
            publish_json(self.queues / "pace.json", **pace)
            self.pace_published_at = now

    async def wait_for_trainer(self):
        """Wait until the trainer has put its first weights into engines."""
        # The trainer gives up before this limit, with a message that says why.
        limit = longest_wait(self.config)
        deadline = time.monotonic() + limit
        while self.follow_trainer() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"actor: the trainer has put no weights into engines within {limit:.0f} s: "
                    f"{self.queues}/version.json is absent, see {self.run_dir}/logs/train.log"
                )
            await asyncio.sleep(0.05)

    def start_groups(self, draws, problems, started):
        """Start as many groups as free slots and the gate allow; returns their asyncio tasks.

        A group is started as soon as a single slot is free, so that some of its attempts may wait.
        """
        # a group that was dropped whole may be replaced by another one
        dropped = read_json(self.queues / "dropped.json").get("groups", 0)
        allowed = allowed_groups(self.config, self.version) + dropped - started
        chosen = []
        while self.slots.taken < self.engines.capacity and len(chosen) < allowed:
            chosen.append(draws.next())
            self.slots.reserve(self.config.attempts)
        if chosen:
            draws.save()
        groups = set()
        for draw, task, i in chosen:
            group = self.group(draw, task, i, problems[task][i], draws.sampler)
            groups.add(asyncio.create_task(group))
        return groups

    async def run(self):
        """Sample groups and evaluations until the trainer has made its last step."""
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
            f"actor: {len(self.engines.serving)} engines x {c.concurrency} sequences, "
            f"task {c.task}, from version {self.version}",
            flush=True,
        )
        # The garbage collector need not look at modules and problems any more: they stay
        gc.freeze()
        seen = self.version
        evaluated = self.served
        patience = Patience(c, self.run_dir)
        # The number of groups started, for the gate. When a run is continued, it begins at the
        # number of groups trained so far.
        started = state["version"] * c.groups_per_step
        evaluations = {asyncio.create_task(self.evaluate(self.served))}
        groups = set()
        while self.version < c.steps:
            position = self.follow_trainer()
            if position:
                draws.forget(position)
            if self.version != seen:
                seen = self.version
                patience.start()
            patience.check(f"actor: the trainer has stayed at version {seen}")
            # Engines answer evaluations, so the scores belong to the version that they have.
            is_due = c.eval_every and self.served // c.eval_every > evaluated // c.eval_every
            if self.version >= c.steps or is_due:
                evaluated = self.served
                evaluations.add(asyncio.create_task(self.evaluate(self.served)))
            new = self.start_groups(draws, problems, started)
            started += len(new)
            groups = await reap(groups | new)
            evaluations = await reap(evaluations)
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        while evaluations:
            self.follow_trainer()
            evaluations = await reap(evaluations)
        await self.close()
        counts = self.engines.counts + self.sandbox.counts + self.endpoint.counts
        events = [f"{count} {event}" for event, count in counts.items()]
        print(f"actor: done, {started} groups started, {', '.join(events)}", flush=True)


def main(run_dir):
    try:
        asyncio.run(Actor(cfg.load(run_dir), run_dir).run())
    # the user's values are wrong: a line says so, without a traceback
    except cfg.ConfigError as e:
        sys.exit(f"actor: {e}")


if __name__ == "__main__":
    main(sys.argv[1])
