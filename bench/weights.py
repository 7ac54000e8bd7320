"""What a weight update costs: tokens/s of one real engine with an update every 2 s against none, alternating in one run.

    python bench/weights.py [--seconds 6] [--rounds 6] [--untied] [--quick]

A random Qwen2 of 21M parameters in 300+ tensors, started as run.sh does it (nice 10, as the trainer goes first there); 48
requests are always in progress. Each round: a window without updates and one with (in turns which is first), some updates with
one broadcast per tensor, and bare gloo broadcasts of the same bytes to a second process (nice 10 too, while the engine decodes).
A ratio compares neighbours of one round; the table has the medians over rounds. Raw numbers: out/bench/weights.json.
"""
import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import requests
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import launch
import weights
from evaluate import start_engines, stop_engines
from tasks import _tiny, toy
from train import token_logprobs

EVERY, CONCURRENCY, PROMPT = 2.0, 48, [45, 4, 52, 29, 2]
BARE = "import sys, bench.weights as b; b.bare_receiver(*map(int, sys.argv[1:]))"


def make_model(path, tied):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512,
        initializer_range=0.08, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0, attn_implementation="sdpa"))
    model.save_pretrained(path)
    _tiny.make_tokenizer([toy]).save_pretrained(path)


class Load(threading.Thread):
    """Keeps the engine busy from a thread of its own; `rate` says how many tokens/s it made in a span of time."""

    def __init__(self, config):
        super().__init__(daemon=True)
        self.url, self.length, self.done, self.running = f"{config.urls[0]}/inference/v1/generate", config.max_new_tokens, [], True

    def run(self):
        asyncio.run(self.keep_busy())

    async def keep_busy(self):
        async def worker(session, k):
            while self.running:
                n, start = self.length // 2 + 31 * k % (self.length // 2), time.time()  # of different lengths, so that they do not end together
                sampling = dict(max_tokens=n, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
                async with session.post(self.url, json=dict(token_ids=PROMPT, sampling_params=sampling)) as answer:
                    got = len((await answer.json())["choices"][0]["token_ids"])
                self.done.append((start, time.time(), got))
                k += CONCURRENCY

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(300)) as session:
            await asyncio.gather(*(worker(session, k) for k in range(CONCURRENCY)))

    def rate(self, start, stop):
        """A request's tokens count as evenly spread over its life (so ask when all that overlap the span have ended)."""
        return sum(n * max(min(end, stop) - max(begin, start), 0) / (end - begin) for begin, end, n in self.done) / (stop - start)


def bare_receiver(port, elements, bucket):
    """The other end of bare_seconds: receives for ever into one buffer."""
    group, _ = weights.join_group("gloo", "127.0.0.1", port, 1, 2, 600)
    flat = torch.ones(elements)
    while True:
        for part in flat.split(bucket):
            group.broadcast(part, 0).wait()


def bare_seconds(group, flat, bucket):
    start = time.time()
    for part in flat.split(bucket):
        group.broadcast(part, 0).wait()
    return time.time() - start


def difference(config, model):
    """Largest |engine logprob - trainer logprob| over fresh completions."""
    worst = 0.0
    for prompt in (PROMPT, PROMPT[::-1]):
        body = dict(token_ids=prompt, sampling_params=dict(max_tokens=32, temperature=1.0, logprobs=0, ignore_eos=True))
        choice = requests.post(f"{config.urls[0]}/inference/v1/generate", timeout=60, json=body).json()["choices"][0]
        ids = torch.tensor(prompt + choice["token_ids"])
        engine = torch.tensor([x["logprob"] for x in choice["logprobs"]["content"]])
        with torch.no_grad():
            mine = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(prompt):]
        worst = max(worst, (mine - engine).abs().max().item())
    return worst


class Updates:
    """Updates of the engine, one after the other."""

    def __init__(self, sender):
        self.sender, self.version = sender, 0

    def one(self, bucket_mb, noise=0.0):
        """One update -> {part: seconds}."""
        with torch.no_grad():
            for p in self.sender.model.parameters() if noise else [self.sender.model.model.norm.weight]:
                p.add_(noise * torch.randn_like(p)) if noise else p.mul_(1.001)
        self.sender.config.bucket_mb, self.version, start = bucket_mb, self.version + 1, time.time()
        self.sender.prepare(self.version)
        self.sender.armed.result()
        arm = time.time() - start
        self.sender.send(self.version, lambda engines: None)
        t = self.sender.timing()
        return dict(arm=arm, total=t["sync_s"], gather=t["gather_s"], send=t["send_s"], wait=t["wait_s"], pause=t["pause_s"])


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seconds", type=float, default=6.0)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--port", type=int, default=8900)
    p.add_argument("--untied", action="store_true", help="an output head of its own")
    p.add_argument("--quick", action="store_true", help="one round of short windows: does it run?")
    a = p.parse_args()
    if a.quick:
        a.seconds, a.rounds = 4.0, 1
    torch.set_num_threads(1)
    path = Path("out/bench/weights-model" + "-untied" * a.untied)
    make_model(path, not a.untied)
    config = cfg.resolve(cfg.parse(["toy", "--run", "weights", "--out", "out/bench", "--model", f"./{path}", "--port", str(a.port), "--concurrency", "64",
                                    "--max_new_tokens", "120", "--max_model_len", "256"], 0), 0)
    launch.write(config)
    bucket_mb = config.bucket_mb
    engines = start_engines(config)
    bare = None
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tensors = [q.numel() for q in model.parameters()]
        updates, load = Updates(weights.Sender(config, model, 0, torch.device("cpu"))), Load(config)
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        flat, bucket = torch.ones(sum(tensors)), max((bucket_mb << 20) // 4, 1)
        bare = subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", BARE, str(store.port), str(sum(tensors)), str(bucket)],
                                cwd=cfg.ROOT, env=os.environ | {"PYTHONPATH": str(cfg.ROOT), "OMP_NUM_THREADS": "1"})
        group, _ = weights.join_group("gloo", "127.0.0.1", store.port, 0, 2, 600)
        updates.one(bucket_mb)  # an engine generates nothing before it has a trainer's weights
        load.start()
        bare_seconds(group, flat, bucket)
        updates.one(bucket_mb), updates.one(0), updates.one(bucket_mb)
        time.sleep(6)  # engine and client are warm
        rounds = []
        for i in range(a.rounds):
            if i % 2 == 0:
                none = (time.time(), time.time() + a.seconds)
                time.sleep(a.seconds)
            start, bucketed = time.time(), []
            while time.time() < start + a.seconds:
                bucketed.append(updates.one(bucket_mb))
                time.sleep(max(start + EVERY * len(bucketed) - time.time(), 0))
            some = (start, time.time())
            if i % 2:
                none = (time.time(), time.time() + a.seconds)
                time.sleep(a.seconds)
            single = [updates.one(0) for _ in range(3)]
            again = [updates.one(bucket_mb) for _ in range(2)][1:]  # the first one after a change of bucket size learns anew
            rounds.append(dict(none=none, some=some, bucketed=bucketed, single=single, neighbour=again, bare=[bare_seconds(group, flat, bucket) for _ in range(5)]))
        updates.one(bucket_mb, noise=0.02)
        worst = difference(config, model)
        load.running = False
        load.join()
    finally:
        if bare:
            bare.kill()
        stop_engines(engines)

    middle = statistics.median
    for r in rounds:
        r["tokens_s"] = [load.rate(*r["none"]), load.rate(*r["some"])]
    u = {k: middle(x[k] for r in rounds for x in r["bucketed"]) for k in rounds[0]["bucketed"][0]}
    ratio = middle(r["tokens_s"][1] / r["tokens_s"][0] for r in rounds)
    single = middle(middle(x["total"] for x in r["single"]) / middle(x["total"] for x in r["bucketed"]) for r in rounds)
    bare_ratio = middle(middle(r["bare"]) / middle(x["gather"] + x["send"] for x in r["bucketed"]) for r in rounds)
    mb, ms = 4e-6 * sum(tensors), lambda s: f"{1000 * s:8.1f} ms"
    rows = [("tokens/s without updates", f"{middle(r['tokens_s'][0] for r in rounds):8.0f}"),
            (f"tokens/s, an update every {EVERY:.0f} s", f"{middle(r['tokens_s'][1] for r in rounds):8.0f}"),
            ("  ratio", f"{ratio:8.3f}    rounds: " + " ".join(f"{r['tokens_s'][1] / r['tokens_s'][0]:.3f}" for r in rounds)),
            ("arm, during the backward pass", ms(u["arm"])), ("whole update, from the first gather on", ms(u["total"])),
            ("  gather", ms(u["gather"])), ("  send", ms(u["send"])), ("  wait for the workers to be ready", ms(u["wait"])), ("  pause, as the engine measures it", ms(u["pause"])),
            ("  pause / whole", f"{middle(x['pause'] / x['total'] for r in rounds for x in r['bucketed']):8.2f}"),
            ("one broadcast per tensor / bucketed", f"{single:8.2f}    whole update"),
            ("bare gloo broadcast", ms(middle(x for r in rounds for x in r["bare"])) + f"   {mb:.0f} MB"),
            ("  effective / bare bandwidth", f"{bare_ratio:8.2f}    gather and send against the bare broadcast"),
            ("engine - trainer logprob", f"{worst:8.1e}")]
    print(f"{sum(tensors) / 1e6:.1f}M parameters, {len(tensors)} tensors, {'untied' if a.untied else 'tied'}; {CONCURRENCY} requests in progress; {a.rounds} rounds of 2 x {a.seconds:.0f} s")
    for name, value in rows:
        print(f"{name:<38}{value}")
    Path("out/bench/weights.json").write_text(json.dumps(dict(parameters=sum(tensors), tensors=len(tensors), difference=worst, rounds=rounds), indent=1))
    sys.stdout.flush()
    assert worst < 1e-4, f"the engine's logprobs differ from the trainer's by {worst}"
    os._exit(0)  # gloo's threads, as in train.py


if __name__ == "__main__":
    main()
