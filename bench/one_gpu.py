"""Parts that the checks of bench/gpu.py share: figures with limits, models, rows, an engine.

Not a program.
"""

import functools
import importlib.util
import itertools
import math
import os
import sys
import threading
import time
import types
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

# The trainer imports these to call engines and to count ranks; here it has no engine and one rank
for name in ("requests", "accelerate"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.SimpleNamespace(PartialState=None)

import config as cfg
import train
from bench.train import CUDA, DEVICE, draw, model_config
from plumbing import transport
from plumbing.samples import TOKEN_FIELDS, join

# ---- figures


def figure(case, what, value, unit="", most=None, least=None):
    """A line of the table: a number and, where there is one, its limit."""
    fine = math.isfinite(value)
    limit = ""
    if most is not None:
        fine = fine and value <= most
        limit = f"<= {most:.3g}"
    if least is not None:
        fine = fine and value >= least
        limit = f">= {least:.3g}"
    status = "ok" if fine else "FAIL"
    return dict(what=f"{case}{what}", value=value, unit=unit, limit=limit, status=status)


def skipped(what, why):
    return dict(what=what, value=None, unit="", limit="", status=f"skipped ({why})")


def on_gpu(real, tiny):
    """The first value on a GPU, the second one in the rehearsal."""
    return real if CUDA else tiny


def relative(a, b):
    """|a - b| / |b| of two tensors."""
    a = a.double()
    b = b.double()
    return ((a - b).norm() / b.norm()).item()


def measure(function, repeats=3):
    """Call the function 1 + repeats times.

    Returns (median seconds without the first call; seconds of the first call, which also warms up;
    peak bytes of this process's tensors on the GPU in these calls, 0 on a CPU).
    """
    device = torch.get_device_module(DEVICE)
    if CUDA:
        # A model of random weights may have taken more while it was made
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + repeats):
        device.synchronize()
        start = time.perf_counter()
        function()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])), times[0], torch.cuda.max_memory_allocated()


# ---- models and rows


def random_model(shape, changed, config, dtype):
    """A model of random weights, made on the device; it takes the place of train.load_model."""
    torch.manual_seed(0)
    with DEVICE:
        model = Qwen2ForCausalLM(model_config(shape, attn_implementation="packed", **changed))
    return model.to(dtype)


def build(shape, dtype, changed, **knobs):
    """(config, model, optimizers) as train.build makes them on one rank, with random weights."""
    config = cfg.check(cfg.Config(run="bench", dtype=dtype, **knobs))
    train.load_model = functools.partial(random_model, shape, changed)
    if not dist.is_initialized():
        backend = on_gpu("nccl", "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model, optimizers = train.build(config, DEVICE, 1)
    return config, model, optimizers


def row(shape, tokens, seed=0):
    """A record of exactly so many tokens: samples of bench/train.py, the last of which is cut."""
    samples = []
    missing = tokens
    while missing:
        for sample in draw(shape, 1000 * seed + len(samples)):
            n = min(missing, len(sample["tokens"]))
            missing -= n
            if n:
                cut = {k: sample[k][:n] for k in sample if k in TOKEN_FIELDS}
                samples.append(sample | cut)
    return join(samples)


def whole(tensor):
    """A tensor that may be sharded, as a plain one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- around weights.Sender and checkpoints.Saver


class OneRank:
    """The part of plumbing.ranks.Ranks that Sender and Saver use, without accelerate.

    The check that needs `saving`, the group for checkpoints, sets it.
    """

    rank = 0
    device = DEVICE
    stop = threading.Event()

    error = None

    def fail(self, error):
        self.error = error
        self.stop.set()

    def check_stop(self, condition=False):
        if self.error:
            raise self.error
        return condition


class StandIn:
    """An engine in a thread of this process, without HTTP.

    It also takes the place of the plumbing.weight_group.EngineRegistry that would call it.
    `received` has the newest parameters, {name: tensor on the device}.
    """

    def __init__(self):
        self.failing = set()
        self.error = ""

    def listed(self):
        return [("stand-in", 0)]

    def begin(self):
        pass

    def succeeded(self, engine):
        pass

    def due_again(self):
        return set()

    def newcomers(self, known):
        return [] if known else self.listed()

    def drop(self, engine, why):
        self.error = why

    def call_all(self, path, bodies):
        if path == "/init_process_group":
            self.thread = transport.in_thread(self.receive, *bodies.values())
        return dict.fromkeys(bodies, dict(pause_s=0.0))

    def receive(self, group):
        """Join the weight group, and receive update after update."""
        limit = timedelta(seconds=group["timeout"])
        buckets = group["layout"]["buckets"]
        store = transport.open_store(group["host"], group["port"], group["timeout"])
        store.set("here/1", "")
        store.wait(["all_here"], limit)
        wire = transport.join_group("gloo", store, 1, group["world"], group["timeout"])
        for n in itertools.count():
            store.wait([f"update/{n}"], limit)
            self.received = {}
            for tensors in buckets:
                bucket = torch.empty(transport.bucket_bytes(tensors), dtype=torch.uint8)
                wire.broadcast(bucket, 0).wait(limit)
                self.received |= transport.named_views(tensors, bucket.to(DEVICE))
            store.set(f"ready/{n}/1", "")


def resources():
    """The resources of this process; the GPU's memory is that of all its processes (0 on a CPU)."""
    free, total = torch.cuda.mem_get_info() if CUDA else (0, 0)
    with open("/proc/self/statm") as f:
        pages = int(f.read().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "MB of the GPU": (total - free) / 1e6,
    }
