"""How much a weight update costs: tokens/s of a real engine with updates against none.

    python bench/weights.py [--shape tensors] [--seconds 6] [--rounds 6] [--quick]

A random model of one of SHAPES, by default a Qwen2 of 21M parameters in 300+ tensors; its engine
runs at nice 10, as run.sh starts it, and has 48 requests in progress at all times. Each round has
a window without updates and one with
an update every 2 s (which of them is first alternates), and bare gloo broadcasts of the same bytes
to a second process (at nice 10, too). A ratio compares neighbours of one round; the table has the
medians. At the end the engine's logprobs must be the trainer's.
"""

import multiprocessing
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import WORK, in_turn, keep, machine, median_and_range, parser, result_file, table
from bench.engines import Load, make_run, requests_of, url_of
from plumbing.ranks import Ranks
from plumbing.secret import secret_header
from plumbing.transport import join_group, open_store
from tasks import toy
from tools.base_model import make_tokenizer
from tools.evaluate import start_engines, stop
from train import token_logprobs
from weights import Sender

# Seconds from one update to the next
EVERY = 2.0
CONCURRENCY = 48
PROMPT = [45, 4, 52, 29, 2]
LONGEST = 120
NICE = 10
# family, compute dtype, (heads of queries, of keys), values of the configuration
SHAPES = {
    "tensors": (
        "qwen2",
        "float32",
        (8, 8),
        dict(vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=26),
    ),
    # the model of `bash run.sh toy`
    "toy": (
        "qwen2",
        "float32",
        (4, 4),
        dict(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2),
    ),
    # SmolLM2-135M with an output head of its own
    "smol": (
        "llama",
        "bfloat16",
        (9, 3),
        dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30),
    ),
    # two of the 28 layers of Qwen2.5-7B
    "7b": (
        "qwen2",
        "bfloat16",
        (28, 4),
        dict(vocab_size=1024, hidden_size=3584, intermediate_size=18944, num_hidden_layers=2),
    ),
    # as many tensors as Qwen3-30B-A3B has, each of them small
    "experts": (
        "qwen3_moe",
        "float32",
        (4, 4),
        dict(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=64,
            head_dim=32,
            num_hidden_layers=48,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=32,
        ),
    ),
}
# the largest difference of logprobs of engine and trainer, in nats, that rounding explains
LIMITS = {"float32": 1e-4, "bfloat16": 0.5}
TIMEOUT = 600.0
PARTS = {
    "sync_s": "whole update",
    "wait_sync_s": "  of which the trainer waits",
    "gather_s": "  gather",
    "send_s": "  send",
    "ready_s": "  until every worker has prepared it",
    "pause_s": "  pause, as the engine measures it",
}


def make_model(shape, path):
    """A random model of one of SHAPES, with the toy task's tokenizer."""
    torch.manual_seed(0)
    family, dtype, heads, values = SHAPES[shape]
    query_heads, key_heads = heads
    config = AutoConfig.for_model(
        family,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=512,
        initializer_range=0.5 * values["hidden_size"] ** -0.5,
        **values,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path)
    make_tokenizer([toy]).save_pretrained(path)


def receive(port, elements, times):
    """The other end of `bare_broadcasts`, in a process of its own."""
    os.nice(NICE)
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, TIMEOUT)
    group = join_group("gloo", store, 1, 2, TIMEOUT)
    flat = torch.ones(elements)
    for _ in range(times):
        group.broadcast(flat, 0).wait()


def bare_broadcasts(elements, times=6):
    """Seconds of broadcasts of so many float32 to a second process, without the first one."""
    store = open_store("127.0.0.1", 0, TIMEOUT, server=True)
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=receive, args=(store.port, elements, times), daemon=True)
    other.start()
    group = join_group("gloo", store, 0, 2, TIMEOUT)
    flat = torch.ones(elements)
    seconds = []
    for _ in range(times):
        start = time.monotonic()
        group.broadcast(flat, 0).wait()
        seconds.append(time.monotonic() - start)
    other.join()
    return seconds[1:]


class Updates:
    """Updates of the engine, one after the other."""

    def __init__(self, sender, model):
        self.sender = sender
        self.model = model
        # Version 0 would have to be what the engine has loaded.
        self.version = 0

    @torch.no_grad()
    def one(self, noise=0.0):
        """Slightly other weights to the engine; {part: seconds}, as Sender.take_timing.

        noise: on every parameter, so that an engine that missed one would be found out.
        """
        self.model.model.norm.weight.mul_(1.001)
        for p in self.model.parameters() if noise else []:
            p.add_(noise * torch.randn_like(p))
        self.version += 1
        self.sender.push(self.version)
        self.sender.wait()
        return self.sender.take_timing()

    def window(self, seconds):
        """Update every EVERY seconds; returns (start, end, the times of the updates)."""
        start = time.monotonic()
        times = []
        while time.monotonic() < start + seconds:
            times.append(self.one())
            due = start + EVERY * len(times)
            time.sleep(max(due - time.monotonic(), 0))
        return start, time.monotonic(), times


def quiet(seconds):
    """A window without updates; returns (start, end, []) as `Updates.window` does."""
    start = time.monotonic()
    time.sleep(seconds)
    return start, time.monotonic(), []


@torch.no_grad()
def difference(config, run_dir, model):
    """The largest |engine logprob - trainer logprob| of a new completion."""
    url = f"{url_of(config)}/inference/v1/generate"
    body = next(requests_of([PROMPT], [LONGEST], ignore_eos=True))
    answer = requests.post(url, json=body, headers=secret_header(run_dir), timeout=60)
    choice = answer.json()["choices"][0]
    ids = torch.tensor(PROMPT + choice["token_ids"])
    logprobs, _ = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)
    engine = torch.tensor(choice["behavior_logprobs"])
    return (logprobs[len(PROMPT) :] - engine).abs().max().item()


def measure(config, run_dir, seconds, rounds):
    """All rounds on an engine that runs: (results of in_turn, difference, parameters, tensors)."""
    (run_dir / "queues").mkdir()
    model = AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.float32, attn_implementation="packed"
    )
    sizes = [p.numel() for p in model.parameters()]
    updates = Updates(Sender(config, model, Ranks(config), run_dir), model)
    # Lengths differ, so that requests do not end together
    lengths = [LONGEST // 2 + 31 * k % (LONGEST // 2) for k in range(CONCURRENCY)]
    updates.one()
    load = Load(config, run_dir, requests_of([PROMPT], lengths, ignore_eos=True), CONCURRENCY)
    updates.window(seconds)
    contenders = {
        "none": lambda _: quiet(seconds),
        "some": lambda _: updates.window(seconds),
        "bare": lambda _: bare_broadcasts(sum(sizes)),
    }
    results = in_turn(contenders, rounds)
    updates.one(noise=0.02 if config.dtype == "float32" else 0.002)
    worst = difference(config, run_dir, model)
    load.stop()
    results["tokens_s without"] = [load.rate(*window[:2]) for window in results.pop("none")]
    results["tokens_s with"] = [load.rate(*window[:2]) for window in results["some"]]
    results["updates"] = [times for _, _, times in results.pop("some")]
    return results, worst, sum(sizes), len(sizes)


def rows(results, parameters, worst):
    """Lines of the table: medians over updates; of ratios, medians over rounds."""
    without = results["tokens_s without"]
    some = results["tokens_s with"]
    ratios = [b / a for a, b in zip(without, some)]
    yield f"tokens/s, an update every {EVERY:.0f} s / none", median_and_range(ratios, ".3f")
    for part, label in PARTS.items():
        seconds = [t[part] for times in results["updates"] for t in times]
        yield label, f"{1000 * statistics.median(seconds):.1f} ms"
    bare = [statistics.median(seconds) for seconds in results["bare"]]
    sent = [statistics.median(t["send_s"] for t in times) for times in results["updates"]]
    size = f"{4e-6 * parameters:.0f} MB"
    yield f"bare gloo broadcast of {size}", f"{1000 * statistics.median(bare):.1f} ms"
    yield "  bare / send", median_and_range([a / b for a, b in zip(bare, sent)])
    yield "engine - trainer logprob", f"{worst:.1e}"


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--shape", choices=SHAPES, default="tensors")
    p.add_argument("--seconds", type=float, default=6.0)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--port", type=int, default=8900)
    a = p.parse_args(argv)
    if a.quick:
        a.seconds = 4.0
        a.rounds = 1
    torch.set_num_threads(1)
    path = WORK / f"weights-model-{a.shape}"
    make_model(a.shape, path)
    dtype = SHAPES[a.shape][1]
    knobs = dict(model=path, dtype=dtype, port=a.port, concurrency=64)
    config, run_dir = make_run("weights", **knobs, max_new_tokens=LONGEST, max_model_len=256)
    engines = start_engines(config)
    try:
        os.setpriority(os.PRIO_PGRP, engines[0].process.pid, NICE)
        results, worst, parameters, tensors = measure(config, run_dir, a.seconds, a.rounds)
    finally:
        stop(engines, 0)
    print(f"{machine()}; {parameters / 1e6:.1f}M parameters in {tensors} tensors")
    table(["", "median"], rows(results, parameters, worst))
    raw = dict(machine=machine(), parameters=parameters, tensors=tensors, difference=worst)
    name = "weights" if a.shape == "tensors" else f"weights-{a.shape}"
    keep(result_file(a, name), raw | results)
    if worst > LIMITS[dtype]:
        sys.exit(f"bench/weights.py: the engine's logprobs differ from the trainer's by {worst}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # As train.py ends: gloo's threads may still wait for the interpreter's lock
    os._exit(0)
