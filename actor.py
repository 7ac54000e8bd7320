"""Stage 1: problems -> groups of rollouts with rewards, sampled by the vLLM servers over plain HTTP.

Keeps every engine busy with `concurrency` sequences; a group of `attempts` rollouts of one problem is one record in
queues/rollouts. A weight update in the middle of a sequence is no event here: the engine says afterwards which version
sampled which tokens. How far ahead of the trainer samples may be started is decided by one function, `allowed_samples`.

Alone, with engines and a trainer running: `python actor.py out/toy`. A checkpoint's score: `python actor.py --eval out/toy/checkpoints/step_000270`
(evaluate.py). Several actors (`--actors`) share the problems out by position and know nothing of each other. Deliberately absent: streaming, threads.
"""
import asyncio
import contextlib
import functools
import json
import random
import secrets
import sys
import time
from collections import Counter, deque
from pathlib import Path

import aiohttp
import numpy as np
from transformers import AutoTokenizer, GenerationConfig

import config as cfg
from queues import Queue, noticed
from rewards import Judges


def allowed_samples(config, version):
    """The gate: how many samples may have been started, in all, when the trainer is at `version`.

    Pipeline: (v + max_lag + 1) B, so that with max_lag = 0 only the step being collected is sampled. Conventional RL with
    G steps per generation phase: (v // G * G + G) B. It depends on v alone: updates that went by unseen lose no credit.
    """
    g = config.conventional_g
    return ((version // g * g + g) if g else (version + config.max_lag + 1)) * config.batch_size


def share(samples, config, k):
    """Actor k's share of the first so many samples, counted in whole groups: group i is actor (i mod actors)'s."""
    return (samples // config.attempts + config.actors - 1 - k) // config.actors * config.attempts


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
    """The endless stream of (task, problem), given by position alone: of each task every problem once per epoch, shuffled anew.

    problems: {task: list}; shares: {task: share}, kept exactly in every 100 problems, to one percent.
    """

    def __init__(self, problems, shares, seed):
        self.problems, self.seed, self.orders = problems, seed, {}
        count = {task: max(int(100 * share), 1) for task, share in shares.items()}
        for task in sorted(shares, key=lambda t: count[t] - 100 * shares[t])[:max(100 - sum(count.values()), 0)]:
            count[task] += 1
        self.round = [task for task in count for _ in range(count[task])]

    def __getitem__(self, i):
        r, k = divmod(i, len(self.round))
        tasks = [self.round[place] for place in self.shuffled("", r, len(self.round))[:k + 1]]
        task = tasks[-1]
        epoch, j = divmod(r * self.round.count(task) + tasks.count(task) - 1, len(self.problems[task]))
        return task, self.problems[task][self.shuffled(task, epoch, len(self.problems[task]))[j]]

    def shuffled(self, what, epoch, n):
        """0 .. n-1 in the order of this epoch; the last one asked for is kept."""
        if self.orders.get(what, (None,))[0] != epoch:
            order = list(range(n))
            random.Random(f"{self.seed}/{what}/{epoch}").shuffle(order)
            self.orders[what] = epoch, order
        return self.orders[what][1]


class Prompter:
    """Texts of problems and environments -> token ids, raw or through the model's chat template."""

    def __init__(self, config):
        self.config, self.tokenizer = config, AutoTokenizer.from_pretrained(config.model)
        if config.chat and not self.tokenizer.chat_template:
            raise cfg.ConfigError(f"--chat True: the tokenizer of {config.model} has no chat template")
        ends = None
        with contextlib.suppress(OSError):  # a model need not have a generation config; chat models often have several stop tokens
            ends = GenerationConfig.from_pretrained(config.model).eos_token_id
        self.stop = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}

    def render(self, messages, **options):
        """Messages as text, by the chat template."""
        thinking = {} if self.config.thinking == "auto" else {"enable_thinking": self.config.thinking == "on"}
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **thinking, **options)

    def start(self, problem):
        """Token ids of a problem's prompt."""
        if not self.config.chat:
            return self.tokenizer(self.config.system_prompt + problem["prompt"])["input_ids"]
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        text = self.render(system + [{"role": "user", "content": problem["prompt"]}], add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def more(self, text):
        """Token ids of the environment's answer to a turn, to be appended to what the engine has sampled, its stop token included."""
        if self.config.chat:  # what the template puts between the end of an assistant's turn and the beginning of the next one
            turn = secrets.token_hex(8)
            said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": turn}]
            text = self.render(said + [{"role": "user", "content": text}], add_generation_prompt=True).partition(turn)[2]
            for end in self.tokenizer.convert_ids_to_tokens(sorted(self.stop)):
                text = text.lstrip(" ").removeprefix(end) if text.lstrip(" ").startswith(end) else text
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def check(self, problems):
        """Raise ConfigError if a prompt leaves no room for a completion; a prompt has at most as many tokens as bytes, and what a template adds."""
        room, c = self.config.max_model_len - 1, self.config
        extra = len(self.start({"prompt": ""}))
        for task, found in problems.items():
            for n, p in enumerate(found, 1):
                if len(p["prompt"].encode()) + extra > room and (length := len(self.start(p))) > room:
                    raise cfg.ConfigError(f"{p.get('where', f'task {task}, problem {n}')}: the prompt has {length} tokens, --max_model_len {c.max_model_len} leaves room for {room}: raise it or take the problem out")


class Actor:
    """Everything the coroutines below share. k: which of `config.actors` this is; it takes problems k, k + actors, ..."""

    def __init__(self, config, run_dir, k=0):
        self.config, self.run_dir, self.k, self.places = config, Path(run_dir), k, -(-config.concurrency // config.actors)  # places: of each engine
        self.queues = self.run_dir / "queues"
        self.prompter, self.judges = Prompter(config), Judges(config)
        self.tokenizer = self.prompter.tokenizer
        self.rollouts, self.evals = Queue(self.queues / "rollouts", maxlen=10000), Queue(self.queues / "evals")
        self.urls = list(config.urls)
        self.load = {url: 0 for url in self.urls}  # sequences in progress
        self.serving = []  # engines that the trainer says hold its weights
        self.sessions = {}  # one per engine, so that closing it ends the requests of an engine that hangs
        self.rest = {url: 0.0 for url in self.urls}  # an engine that failed gets no work before this time
        self.slots = asyncio.Condition()
        self.wanted = 0  # sequences of groups that run or wait for a slot
        self.counts = Counter()  # events that are not errors but worth a line: retried, failed, dropped groups
        self.recent, self.idle = deque(), 0.0  # (time, sampled tokens) of the last seconds; see pace
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
        return [url for url in self.serving if self.rest[url] < now and self.load[url] < self.places]

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

    async def generate(self, prompt, temperature, limit, seed=None):
        """One completion, of at most `limit` tokens, of prompt token ids, from the least loaded engine: {tokens, logprobs, versions, finished}.

        Failed requests are tried again, with back-off; None when `retries` are used up. Those that an engine's death or
        restart broke off do not count: they wait for an engine.
        """
        c, tries = self.config, 0
        while tries <= c.retries:
            async with self.slot() as url:
                try:
                    body = dict(token_ids=prompt, sampling_params=dict(max_tokens=limit, temperature=temperature, logprobs=0, seed=seed,
                                                                       stop_token_ids=sorted(self.prompter.stop), detokenize=False))
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

    async def rollout(self, task, problem, temperature, seed=None):
        """One attempt at a problem: tokens (what was sent and what was sampled, never re-tokenised), mask of the sampled ones, reward.

        Where the task has `respond`, its answer to each turn is appended, and the next turn's prompt is everything so far. At most
        max_new_tokens are sampled in all turns together. None if a request failed for good.
        """
        c, judges = self.config, self.judges
        several = hasattr(judges.tasks[task], "respond")
        parts, turns, left = [(self.prompter.start(problem), None)], [], c.max_new_tokens  # (token ids, what the engine said of them; None: not sampled)
        while True:
            tokens = [t for ids, _ in parts for t in ids]
            sample = await self.generate(tokens, temperature, min(left, c.max_model_len - len(tokens)), None if seed is None else seed + len(turns))
            if sample is None:
                return None
            parts.append((sample["tokens"], sample))
            left -= len(sample["tokens"])
            turns.append(self.tokenizer.decode(sample["tokens"], skip_special_tokens=True))
            finished = sample["finished"]
            if not several or not finished or (answer := await judges.respond(task, problem, turns)) is None:
                break
            ids = self.prompter.more(answer)
            if len(tokens) + len(sample["tokens"]) + len(ids) >= c.max_model_len or left <= 0:
                finished = False  # cut off between two turns
                break
            parts.append((ids, None))
        text = turns if several else turns[0]
        verdict = await judges.score(task, problem, text, finished)
        verdict["reward"] += overlong_penalty(c.max_new_tokens - left, c)
        column = lambda key, nothing, kind: np.concatenate([np.array(s[key] if s else [nothing] * len(ids), kind) for ids, s in parts])
        return verdict | dict(tokens=np.array([t for ids, _ in parts for t in ids], np.int32), mask=np.concatenate([np.full(len(ids), s is not None) for ids, s in parts]),
                              logprobs=column("logprobs", 0, np.float32), versions=column("versions", -1, np.int32), text=text, finished=finished)

    async def group(self, i, task, problem, n):
        """n attempts at problem i of the stream -> one record in queues/rollouts, which says how many of them were lost: preprocess counts those."""
        c = self.config

        async def attempt():
            try:
                return await self.rollout(task, problem, c.temperature)
            finally:
                self.wanted -= 1
        attempts = await asyncio.gather(*(attempt() for _ in range(n)))
        good = [a for a in attempts if a is not None]
        if len(good) < min(2, n):
            self.counts["dropped_groups"] += 1
            print(f"actor: problem {i} dropped: {len(good)} of {n} attempts came back, dropped so far {self.counts['dropped_groups']}", flush=True)
            # an empty record tells preprocess, which may wait for this group (late = wait), that it will not come
            await asyncio.to_thread(self.rollouts.put, dict(run_id=c.run_id, index=i, task=task, lost=n, **self.pace(), lengths=np.zeros(0, int), rewards=np.zeros(0, np.float32)), c.stall_timeout)
            return
        cat = {k: np.concatenate([a[k] for a in good]) for k in ("tokens", "mask", "logprobs", "versions")}
        record = cat | dict(lengths=np.array([len(a["tokens"]) for a in good]), rewards=np.array([a["reward"] for a in good], np.float32),
                            finished=np.array([a["finished"] for a in good]), outcomes=[a["outcome"] for a in good], task=task, run_id=c.run_id, index=i, lost=n - len(good), **self.pace())
        await asyncio.to_thread(self.rollouts.put, record, c.stall_timeout)
        self.show(i, task, problem, good)

    def pace(self):
        """gen_tok_s: sampled tokens per second over the last 10 s; gen_idle: share of the engines' places that were empty, likewise."""
        now = time.time()
        while self.recent and self.recent[0][0] < now - 10:
            self.recent.popleft()
        return dict(gen_tok_s=sum(n for _, n in self.recent) / max(now - self.recent[0][0], 0.1) if self.recent else 0.0, gen_idle=self.idle)

    def look(self, seconds):
        """Take the last `seconds` into gen_idle, an exponential mean over 10 s."""
        empty = 1 - sum(self.load.values()) / (self.places * max(len(self.serving), 1))
        self.idle += (max(empty, 0.0) - self.idle) * min(seconds / 10, 1)

    def show(self, i, task, problem, attempts):
        """A few decoded rollouts per version into samples.jsonl, for people; `python bench/show.py out/<run>` prints them."""
        version = self.version()
        if version != self.logged_version:
            self.logged_version, self.logged = version, 0
        for a in attempts[:self.logged < self.config.samples_logged]:  # one of a group
            self.logged += 1
            starts = np.flatnonzero(np.diff(a["versions"], prepend=-2)).tolist()  # the prompt and the environment's texts are spans, too, of version -1
            spans = [[int(a["versions"][s]), self.tokenizer.decode(a["tokens"][s:e].tolist())] for s, e in zip(starts, starts[1:] + [len(a["tokens"])])]
            sampled = a["versions"][a["mask"]]
            self.samples_file.write(json.dumps(dict(
                version=version, index=i, task=task, prompt=problem["prompt"], completion=a["text"], reward=a["reward"], outcome=a["outcome"], finished=a["finished"],
                answer=problem.get("answer"), versions=[[int(sampled[s]), int(s)] for s in np.flatnonzero(np.diff(sampled, prepend=-1))],  # [version, first sampled token of it]
                spans=spans)) + "\n")
            self.samples_file.flush()

    @functools.cached_property
    def test(self):
        """The held-out problems of each task, read once: a run is measured on the same ones from beginning to end."""
        return cfg.load_problems(self.config, "test")

    def held_out(self):
        """(task, set, number, problem) of the held-out problems to evaluate on: the first eval_problems of each set."""
        counts = Counter()
        for task, problems in self.test.items():
            for n, problem in enumerate(problems):
                source = problem.get("source", task)
                counts[source] += 1
                if counts[source] <= self.config.eval_problems:
                    yield task, source, n, problem

    async def evaluate(self, version):
        """Held-out problems through the same engines, while training goes on; the result goes to the trainer's metrics."""
        c = self.config
        work = [(source, self.rollout(task, problem, c.eval_temperature)) for task, source, _, problem in self.held_out() for _ in range(c.eval_attempts)]
        results = [(source, r) for (source, _), r in zip(work, await asyncio.gather(*(w for _, w in work))) if r]
        scores = {source: float(np.mean([r["success"] for s, r in results if s == source])) for source in dict.fromkeys(s for s, _ in results)}
        sampled = np.concatenate([r["versions"][r["mask"]] for _, r in results]) if results else np.zeros(1)
        self.evals.put(dict(eval=scores, problems=len(work) // c.eval_attempts, answers=len(results), version=version, wall_s=time.time(), versions=[int(sampled.min()), int(sampled.max())]))

    async def close(self):
        """End connections and reward workers."""
        self.judges.close()
        await asyncio.gather(*(s.close() for s in self.sessions.values()), return_exceptions=True)

    async def ready(self):
        """Wait until every engine is healthy and the trainer has announced its first version."""
        deadline = time.monotonic() + self.config.start_timeout
        missing = "the trainer's first version"
        while self.version() < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"actor: waited {self.config.start_timeout:.0f} s for {missing} in {self.queues}")
            await asyncio.sleep(0.05)

    async def run(self):
        c, problems = self.config, cfg.load_problems(self.config, "train")
        self.prompter.check(problems)
        self.prompter.check(self.test)
        await self.judges.start()
        await self.ready()
        watches = {asyncio.create_task(self.watch(url)) for url in self.urls}
        version = first = evaluated = self.version()
        print(f"actor: {len(self.urls)} engines x {self.places} sequences, task {c.task}, from version {version}", flush=True)
        if not self.k:
            await self.evaluate(version)
        stream = Problems(problems, cfg.task_weights(c.task), c.seed)
        position = noticed(self.queues / "version.json")["position"]  # problems already done with, of a continued run
        i, done_ahead, left, started = position["next"], set(position["ahead"]), position.get("left", {}), share(first * c.batch_size, c, self.k)
        i += (self.k - i) % c.actors
        groups, evaluations, last_change, looked = set(), set(), time.monotonic(), time.monotonic()
        while True:
            now_version = self.version()
            self.look(time.monotonic() - looked)
            looked = time.monotonic()
            if now_version != version:
                version, last_change = now_version, time.monotonic()
            if time.monotonic() - last_change > c.stall_timeout:
                raise TimeoutError(f"actor: the trainer has stayed at version {version} for {c.stall_timeout:.0f} s")
            if not self.k and (version >= c.steps or c.eval_every and version // c.eval_every > evaluated // c.eval_every):
                evaluated = version
                evaluations.add(asyncio.create_task(self.evaluate(version)))
            if version >= c.steps:
                break
            dropped = noticed(self.queues / "dropped.json").get("of_actor", {}).get(str(self.k), 0)
            while self.wanted < self.places * len(self.serving):
                while i in done_ahead:
                    i += c.actors
                # a group is smaller where samples were lost: with all of `attempts` the step might never be complete; and where some were trained before a crash
                if (n := min(left.get(str(i), c.attempts), share(allowed_samples(c, version), c, self.k) - started + dropped)) <= 0:
                    break
                groups.add(asyncio.create_task(self.group(i, *stream[i], n)))
                i, started, self.wanted = i + c.actors, started + n, self.wanted + n
            done, groups = await asyncio.wait(groups, timeout=0.01, return_when=asyncio.FIRST_COMPLETED) if groups else (set(), groups)
            for t in [*done, *(t for t in evaluations | watches if t.done())]:
                evaluations.discard(t)
                t.result()
            if not done:
                await asyncio.sleep(0.005)
        for g in groups:
            g.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        await asyncio.gather(*evaluations)
        for w in watches:
            w.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self.close()
        print(f"actor: done, {started} samples started, events {dict(self.counts)}, rewards {dict(self.judges.counts)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--eval"]:
        import evaluate
        evaluate.main(sys.argv[1:])
    else:
        run_directory = sys.argv[1]
        try:
            asyncio.run(Actor(cfg.load(run_directory), run_directory, int((sys.argv[2:] or [0])[0])).run())
        except cfg.ConfigError as e:  # what the user gave us: one line, no traceback
            sys.exit(f"actor: {e}")
