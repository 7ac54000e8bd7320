"""Stage 1: problems -> groups of rollouts with rewards, sampled by the vLLM servers over plain HTTP.

Keeps every engine busy with `concurrency` sequences; a group of `attempts` rollouts of one problem is one record in
queues/rollouts. A weight update in the middle of a sequence is no event here: the engine says afterwards which version
sampled which tokens. How far ahead of the trainer samples may be started is decided by one function, `allowed_samples`.

Alone, with engines and a trainer running: `python actor.py out/toy`. Deliberately absent: streaming, threads, a second
actor's coordination.
"""
import asyncio
import contextlib
import importlib
import json
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path

import aiohttp
import numpy as np
from transformers import AutoTokenizer

import config as cfg
from queues import Queue, noticed


def allowed_samples(config, version):
    """The gate: how many samples may have been started, in all, when the trainer is at `version`.

    Pipeline: (v + max_lag + 1) B, so that with max_lag = 0 only the step being collected is sampled. Conventional RL with
    G steps per generation phase: (v // G * G + G) B. It depends on v alone: updates that went by unseen lose no credit.
    """
    g = config.conventional_g
    return ((version // g * g + g) if g else (version + config.max_lag + 1)) * config.batch_size


def token_versions(spans, length):
    """vLLM's weight version spans [{version, start, end}] -> version of each sampled token, int32 [length].

    Raises ValueError if the spans do not cover the tokens exactly, or if the engine never got a version from a trainer.
    """
    versions = np.full(length, -1, np.int32)
    for span in spans or []:
        versions[span["start"]:span["end"]] = int(span["version"])
    if length and versions.min() < 0:
        raise ValueError(f"version spans {spans} do not cover {length} tokens")
    return versions


def overlong_penalty(length, config):
    """Soft over-length penalty, DAPO (arXiv 2503.14476) eq. 13: 0 up to max_new_tokens - overlong_buffer, then linear to -1."""
    return -max(0.0, length - (config.max_new_tokens - config.overlong_buffer)) / config.overlong_buffer if config.overlong_buffer else 0.0


class Problems:
    """The endless problem stream: every problem of the split once per epoch, shuffled anew, given by position alone."""

    def __init__(self, problems, seed):
        self.problems, self.seed, self.epoch, self.order = problems, seed, -1, []

    def __getitem__(self, i):
        epoch, k = divmod(i, len(self.problems))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
        return self.problems[self.order[k]]


class Actor:
    """Everything the coroutines below share."""

    def __init__(self, config, run_dir):
        self.config, self.run_dir = config, Path(run_dir)
        self.queues = self.run_dir / "queues"
        self.task = importlib.import_module(f"tasks.{config.task}")
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        self.eos = self.tokenizer.eos_token_id
        self.rollouts, self.evals = Queue(self.queues / "rollouts", maxlen=10000), Queue(self.queues / "evals")
        self.urls = [f"http://{config.host}:{config.port + i}" for i in range(config.engines)]
        self.load = {url: 0 for url in self.urls}  # sequences in progress
        self.serving = []  # engines that the trainer says hold its weights
        self.sessions = {}  # one per engine, so that closing it ends the requests of an engine that hangs
        self.rest = {url: 0.0 for url in self.urls}  # an engine that failed gets no work before this time
        self.slots = asyncio.Condition()
        self.wanted = 0  # sequences of groups that run or wait for a slot
        self.counts = Counter()  # events that are not errors but worth a line: retried, failed, dropped groups
        self.recent = deque()  # (time, sampled tokens) of the last seconds
        self.logged_version, self.logged, self.next_warning = -1, 0, 0.0
        self.samples_file = open(self.run_dir / "samples.jsonl", "a")

    def version(self):
        """The trainer's version, -1 before it announced one; also learns which engines serve it."""
        said = noticed(self.queues / "version.json")
        self.serving = said.get("engines", [])
        return said.get("version", -1)

    def free(self):
        """Engines that serve the trainer's weights, are well and have room for a sequence."""
        now = time.monotonic()
        return [url for url in self.serving if self.rest[url] < now and self.load[url] < self.config.concurrency]

    @contextlib.asynccontextmanager
    async def slot(self):
        """One sequence's place on the least loaded engine; waits until there is one."""
        async with self.slots:
            await self.slots.wait_for(self.free)
            url = min(self.free(), key=self.load.get)
            self.load[url] += 1
        try:
            yield url
        finally:
            self.load[url] -= 1
            async with self.slots:
                self.slots.notify()

    def session(self, url):
        """The HTTP connections to one engine."""
        if url not in self.sessions:  # the server closes idle connections after 5 s: close them first
            self.sessions[url] = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.config.request_timeout), connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
        return self.sessions[url]

    async def watch(self, url):
        """Every 2 s: an engine that does not answer, or that the trainer has dropped, gets no work, and its requests go elsewhere."""
        while True:
            try:
                async with self.session(url).get(url + "/health", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    well = answer.status == 200
            except (aiohttp.ClientError, asyncio.TimeoutError):
                well = False
            if not well or url not in self.serving:
                self.rest[url] = time.monotonic() + 2.5
                if self.load[url]:
                    print(f"actor: engine {url} {'was dropped by the trainer' if well else 'does not answer'}: its {self.load[url]} sequences start again elsewhere", flush=True)
                await self.sessions.pop(url).close()
            await asyncio.sleep(2)
            async with self.slots:
                self.slots.notify_all()

    async def generate(self, prompt, temperature):
        """One completion of prompt token ids, from the least loaded engine: {tokens, logprobs, versions, finished}.

        Failed requests are tried again, with back-off; None when `retries` are used up. Those that an engine's death or
        restart broke off do not count: they wait for an engine.
        """
        c, tries = self.config, 0
        while tries <= c.retries:
            async with self.slot() as url:
                try:
                    body = dict(token_ids=prompt, sampling_params=dict(
                        max_tokens=min(c.max_new_tokens, c.max_model_len - len(prompt)), temperature=temperature, logprobs=0,
                        stop_token_ids=[self.eos], detokenize=False))
                    async with self.session(url).post(url + "/inference/v1/generate", json=body) as answer:
                        if answer.status == 503:
                            raise aiohttp.ClientConnectionError(await answer.text())
                        if answer.status != 200:
                            raise ValueError(f"{answer.status} {(await answer.text())[:300]}")
                        choice = (await answer.json())["choices"][0]
                    tokens = choice["token_ids"]
                    self.recent.append((time.time(), len(tokens)))
                    return dict(tokens=tokens, logprobs=[x["logprob"] for x in choice["logprobs"]["content"]],
                                versions=token_versions(choice["weight_versions"], len(tokens)), finished=choice["finish_reason"] == "stop")
                except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError) as e:
                    if gone := isinstance(e, aiohttp.ClientConnectionError) and not isinstance(e, asyncio.TimeoutError):
                        self.rest[url] = time.monotonic() + 2.5
                    tries += not gone
                    self.counts["moved" if gone else "retried" if tries <= c.retries else "failed"] += 1
                    if time.monotonic() > self.next_warning:  # hundreds of requests may fail at once
                        self.next_warning = time.monotonic() + 5
                        print(f"actor: request to {url} failed ({type(e).__name__}: {str(e)[:200]}), {tries} of {c.retries + 1} tries used; so far {dict(self.counts)}", flush=True)
            await asyncio.sleep(min(0.5 * 2 ** tries, 10) * random.uniform(0.5, 1.5))
        return None

    async def rollout(self, problem, temperature):
        """One attempt at a problem: tokens (prompt and completion ids, never re-tokenised), mask of the sampled ones, reward."""
        prompt = self.tokenizer(problem["prompt"], add_special_tokens=False)["input_ids"]
        sample = await self.generate(prompt, temperature)
        if sample is None:
            return None
        n = len(prompt)
        text = self.tokenizer.decode(sample["tokens"], skip_special_tokens=True)
        reward = self.task.reward(problem, text, sample["finished"])
        return dict(tokens=np.array(prompt + sample["tokens"], np.int32), mask=np.arange(n + len(sample["tokens"])) >= n,
                    logprobs=np.concatenate([np.zeros(n, np.float32), np.array(sample["logprobs"], np.float32)]),
                    versions=np.concatenate([np.full(n, -1, np.int32), sample["versions"]]),
                    reward=reward + overlong_penalty(len(sample["tokens"]), self.config), success=reward >= 1, finished=sample["finished"], text=text)

    async def group(self, i, problem, n):
        """n attempts at problem i -> one record in queues/rollouts; returns how many samples it did not yield."""
        c = self.config

        async def attempt():
            try:
                return await self.rollout(problem, c.temperature)
            finally:
                self.wanted -= 1
        attempts = await asyncio.gather(*(attempt() for _ in range(n)))
        good = [a for a in attempts if a is not None]
        if len(good) < min(2, n):
            self.counts["dropped_groups"] += 1
            print(f"actor: problem {i} dropped: {len(good)} of {n} attempts came back, dropped so far {self.counts['dropped_groups']}", flush=True)
            # an empty record tells preprocess, which may wait for this group (late = wait), that it will not come
            await asyncio.to_thread(self.rollouts.put, dict(run_id=c.run_id, index=i, gen_tok_s=self.speed(), lengths=np.zeros(0, int), rewards=np.zeros(0, np.float32)), c.stall_timeout)
            return n
        cat = {k: np.concatenate([a[k] for a in good]) for k in ("tokens", "mask", "logprobs", "versions")}
        record = cat | dict(lengths=np.array([len(a["tokens"]) for a in good]), rewards=np.array([a["reward"] for a in good], np.float32),
                            successes=np.array([a["success"] for a in good]), finished=np.array([a["finished"] for a in good]), run_id=c.run_id, index=i, gen_tok_s=self.speed())
        await asyncio.to_thread(self.rollouts.put, record, c.stall_timeout)
        self.show(i, problem, good)
        return n - len(good)

    def speed(self):
        """Sampled tokens per second over the last 10 s."""
        now = time.time()
        while self.recent and self.recent[0][0] < now - 10:
            self.recent.popleft()
        return sum(n for _, n in self.recent) / max(now - self.recent[0][0], 0.1) if self.recent else 0.0

    def show(self, i, problem, attempts):
        """A few decoded rollouts per version into samples.jsonl, for people."""
        version = self.version()
        if version != self.logged_version:
            self.logged_version, self.logged = version, 0
        for a in attempts[:self.logged < self.config.samples_logged]:  # one of a group
            self.logged += 1
            sampled = a["versions"][a["mask"]]
            starts = np.flatnonzero(np.diff(sampled, prepend=-1))
            self.samples_file.write(json.dumps(dict(
                version=version, index=i, prompt=problem["prompt"], completion=a["text"], reward=a["reward"], finished=a["finished"], answer=problem.get("answer"),
                versions=[[int(sampled[s]), int(s)] for s in starts])) + "\n")  # [version, first completion token it sampled]
            self.samples_file.flush()

    async def evaluate(self, version):
        """Held-out problems through the same engines, while training goes on; the result goes to the trainer's metrics."""
        c = self.config
        problems = self.task.problems("test", c.seed)[:c.eval_problems]
        results = [r for r in await asyncio.gather(*(self.rollout(p, c.eval_temperature) for p in problems)) if r]
        accuracy = float(np.mean([r["success"] for r in results])) if results else 0.0
        sampled = np.concatenate([r["versions"][r["mask"]] for r in results]) if results else np.zeros(1)
        self.evals.put(dict(eval={c.task: accuracy}, problems=len(results), version=version, wall_s=time.time(), versions=[int(sampled.min()), int(sampled.max())]))

    async def ready(self):
        """Wait until every engine is healthy and the trainer has announced its first version."""
        deadline = time.monotonic() + self.config.start_timeout
        missing = "the trainer's first version"
        while self.version() < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"actor: waited {self.config.start_timeout:.0f} s for {missing} in {self.queues}")
            await asyncio.sleep(0.05)

    async def run(self):
        c = self.config
        await self.ready()
        watches = {asyncio.create_task(self.watch(url)) for url in self.urls}
        version = first = evaluated = self.version()
        print(f"actor: {len(self.urls)} engines x {c.concurrency} sequences, task {c.task}, from version {version}", flush=True)
        await self.evaluate(version)
        stream = Problems(self.task.problems("train", c.seed), c.seed)
        position = noticed(self.queues / "version.json")["position"]  # problems already done with, of a continued run
        i, done_ahead, started, returned = position["next"], set(position["ahead"]), first * c.batch_size, 0
        groups, evaluations, last_change = set(), set(), time.monotonic()
        while True:
            now_version = self.version()
            if now_version != version:
                version, last_change = now_version, time.monotonic()
            if time.monotonic() - last_change > c.stall_timeout:
                raise TimeoutError(f"actor: the trainer has stayed at version {version} for {c.stall_timeout:.0f} s")
            if version >= c.steps or c.eval_every and version // c.eval_every > evaluated // c.eval_every:
                evaluated = version
                evaluations.add(asyncio.create_task(self.evaluate(version)))
                if version >= c.steps:
                    break
            dropped = noticed(self.queues / "dropped.json").get("samples", 0)
            # a group is smaller where samples were lost: with all of `attempts` the step might never be complete
            while self.wanted < c.concurrency * len(self.serving) and (n := min(c.attempts, allowed_samples(c, version) - started + returned + dropped)) > 0:
                while i in done_ahead:
                    i += 1
                groups.add(asyncio.create_task(self.group(i, stream[i], n)))
                i, started, self.wanted = i + 1, started + n, self.wanted + n
            done, groups = await asyncio.wait(groups, timeout=0.01, return_when=asyncio.FIRST_COMPLETED) if groups else (set(), groups)
            returned += sum(g.result() for g in done)
            for task in [t for t in evaluations | watches if t.done()]:
                evaluations.discard(task)
                task.result()
            if not done:
                await asyncio.sleep(0.005)
        for g in groups:
            g.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        await asyncio.gather(*evaluations)
        for w in watches:
            w.cancel()
        await asyncio.gather(*watches, *(s.close() for s in self.sessions.values()), return_exceptions=True)
        print(f"actor: done, {started - returned} samples started, events {dict(self.counts)}", flush=True)


if __name__ == "__main__":
    run_directory = sys.argv[1]
    asyncio.run(Actor(cfg.load(run_directory), run_directory).run())
