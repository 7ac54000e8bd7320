"""How much one actor can take in: answers and tokens per second of its own CPU time, by length of the answers; FAKE engines that answer at once.

    python bench/actor.py [--lengths 40,500,4000,16000] [--seconds 10] [--actors 1]

The actor is the real process, with rewards, groups and queue; a thread of this program reads the queue. Tokens per CPU second is what one
core can take in: when the engines together sample more than that, start several (`--actors`). Sum over the actors' processes.
"""
import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import launch
from queues import Queue, notice
from tasks import _tiny


def fake_engine(port, length):
    """A FAKE vLLM server: the same answer to everybody, of `length` tokens, shaped as vLLM's."""
    words = dict(token_ids=[2 + i % 50 for i in range(length)], finish_reason="stop", weight_versions=[dict(version="0", start=0, end=length)],
                 logprobs=dict(content=[dict(token=f"token_id:{2 + i % 50}", logprob=-0.1234567890123 - i % 7, bytes=None, top_logprobs=[]) for i in range(length)]))
    body = json.dumps(dict(request_id="r", choices=[words])).encode()

    async def generate(request):
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def health(_):
        return web.Response()
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def cpu_seconds(pid):
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(config, seconds):
    """(answers, tokens, CPU seconds of all actors, wall seconds), once they are warm."""
    run_dir = launch.write(config)
    shutil.rmtree(run_dir / "queues", ignore_errors=True)
    (run_dir / "queues").mkdir()
    notice(run_dir / "queues" / "version.json", version=0, position=dict(next=0, ahead=[]), engines=config.urls)
    queue, seen, over = Queue(run_dir / "queues" / "rollouts"), [0, 0], threading.Event()

    def read():
        while not over.is_set():
            try:
                seq, record = queue.get(0.2)
            except TimeoutError:
                continue
            seen[0] += len(record["lengths"])
            seen[1] += int(record["mask"].sum())
            queue.ack(seq)
    actors = [subprocess.Popen([sys.executable, "actor.py", str(run_dir), str(k)], cwd=cfg.ROOT, stdout=subprocess.DEVNULL) for k in range(config.actors)]
    reader = threading.Thread(target=read)
    reader.start()
    try:
        while seen[0] < 64 * config.actors:
            time.sleep(0.05)
        used = lambda: (time.time(), sum(cpu_seconds(p.pid) for p in actors), *seen)
        before = used()
        time.sleep(seconds)
        wall, cpu, answers, tokens = (b - a for a, b in zip(before, used()))
    finally:
        over.set()
        for p in actors:
            p.kill()
            p.wait()
        reader.join()
    return answers, tokens, cpu, wall


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--lengths", default="40,500,4000,16000")
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--actors", type=int, default=1)
    p.add_argument("--port", type=int, default=8600)
    a = p.parse_args()
    print(f"{'tokens/answer':>13} {'answers/CPU s':>14} {'tokens/CPU s':>13} {'cores used':>11}")
    for length in map(int, a.lengths.split(",")):
        config = cfg.resolve(cfg.parse(["toy", "--run", "bench-actor", "--port", str(a.port), "--actors", str(a.actors), "--max_lag", "10000000", "--eval_problems", "1", "--eval_every", "0",
                                        "--max_new_tokens", "20000", "--max_model_len", "30000", "--concurrency", "64"], 0), 0)
        _tiny.make_model(["toy"], config.model, config.seed)
        server = multiprocessing.Process(target=fake_engine, args=(a.port, length), daemon=True)
        server.start()
        try:
            answers, tokens, cpu, wall = measure(config, a.seconds)
        finally:
            server.terminate()
            server.join()
        print(f"{length:>13} {answers / cpu:>14.0f} {tokens / cpu:>13.0f} {cpu / wall:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
