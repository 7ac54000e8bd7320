"""What one GPU can prove in ten minutes, without the internet: parity, gradients, memory, MFU, copies.

    bash bench/gpu.sh [--only parity mfu-1.5b ...] [--minutes 9.5] [--rehearse] [--out DIR]

Each check is a function below whose docstring says what it proves. It has a process of its own, so that
memory that runs out or a crash costs the others nothing and peaks are its own, and a time limit. Its
figures are on disk as soon as they are measured: the table is printed as it grows, gpu.json is written
after every check. All weights are random. What a machine lacks (vLLM, a second GPU, memory) is skipped
by name. `--rehearse` runs the same lines on the CPU with tiny shapes, into out/bench; its times and
bandwidths mean nothing. Deliberately absent: generation, and whatever needs two GPUs.
"""

import functools
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

# before this folder, whose train.py is not the one meant
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if importlib.util.find_spec("requests") is None:
    # weights.py imports it for updates of engines, which take no part here
    sys.modules["requests"] = types.ModuleType("requests")
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import config as cfg
import train
from bench.common import WORK, keep, machine, parser, result_file
from bench.train import (
    CUDA,
    DEVICE,
    PEAK_FLOPS,
    SHAPES,
    draw,
    flops,
    make_model,
    model_config,
)
from plumbing import attention
from plumbing.ranks import Ranks
from plumbing.samples import TOKEN_FIELDS, filler, join
from plumbing.wire import checksum

# Qwen2.5-7B
SEVEN = dict(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
TINY = SHAPES["small"] | dict(vocab_size=512, hidden_size=128, intermediate_size=256)
TINY |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
WIDE = SHAPES["1.5b"]
# of a new model: wide enough for logits and attention scores as sharp as a trained model's
SHARP = dict(initializer_range=0.04)
MB = 1 << 20
# of 1.5B, rows of 16k tokens
MFU_GOAL = 0.45


# ---- figures


def figure(what, value, unit="", most=None, least=None):
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
    return dict(what=what, value=value, unit=unit, limit=limit, status=status)


def skipped(what, why):
    return dict(what=what, value=None, unit="", limit="", status=f"skipped ({why})")


def of_rehearsal(tiny, real):
    """What differs between a GPU and the rehearsal."""
    return real if CUDA else tiny


# ---- models, rows, time


def random_model(shape, changed, config, dtype):
    """A model of random weights, made on the device, in place of train.load_model's from files."""
    torch.manual_seed(0)
    with DEVICE:
        model = Qwen2ForCausalLM(model_config(shape, attn_implementation="packed", **changed))
    model.head_float32 = config.head_float32
    return model.to(dtype)


def build(shape, dtype, changed, **knobs):
    """(config, model, optimizers) as train.build makes them on one rank, with random weights."""
    config = cfg.check(cfg.Config(run="bench", dtype=dtype, **knobs))
    train.load_model = functools.partial(random_model, shape, changed)
    if not dist.is_initialized():
        Ranks(config)
    model, optimizers = train.build(config, DEVICE, 1)
    return config, model, optimizers


def row(shape, tokens, seed=0):
    """A record of exactly so many tokens: samples as bench/train.py draws them, the last one cut."""
    samples = []
    missing = tokens
    while missing:
        for sample in draw(shape, 1000 * seed + len(samples)):
            n = min(missing, len(sample["tokens"]))
            cut = {k: sample[k][:n] for k in sample if k in TOKEN_FIELDS}
            samples += [sample | cut] * bool(n)
            missing -= n
    return join(samples)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def measure(function, repeats=3):
    """(median seconds of a call, largest memory of tensors on the GPU, 0 on a CPU) after one call to
    warm up.
    """
    function()
    synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return statistics.median(times), peak


def off(a, b):
    """|a - b| / |b| of two tensors."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- attention, logprobs, gradients, learning


def attention_alone(heads, key_heads, width, window):
    """packed_attention in bfloat16 (on a GPU: varlen_attn), forward and backward, against float32
    attention under a mask [T, T]: sequences do not see each other, fewer key heads, sliding window.
    """
    name = f"{heads}/{key_heads} heads of {width}" + f", window {window}" * bool(window)
    if window and not CUDA:
        yield skipped(name, "a sliding window needs a GPU")
        return
    torch.manual_seed(0)
    lengths = of_rehearsal([1, 2, 30, 31], [1, 2, 300, 127, 129, 465])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    place = torch.arange(len(ids), device=DEVICE)
    distance = place[:, None] - place
    seen = (ids[:, None] == ids) & (distance >= 0)
    if window:
        seen &= distance < window
    shapes = [(1, n, len(ids), width) for n in (heads, key_heads, key_heads)]
    rounded = [torch.randn(s, device=DEVICE).bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    expected = sdpa(*exact, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    got, _ = attention.packed_attention(
        None, *rounded, None, None, window or None, cu_seq_lens_q=bounds, lengths=lengths
    )
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got.float() * weight).sum().backward()
    yield figure(f"{name}: output", off(got, expected), "of its norm", most=0.01)
    for of, a, b in zip(("query", "key", "value"), rounded, exact):
        yield figure(f"{name}: d {of}", off(a.grad, b.grad), "of its norm", most=0.01)


def attentions():
    """attention_alone, of Qwen2.5-1.5B, of Qwen2.5-0.5B, and with a sliding window."""
    yield from attention_alone(12, 2, 128, 0)
    yield from attention_alone(14, 2, 64, 0)
    yield from attention_alone(12, 2, 128, 100)


@torch.no_grad()
def packed_logprobs(model, sequences):
    """token_logprobs of these sequences as one packed row, without what first tokens get."""
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    tokens = torch.cat(sequences)
    token_logprobs = getattr(
        model, "token_logprobs", functools.partial(train.token_logprobs, model)
    )
    found, _ = token_logprobs(tokens.numpy(), positions.numpy(), 1.0)
    return found.cpu()[positions > 0]


def alone(model, sequences):
    """Likewise, one by one."""
    return torch.cat([packed_logprobs(model, [s]) for s in sequences])


def apart(what, a, b, yardstick=None):
    """Two figures: how far logprobs are apart, in the mean and at most."""
    error = (a - b).abs()
    limits = [None, None]
    if yardstick is not None:
        # two roundings, each as large as the yardstick's, are 1.4 times as far apart
        limits = [1.5 * yardstick.mean().item(), 3 * yardstick.max().item()]
    yield figure(f"{what}, mean", error.mean().item(), "nats", most=limits[0])
    yield figure(f"{what}, max", error.max().item(), "nats", most=limits[1])


def parity():
    """bfloat16 token_logprobs of a packed row, on the model as train.build makes it, against the same
    sequences one by one: packing adds no more error than bfloat16 has anyway (sdpa, one by one,
    against float32).
    """
    shape = of_rehearsal(TINY, WIDE | dict(num_hidden_layers=4))
    lengths = of_rehearsal([1, 2, 3, 17, 40, 65], [1, 2, 3, 127, 128, 129, 1000, 2706])
    torch.manual_seed(1)
    sequences = [torch.randint(shape["vocab_size"], (n,)) for n in lengths]
    _, model, _ = build(shape, "float32", SHARP)
    in_row = packed_logprobs(model, sequences)
    model.set_attn_implementation("sdpa")
    exact = alone(model, sequences)
    error = (in_row - exact).abs().max().item()
    yield figure("float32: packed - alone, max", error, "nats", most=1e-3)
    _, model, _ = build(shape, "bfloat16", SHARP)
    for head in ("bfloat16", "float32"):
        model.head_float32 = head == "float32"
        model.set_attn_implementation("sdpa")
        of_sdpa = alone(model, sequences)
        model.set_attn_implementation("packed")
        calls = []
        attention.varlen_attn = counted(VARLEN, calls)
        in_row = packed_logprobs(model, sequences)
        yardstick = (of_sdpa - exact).abs()
        yield from apart(f"head in {head}: alone (sdpa) - float32", of_sdpa, exact)
        yield from apart(f"head in {head}: packed - float32", in_row, exact, yardstick)
        one_by_one = alone(model, sequences)
        yield from apart(f"head in {head}: packed - alone", in_row, one_by_one, yardstick)
        wanted = of_rehearsal(0, (1 + len(lengths)) * shape["num_hidden_layers"])
        yield figure("  calls of varlen_attn", len(calls), most=wanted, least=wanted)
    mixed = packed_logprobs(model, [torch.cat(sequences)])
    first = torch.cat([torch.arange(n) for n in lengths])[1:] == 0
    error = (mixed[~first] - exact).abs().mean().item()
    yield figure(
        "if sequences saw each other, mean", error, "nats", least=2 * yardstick.mean().item()
    )


VARLEN = attention.varlen_attn


def counted(function, calls):
    """The function, which adds to the list `calls` at every call."""

    def call(*args, **knobs):
        calls.append(1)
        return function(*args, **knobs)

    return call


GROUPS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norm")


def gradient(shape, dtype, record):
    """{group of parameters: gradient as one vector} of train.micro_batch."""
    config, model, _ = build(shape, dtype, SHARP)
    loss, _ = train.micro_batch(model, record, 0, config, DEVICE)
    loss.backward()
    found = {group: [] for group in GROUPS}
    for name, p in model.named_parameters():
        group = next(g for g in GROUPS if g in name)
        found[group].append(whole(p.grad).flatten().double())
    return {group: torch.cat(parts) for group, parts in found.items()}


def gradients():
    """Gradients through FSDP2's mixed precision (bfloat16, one rank, as train.build makes it) point
    where float32's do, and are as long.
    """
    shape = of_rehearsal(TINY, WIDE | dict(num_hidden_layers=4))
    record = row(shape, of_rehearsal(512, 4096))
    exact = gradient(shape, "float32", record)
    rounded = gradient(shape, "bfloat16", record)
    for group in GROUPS:
        a = rounded[group]
        b = exact[group]
        cosine = a @ b / (a.norm() * b.norm())
        yield figure(f"{group}: cosine", cosine.item(), least=0.99)
        longer = a.norm() / b.norm() - 1
        yield figure(f"{group}: norm / norm in float32 - 1", abs(longer.item()), most=0.03)


def learn(dtype):
    """The losses of 20 train_steps on one batch."""
    samples = draw(TINY | dict(samples=16), 0)
    for sample in samples:
        # far more probable now than when it was sampled: all weights are cut to c, and the loss is c
        # times the cross-entropy
        sample["logprobs"] = np.where(sample["mask"], -20.0, 0.0)
        sample["advantage"] = 1.0
    batches = [join(samples[:8]), join(samples[8:]), join([filler()])]
    config, model, optimizers = build(TINY, dtype, {}, lr=3e-3)
    losses = []
    for _ in range(20):
        metrics, _ = train.train_step(model, optimizers, batches, 0, config, DEVICE)
        losses.append(metrics["loss"])
    return losses


def learning():
    """train_step lowers the loss of one batch in bfloat16 as it does in float32: optimizer, FSDP2,
    accumulation, a micro-batch that is only a filler.
    """
    exact = learn("float32")
    losses = learn("bfloat16")
    yield figure("loss after 20 steps / before", losses[-1] / losses[0], most=0.8)
    yield figure("then bfloat16 / float32 - 1", abs(losses[-1] / exact[-1] - 1), most=0.02)


# ---- the head, memory, MFU


def head_step(model, tokens):
    """Forward and backward with the head: tokens [T] -> logprobs [T]."""
    model.zero_grad()
    found, _ = train.token_logprobs(model, tokens, np.arange(len(tokens)), 1.0)
    found.sum().backward()
    return found.detach()


def head():
    """The output head in chunks gives the same logprobs and gradient whatever their size; time and
    memory of each size, forward and backward, and of a compiled head. The model has no layers.
    """
    shape = of_rehearsal(TINY, WIDE) | dict(num_hidden_layers=0)
    tokens = row(shape, of_rehearsal(512, 8192))["tokens"]
    model = random_model(shape, {}, cfg.Config(), torch.bfloat16)
    step = functools.partial(head_step, model, tokens)
    usual = train.HEAD_ELEMENTS
    train.HEAD_ELEMENTS = 1 << 40
    reference = step()
    of_reference = model.lm_head.weight.grad.clone()
    for bits in of_rehearsal([15, 17], [24, 26, 28]):
        train.HEAD_ELEMENTS = 1 << bits
        name = f"2^{bits} logits at once"
        error = (step() - reference).abs().max().item()
        yield figure(f"{name}: logprobs, max", error, "nats", most=0.02)
        error = off(model.lm_head.weight.grad, of_reference)
        yield figure(f"{name}: d weight", error, "of its norm", most=0.02)
        seconds, peak = measure(step)
        yield figure(f"{name}: {len(tokens)} tokens", 1e3 * seconds, "ms")
        yield figure(f"{name}: peak", peak / 1e9, "GB")
    train.HEAD_ELEMENTS = usual
    if not CUDA:
        yield skipped("compiled", "the rehearsal compiles nothing")
        return
    train.head_logprobs = torch.compile(train.head_logprobs)
    try:
        seconds, peak = measure(step)
    except Exception as e:
        yield skipped("compiled", f"torch.compile: {type(e).__name__}")
        return
    yield figure(f"compiled: {len(tokens)} tokens", 1e3 * seconds, "ms")
    yield figure("compiled: peak", peak / 1e9, "GB")


def estimated_bytes(row_tokens):
    """Peak of a step of Qwen2.5-1.5B with checkpointing, as tools/memory.py computes it.

    In a process of its own: that module hides the GPU. KeyError if its parts have other names.
    """
    knobs = dict(model="Qwen/Qwen2.5-1.5B", dtype="bfloat16", trainers=1, row_tokens=row_tokens)
    knobs |= dict(run="bench", gradient_checkpointing=True)
    code = (
        "import json; from bench import gpu; from tools import memory; "
        f"c = gpu.cfg.check(gpu.cfg.Config(**{knobs})); print(json.dumps(memory.trainer_bytes(c)))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    parts = ("weights", "gradients", "optimizer", "activations", "gathered", "head")
    return sum(found[part] for part in parts)


def memory(row_tokens):
    """A train_step takes as much memory on the GPU as tools/memory.py says, within 10%."""
    name = f"rows of {row_tokens}, checkpointing"
    if importlib.util.find_spec("tools.memory") is None:
        yield skipped(f"{name}: estimate", "there is no tools/memory.py")
        estimate = math.inf
    else:
        estimate = estimated_bytes(row_tokens)
        yield figure(f"{name}: estimate", estimate / 1e9, "GB")
    shape = of_rehearsal(TINY, WIDE)
    records = [row(shape, of_rehearsal(512, row_tokens), seed) for seed in range(2)]
    config, model, optimizers = build(
        shape, "bfloat16", {}, gradient_checkpointing=True, row_tokens=row_tokens
    )
    step = functools.partial(train.train_step, model, optimizers, records, 0, config, DEVICE)
    _, peak = measure(step, repeats=1)
    if not CUDA:
        yield skipped(f"{name}: peak / estimate", "only a GPU's allocator knows its peak")
        return
    yield figure(f"{name}: peak", peak / 1e9, "GB")
    if estimate < math.inf:
        yield figure(f"{name}: abs(peak / estimate - 1)", abs(peak / estimate - 1), most=0.1)


def mfu(size, row_tokens, gradient_checkpointing, goal=None):
    """How much of the GPU's peak a step of 64k tokens uses, by bench/train.py's formula.

    7B: forward, backward and clipping without AdamW, whose state does not fit beside the rest.
    """
    shape = of_rehearsal(TINY, {"1.5b": WIDE, "7b": WIDE | SEVEN}[size])
    row_tokens = of_rehearsal(row_tokens // 32, row_tokens)
    rows = of_rehearsal(2048, 65536) // row_tokens
    records = [row(shape, row_tokens, seed) for seed in range(rows)]
    name = f"{size}, rows of {row_tokens}" + ", checkpointing" * gradient_checkpointing
    changed = {}
    if size == "7b":
        name += ", without AdamW"
        changed = dict(tie_word_embeddings=False)
    try:
        config, model, optimizers = build(
            shape, "bfloat16", changed, gradient_checkpointing=gradient_checkpointing
        )
        if size == "7b":
            optimizers = []
        step = functools.partial(mfu_step, model, optimizers, records, config)
        seconds, peak = measure(step, repeats=of_rehearsal(1, 2))
    except torch.OutOfMemoryError:
        yield skipped(f"{name}: MFU", "out of memory")
        return
    lengths = np.concatenate([record["lengths"] for record in records])
    share = flops(shape, lengths) / seconds / PEAK_FLOPS
    yield figure(f"{name}: MFU", share, least=goal if CUDA else None)
    yield figure(f"{name}: tokens/s", rows * row_tokens / seconds)
    yield figure(f"{name}: peak", peak / 1e9, "GB")


def mfu_step(model, optimizers, records, config):
    """A train_step that works without optimizers, too."""
    model.zero_grad()
    train.train_step(model, optimizers, records, 0, config, DEVICE)


# ---- weight updates


def to_host(parts, flats):
    """As weights.Sender._gather."""
    for part, flat in zip(parts, flats):
        flat.copy_(part, non_blocking=True)


def to_gpu(flats, staging, sums):
    """As plumbing.group.Group._send_through_gpu; sums: None, or where checksums go."""
    with torch.cuda.stream(torch.cuda.Stream() if CUDA else None):
        for k, flat in enumerate(flats):
            sent = staging[k % 2]
            sent.copy_(flat, non_blocking=True)
            if sums is not None:
                sums.append(checksum(sent))


def copies():
    """The copies of a weight update, bucket by bucket as weights.py makes them, GB/s of each; what
    arrives is what was sent.
    """
    total = of_rehearsal(4, 2048) * MB
    weights = torch.randn(total // 2, device=DEVICE)
    for size in of_rehearsal([1], [64, 256, 1024]):
        n = size * MB // 2
        parts = weights.split(n)
        flats = [torch.empty(n, dtype=torch.bfloat16, pin_memory=CUDA) for _ in parts]
        staging = [torch.empty(n, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        seconds, _ = measure(functools.partial(to_host, parts, flats))
        yield figure(f"{size} MB: GPU to pinned host", total / seconds / 1e9, "GB/s")
        seconds, _ = measure(functools.partial(to_gpu, flats, staging, None))
        yield figure(f"{size} MB: pinned host to GPU", total / seconds / 1e9, "GB/s")
        sums = []
        seconds, _ = measure(functools.partial(to_gpu, flats, staging, sums))
        yield figure(f"{size} MB: likewise, with checksums", total / seconds / 1e9, "GB/s")
        expected = [checksum(part.bfloat16()) for part in parts]
        wrong = sum(int(a != b) for a, b in zip(sums, itertools.cycle(expected)))
        yield figure(f"{size} MB: buckets with a wrong checksum", wrong, most=0)
    sources = weights.bfloat16().split(MB)
    targets = [torch.empty_like(x) for x in sources]
    seconds, _ = measure(functools.partial(torch._foreach_copy_, targets, sources))
    yield figure("swap on the GPU (_foreach_copy_)", total / seconds / 1e9, "GB/s")
    seconds, _ = measure(functools.partial(checksum, weights.bfloat16()))
    yield figure("checksum", total / seconds / 1e9, "GB/s")
    yield skipped("broadcast over NCCL", "needs two GPUs")


def swap_in(received, engine):
    """The received weights into vLLM's model, through a Plan: does it hold them before, and then?"""
    from plumbing.plan import Plan

    like = next(engine.parameters())
    plan = Plan(engine, [(name, p.to(like)) for name, p in received])
    before = plan.holds()
    seconds, _ = measure(plan.swap)
    return before, plan.holds(), seconds


def plan():
    """plumbing/plan.py on vLLM's model in GPU memory: after a swap it generates with the new weights."""
    if importlib.util.find_spec("vllm") is None:
        yield skipped("Plan on vLLM's tensors", "vLLM is not installed")
        return
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    # before vLLM loads a model: on a CPU it keeps matrices that vLLM would free
    from vllm import LLM, SamplingParams

    import plumbing.plan  # noqa: F401

    path = make_model("small")
    llm = LLM(
        str(path),
        dtype=of_rehearsal("float32", "bfloat16"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
    )
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    received = [(name, p.data) for name, p in model.named_parameters()]
    before, after, seconds = llm.apply_model(functools.partial(swap_in, received))[0]
    yield figure("model holds what was received, before", int(before), most=0)
    yield figure("likewise, after a swap", int(after), least=1)
    yield figure("swap", 1e3 * seconds, "ms")
    prompt = [45, 4, 52, 29, 2]
    sampling = SamplingParams(max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False)
    answer = llm.generate([dict(prompt_token_ids=prompt)], sampling, use_tqdm=False)[0].outputs[0]
    sampled = list(answer.token_ids)
    reported = [of[token].logprob for of, token in zip(answer.logprobs, sampled)]
    expected = packed_logprobs(model, [torch.tensor(prompt + sampled)])[-len(sampled) :]
    error = (torch.tensor(reported) - expected).abs().max().item()
    most = of_rehearsal(1e-4, 0.1)
    yield figure("vLLM's logprobs - token_logprobs, max", error, "nats", most=most)


# ---- running them

# {name: (seconds it may take, function, arguments)}, what matters most first
CHECKS = {
    "attention": (60, attentions, {}),
    "parity": (90, parity, {}),
    "gradients": (90, gradients, {}),
    "learning": (60, learning, {}),
    "mfu-1.5b-16k": (90, mfu, dict(size="1.5b", row_tokens=16384, gradient_checkpointing=False)),
    "mfu-1.5b-64k": (90, mfu, dict(size="1.5b", row_tokens=65536, gradient_checkpointing=True)),
    "memory-16k": (60, memory, dict(row_tokens=16384)),
    "memory-32k": (60, memory, dict(row_tokens=32768)),
    "mfu-7b-16k": (120, mfu, dict(size="7b", row_tokens=16384, gradient_checkpointing=True)),
    "mfu-7b-64k": (120, mfu, dict(size="7b", row_tokens=65536, gradient_checkpointing=True)),
    "head": (90, head, {}),
    "copies": (60, copies, {}),
    "plan": (120, plan, {}),
    "mfu-1.5b-16k-checkpointing": (
        60,
        mfu,
        dict(size="1.5b", row_tokens=16384, gradient_checkpointing=True),
    ),
    "mfu-7b-16k-all": (60, mfu, dict(size="7b", row_tokens=16384, gradient_checkpointing=False)),
    "mfu-1.5b-64k-all": (
        60,
        mfu,
        dict(size="1.5b", row_tokens=65536, gradient_checkpointing=False),
    ),
}
CHECKS["mfu-1.5b-16k"][2]["goal"] = MFU_GOAL


def rows_file(name):
    """Where a check leaves its figures, a line each; its words go beside it."""
    path = WORK / "gpu" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check(name):
    """One check, in this process: each figure is on disk as soon as it is there."""
    _, function, arguments = CHECKS[name]
    with open(rows_file(name), "w") as file:
        for line in function(**arguments):
            file.write(json.dumps(line) + "\n")
            file.flush()


def run(name, limit, rehearse):
    """The lines of one check, in a process of its own; its last words if it breaks off."""
    path = rows_file(name)
    path.write_text("")
    log = path.with_suffix(".log")
    command = [sys.executable, __file__, "--check", name, *["--rehearse"] * rehearse]
    why = ""
    with open(log, "w") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=limit)
            if done.returncode:
                last = log.read_text().strip().splitlines()[-1:] or ["no word"]
                why = f"exit code {done.returncode}: {last[0]}"
        except subprocess.TimeoutExpired:
            why = f"not done within {limit:.0f} s"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if why:
        lines.append(figure("all of it", math.nan) | dict(value=None, status=f"FAIL ({why})"))
    return lines


def show(name, line):
    """Print a line of the table."""
    value = ""
    if line["value"] is not None:
        value = f"{line['value']:.4g} {line['unit']}"
    what = line["what"]
    print(f"{name:26}  {what:58}  {value:>18}  {line['limit']:>10}  {line['status']}", flush=True)


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    p.add_argument("--minutes", type=float, default=9.5, help="what is not done by then is skipped")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    p.add_argument("--check", nargs="+", choices=CHECKS, help="these, in this process")
    a = p.parse_args(argv)
    a.quick |= a.rehearse
    if not CUDA and not a.rehearse:
        sys.exit("bench/gpu.py: torch sees no GPU: --rehearse runs the same lines on the CPU")
    for name in a.check or []:
        check(name)
    if a.check:
        sys.stdout.flush()
        # as in train.py: threads of gloo and NCCL may still be at work
        os._exit(0)
    deadline = time.monotonic() + 60 * a.minutes
    where = torch.cuda.get_device_name() if CUDA else "rehearsal on the CPU"
    print(f"{machine()}; {where}")
    result = result_file(a, "gpu")
    found = {}
    for name in a.only:
        left = deadline - time.monotonic()
        start = time.monotonic()
        found[name] = [skipped("all of it", f"{a.minutes:g} minutes are over")]
        if left > 10:
            limit = of_rehearsal(10, 1) * CHECKS[name][0]
            found[name] = run(name, min(limit, left), a.rehearse)
        for line in found[name]:
            show(name, line)
        found[name][0]["seconds"] = round(time.monotonic() - start, 1)
        keep(result, dict(machine=f"{machine()}; {where}") | found)
    failed = [x for lines in found.values() for x in lines if x["status"].startswith("FAIL")]
    print(f"{os.path.relpath(result)}: {len(failed)} figures outside their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
