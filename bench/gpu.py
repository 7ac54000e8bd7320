"""Checks for one GPU, the most important first: parity, gradients, MFU, updates, checkpoints.

    bash bench/gpu.sh [--only parity mfu-1.5b-16k ...] [--minutes 9.5] [--rehearse] [--out DIR]

Each check is a function below whose docstring says what it proves. It has a process of its own, so
that a crash or a lack of memory costs the others nothing and its memory peak is its own, and it has
a time limit; checks that are not done after --minutes are skipped. gpu.json is written after each
check; messages of a check are in out/bench/gpu-<check>.log. All weights are random; torch,
transformers, psutil and this checkout are enough, and no network is needed. `--rehearse` runs the
same lines on the CPU with tiny shapes; its times mean nothing. Deliberately absent: vLLM (`bash
run.sh doctor` checks it), several GPUs.
"""

import functools
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

# Before this folder, as `import train` must not find bench/train.py
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import config as cfg
from bench.common import WORK, keep, machine, parser, printed_lines, result_file
from bench.one_gpu import (
    OneRank,
    StandIn,
    build,
    figure,
    measure,
    on_gpu,
    relative,
    resources,
    row,
    skipped,
    whole,
)
from bench.train import (
    CUDA,
    DEVICE,
    PEAK_FLOPS,
    SMALL,
    WIDE,
    flops,
    model_config,
    one_step,
)
from plumbing import checkpoints, transport
from plumbing.metrics import Sums
from plumbing.model import Packing, flash_runs_on, packed_attention, scores_attention
from plumbing.placement import ONE_HEAP
from plumbing.shadow import Shadow
from tools import memory
from train import micro_batch, optimizer_step
from weights import Sender

TINY = SMALL | dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
# Qwen2.5-7B
SEVEN = WIDE | dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944)
SEVEN |= dict(num_attention_heads=28, num_key_value_heads=4)
# Logits and attention scores become about as sharp as a trained model's
SHARP = dict(initializer_range=0.04)
GROUPS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norm")


# ---- attention, logprobs, gradients


def attend(heads, key_heads, width, window, has_sinks):
    """packed_attention in bfloat16 against float32 attention under a mask [T, T], both ways."""
    case = f"{heads}/{key_heads} heads of {width}" + f", window {window}" * bool(window)
    case += ", sinks" * has_sinks
    torch.manual_seed(0)
    lengths = torch.tensor(on_gpu([1, 2, 300, 127, 129, 465], [1, 2, 30, 31]))
    places = torch.arange(int(lengths.sum()), device=DEVICE)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    ids = torch.bucketize(places, bounds.long(), right=True)
    distance = places[:, None] - places
    seen = (ids[:, None] == ids) & (distance >= 0) & (distance < (window or len(ids)))
    shapes = [(1, n, len(ids), width) for n in (heads, key_heads, key_heads)]
    rounded = [torch.randn(s, device=DEVICE).bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    kernel = int(flash_runs_on(rounded[0], rounded[2]))
    yield figure(case, ": varlen_attn runs", kernel, least=on_gpu(1, 0))
    names = ["query", "key", "value"]
    sinks = None
    if has_sinks:
        names.append("sinks")
        sinks = torch.randn(heads, device=DEVICE).bfloat16().requires_grad_()
        rounded.append(sinks)
        exact.append(sinks.detach().float().requires_grad_())
        expected = scores_attention(*exact[:3], seen, None, None, exact[3]).transpose(1, 2)
    else:
        expected = sdpa(*exact, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    packing = Packing(None, bounds, bounds, lengths, lengths)
    # The attributes of a layer that are read where there is no kernel for windows
    layer = SimpleNamespace(head_dim=width, num_key_value_groups=heads // key_heads, training=False)
    options = dict(sliding_window=window or None, s_aux=sinks)
    got, _ = packed_attention(layer, *rounded[:3], None, packing, **options)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got.float() * weight).sum().backward()
    yield figure(case, ": output", relative(got, expected), "of its norm", most=0.01)
    for name, a, b in zip(names, rounded, exact):
        yield figure(case, f": d {name}", relative(a.grad, b.grad), "of its norm", most=0.01)


def attentions():
    """varlen_attn, forward and backward: sequences do not see each other, key heads are shared, and
    the window is the model's. The heads are those of Qwen2.5-1.5B and 0.5B, and of gpt-oss, where
    they have sinks.
    """
    for heads, key_heads, width, window, has_sinks in (
        (12, 2, 128, 0, False),
        (14, 2, 64, 0, False),
        (12, 2, 128, on_gpu(100, 10), False),
        (64, 8, 64, 0, True),
        (64, 8, 64, on_gpu(128, 10), True),
    ):
        yield from attend(heads, key_heads, width, window, has_sinks)


@torch.no_grad()
def packed(model, sequences):
    """Logprobs of these sequences as one packed row, without those of first tokens."""
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    tokens = torch.cat(sequences)
    logprobs, _ = model.logprobs(tokens.numpy(), positions.numpy(), 1.0)
    return logprobs.cpu()[positions > 0]


def alone(model, sequences):
    """Logprobs of these sequences one by one, without those of first tokens."""
    return torch.cat([packed(model, [s]) for s in sequences])


def apart(case, a, b, yardstick=None):
    """Two figures: the mean and the largest distance of logprobs."""
    error = (a - b).abs()
    most = [None, None]
    if yardstick is not None:
        # Two roundings as large as the yardstick's are 1.4 times as far apart
        most = [1.5 * yardstick.mean().item(), 3 * yardstick.max().item()]
    yield figure(case, ", mean", error.mean().item(), "nats", most=most[0])
    yield figure(case, ", max", error.max().item(), "nats", most=most[1])


def parity():
    """bfloat16 logprobs of a packed row, on the model as train.build makes it, against the same
    sequences one by one. Packing adds no more error than bfloat16 has anyway, which is that of sdpa
    one by one against float32. The last two sequences share a beginning.
    """
    shape = on_gpu(WIDE | dict(num_hidden_layers=4), TINY)
    lengths = on_gpu([1, 2, 3, 127, 128, 129, 1000, 2706], [1, 2, 3, 17, 40, 65])
    torch.manual_seed(1)
    sequences = [torch.randint(shape["vocab_size"], (n,)) for n in lengths]
    sequences[-1][: lengths[-2] // 2] = sequences[-2][: lengths[-2] // 2]
    _, model, _ = build(shape, "float32", SHARP)
    in_row = packed(model, sequences)
    model.model.set_attn_implementation("sdpa")
    exact = alone(model, sequences)
    yield from apart("float32: packed - alone", in_row, exact, torch.tensor([1e-4]))
    _, model, _ = build(shape, "bfloat16", SHARP)
    in_row = packed(model, sequences)
    one_by_one = alone(model, sequences)
    model.model.set_attn_implementation("sdpa")
    of_sdpa = alone(model, sequences)
    model.model.set_attn_implementation("packed")
    yardstick = (of_sdpa - exact).abs()
    yield from apart("alone (sdpa) - float32", of_sdpa, exact)
    yield from apart("packed - float32", in_row, exact, yardstick)
    yield from apart("packed - alone", in_row, one_by_one, yardstick)
    mixed = packed(model, [torch.cat(sequences)])
    starts = torch.cat([torch.arange(n) for n in lengths])[1:] == 0
    error = (mixed[~starts] - exact).abs().mean().item()
    least = 2 * yardstick.mean().item()
    yield figure("", "if sequences saw each other, mean", error, "nats", least=least)


def gradient(shape, dtype, record):
    """{group of parameters: gradient as one vector} of train.micro_batch."""
    config, model, _ = build(shape, dtype, SHARP)
    loss, _, _ = micro_batch(model, record, 0, config, DEVICE)
    loss.backward()
    gradients = {group: [] for group in GROUPS}
    for name, p in model.named_parameters():
        group = next(g for g in GROUPS if g in name)
        gradients[group].append(whole(p.grad).flatten().double())
    return {group: torch.cat(parts) for group, parts in gradients.items()}


def gradients():
    """Gradients through FSDP2's mixed precision (bfloat16, one rank, as train.build makes it) have
    the direction and the norm of float32's.
    """
    shape = on_gpu(WIDE | dict(num_hidden_layers=4), TINY)
    record = row(shape, on_gpu(4096, 512))
    exact = gradient(shape, "float32", record)
    rounded = gradient(shape, "bfloat16", record)
    for group in GROUPS:
        a = rounded[group]
        b = exact[group]
        cosine = a @ b / (a.norm() * b.norm())
        yield figure(group, ": cosine", cosine.item(), least=0.99)
        longer = a.norm() / b.norm() - 1
        yield figure(group, ": norm / norm in float32 - 1", abs(longer.item()), most=0.03)


# ---- MFU and memory


def computed_gb(size, without_adamw, **knobs):
    """The GB that tools/memory.py computes for a trainer on one GPU, at the peak of a step."""
    model = f"Qwen2.5-{size.upper()}"
    parts = memory.trainer_gb(cfg.Config(model=model, dtype="bfloat16", trainers=1, **knobs))
    return sum(parts.values()) - parts["optimizer"] * without_adamw


def mfu(size, row_tokens, goal=None, **knobs):
    """The share of the GPU's peak that a step of 64k tokens uses, by the formula of bench/train.py
    and on its samples (median 600 tokens, mean some 900, up to 8k), and whether tools/memory.py
    knows the memory that it takes. knobs: those of config.py.

    7B, all weights: forward, backward and clipping without AdamW, whose state does not fit on 80 GB
    beside the rest. With adapters the formula counts gradients of all weights, though two thirds of
    the FLOPs are enough. tools/memory.py expects the gradients of an earlier row, which a step of
    one row does not have. What needs far more memory than the GPU has is not tried.
    """
    without_adamw = size == "7b" and "lora_rank" not in knobs
    case = "without AdamW: " * without_adamw
    computed = computed_gb(size, without_adamw, row_tokens=row_tokens, **knobs)
    total = torch.cuda.mem_get_info()[1] / 1e9 if CUDA else np.inf
    if computed > 1.1 * total:
        why = f"not tried: tools/memory.py computes {computed:.1f} GB, this GPU has {total:.1f} GB"
        yield skipped(f"{case}MFU", why)
        return
    shape = on_gpu(WIDE if size == "1.5b" else SEVEN, TINY)
    row_tokens = on_gpu(row_tokens, row_tokens // 32)
    rows = on_gpu(65536, 2048) // row_tokens
    records = [row(shape, row_tokens, seed) for seed in range(rows)]
    changed = dict(tie_word_embeddings=size == "1.5b")
    try:
        config, model, optimizers = build(shape, "bfloat16", changed, **knobs)
        if without_adamw:
            optimizers = []
        step = functools.partial(one_step, model, optimizers, config, DEVICE, records)
        seconds, first, peak = measure(step, repeats=on_gpu(2, 1))
    except torch.OutOfMemoryError:
        why = f"out of memory; tools/memory.py computes {computed:.1f} GB"
        yield skipped(f"{case}MFU", why)
        return
    lengths = np.concatenate([record["lengths"] for record in records])
    share = flops(shape, lengths) / seconds / PEAK_FLOPS
    name = "MFU, if all weights had gradients" if "lora_rank" in knobs else "MFU"
    yield figure(case, name, share, least=on_gpu(goal, None))
    yield figure(case, "tokens/s", rows * row_tokens / seconds)
    yield figure(case, "the first step", first, "s")
    yield figure(case, "peak", peak / 1e9, "GB")
    # tools/memory.py does not know what these knobs change, and some gradients of a step of one row
    # do not exist at its peak
    limits = dict(least=0.9, most=1.1)
    if not CUDA or rows == 1 or knobs.keys() & {"compile", "head_float32"}:
        limits = {}
    yield figure(case, "peak / computed by tools/memory.py", peak / 1e9 / computed, **limits)


# Kinds of kernels by their names, the first that matches
KERNELS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|_mm\b|addmm|bmm",
    "copies": r"memcpy|memset|copy|_cat|CatArray",
    "optimizer and clipping": r"multi_tensor|foreach|adam",
    "reductions": r"reduce|softmax|logsumexp|norm|sum|mean",
    "elementwise": r"elementwise|mul|add|silu|where|pow|exp|neg",
}


def profile():
    """Which kinds of kernels a step of 1.5B parameters spends its time in, rows of 16k tokens.

    The shares are those of the time of a step without the profiler. If no kernels overlap, what is
    missing from 1 is the time in which the GPU waits; kernels that overlap are counted twice. The
    kernels that take longest go to the log of this check.
    """
    shape = on_gpu(WIDE, TINY)
    config, model, optimizers = build(shape, "bfloat16", {})
    records = [row(shape, on_gpu(16384, 512), seed) for seed in range(4)]
    step = functools.partial(one_step, model, optimizers, config, DEVICE, records)
    seconds, *_ = measure(step)
    activity = on_gpu(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with torch_profile(activities=[activity]) as profiler:
        step()
        torch.get_device_module(DEVICE).synchronize()
    taken = dict.fromkeys([*KERNELS, "others"], 0.0)
    events = profiler.key_averages()
    for event in events:
        kinds = [kind for kind, names in KERNELS.items() if re.search(names, event.key, re.I)]
        taken[[*kinds, "others"][0]] += on_gpu(
            event.self_device_time_total, event.self_cpu_time_total
        )
    for kind, microseconds in taken.items():
        yield figure("", f"{kind}, share of the step", microseconds / 1e6 / seconds)
    busy = sum(taken.values()) / 1e6 / seconds
    yield figure("", "kernels in all, share of the step", busy)
    order = on_gpu("self_device_time_total", "self_cpu_time_total")
    print(events.table(sort_by=order, row_limit=40, max_name_column_width=90), file=sys.stderr)


# ---- weight updates, checkpoints, and two processes on one GPU


def groups():
    """A weight group of one process, NCCL's on a GPU, is made, used and aborted 24 times and leaves
    nothing behind: one thread, file or MB for each group would be over the limit.

    On an H200, 50 groups of NCCL had not finished after a minute.
    """
    samples = []
    start = time.perf_counter()
    for _ in range(24):
        store = transport.open_store("127.0.0.1", 0, 60, server=True)
        group = transport.join_group(on_gpu("nccl", "gloo"), store, 0, 1, 60.0, DEVICE)
        sent = torch.ones(1024, device=DEVICE)
        group.broadcast(sent, 0).wait()
        assert sent.mean() == 1
        transport.abort_group(group)
        del group, store
        samples.append(resources())
    yield figure("", "a group", (time.perf_counter() - start) / len(samples), "s")
    # The first groups load libraries
    for resource in samples[0]:
        growth = samples[-1][resource] - samples[3][resource]
        yield figure(resource, ", more after 20 more", growth, most=10)


@torch.no_grad()
def scale(model, factor):
    for p in model.parameters():
        p.mul_(factor)


def updates():
    """weights.Sender of a model on the GPU: the parameters that arrive over gloo, as they do where
    engine and trainer share a GPU, are the trainer's bit by bit.
    """
    knobs = dict(weight_backend="gloo", master_addr="127.0.0.1", start_timeout=30.0)
    config, model, _ = build(on_gpu(WIDE, TINY), "bfloat16", {}, **knobs)
    run_dir = WORK / "gpu-updates"
    (run_dir / "queues").mkdir(parents=True, exist_ok=True)
    sender = Sender(config, model, OneRank(), run_dir)
    engine = sender.engines = StandIn()
    for version in range(3):
        scale(model, 1.25)
        sender.push(version)
        # Training goes on: the update that is on its way must stay as it was
        scale(model, 2.0)
        sender.wait()
        scale(model, 0.5)
    times = sender.take_timing()
    wrong = 0
    size = 0
    for name, p in model.named_parameters():
        arrived = engine.received[name]
        wrong += not torch.equal(whole(p).to(arrived.dtype), arrived)
        size += arrived.nbytes
    yield figure("", "parameters that arrived as others", wrong, most=0)
    yield figure("", "gather", times["gather_s"], "s")
    yield figure("", "broadcast", times["send_s"], "s")
    yield figure("", "broadcast, speed", size / 1e9 / times["send_s"], "GB/s")
    yield figure("", "the whole update", times["sync_s"], "s")


class Matrices(torch.nn.Module):
    """Stands in for an engine's model: a batch [B, width] is multiplied by matrix after matrix."""

    def __init__(self, count, width):
        super().__init__()
        self.matrices = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(width, width, dtype=torch.bfloat16, device=DEVICE))
            for _ in range(count)
        )

    def load_weights(self, weights):
        """Copy [(name, tensor)] into the parameters, as the models of vLLM do."""
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)

    def forward(self, x):
        for matrix in self.matrices:
            x = torch.nn.functional.rms_norm(x @ matrix.T, x.shape[1:])
        return x


def captured(model, x):
    """(the output, a function that computes it anew): by a CUDA graph, or on a CPU by calling the
    model.
    """
    y = model(x).clone()
    if not CUDA:
        return y, lambda: y.copy_(model(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(model(x))
    return y, graph.replay


@torch.no_grad()
def graphs():
    """A captured CUDA graph decodes while an update of 15 GB of weights is staged, and is then
    swapped in, by plumbing/shadow.py. Until the swap its outputs do not change; after the swap they
    are those of the new weights. The model is a stand-in (Matrices), and the buckets come from host
    memory.
    """
    count, width = on_gpu((112, 8192), (6, 64))
    torch.manual_seed(0)
    live, second = Matrices(count, width), Matrices(count, width)
    for matrix in live.matrices:
        matrix.normal_()
    x = torch.randn(on_gpu(256, 4), width, dtype=torch.bfloat16, device=DEVICE)
    y, replay = captured(live, x)
    named = [[name, list(p.shape), "bfloat16"] for name, p in live.named_parameters()]
    # eight matrices, 1 GB on a GPU, make a bucket
    buckets = [named[first : first + 8] for first in range(0, count, 8)]
    layout = dict(buckets=buckets, whole=True)
    shadow = Shadow(live, second, lambda model: None, layout)
    sizes = [transport.bucket_bytes(tensors) for tensors in buckets]
    host = torch.randn(max(sizes) // 2).bfloat16().view(torch.uint8)
    host = host.pin_memory() if CUDA else host
    received = torch.empty(max(sizes), dtype=torch.uint8, device=DEVICE)

    def arrive(k, version):
        """Bucket k of a version, in `received`: the host's numbers times a factor of its own."""
        bucket = received[: sizes[k]]
        bucket.copy_(host[: sizes[k]], non_blocking=True)
        bucket.view(torch.bfloat16).mul_(1 + (k + version) % 16 / 16)
        return bucket

    def stage(version):
        with torch.cuda.stream(transport.weight_stream(DEVICE)):
            for k in range(len(buckets)):
                shadow.stage(k, arrive(k, version))
            transport.synchronize(DEVICE)

    def decode_step():
        """One decode step, which is waited for; returns its seconds."""
        start = time.perf_counter()
        replay()
        transport.synchronize(DEVICE)
        return time.perf_counter() - start

    alone = [decode_step() for _ in range(on_gpu(200, 20))]
    beside = []
    wrong_before = wrong_after = 0
    for version in range(3):
        expected = y.clone()
        start = time.perf_counter()
        staging = transport.in_thread(stage, version)
        is_over = False
        while not is_over:
            is_over = staging.done()
            beside.append(decode_step())
            wrong_before += not torch.equal(y, expected)
        staging.result()
        staged = time.perf_counter() - start
        start = time.perf_counter()
        shadow.swap()
        transport.synchronize(DEVICE)
        pause = time.perf_counter() - start
        for k, tensors in enumerate(buckets):
            for name, view in transport.named_views(tensors, arrive(k, version)):
                wrong_after += not torch.equal(live.get_parameter(name), view)
        replay()
        error = relative(y, live(x))
        yield figure(f"update {version}", ": error of the output after the swap", error, most=0.1)
    yield figure("", "outputs that change before the swap", wrong_before, most=0)
    yield figure("", "matrices that are wrong after it", wrong_after, most=0)
    yield figure("", "staging", sum(sizes) / 1e9 / staged, "GB/s")
    # The first two swaps also compare all that they have copied.
    yield figure("", "the third swap, without checks", pause, "s", most=on_gpu(0.1, None))
    yield figure("", "a decode step, median", float(np.median(alone)), "s")
    slower = float(np.median(beside) / np.median(alone))
    yield figure("", "a decode step beside staging / alone", slower, most=on_gpu(3, None))


def trained(model, optimizers, config, record, gradients=()):
    """Make a step of train.py; returns its gradients. gradients: those that it takes instead."""
    loss, metrics, _ = micro_batch(model, record, 0, config, DEVICE)
    loss.backward()
    for p, gradient in zip(model.parameters(), gradients):
        p.grad.copy_(gradient)
    taken = [p.grad.clone() for p in model.parameters()]
    sums = Sums()
    sums.add(metrics)
    optimizer_step(model, optimizers, sums, 0, config)
    return taken


def save():
    """A checkpoint that is written and read on the device continues the run bit by bit: a step
    after it gives the same parameters and the same state of AdamW in a model that is newly built.

    On a GPU two backward passes need not be equal bit by bit, because atomic additions have no
    fixed order. So the second model computes its gradients, and then takes those of the first one.
    """
    shape = on_gpu(WIDE | dict(num_hidden_layers=2), TINY)
    record = row(shape, on_gpu(4096, 512))
    run_dir = WORK / "gpu-save"
    shutil.rmtree(run_dir, ignore_errors=True)
    model_config(shape).save_pretrained(run_dir / "model_files")
    config, model, optimizers = build(shape, "bfloat16", {})
    ranks = OneRank()
    ranks.saving = dist.new_group(backend="gloo")
    state = checkpoints.NEW_RUN
    saver = checkpoints.Saver(config, run_dir, model.model, optimizers, ranks, state)
    trained(model, optimizers, config, record)
    start = time.perf_counter()
    paused = saver.save(state | {"version": 1})
    saved = [whole(p).clone() for p in model.parameters()]
    # What is written must be what was saved, though training goes on meanwhile
    gradients = trained(model, optimizers, config, record)
    saver.finish()
    yield figure("", "save: training waits", paused, "s")
    yield figure("", "save: until all is on disk", time.perf_counter() - start, "s")
    _, again, new_optimizers = build(shape, "bfloat16", {})
    start = time.perf_counter()
    newest = checkpoints.newest(run_dir)
    restored = checkpoints.restore(newest, again.model, new_optimizers, ranks.saving)
    yield figure("", "restore", time.perf_counter() - start, "s")
    assert restored["version"] == 1
    shutil.rmtree(run_dir)
    pairs = zip(saved, again.parameters(), strict=True)
    wrong = sum(not torch.equal(a, whole(p)) for a, p in pairs)
    yield figure("", "parameters that differ after restoring", wrong, most=0)
    trained(again, new_optimizers, config, record, gradients)
    wrong = different = changed = 0
    for a, p, q in zip(saved, model.parameters(), again.parameters(), strict=True):
        wrong += not torch.equal(whole(p), whole(q))
        changed += not torch.equal(a, whole(p))
        for name, value in optimizers[0].state[p].items():
            different += not torch.equal(whole(value), whole(new_optimizers[0].state[q][name]))
    yield figure("", "parameters that a step changes", changed, least=len(saved))
    yield figure("", "parameters that differ after one more step", wrong, most=0)
    yield figure("", "tensors of AdamW that differ then", different, most=0)


def forwards(count):
    """Run and count forward passes, in place of an engine, until the parent process ends."""
    shape = on_gpu(WIDE, TINY)
    _, model, _ = build(shape, "bfloat16", {})
    sequences = [torch.randint(shape["vocab_size"], (on_gpu(4096, 64),))]
    while multiprocessing.parent_process().is_alive():
        packed(model, sequences)
        count.value += 1


def counted(count, function, *arguments):
    """(the function's result, forward passes a second of the other process meanwhile)."""
    start = time.perf_counter()
    before = count.value
    result = function(*arguments)
    return result, (count.value - before) / (time.perf_counter() - start)


def sharing():
    """Two processes on one GPU, one of which trains while the other one runs forward passes: both
    fit, and neither starves.
    """
    shape = on_gpu(WIDE, TINY)
    config, model, optimizers = build(shape, "bfloat16", {}, checkpointed_layers=1000)
    records = [row(shape, on_gpu(16384, 512))]
    step = functools.partial(one_step, model, optimizers, config, DEVICE, records)
    alone, *_ = measure(step)
    spawn = multiprocessing.get_context("spawn")
    count = spawn.Value("q", 0)
    other = spawn.Process(target=forwards, args=(count,), daemon=True)
    other.start()
    deadline = time.monotonic() + 60
    while count.value < 2 and other.is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    _, passes_alone = counted(count, time.sleep, on_gpu(3, 1))
    (together, *_), passes_together = counted(count, measure, step)
    used = resources()["MB of the GPU"]
    other.kill()
    yield figure("", "a step beside forward passes / alone", together / alone, most=on_gpu(4, None))
    yield figure("", "forward passes/s alone", passes_alone, least=1e-3)
    slower = passes_alone / max(passes_together, 1e-9)
    yield figure("", "a forward pass beside steps / alone", slower, most=on_gpu(4, None))
    yield figure("", "memory of both", used / 1000, "GB")


# ---- running them

CHECKPOINTING = dict(checkpointed_layers=1000)
OFFLOADING = CHECKPOINTING | dict(offload_activations=True)
# {name: (seconds it may take, function, its arguments)}, the most important check first
CHECKS = {
    "attention": (90, attentions, {}),
    "parity": (90, parity, {}),
    "gradients": (90, gradients, {}),
    "mfu-1.5b-16k": (90, mfu, dict(size="1.5b", row_tokens=16384, goal=0.45)),
    "profile": (90, profile, {}),
    "groups": (120, groups, {}),
    "updates": (60, updates, {}),
    "graphs": (60, graphs, {}),
    "save": (120, save, {}),
    "sharing": (90, sharing, {}),
    "mfu-7b-16k": (120, mfu, dict(size="7b", row_tokens=16384) | CHECKPOINTING),
    "mfu-1.5b-16k-compile": (120, mfu, dict(size="1.5b", row_tokens=16384, compile=True)),
    "mfu-7b-lora-16k": (120, mfu, dict(size="7b", row_tokens=16384, lora_rank=32) | CHECKPOINTING),
    "mfu-7b-16k-20": (120, mfu, dict(size="7b", row_tokens=16384, checkpointed_layers=20)),
    "mfu-1.5b-64k": (90, mfu, dict(size="1.5b", row_tokens=65536) | CHECKPOINTING),
    "mfu-1.5b-16k-head": (90, mfu, dict(size="1.5b", row_tokens=16384, head_float32=True)),
    "mfu-7b-64k": (120, mfu, dict(size="7b", row_tokens=65536) | CHECKPOINTING),
    "mfu-7b-16k-offload": (120, mfu, dict(size="7b", row_tokens=16384) | OFFLOADING),
    "mfu-1.5b-16k-checkpointing": (60, mfu, dict(size="1.5b", row_tokens=16384) | CHECKPOINTING),
    "mfu-7b-16k-keeping": (60, mfu, dict(size="7b", row_tokens=16384)),
}


def run(name, limit, rehearse):
    """The lines of one check, in a process of its own; its last message if it breaks off."""
    command = [sys.executable, __file__, "--check", name, *["--rehearse"] * rehearse]
    WORK.mkdir(parents=True, exist_ok=True)
    # The checks of memory use the trainer's setting of the allocator
    env = os.environ | (ONE_HEAP if name.startswith(("mfu", "profile")) else {})
    lines, failure = printed_lines(command, WORK / f"gpu-{name}.log", limit, env)
    if failure:
        lines.append(skipped("all of it", "") | dict(status=f"FAIL ({failure})"))
    return lines


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    p.add_argument(
        "--minutes", type=float, default=9.5, help="checks that remain by then are skipped"
    )
    p.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    p.add_argument("--check", choices=CHECKS, help="run this check in this process")
    a = p.parse_args(argv)
    a.quick |= a.rehearse
    if not CUDA and not a.rehearse:
        sys.exit("bench/gpu.py: torch sees no GPU; add --rehearse to run on the CPU")
    if a.check:
        _, function, arguments = CHECKS[a.check]
        for line in function(**arguments):
            print(json.dumps(line), flush=True)
        # As train.py ends: threads of gloo and NCCL may still be at work
        os._exit(0)
    deadline = time.monotonic() + 60 * a.minutes
    where = torch.cuda.get_device_name() if CUDA else "rehearsal on the CPU"
    print(f"{machine()}; {where}")
    result = result_file(a, "gpu")
    results = {"machine": f"{machine()}; {where}"}
    for name in a.only:
        left = deadline - time.monotonic()
        limit = on_gpu(1, 10) * CHECKS[name][0]
        lines = run(name, min(limit, left), a.rehearse) if left > 10 else []
        if left < limit and (not lines or "signal 9" in lines[-1]["status"]):
            over = skipped(
                "all of it" if not lines else "the rest", f"{a.minutes:g} minutes are over"
            )
            lines = [*lines[:-1], over]
        for line in lines:
            value = "" if line["value"] is None else f"{line['value']:.4g} {line['unit']}"
            cells = f"{name:27} {line['what']:51} {value:>18} {line['limit']:>10}"
            print(f"{cells}  {line['status']}", flush=True)
        results[name] = lines
        keep(result, results)
    every = [line for name in a.only for line in results[name]]
    failed = sum(line["status"].startswith("FAIL") for line in every)
    print(f"{os.path.relpath(result)}: {failed} figures outside their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
