"""What one GPU can prove in ten minutes, without the internet: parity, gradients, memory, MFU, copies.

    bash bench/gpu.sh [--only parity mfu-1.5b-16k ...] [--minutes 9.5] [--rehearse] [--out DIR]

Each check is a function below whose docstring says what it proves. It has a process of its own, so that
memory that runs out or a crash costs the others nothing and peaks are its own, and a time limit. Its
figures are on disk as soon as they are measured (out/bench/gpu, its words beside them); the table grows
and gpu.json is written after every check. All weights are random. What a machine lacks (vLLM, a second
GPU, memory) is skipped by name. `--rehearse` runs the same lines on the CPU with tiny shapes; its
times mean nothing. Deliberately absent: generation, and whatever needs two GPUs.
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
    # weights.py imports it to call engines, of which there are none
    sys.modules["requests"] = types.ModuleType("requests")
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import config as cfg
import plumbing.model
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
from plumbing.ranks import Ranks
from plumbing.samples import TOKEN_FIELDS, filler, join
from plumbing.transport import buckets, checksum

TINY = SHAPES["small"] | dict(vocab_size=512, hidden_size=128, intermediate_size=256)
TINY |= dict(num_hidden_layers=2)
WIDE = SHAPES["1.5b"]
# Qwen2.5-7B
SEVEN = WIDE | dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944)
SEVEN |= dict(num_attention_heads=28, num_key_value_heads=4)
# logits and attention scores about as sharp as a trained model's
SHARP = dict(initializer_range=0.04)
GROUPS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norm")
VARLEN = plumbing.model.varlen_attn


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


def without_figure(what, status):
    return dict(what=what, value=None, unit="", limit="", status=status)


def skipped(what, why):
    return without_figure(what, f"skipped ({why})")


def peak_of(case, size):
    """The largest memory of tensors, bytes, which a CPU does not tell."""
    if not CUDA:
        return skipped(f"{case}peak", "only a GPU's allocator knows its peak")
    return figure(case, "peak", size / 1e9, "GB")


def on_gpu(real, tiny):
    """What differs between a GPU and the rehearsal."""
    return real if CUDA else tiny


def relative(a, b):
    """|a - b| / |b| of two tensors."""
    a = a.double()
    b = b.double()
    return ((a - b).norm() / b.norm()).item()


def measure(function, repeats=3):
    """(median seconds of a call, largest memory of tensors on the GPU, 0 on a CPU), after a call to
    warm up.
    """
    function()
    times = []
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return statistics.median(times), peak


# ---- models and rows


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
            missing -= n
            if n:
                cut = {k: sample[k][:n] for k in sample if k in TOKEN_FIELDS}
                samples.append(sample | cut)
    return join(samples)


# ---- attention, logprobs, gradients, learning


def attend(heads, key_heads, width, window):
    """packed_attention in bfloat16 against float32 attention under a mask [T, T], both ways."""
    case = f"{heads}/{key_heads} heads of {width}" + f", window {window}" * bool(window)
    if window and not CUDA:
        yield skipped(case, "a sliding window needs a GPU")
        return
    torch.manual_seed(0)
    lengths = on_gpu([1, 2, 300, 127, 129, 465], [1, 2, 30, 31])
    places = torch.arange(sum(lengths), device=DEVICE)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    ids = torch.bucketize(places, bounds.long(), right=True)
    distance = places[:, None] - places
    seen = (ids[:, None] == ids) & (distance >= 0) & (distance < (window or len(ids)))
    shapes = [(1, n, len(ids), width) for n in (heads, key_heads, key_heads)]
    rounded = [torch.randn(s, device=DEVICE).bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    expected = sdpa(*exact, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    got, _ = plumbing.model.packed_attention(
        None, *rounded, None, None, window or None, cu_seq_lens_q=bounds, lengths=lengths
    )
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got.float() * weight).sum().backward()
    yield figure(case, ": output", relative(got, expected), "of its norm", most=0.01)
    for name, a, b in zip(("query", "key", "value"), rounded, exact):
        yield figure(case, f": d {name}", relative(a.grad, b.grad), "of its norm", most=0.01)


def attentions():
    """varlen_attn, forward and backward: sequences do not see each other, key heads are shared, the
    window is the model's. Heads of Qwen2.5-1.5B and of 0.5B.
    """
    for heads, key_heads, width, window in ((12, 2, 128, 0), (14, 2, 64, 0), (12, 2, 128, 100)):
        yield from attend(heads, key_heads, width, window)


@torch.no_grad()
def packed(model, sequences):
    """token_logprobs of these sequences as one packed row, without what first tokens get."""
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    tokens = torch.cat(sequences)
    found, _ = model.token_logprobs(tokens.numpy(), positions.numpy(), 1.0)
    return found.cpu()[positions > 0]


def alone(model, sequences):
    """Likewise, one by one."""
    return torch.cat([packed(model, [s]) for s in sequences])


def apart(case, a, b, yardstick=None):
    """Two figures: how far logprobs are apart, in the mean and at most."""
    error = (a - b).abs()
    most = [None, None]
    if yardstick is not None:
        # two roundings, each as large as the yardstick's, are 1.4 times as far apart
        most = [1.5 * yardstick.mean().item(), 3 * yardstick.max().item()]
    yield figure(case, ", mean", error.mean().item(), "nats", most=most[0])
    yield figure(case, ", max", error.max().item(), "nats", most=most[1])


def count_calls(calls, *args, **knobs):
    """varlen_attn, which adds to the list `calls` at every call."""
    calls.append(1)
    return VARLEN(*args, **knobs)


def parity():
    """bfloat16 token_logprobs of a packed row, on the model as train.build makes it, against the same
    sequences one by one: packing adds no more error than bfloat16 has anyway (sdpa, one by one,
    against float32).
    """
    shape = on_gpu(WIDE | dict(num_hidden_layers=4), TINY)
    lengths = on_gpu([1, 2, 3, 127, 128, 129, 1000, 2706], [1, 2, 3, 17, 40, 65])
    torch.manual_seed(1)
    sequences = [torch.randint(shape["vocab_size"], (n,)) for n in lengths]
    _, model, _ = build(shape, "float32", SHARP)
    in_row = packed(model, sequences)
    model.set_attn_implementation("sdpa")
    exact = alone(model, sequences)
    yield from apart("float32: packed - alone", in_row, exact, torch.tensor([1e-4]))
    _, model, _ = build(shape, "bfloat16", SHARP)
    for head in ("bfloat16", "float32"):
        case = f"head in {head}: "
        model.head_float32 = head == "float32"
        model.set_attn_implementation("sdpa")
        of_sdpa = alone(model, sequences)
        model.set_attn_implementation("packed")
        calls = []
        plumbing.model.varlen_attn = functools.partial(count_calls, calls)
        in_row = packed(model, sequences)
        one_by_one = alone(model, sequences)
        yardstick = (of_sdpa - exact).abs()
        yield from apart(case + "alone (sdpa) - float32", of_sdpa, exact)
        yield from apart(case + "packed - float32", in_row, exact, yardstick)
        yield from apart(case + "packed - alone", in_row, one_by_one, yardstick)
        wanted = on_gpu((1 + len(lengths)) * shape["num_hidden_layers"], 0)
        yield figure(case, "calls of varlen_attn", len(calls), most=wanted, least=wanted)
    mixed = packed(model, [torch.cat(sequences)])
    starts = torch.cat([torch.arange(n) for n in lengths])[1:] == 0
    error = (mixed[~starts] - exact).abs().mean().item()
    least = 2 * yardstick.mean().item()
    yield figure("", "if sequences saw each other, mean", error, "nats", least=least)


def gradient(shape, dtype, record):
    """{group of parameters: gradient as one vector} of train.micro_batch."""
    config, model, _ = build(shape, dtype, SHARP)
    loss, _ = train.micro_batch(model, record, 0, config, DEVICE)
    loss.backward()
    found = {group: [] for group in GROUPS}
    for name, p in model.named_parameters():
        group = next(g for g in GROUPS if g in name)
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[group].append(grad.flatten().double())
    return {group: torch.cat(parts) for group, parts in found.items()}


def gradients():
    """Gradients through FSDP2's mixed precision (bfloat16, one rank, as train.build makes it) point
    where float32's do, and are as long.
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


def learn(dtype):
    """The losses of 20 train_steps on one batch."""
    samples = draw(TINY | dict(samples=16), 0)
    for sample in samples:
        # far more probable now than when it was sampled: all weights are cut to c, and the loss is c
        # times the cross-entropy
        sample["behavior_logprobs"] = np.where(sample["mask"], -20.0, 0.0)
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
    yield figure("", "loss after 20 steps / before", losses[-1] / losses[0], most=0.8)
    off = losses[-1] / exact[-1] - 1
    yield figure("", "then bfloat16 / float32 - 1", abs(off), most=0.02)


# ---- the head, memory, MFU


def head_step(model, tokens):
    """Forward and backward: tokens [T] -> logprobs [T]."""
    model.zero_grad()
    found, _ = train.token_logprobs(model, tokens, np.arange(len(tokens)), 1.0)
    found.sum().backward()
    return found.detach()


def fixed_chunk(tokens):
    """In place of train.head_chunk: so many tokens, whatever the model."""
    return lambda vocabulary, width: tokens


def head():
    """The output head in chunks gives the same logprobs and gradient whatever their size; time and
    memory of each size, forward and backward, and of a compiled head. The model has no layers.
    """
    shape = on_gpu(WIDE, TINY) | dict(num_hidden_layers=0)
    tokens = row(shape, on_gpu(8192, 512))["tokens"]
    model = random_model(shape, {}, cfg.Config(), torch.bfloat16)
    step = functools.partial(head_step, model, tokens)
    usual = train.head_chunk
    train.head_chunk = fixed_chunk(len(tokens))
    reference = step()
    of_reference = model.lm_head.weight.grad.clone()
    for chunk in on_gpu([110, 440, 1760], [128, 256]):
        train.head_chunk = fixed_chunk(chunk)
        case = f"logits of {chunk} tokens at once: "
        error = (step() - reference).abs().max().item()
        yield figure(case, "logprobs, max", error, "nats", most=0.02)
        error = relative(model.lm_head.weight.grad, of_reference)
        yield figure(case, "d weight", error, "of its norm", most=0.02)
        seconds, peak = measure(step)
        yield figure(case, f"{len(tokens)} tokens", 1e3 * seconds, "ms")
        yield peak_of(case, peak)
    train.head_chunk = usual
    if not CUDA:
        yield skipped("compiled", "the rehearsal compiles nothing")
        return
    train.head_logprobs = torch.compile(train.head_logprobs)
    try:
        seconds, peak = measure(step)
    except Exception as e:
        yield skipped("compiled", f"torch.compile: {type(e).__name__}")
        return
    yield figure("compiled: ", f"{len(tokens)} tokens", 1e3 * seconds, "ms")
    yield peak_of("compiled: ", peak)


# in a process of its own, which must not see the GPU
ESTIMATE = """
import json, sys
from bench import gpu
from tools import memory
config = gpu.cfg.check(gpu.cfg.Config(**json.loads(sys.argv[1])))
print(json.dumps(memory.trainer_gb(config)))
"""


def estimated_gb(knobs):
    """Peak of a trainer's step as tools/memory.py computes it. RuntimeError if it does not."""
    command = [sys.executable, "-c", ESTIMATE, json.dumps(knobs)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"tools/memory.py: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    parts = ("weights", "gradients", "optimizer", "activations", "gathered", "head")
    return sum(found[part] for part in parts)


def memory(row_tokens):
    """A train_step takes as much memory on the GPU as tools/memory.py says, within 10%."""
    case = f"rows of {row_tokens}, checkpointing: "
    knobs = dict(row_tokens=row_tokens, gradient_checkpointing=True)
    shape = on_gpu(WIDE, TINY)
    records = [row(shape, on_gpu(row_tokens, 512), seed) for seed in range(2)]
    config, model, optimizers = build(shape, "bfloat16", {}, **knobs)
    step = functools.partial(train.train_step, model, optimizers, records, 0, config, DEVICE)
    _, peak = measure(step, repeats=1)
    yield peak_of(case, peak)
    if importlib.util.find_spec("tools.memory") is None:
        yield skipped(case + "peak / estimate", "there is no tools/memory.py")
        return
    knobs |= dict(run="bench", model="Qwen/Qwen2.5-1.5B", dtype="bfloat16", trainers=1)
    estimate = estimated_gb(knobs)
    yield figure(case, "estimate", estimate, "GB")
    if not CUDA:
        yield skipped(case + "peak / estimate", "only a GPU's allocator knows its peak")
        return
    off = peak / 1e9 / estimate - 1
    yield figure(case, "peak / estimate - 1", abs(off), most=0.1)


def mfu_step(model, optimizers, records, config):
    """A train_step that works without optimizers, too."""
    model.zero_grad()
    train.train_step(model, optimizers, records, 0, config, DEVICE)


def mfu(size, row_tokens, gradient_checkpointing, goal=None):
    """How much of the GPU's peak a step of 64k tokens uses, by bench/train.py's formula, on its samples
    (median 600 tokens, mean some 900, up to 8k).

    7B: forward, backward and clipping without AdamW, whose state does not fit beside the rest.
    """
    shape = on_gpu(WIDE if size == "1.5b" else SEVEN, TINY)
    row_tokens = on_gpu(row_tokens, row_tokens // 32)
    rows = on_gpu(65536, 2048) // row_tokens
    records = [row(shape, row_tokens, seed) for seed in range(rows)]
    case = f"{size}, rows of {row_tokens}" + ", checkpointing" * gradient_checkpointing
    changed = {}
    if size == "7b":
        case += ", without AdamW"
        changed = dict(tie_word_embeddings=False)
    try:
        config, model, optimizers = build(
            shape, "bfloat16", changed, gradient_checkpointing=gradient_checkpointing
        )
        if size == "7b":
            optimizers = []
        step = functools.partial(mfu_step, model, optimizers, records, config)
        seconds, peak = measure(step, repeats=on_gpu(2, 1))
    except torch.OutOfMemoryError:
        yield skipped(case, "out of memory")
        return
    lengths = np.concatenate([record["lengths"] for record in records])
    share = flops(shape, lengths) / seconds / PEAK_FLOPS
    yield figure(case, ": MFU", share, least=on_gpu(goal, None))
    yield figure(case, ": tokens/s", rows * row_tokens / seconds)
    yield peak_of(f"{case}: ", peak)


# ---- weight updates


def to_host(parts, flats):
    """As weights.Sender._gather."""
    for part, flat in zip(parts, flats):
        flat.copy_(part, non_blocking=True)


def to_gpu(flats, staging, sums):
    """As plumbing.group.Group._send_through_gpu; sums: None, or where checksums go."""
    with torch.cuda.stream(torch.cuda.Stream() if CUDA else None):
        for flat, sent in zip(flats, itertools.cycle(staging)):
            sent.copy_(flat, non_blocking=True)
            if sums is not None:
                sums.append(checksum(sent))


def rate(case, what, size, function, *args):
    """Of a function that moves so many bytes."""
    seconds, _ = measure(functools.partial(function, *args))
    return figure(case, what, size / seconds / 1e9, "GB/s")


def copies():
    """The copies of a weight update, bucket by bucket as weights.py makes them, GB/s of each; what
    arrives is what was sent.
    """
    total = on_gpu(2048, 4) << 20
    weights = torch.randn(total // 2, device=DEVICE)
    for size in on_gpu([64, 256, 1024], [1]):
        case = f"{size} MB: "
        n = (size << 20) // 2
        parts = weights.split(n)
        flats = [torch.empty(n, dtype=torch.bfloat16, pin_memory=CUDA) for _ in parts]
        staging = [torch.empty(n, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        sums = []
        yield rate(case, "GPU to pinned host", total, to_host, parts, flats)
        yield rate(case, "pinned host to GPU", total, to_gpu, flats, staging, None)
        yield rate(case, "likewise, with checksums", total, to_gpu, flats, staging, sums)
        expected = [checksum(part.bfloat16()) for part in parts]
        wrong = sum(int(a != b) for a, b in zip(sums, itertools.cycle(expected)))
        yield figure(case, "buckets with a wrong checksum", wrong, most=0)
    flat = weights.bfloat16()
    sources = flat.split(1 << 20)
    targets = [torch.empty_like(x) for x in sources]
    yield rate(
        "", "swap on the GPU (_foreach_copy_)", total, torch._foreach_copy_, targets, sources
    )
    yield rate("", "checksum", total, checksum, flat)
    yield skipped("broadcast over NCCL", "needs two GPUs")


def swap_in(received, engine):
    """The received weights into vLLM's model, through an Inbox: does it hold them before, and then?"""
    from plumbing.engine import Inbox

    like = next(engine.parameters())
    shapes = [list(p.shape) for _, p in received]
    group = dict(
        names=[name for name, _ in received],
        shapes=shapes,
        dtype=str(like.dtype).removeprefix("torch."),
        bucket_bytes=8 << 20,
    )
    inbox = Inbox(engine, group, like.device)
    in_buckets = buckets(shapes, like.element_size(), group["bucket_bytes"])
    for k, (first, last, _) in enumerate(in_buckets):
        parts = [p.reshape(-1) for _, p in received[first:last]]
        inbox.memory(k).copy_(torch.cat(parts))
        inbox.keep(k)
    inbox.plan.prepare()
    before = inbox.plan.holds()
    seconds, _ = measure(inbox.plan.swap)
    return before, inbox.plan.holds(), seconds


def plan():
    """plumbing/plan.py on vLLM's model in GPU memory: after a swap it generates with the new weights."""
    if importlib.util.find_spec("vllm") is None:
        yield skipped("Plan on vLLM's tensors", "vLLM is not installed")
        return
    from plumbing.launch import ENGINE_ENV

    os.environ |= ENGINE_ENV
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    # before vLLM loads a model: on a CPU it keeps matrices that vLLM would free
    from vllm import LLM, SamplingParams

    import plumbing.plan  # noqa: F401

    path = make_model("small")
    llm = LLM(
        str(path),
        dtype=on_gpu("bfloat16", "float32"),
        skip_tokenizer_init=True,
        # as plumbing/launch.py has it: with CUDA graphs
        enforce_eager=not CUDA,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
    )
    prompt = [45, 4, 52, 29, 2]
    sampling = SamplingParams(max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False)
    # once with the old weights
    llm.generate([dict(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    model.token_logprobs = types.MethodType(train.token_logprobs, model)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    received = [(name, p.data) for name, p in model.named_parameters()]
    before, after, seconds = llm.apply_model(functools.partial(swap_in, received))[0]
    yield figure("", "model holds what was received, before", int(before), most=0)
    yield figure("", "likewise, after a swap", int(after), least=1)
    yield figure("", "swap", 1e3 * seconds, "ms")
    answers = llm.generate([dict(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    answer = answers[0].outputs[0]
    sampled = list(answer.token_ids)
    reported = [of[token].logprob for of, token in zip(answer.logprobs, sampled)]
    expected = packed(model, [torch.tensor(prompt + sampled)])[-len(sampled) :]
    error = (torch.tensor(reported) - expected).abs().max().item()
    most = on_gpu(0.1, 1e-4)
    yield figure("", "vLLM's logprobs - token_logprobs, max", error, "nats", most=most)


# ---- running them

# {name: (seconds it may take, function, *arguments)}, what matters most first
CHECKS = {
    "attention": (90, attentions),
    "parity": (90, parity),
    "gradients": (90, gradients),
    "learning": (60, learning),
    "mfu-1.5b-16k": (90, mfu, "1.5b", 16384, False, 0.45),
    "mfu-1.5b-64k": (90, mfu, "1.5b", 65536, True),
    "memory-16k": (90, memory, 16384),
    "memory-32k": (90, memory, 32768),
    "mfu-7b-16k": (120, mfu, "7b", 16384, True),
    "mfu-7b-64k": (120, mfu, "7b", 65536, True),
    "head": (120, head),
    "copies": (60, copies),
    "plan": (120, plan),
    "mfu-1.5b-16k-checkpointing": (60, mfu, "1.5b", 16384, True),
    "mfu-7b-16k-keeping": (60, mfu, "7b", 16384, False),
    "mfu-1.5b-64k-keeping": (60, mfu, "1.5b", 65536, False),
}


def rows_file(name):
    """Where a check leaves its figures, a line each; what it prints goes beside it."""
    path = WORK / "gpu" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check(name):
    """One check, in this process: each figure is on disk as soon as it is there."""
    _, function, *arguments = CHECKS[name]
    with open(rows_file(name), "w") as file:
        for line in function(*arguments):
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
                words = log.read_text().strip().splitlines() or ["no word"]
                why = f"exit code {done.returncode}: {words[-1]}"
        except subprocess.TimeoutExpired:
            why = f"not done within {limit:.0f} s"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if why:
        lines.append(without_figure("all of it", f"FAIL ({why})"))
    return lines


def show(name, line):
    """Print a line of the table."""
    value = ""
    if line["value"] is not None:
        value = f"{line['value']:.4g} {line['unit']}"
    cells = f"{name:27} {line['what']:51} {value:>18} {line['limit']:>10}"
    print(f"{cells}  {line['status']}", flush=True)


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
    found = {"machine": f"{machine()}; {where}", "seconds": {}}
    failed = 0
    for name in a.only:
        start = time.monotonic()
        left = deadline - start
        lines = [skipped("all of it", f"{a.minutes:g} minutes are over")]
        if left > 10:
            limit = on_gpu(1, 10) * CHECKS[name][0]
            lines = run(name, min(limit, left), a.rehearse)
        for line in lines:
            show(name, line)
        failed += sum(line["status"].startswith("FAIL") for line in lines)
        found[name] = lines
        found["seconds"][name] = round(time.monotonic() - start, 1)
        keep(result, found)
    print(f"{os.path.relpath(result)}: {failed} figures outside their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
