"""What actor.py costs: its tokens/s against a bare client's, same vLLM server, same concurrency, alternating in one run.

    python bench/generation.py [--rounds 3] [--seconds 15] [--concurrency 256]

The bare client keeps `concurrency` requests in progress and reads only the number of tokens of each answer. The actor is the
real process, with rewards, groups and queue. Also usable to see what an engine flag brings: --engine_args "--x y".
"""
import argparse
import asyncio
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import launch
from evaluate import ready, start_engines, stop_engines
from queues import Queue, notice
from tasks import _tiny, toy


async def bare(config, prompts, seconds):
    """Tokens/s of a client that does nothing but keep the server busy."""
    url, tokens, stop = f"{config.urls[0]}/inference/v1/generate", 0, time.time() + seconds

    async def worker(session, k):
        nonlocal tokens
        while time.time() < stop:
            body = dict(token_ids=prompts[k % len(prompts)], sampling_params=dict(max_tokens=config.max_new_tokens, temperature=1.0, logprobs=0, stop_token_ids=[1], detokenize=False))
            async with session.post(url, json=body) as answer:
                n = len((await answer.json())["choices"][0]["token_ids"])
            tokens += n if time.time() < stop else 0
            k += config.concurrency

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)) as session:
        await asyncio.gather(*(worker(session, k) for k in range(config.concurrency)))
    return tokens / seconds


def through_actor(config, seconds):
    """Tokens/s that arrive in queues/rollouts from the real actor process."""
    run_dir = Path(config.out, config.run)
    shutil.rmtree(run_dir / "queues", ignore_errors=True)
    (run_dir / "queues").mkdir()
    notice(run_dir / "queues" / "version.json", version=0, position=dict(next=0, ahead=[]), engines=config.urls)
    process = subprocess.Popen([sys.executable, "actor.py", str(run_dir)], cwd=cfg.ROOT, stdout=subprocess.DEVNULL)
    queue = Queue(run_dir / "queues" / "rollouts")
    while not len(queue):
        time.sleep(0.05)
    time.sleep(2)
    start = time.time()
    time.sleep(seconds)
    stop = time.time()
    process.kill()
    process.wait()
    tokens = 0
    while len(queue):
        file = queue._file(0, queue.next_get.get(0, 0))
        inside = start < file.stat().st_mtime <= stop
        seq, record = queue.get(1.0)
        tokens += int(record["mask"].sum()) * inside
        queue.ack(seq)
    return tokens / (stop - start)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=15.0)
    p.add_argument("--concurrency", type=int, default=256)
    p.add_argument("--engine_args", default="")
    a = p.parse_args()
    config = cfg.resolve(cfg.parse(["toy", "--run", "bench-generation", "--concurrency", str(a.concurrency), "--max_lag", "1000000", "--eval_problems", "1", "--eval_every", "0"], 0), 0)
    _tiny.make_model(["toy"], config.model, config.seed)
    launch.write(config)
    tokenizer = _tiny.make_tokenizer([toy])
    prompts = [tokenizer(p["prompt"])["input_ids"] for p in toy.problems("train", 0)]
    engines = start_engines(config, extra=shlex.split(a.engine_args))
    try:
        ready(config)
        asyncio.run(bare(config, prompts, 5))  # warm-up
        rates = [(asyncio.run(bare(config, prompts, a.seconds)), through_actor(config, a.seconds)) for _ in range(a.rounds)]
    finally:
        stop_engines(engines)
    print(f"{'round':>8} {'bare tok/s':>12} {'actor tok/s':>12} {'ratio':>7}")
    for i, (b, c) in enumerate(rates):
        print(f"{i:>8} {b:>12.0f} {c:>12.0f} {c / b:>7.2f}")
    b, c = np.mean(rates, axis=0)
    print(f"{'mean':>8} {b:>12.0f} {c:>12.0f} {c / b:>7.2f}   ({config.concurrency} sequences in progress, toy model)")


if __name__ == "__main__":
    main()
