"""Runs whose engines and stages a script starts by itself, without a trainer; what FAKE engines answer; a client that keeps an engine busy.

Not a program. Deliberately absent: what is measured.
"""

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

import config as cfg
from bench.common import WORK, flags
from plumbing import launch
from plumbing.queues import publish_json
from plumbing.transport import in_thread
from tools import base_model


def make_run(name, **knobs):
    """(config, run directory) of a run out/bench/<name> of the toy preset on CPUs, with its model."""
    argv = ["toy", *flags(dict(run=name, out=WORK) | knobs)]
    config = launch.resolve(cfg.parse(argv, 0), 0)
    if not knobs.get("model"):
        base_model.make_model([config.task], config.model, config.seed)
    shutil.rmtree(Path(config.out, config.run), ignore_errors=True)
    return config, launch.write(config)


def announce_engines(config, run_dir):
    """Tell the stages, in place of a trainer, that the engines serve version 0."""
    shutil.rmtree(run_dir / "queues", ignore_errors=True)
    (run_dir / "queues").mkdir()
    position = dict(next=0, ahead=[])
    urls = launch.urls(config, 0)
    publish_json(run_dir / "queues" / "version.json", version=0, position=position, engines=urls)


def start_stage(name, run_dir):
    """The real process of a stage, "actor" or "preprocess", which says what it says in the run's logs."""
    command = [sys.executable, f"{name}.py", str(run_dir)]
    with open(run_dir / "logs" / f"{name}.log", "w") as log:
        # in a session of its own: Ctrl-C is for the script
        return subprocess.Popen(
            command, cwd=cfg.ROOT, stdout=log, stderr=log, start_new_session=True
        )


class FakeAnswers:
    """Bodies of answers as plumbing/generate.py writes them, of FAKE tokens, each length made once.

    stop: id of the token that ends them.
    """

    def __init__(self, stop):
        self.stop = stop
        self.made = {}

    def body(self, length, spans):
        """Of an answer of so many tokens; spans: its weight_versions, [{version, start, end}]."""
        if length not in self.made:
            self.made[length] = self._beginning(length)
        return self.made[length] + json.dumps(spans).encode() + b'}],"cached_tokens":0}'

    def _beginning(self, length):
        tokens = [2 + i % 50 for i in range(length - 1)] + [self.stop]
        # as many digits as a float32 has in JSON
        logprobs = -np.random.default_rng(length).random(length, np.float32)
        choice = dict(token_ids=tokens, behavior_logprobs=logprobs.tolist(), finish_reason="stop")
        text = json.dumps(choice, separators=(",", ":"))
        # the spans come last
        return ('{"choices":[' + text.removesuffix("}") + ',"weight_versions":').encode()


class Load:
    """A client that does nothing but keep an engine busy, from a thread of its own.

    headers: of every request; bodies: endless iterator of them; places: so many are always in progress.
    """

    def __init__(self, url, headers, bodies, places):
        self.url = f"{url}/inference/v1/generate"
        self.headers = headers
        self.bodies = bodies
        self.places = places
        # (begin, end, tokens) of every answer
        self.answers = []
        self.going_on = True
        self.end = in_thread(asyncio.run, self._keep_busy())

    async def _keep_busy(self):
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(connector=connector, headers=self.headers) as session:
            await asyncio.gather(*(self._work(session) for _ in range(self.places)))

    async def _work(self, session):
        while self.going_on:
            begin = time.monotonic()
            async with session.post(self.url, json=next(self.bodies)) as answer:
                answer.raise_for_status()
                tokens = (await answer.json())["choices"][0]["token_ids"]
            self.answers.append((begin, time.monotonic(), len(tokens)))

    def stop(self):
        """Let what is in progress end. Raises what went wrong; TimeoutError after 5 minutes."""
        self.going_on = False
        self.end.result(300)

    def rate(self, start, end):
        """Tokens/s in a span of time, once all requests that overlap it have ended: those of an answer
        count as evenly spread over its life.
        """
        tokens = 0.0
        for begin, finish, n in self.answers:
            overlap = min(finish, end) - max(begin, start)
            tokens += n * max(overlap, 0.0) / (finish - begin)
        return tokens / (end - start)


def bodies(prompts, lengths, **sampling):
    """Endless iterator of requests for Load: these prompts, and at most so many tokens each, in turn."""
    for prompt, length in zip(itertools.cycle(prompts), itertools.cycle(lengths)):
        params = dict(max_tokens=length, temperature=1.0, logprobs=0, detokenize=False)
        yield dict(token_ids=prompt, sampling_params=params | sampling)
