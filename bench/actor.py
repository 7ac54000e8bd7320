"""How much one actor can take in: answers and tokens per second of its own CPU time, by length of the answers; FAKE engines that answer at once.

    python bench/actor.py [--lengths 40,500,4000,16000] [--seconds 10]

The actor is the real process, with rewards, groups and queue; this program reads the queue. Tokens per
CPU second is what one core takes in: the engines together should sample less.
"""

import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import cpu_seconds, keep, machine, parser, result_file, table
from bench.engines import FakeAnswers, announce_engines, make_run, start_stage
from plumbing.prompts import Prompter
from plumbing.queues import Queue

# answers before the clock starts
WARM = 256


def fake_engine(port, length, stop):
    """A FAKE vLLM server: the same answer to everybody, of `length` tokens."""
    from aiohttp import web

    spans = [dict(version="0", start=0, end=length)]
    body = FakeAnswers(stop).body(length, spans)

    async def generate(request):
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def health(_):
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def read(queue, seconds, answers=float("inf")):
    """Read for so long, or until so many answers have come; (answers, tokens)."""
    deadline = time.monotonic() + seconds
    found = 0
    tokens = 0
    while time.monotonic() < deadline and found < answers:
        try:
            seq, record = queue.get(0.1)
        except TimeoutError:
            continue
        found += len(record["lengths"])
        tokens += int(record["mask"].sum())
        queue.ack(seq)
    return found, tokens


def intake(config, run_dir, seconds):
    """What arrives in queues/rollouts from the real actor, once it is warm: {answers, tokens, cpu_s, seconds}."""
    announce_engines(config, run_dir)
    queue = Queue(run_dir / "queues" / "rollouts")
    actor = start_stage("actor", run_dir)
    try:
        found, _ = read(queue, config.start_timeout, WARM)
        if found < WARM:
            raise TimeoutError(f"the actor gave {found} answers, see {run_dir}/logs/actor.log")
        start = time.monotonic()
        cpu = cpu_seconds(actor.pid)
        answers, tokens = read(queue, seconds)
        cpu = cpu_seconds(actor.pid) - cpu
        return dict(answers=answers, tokens=tokens, cpu_s=cpu, seconds=time.monotonic() - start)
    finally:
        actor.kill()
        actor.wait()


def measure(length, port, seconds):
    """`intake` with answers of this length."""
    config, run_dir = make_run(
        "actor",
        port=port,
        steps=10**7,
        max_lag=10**7,
        eval_problems=1,
        eval_every=0,
        max_new_tokens=20000,
        max_model_len=30000,
        concurrency=64,
    )
    stop = min(Prompter(config).stop)
    arguments = (port, length, stop)
    engine = multiprocessing.Process(target=fake_engine, args=arguments, daemon=True)
    engine.start()
    try:
        return intake(config, run_dir, seconds)
    finally:
        engine.terminate()
        engine.join()


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--lengths", default="40,500,4000,16000")
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--port", type=int, default=8600)
    a = p.parse_args(argv)
    if a.quick:
        a.lengths = "40,4000"
        a.seconds = 3.0
    results = {}
    rows = []
    for length in map(int, a.lengths.split(",")):
        r = measure(length, a.port, a.seconds)
        results[length] = r
        per_cpu_s = [f"{r[k] / r['cpu_s']:.0f}" for k in ("answers", "tokens")]
        rows.append([length, *per_cpu_s, f"{r['cpu_s'] / r['seconds']:.2f}"])
    print(machine())
    table(["tokens/answer", "answers/CPU s", "tokens/CPU s", "cores used"], rows)
    keep(result_file(a, "actor"), dict(machine=machine(), lengths=results))


if __name__ == "__main__":
    main()
