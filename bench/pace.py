"""Do the real actor, preprocess and queues keep up with 16 engines paced like H100s, and is their memory flat? Engines and trainer are FAKE.

    python bench/pace.py [--engines 16] [--sequences 256] [--tokens 4000] [--minutes 30] [--speed 1]

An engine's clock: a decode step takes as long as an H100 needs to read a 7B's weights and the KV cache
of every sequence in progress (tools/scale.py, step_seconds), which no engine undercuts; a sequence gets
a token a step. Answers are of log-normal length, their bodies as plumbing/generate.py writes them. `--speed` is that of
the engines' clock: 0.7 is an H100 that reaches 70% of its bandwidth, 4 does 30 minutes' work in 7.5.
Minutes are the engines'. The FAKE trainer reads and checks micro-batches as train.py does, trains
nothing, and announces the next version at once. Ctrl-C ends the run early, with its table. Deliberately
absent: weight updates, rewards that take time (bench/rewards.py).
"""

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import multiprocessing
import signal
import sys
import threading
import time
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import cpu_seconds, keep, machine, parser, resident_mb, result_file, table
from bench.engines import FakeAnswers, make_run, start_stage
from plumbing.launch import urls
from plumbing.prompts import Prompter
from plumbing.queues import Queue, publish_json, read_json
from plumbing.reader import Reader
from tools.scale import BANDWIDTH, KV_BYTES, WEIGHT_BYTES, mean_context, step_seconds

# of the law of lengths
SIGMA = 0.5
# seconds between two looks at the engines' clock
TICK = 0.02
# looks at processes and queues in a run, but at least every so many seconds
LOOKS = 20
LOOK_EVERY = 5.0
# an actor that has had no answer for so long has stopped, seconds
START_TIMEOUT = 120.0


class Seen(ctypes.Structure):
    """What the FAKE processes have done by now."""

    _fields_ = [
        # seconds of the engines' clock; sequences in progress x those seconds
        ("clock", ctypes.c_double),
        ("busy", ctypes.c_double),
        ("answers", ctypes.c_long),
        ("sampled", ctypes.c_long),
        ("trained", ctypes.c_long),
        ("steps", ctypes.c_long),
    ]


def draw_lengths(mean, n):
    """Log-normal lengths of this mean and SIGMA, [n], cut off at three times the mean; rounded, so that
    bodies need not be made for each.
    """
    rng = np.random.default_rng(0)
    median = mean / np.exp(SIGMA**2 / 2)
    lengths = median * np.exp(SIGMA * rng.standard_normal(n))
    unit = max(mean // 40, 1)
    return np.clip(np.rint(lengths / unit), 1, 3 * mean // unit).astype(int) * unit


# ---- the FAKE ends of the pipeline


class FakeEngines:
    """FAKE: all engines in one process, which give answers when their time has come."""

    def __init__(self, config, run_dir, lengths, step_s, speed, stop, seen):
        self.config = config
        self.run_dir = run_dir
        self.lengths = itertools.cycle(lengths.tolist())
        self.step_s = step_s
        self.speed = speed
        self.answers = FakeAnswers(stop)
        self.seen = seen
        self.random = np.random.default_rng(1)
        self.version = 0
        self.requests = 0
        self.in_progress = 0
        # (when, number of the request, its future)
        self.due = []

    async def serve(self):
        """Listen where the engines should, and tick, for good."""
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
        await self.tick()

    async def tick(self):
        last = time.monotonic()
        for n in itertools.count():
            await asyncio.sleep(TICK)
            now = time.monotonic()
            seconds = (now - last) * self.speed
            last = now
            # it starts with the first request
            if not self.requests:
                continue
            self.seen.clock += seconds
            self.seen.busy += seconds * self.in_progress
            while self.due and self.due[0][0] <= self.seen.clock:
                _, _, future = heapq.heappop(self.due)
                future.set_result(None)
            if n % 25 == 0:
                said = read_json(self.run_dir / "queues" / "version.json")
                self.version = said.get("version", 0)

    async def health(self, _):
        from aiohttp import web

        return web.Response()

    async def generate(self, request):
        from aiohttp import web

        await request.read()
        length = next(self.lengths)
        seconds = length * self.step_s
        self.requests += 1
        if self.requests <= self.config.engines * self.config.concurrency:
            # in progress for a while already: not all are to end at once
            seconds *= self.random.random()
        first = self.version
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self.due, (self.seen.clock + seconds, self.requests, future))
        self.in_progress += 1
        await future
        self.in_progress -= 1
        self.seen.answers += 1
        self.seen.sampled += length
        body = self.answers.body(length, version_spans(first, self.version, length))
        return web.Response(body=body, content_type="application/json")


def version_spans(first, last, length):
    """weight_versions of an answer that versions first..last sampled, equally many tokens each."""
    spans = []
    versions = range(first, last + 1)[-length:]
    borders = np.linspace(0, length, len(versions) + 1).astype(int).tolist()
    for version, start, end in zip(versions, borders, borders[1:]):
        spans.append(dict(version=str(version), start=start, end=end))
    return spans


def fake_engines(*arguments):
    """The process of the FAKE engines, which is ended with the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(FakeEngines(*arguments).serve())


class FakeRank:
    """FAKE: a trainer rank of plumbing.ranks.Ranks that has no others."""

    def __init__(self, rank):
        self.rank = rank
        self.stop = threading.Event()

    def agree(self, decision):
        return decision


def no_trouble():
    """Nothing goes wrong elsewhere."""


def fake_trainer(config, run_dir, vocabulary, seen):
    """The process of the FAKE trainer: all ranks' micro-batches, and a version after every step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = dict(engines=urls(config, 0), done=False, vocabulary=vocabulary)
    file = run_dir / "queues" / "version.json"
    readers = []
    for rank in range(config.trainers):
        readers.append(Reader(config, run_dir, FakeRank(rank), vocabulary, no_trouble))
    publish_json(file, version=0, position=dict(next=0, ahead=[]), **said)
    for version in range(config.steps):
        for rows in zip(*(reader.step(version) for reader in readers), strict=True):
            seen.trained += sum(int(row["mask"].sum()) for row in rows)
        readers[0].evaluations()
        seen.steps = version + 1
        publish_json(file, version=version + 1, position=readers[0].last["position"], **said)


# ---- what is seen of it


class Watch:
    """Looks at a run's processes and queues. processes: {kind: pid}; speed: of the engines' clock."""

    def __init__(self, run_dir, processes, speed, seen):
        self.speed = speed
        self.processes = processes
        self.seen = seen
        queues = run_dir / "queues"
        self.rollouts = Queue(queues / "rollouts")
        self.batches = [Queue(path) for path in sorted(queues.glob("batches/rank_*"))]
        # {kind: {pid: CPU seconds}}: of those that have ended, too
        self.cpu = {kind: {} for kind in (*processes, "reward workers")}
        self.samples = []

    def look(self):
        """{what: value} of now: seconds, CPU seconds and MB by kind of process, queues, what was done."""
        mb = dict.fromkeys(self.cpu, 0.0)
        pids = {kind: {pid} for kind, pid in self.processes.items()}
        workers = psutil.Process(self.processes["actor"]).children(recursive=True)
        pids["reward workers"] = {worker.pid for worker in workers}
        for kind, pid in ((kind, pid) for kind in pids for pid in pids[kind]):
            try:
                self.cpu[kind][pid] = cpu_seconds(pid)
                mb[kind] += resident_mb(pid)
            # a reward worker that has been replaced
            except OSError:
                continue
        cpu = {kind: sum(of.values()) for kind, of in self.cpu.items()}
        done = {name: getattr(self.seen, name) for name, _ in Seen._fields_}
        lengths = dict(rollouts=len(self.rollouts), batches=sum(map(len, self.batches)))
        return dict(seconds=time.monotonic(), cpu=cpu, mb=mb) | lengths | done

    def until(self, minutes, check):
        """Keep samples until the engines' clock has come so far."""
        every = min(60 * minutes / self.speed / LOOKS, LOOK_EVERY)
        while self.seen.clock < 60 * minutes:
            time.sleep(every)
            check()
            self.samples.append(self.look())


def slope(minutes, values):
    """Growth a minute of the line through values at these minutes, both [n]; 0 of fewer than 3."""
    if len(values) < 3:
        return 0.0
    return float(np.polyfit(minutes, values, 1)[0])


def summary(samples, places, possible):
    """What the table says of samples after the warm-up. possible: tokens a second that full engines sample."""
    first = samples[0]
    last = samples[-1]
    seconds = last["seconds"] - first["seconds"]
    passed = {name: last[name] - first[name] for name, _ in Seen._fields_}
    # memory is looked at once all places have been filled twice over
    late = samples[len(samples) // 3 :]
    minutes = [s["clock"] / 60 for s in late]
    processes = {}
    for kind in first["cpu"]:
        mb = [s["mb"][kind] for s in late]
        processes[kind] = dict(
            cores=(last["cpu"][kind] - first["cpu"][kind]) / seconds,
            mb_start=first["mb"][kind],
            mb_third=mb[0],
            mb_end=mb[-1],
            mb_a_minute=slope(minutes, mb),
        )
    queues = {}
    for name in ("rollouts", "batches"):
        records = [s[name] for s in samples]
        a_minute = slope(minutes, [s[name] for s in late])
        queues[name] = dict(mean=float(np.mean(records)), most=max(records), a_minute=a_minute)
    return dict(
        seconds=seconds,
        minutes=passed["clock"] / 60,
        possible_tok_s=possible,
        sampled_tok_s=passed["sampled"] / seconds,
        trained_tok_s=passed["trained"] / seconds,
        answers_s=passed["answers"] / seconds,
        steps=passed["steps"],
        empty=1 - passed["busy"] / (places * passed["clock"]),
        processes=processes,
        queues=queues,
    )


def print_summary(found):
    """The tables."""
    sampled = found["sampled_tok_s"]
    header = ["", "tokens/s", "of what the engines can"]
    rows = []
    for name in ("possible", "sampled", "trained"):
        rate = found[f"{name}_tok_s"]
        rows.append([name, f"{rate:.0f}", f"{rate / found['possible_tok_s']:.1%}"])
    table(header, rows)
    print(
        f"{found['minutes']:.1f} minutes of the engines in {found['seconds'] / 60:.1f}; places empty "
        f"{found['empty']:.1%}; {found['answers_s']:.1f} answers/s, {found['steps']} steps\n"
    )
    header = ["process", "cores", "CPU ms a 1,000 tokens"]
    header += ["MB at first", "after a third", "at the end", "slope, MB/min"]
    rows = []
    for kind, p in found["processes"].items():
        cells = [p["cores"], 1e6 * p["cores"] / max(sampled, 1)]
        cells = [f"{x:.2f}" for x in cells]
        cells += [f"{p[k]:.0f}" for k in ("mb_start", "mb_third", "mb_end")]
        rows.append([kind, *cells, f"{p['mb_a_minute']:+.2f}"])
    table(header, rows)
    print()
    rows = []
    for name, q in found["queues"].items():
        rows.append([name, f"{q['mean']:.1f}", q["most"], f"{q['a_minute']:+.2f}"])
    table(["queue", "records, mean", "most", "slope, records/min"], rows)


# ---- the run


class Run:
    """Starts everything, and ends it."""

    def __init__(self, config, run_dir, lengths, step_s, speed):
        self.seen = RawValue(Seen)
        self.run_dir = run_dir
        prompter = Prompter(config)
        stop = min(prompter.stop)
        (run_dir / "queues").mkdir()
        engines = (config, run_dir, lengths, step_s, speed, stop, self.seen)
        trainer = (config, run_dir, prompter.vocabulary, self.seen)
        self.processes = {
            "FAKE trainer": self._start_fake(fake_trainer, trainer),
            "FAKE engines": self._start_fake(fake_engines, engines),
            "actor": start_stage("actor", run_dir),
            "preprocess": start_stage("preprocess", run_dir),
        }

    def _start_fake(self, function, arguments):
        process = multiprocessing.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    def check(self):
        """RuntimeError if a process has ended."""
        for kind, process in self.processes.items():
            fake = kind.startswith("FAKE")
            if (process.exitcode if fake else process.poll()) is not None:
                raise RuntimeError(f"{kind} has ended, see {self.run_dir}/logs")

    def wait_for_answers(self):
        """Until the engines have given an answer."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self.seen.answers:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer was asked for, see {self.run_dir}/logs/actor.log")
            time.sleep(0.1)

    def end(self):
        for process in self.processes.values():
            process.kill()
        for kind, process in self.processes.items():
            if kind.startswith("FAKE"):
                process.join(10)
            else:
                process.wait(10)


def measure(a):
    """(summary, all samples, how the engines are paced) of a run."""
    lengths = draw_lengths(a.tokens, 4096)
    step_s = step_seconds(a.sequences, mean_context(lengths))
    config, run_dir = make_run(
        a.name,
        port=a.port,
        engines=a.engines,
        concurrency=a.sequences,
        trainers=a.ranks,
        batch_size=a.batch,
        steps=10**6,
        max_lag=10**6,
        on_full="drop_oldest",
        eval_problems=1,
        eval_every=0,
        max_new_tokens=3 * a.tokens,
        max_model_len=3 * a.tokens + 128,
        row_tokens=max(16384, 3 * a.tokens + 128),
        request_timeout=36000,
        stall_timeout=36000,
    )
    places = a.engines * a.sequences
    pace = dict(step_s=step_s, mean_tokens=float(lengths.mean()), longest=int(lengths.max()))
    pace |= dict(engines=a.engines, sequences=a.sequences, speed=a.speed, batch=a.batch)
    run = Run(config, run_dir, lengths, step_s, a.speed)
    try:
        run.wait_for_answers()
        pids = {kind: process.pid for kind, process in run.processes.items()}
        watch = Watch(run_dir, pids, a.speed, run.seen)
        # Ctrl-C ends it early: what there is counts
        with contextlib.suppress(KeyboardInterrupt):
            watch.until(a.minutes, run.check)
    finally:
        run.end()
    said = (run_dir / "logs" / "actor.log").read_text().splitlines()
    events = [line for line in said if line.startswith("actor: ")]
    # the mean answer's time, in which places fill
    warm = lengths.mean() * step_s
    samples = [s for s in watch.samples if s["clock"] >= warm]
    return summary(samples, places, places / step_s * a.speed), watch.samples, pace, events


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--engines", type=int, default=16)
    p.add_argument("--sequences", type=int, default=256, help="in progress on each engine")
    p.add_argument("--tokens", type=int, default=4000, help="mean length of an answer")
    p.add_argument("--batch", type=int, default=1024, help="samples a step")
    p.add_argument("--ranks", type=int, default=8, help="of the FAKE trainer")
    p.add_argument("--minutes", type=float, default=30.0, help="of the engines' clock")
    p.add_argument("--speed", type=float, default=1.0, help="of the engines' clock")
    p.add_argument("--port", type=int, default=8640)
    p.add_argument("--name", default="pace", help="of the run, and of its raw numbers")
    a = p.parse_args(argv)
    if a.quick:
        a.engines = 2
        a.sequences = 16
        a.tokens = 200
        a.batch = 32
        a.ranks = 2
        a.minutes = 0.12
    found, samples, pace, events = measure(a)
    print(machine())
    print(
        f"{a.engines} FAKE engines x {a.sequences} sequences, answers of {pace['mean_tokens']:.0f} tokens on "
        f"average (longest {pace['longest']}); a step of an engine: ({WEIGHT_BYTES / 1e9:.1f} GB + KV cache of "
        f"{KV_BYTES / 1e3:.0f} kB a token) / {BANDWIDTH / 1e12:.2f} TB/s = {1000 * pace['step_s']:.1f} ms, at speed {a.speed:g}\n"
    )
    print_summary(found)
    keep(
        result_file(a, a.name),
        dict(machine=machine(), pace=pace) | found | dict(events=events, samples=samples),
    )


if __name__ == "__main__":
    main()
