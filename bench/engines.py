"""An engine that a script starts by itself, without a trainer, and a client that keeps it busy.

Not a program.
"""

import asyncio
import contextlib
import itertools
import re
import shutil
import time
from pathlib import Path

import aiohttp
import numpy as np
import requests

import config as cfg
from bench.common import WORK, flags
from plumbing import placement, rundir
from plumbing.secret import secret_header
from plumbing.transport import in_thread
from tools import base_model


def make_run(name, **knobs):
    """(config, run directory) of a run out/bench/<name> of preset toy on CPUs, with its model."""
    argv = ["toy", *flags(dict(run=name, out=WORK) | knobs)]
    config = placement.resolve(cfg.parse(argv), 0)
    if not knobs.get("model"):
        base_model.make_model([config.task], config.model, config.seed)
    shutil.rmtree(Path(config.out, config.run), ignore_errors=True)
    return config, rundir.write(config)


def url_of(config):
    """Where the first engine of a run listens."""
    return f"http://{config.master_addr}:{config.port}"


def requests_of(prompts, lengths, **sampling):
    """Endless iterator of requests for Load: prompts and lengths (most tokens) each take turns."""
    for prompt, length in zip(itertools.cycle(prompts), itertools.cycle(lengths)):
        params = dict(max_tokens=length, temperature=1.0, logprobs=0, detokenize=False)
        yield dict(token_ids=prompt, sampling_params=params | sampling)


@contextlib.contextmanager
def statistics():
    """Within this context engines are started so that their /metrics count guessed tokens."""
    commands = placement.engine_commands

    def with_statistics(*arguments):
        engines = commands(*arguments)
        for _, _, command in engines:
            command.remove("--disable-log-stats")
        return engines

    placement.engine_commands = with_statistics
    try:
        yield
    finally:
        placement.engine_commands = commands


def guessed_and_accepted(config):
    """The numbers of tokens that an engine has guessed and accepted so far, in an array [2]."""
    text = requests.get(f"{url_of(config)}/metrics", timeout=60).text
    numbers = []
    for name in ("draft", "accepted"):
        values = re.findall(rf"spec_decode_num_{name}_tokens_total{{.*}} ([\d.e+]+)", text)
        numbers.append(sum(map(float, values)))
    return np.array(numbers)


class Load:
    """A client that keeps `concurrency` requests in progress, from a thread of its own."""

    def __init__(self, config, run_dir, requests, concurrency):
        self.url = f"{url_of(config)}/inference/v1/generate"
        self.headers = secret_header(run_dir)
        self.requests = requests
        self.concurrency = concurrency
        # (begin, end, tokens) of every answer
        self.answers = []
        self.going_on = True
        self.end = in_thread(asyncio.run, self._keep_busy())

    async def _keep_busy(self):
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(connector=connector, headers=self.headers) as session:
            await asyncio.gather(*(self._work(session) for _ in range(self.concurrency)))

    async def _work(self, session):
        while self.going_on:
            begin = time.monotonic()
            async with session.post(self.url, json=next(self.requests)) as answer:
                answer.raise_for_status()
                tokens = (await answer.json())["choices"][0]["token_ids"]
            self.answers.append((begin, time.monotonic(), len(tokens)))

    def stop(self):
        """Wait until the requests in progress end; raises their errors.

        TimeoutError after 5 minutes.
        """
        self.going_on = False
        self.end.result(300)

    def rate(self, start, end):
        """Tokens/s in a span of time, once all requests that overlap it have ended.

        The tokens of an answer count as spread evenly over its life.
        """
        tokens = 0.0
        for begin, finish, n in self.answers:
            overlap = min(finish, end) - max(begin, start)
            tokens += n * max(overlap, 0.0) / (finish - begin)
        return tokens / (end - start)
