"""How many tokens a second can one actor and one preprocess handle, and is their memory flat?

    python bench/pace.py [--engines 16] [--sequences 256] [--tokens 4000] [--minutes 10] [--speed 2]

The actor, preprocess and the queues between them are real. Engines and trainer are FAKE. A FAKE
engine keeps the pace of an H100 that serves a 7B model: a decode step takes as long as the H100
needs to read the weights and the KV cache of all its sequences from memory, so no real engine with
as many sequences is faster. The lengths of answers are log-normal. The FAKE trainer reads and
checks the micro-batches of all ranks as train.py does, trains nothing, and announces the next
version at once. `--speed 2` lets the clock of the engines run twice as fast. Deliberately absent:
weight updates, and rewards that take time.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import keep, machine, parser, result_file, table
from bench.engines import make_run
from plumbing.placement import NO_GAPS
from plumbing.problems import Prompter
from plumbing.queues import publish_json, read_json
from plumbing.reader import Reader

# An H100: bytes a second from its memory. Qwen2.5-7B in bfloat16: bytes of its weights, and of the
# keys and values of one token (28 layers, 4 heads of 128).
BANDWIDTH = 3.35e12
WEIGHT_BYTES = 15.2e9
KV_BYTES = 2 * 28 * 4 * 128 * 2
# standard deviation of the logarithm of an answer's length
SIGMA = 0.5
# seconds between two looks at the processes
LOOK_EVERY = 5.0


def draw_lengths(mean, n):
    """[n] log-normal lengths of answers with this mean and SIGMA, at most three times the mean.

    They are rounded to multiples of mean / 40, so that few different answers must be made.
    """
    rng = np.random.default_rng(0)
    median = mean / np.exp(SIGMA**2 / 2)
    lengths = median * np.exp(SIGMA * rng.standard_normal(n))
    unit = max(mean // 40, 1)
    return np.clip(np.rint(lengths / unit), 1, 3 * mean // unit).astype(int) * unit


def step_seconds(sequences, lengths):
    """Seconds of a decode step of `sequences` sequences whose answers have these lengths [n]."""
    # A long answer is in progress for a longer time; on average half of it is there.
    context = (lengths.astype(float) ** 2).mean() / lengths.mean() / 2
    return (WEIGHT_BYTES + sequences * context * KV_BYTES) / BANDWIDTH


# ---- the FAKE ends of the pipeline


class FakeEngines:
    """FAKE: all engines in one process; they answer when the time of an answer has passed."""

    def __init__(self, config, run_dir, lengths, step_s, stop_token):
        self.config = config
        self.version_file = Path(run_dir, "queues", "version.json")
        self.lengths = itertools.cycle(lengths.tolist())
        self.step_s = step_s
        self.stop_token = stop_token
        self.version = 0
        self.random = np.random.default_rng(1)
        # The first requests are taken for half-finished ones: not all of them are to end at once.
        self.first_wave = config.engines * config.concurrency
        # {length: the beginning of the body of such an answer}
        self.bodies = {}

    async def serve(self):
        from aiohttp import web

        app = web.Application()
        app.add_routes(
            [web.post("/inference/v1/generate", self.generate), web.get("/health", self.health)]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for i in range(self.config.engines):
            site = web.TCPSite(runner, "127.0.0.1", self.config.port + i, backlog=1024)
            await site.start()
        while True:
            self.version = read_json(self.version_file).get("version", 0)
            await asyncio.sleep(0.5)

    async def health(self, _):
        from aiohttp import web

        return web.Response()

    async def generate(self, request):
        from aiohttp import web

        await request.read()
        length = next(self.lengths)
        seconds = length * self.step_s
        if self.first_wave > 0:
            self.first_wave -= 1
            seconds *= self.random.random()
        first = self.version
        await asyncio.sleep(seconds)
        body = self.beginning(length) + json.dumps(version_spans(first, self.version, length))
        return web.Response(text=body + "}]}", content_type="application/json")

    def beginning(self, length):
        """The body of an answer of so many tokens, up to its version spans."""
        if length not in self.bodies:
            tokens = [2 + i % 50 for i in range(length - 1)] + [self.stop_token]
            # as many digits as a float32 has in JSON
            logprobs = -np.random.default_rng(length).random(length, np.float32)
            choice = dict(
                token_ids=tokens, behavior_logprobs=logprobs.tolist(), finish_reason="stop"
            )
            text = json.dumps(choice, separators=(",", ":"))
            self.bodies[length] = '{"choices":[' + text[:-1] + ',"weight_versions":'
        return self.bodies[length]


def version_spans(first, last, length):
    """The weight_versions of an answer that versions first..last sampled, an equal share each."""
    versions = range(first, last + 1)[-length:]
    borders = np.linspace(0, length, len(versions) + 1).astype(int).tolist()
    return [
        dict(version=str(version), start=start, end=end)
        for version, start, end in zip(versions, borders, borders[1:])
    ]


def serve_fake_engines(*arguments):
    """The process of the FAKE engines."""
    asyncio.run(FakeEngines(*arguments).serve())


class FakeRank:
    """FAKE: the rank of a trainer (plumbing.ranks.Ranks) without a process group.

    stages: {name: process}, which may be filled later; the rank stops when one of them has ended.
    """

    def __init__(self, rank, stages):
        self.rank = rank
        self.stages = stages
        self.stop = SimpleNamespace(is_set=self.ended_stages)

    def ended_stages(self):
        return [name for name, process in self.stages.items() if process.poll() is not None]

    def fail(self, error):
        raise error

    def check_stop(self, condition=False):
        for name in self.ended_stages():
            raise RuntimeError(f"pace: {name} has ended: see its log in the run's folder logs/")
        # The FAKE trainer reads rank 0's record before those of the others.
        return condition or self.rank > 0


class FakeTrainer:
    """FAKE: reads the micro-batches of all ranks and announces a version after every step.

    stages: {name: process} of the actor and the preprocessor.
    """

    def __init__(self, config, run_dir, stages):
        self.config = config
        self.queues = Path(run_dir, "queues")
        ranks = [FakeRank(rank, stages) for rank in range(config.trainers)]
        self.readers = [Reader(config, run_dir, rank) for rank in ranks]
        self.urls = [f"http://127.0.0.1:{config.port + i}" for i in range(config.engines)]
        self.version = 0
        # sampled tokens in the micro-batches read so far
        self.tokens = 0
        self.announce(dict(next=0, ahead=[]))

    def announce(self, position):
        publish_json(self.queues / "position.json", **position)
        status = dict(version=self.version, served=self.version, engines=self.urls, done=False)
        publish_json(self.queues / "version.json", **status)

    def step(self):
        for rows in zip(*(reader.step(self.version) for reader in self.readers), strict=True):
            self.tokens += sum(int(row["mask"].sum()) for row in rows)
        for _ in self.readers[0].evaluations():
            pass
        self.version += 1
        self.announce(self.readers[0].last["position"])


# ---- what is seen of it


def look(processes, trainer):
    """The state now: seconds, tokens and steps trained, CPU seconds and MB of each process."""
    cpu = {}
    mb = {}
    for name, process in processes.items():
        process = psutil.Process(process.pid)
        cpu[name] = sum(process.cpu_times()[:2])
        mb[name] = process.memory_info().rss / 1e6
    return dict(
        seconds=time.monotonic(), tokens=trainer.tokens, steps=trainer.version, cpu=cpu, mb=mb
    )


def summary(looks, processes, possible):
    """The numbers of the table. looks: those after the warm-up; possible: tokens/s of engines that
    are always full.
    """
    first = looks[0]
    last = looks[-1]
    seconds = last["seconds"] - first["seconds"]
    # Buffers have their full size after a third of the time.
    late = looks[len(looks) // 3 :]
    minutes = [(x["seconds"] - first["seconds"]) / 60 for x in late]
    numbers = dict(
        seconds=seconds,
        possible_tok_s=possible,
        trained_tok_s=(last["tokens"] - first["tokens"]) / seconds,
        steps=last["steps"] - first["steps"],
        processes={},
    )
    for name in processes:
        mb = [x["mb"][name] for x in late]
        numbers["processes"][name] = dict(
            cores=(last["cpu"][name] - first["cpu"][name]) / seconds,
            mb_third=mb[0],
            mb_end=mb[-1],
            mb_a_minute=float(np.polyfit(minutes, mb, 1)[0]) if len(mb) > 2 else 0.0,
        )
    return numbers


def start_engines(config, run_dir, lengths, step_s):
    """Start the process of the FAKE engines."""
    stop_token = min(Prompter(config).stop)
    engines = multiprocessing.Process(
        target=serve_fake_engines, args=(config, run_dir, lengths, step_s, stop_token), daemon=True
    )
    engines.start()
    return engines


def start_stage(stage, run_dir):
    """Start actor.py or preprocess.py."""
    env = os.environ | (NO_GAPS if stage == "actor" else {})
    with open(run_dir / "logs" / f"{stage}.log", "w") as log:
        command = [sys.executable, f"{stage}.py", str(run_dir)]
        return subprocess.Popen(command, cwd=cfg.ROOT, stdout=log, stderr=log, env=env)


def measure(arguments):
    """(numbers of the table, all looks) of a run."""
    lengths = draw_lengths(arguments.tokens, 4096)
    longest = 3 * arguments.tokens
    step_s = step_seconds(arguments.sequences, lengths) / arguments.speed
    config, run_dir = make_run(
        "pace",
        port=arguments.port,
        engines=arguments.engines,
        concurrency=arguments.sequences,
        trainers=arguments.ranks,
        batch_size=arguments.batch,
        attempts=16,
        steps=10**6,
        max_lag=10**6,
        on_full="drop_oldest",
        eval_problems=1,
        eval_every=0,
        max_new_tokens=longest,
        max_model_len=longest + 128,
        row_tokens=max(16384, longest + 128),
        stall_timeout=600,
    )
    (run_dir / "queues").mkdir(exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    stages = {}
    trainer = FakeTrainer(config, run_dir, stages)
    engines = start_engines(config, run_dir, lengths, step_s)
    for stage in ("actor", "preprocess"):
        stages[stage] = start_stage(stage, run_dir)
    processes = {"FAKE engines": engines} | stages
    looks = []
    try:
        begin = time.monotonic()
        while time.monotonic() < begin + 60 * arguments.minutes:
            trainer.step()
            if not looks or time.monotonic() > looks[-1]["seconds"] + LOOK_EVERY:
                looks.append(look(processes, trainer))
    finally:
        for process in processes.values():
            process.kill()
    # The engines have answered every first request once the mean answer's time has passed twice.
    warm = looks[0]["seconds"] + 2 * lengths.mean() * step_s
    possible = arguments.engines * arguments.sequences / step_s
    return summary([x for x in looks if x["seconds"] >= warm], processes, possible), looks


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--engines", type=int, default=16)
    p.add_argument("--sequences", type=int, default=256, help="in progress on each engine")
    p.add_argument("--tokens", type=int, default=4000, help="mean length of an answer")
    p.add_argument("--batch", type=int, default=1024, help="samples a step")
    p.add_argument("--ranks", type=int, default=8, help="of the FAKE trainer")
    p.add_argument("--minutes", type=float, default=10.0)
    p.add_argument("--speed", type=float, default=2.0, help="of the engines' clock")
    p.add_argument("--port", type=int, default=8640)
    arguments = p.parse_args(argv)
    if arguments.quick:
        arguments.engines = 2
        arguments.sequences = 16
        arguments.tokens = 200
        arguments.batch = 32
        arguments.ranks = 2
        arguments.minutes = 0.5
    numbers, looks = measure(arguments)
    print(machine())
    trained = numbers["trained_tok_s"]
    engine = numbers["possible_tok_s"] / arguments.engines / arguments.speed
    print(
        f"{trained:.0f} tokens/s trained in {numbers['steps']} steps, "
        f"{trained / numbers['possible_tok_s']:.1%} of what the FAKE engines can sample; as much "
        f"as {trained / engine:.0f} H100s sample at most, {engine:.0f} tokens/s each"
    )
    header = ["process", "cores", "MB after a third", "MB at the end", "slope, MB/min"]
    rows = []
    for name, values in numbers["processes"].items():
        cells = [values["cores"], values["mb_third"], values["mb_end"], values["mb_a_minute"]]
        forms = [".2f", ".0f", ".0f", "+.2f"]
        rows.append([name, *(f"{cell:{form}}" for cell, form in zip(cells, forms))])
    table(header, rows)
    keep(result_file(arguments, "pace"), dict(machine=machine()) | numbers | dict(looks=looks))


if __name__ == "__main__":
    main()
