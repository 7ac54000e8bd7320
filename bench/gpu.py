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
from transformers import Qwen2ForCausalLM

import config as cfg
import train
from bench.common import WORK, keep, machine, parser, result_file
from bench.train import CUDA, DEVICE, PEAK_FLOPS, SHAPES, draw, flops, model_config
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
def packed(model, sequences):
    """token_logprobs of these sequences as one packed row, without what first tokens get."""
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    tokens = torch.cat(sequences)
    found, _ = model.token_logprobs(tokens.numpy(), positions.numpy(), 1.0)
    return found.cpu()[positions > 0]


def alone(model, sequences):
    return torch.cat([packed(model, [s]) for s in sequences])


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
    in_row = packed(model, sequences)
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
        in_row = packed(model, sequences)
        yardstick = (of_sdpa - exact).abs()
        yield from apart(f"head in {head}: alone (sdpa) - float32", of_sdpa, exact)
        yield from apart(f"head in {head}: packed - float32", in_row, exact, yardstick)
        one_by_one = alone(model, sequences)
        yield from apart(f"head in {head}: packed - alone", in_row, one_by_one, yardstick)
        wanted = of_rehearsal(0, (1 + len(lengths)) * shape["num_hidden_layers"])
        yield figure("  calls of varlen_attn", len(calls), most=wanted, least=wanted)
    mixed = packed(model, [torch.cat(sequences)])
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


def body_step(model, tokens):
    """Forward and backward without the head: tokens [T] -> None."""
    model.zero_grad()
    ids = torch.from_numpy(tokens)[None].to(DEVICE)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=DEVICE)
    lengths = [len(tokens)]
    out = model.base_model(input_ids=ids, use_cache=False, cu_seq_lens_q=bounds, lengths=lengths)
    out.last_hidden_state.sum().backward()


def head_step(model, tokens):
    """Forward and backward with the head: tokens [T] -> logprobs [T]."""
    model.zero_grad()
    found, _ = train.token_logprobs(model, tokens, np.arange(len(tokens)), 1.0)
    found.sum().backward()
    return found.detach()


def head():
    """The output head in chunks gives the same logprobs and gradient whatever their size; what each
    size costs beyond the model's body, forward and backward, and what a compiled head would cost.
    """
    shape = of_rehearsal(TINY, WIDE) | dict(num_hidden_layers=1)
    tokens = row(shape, of_rehearsal(512, 8192))["tokens"]
    sizes = of_rehearsal([15, 17], [24, 26, 28])
    model = random_model(shape, {}, cfg.Config(), torch.bfloat16)
    of_body, _ = measure(functools.partial(body_step, model, tokens))
    train.HEAD_ELEMENTS = 1 << 40
    reference = head_step(model, tokens)
    of_reference = model.lm_head.weight.grad.clone()
    for compiled in (False, True):
        if compiled and not CUDA:
            yield skipped("compiled", "the rehearsal compiles nothing")
            return
        if compiled:
            train.head_logprobs = torch.compile(train.head_logprobs)
        for size in sizes:
            train.HEAD_ELEMENTS = 1 << size
            name = "compiled, " * compiled + f"2^{size} logits at once"
            error = (head_step(model, tokens) - reference).abs().max().item()
            yield figure(f"{name}: logprobs, max", error, "nats", most=0.02)
            error = off(model.lm_head.weight.grad, of_reference)
            yield figure(f"{name}: d weight", error, "of its norm", most=0.02)
            seconds, peak = measure(functools.partial(head_step, model, tokens))
            yield figure(f"{name}: {len(tokens)} tokens", 1e3 * (seconds - of_body), "ms")
            yield figure(f"{name}: peak", peak / 1e9, "GB")


def estimated_bytes(shape, config):
    """Peak memory of a step as tools/memory.py computes it. ImportError while there is none."""
    from tools import memory

    return memory.peak_bytes(shape, config)


def memory(row_tokens):
    """A train_step takes as much memory on the GPU as tools/memory.py says, within 10%."""
    shape = of_rehearsal(TINY, WIDE)
    row_tokens = of_rehearsal(row_tokens // 32, row_tokens)
    name = of_rehearsal("tiny", "1.5b") + f", rows of {row_tokens}, checkpointing"
    records = [row(shape, row_tokens, seed) for seed in range(2)]
    config, model, optimizers = build(
        shape, "bfloat16", {}, gradient_checkpointing=True, row_tokens=row_tokens
    )
    step = functools.partial(train.train_step, model, optimizers, records, 0, config, DEVICE)
    _, peak = measure(step, repeats=1)
    yield figure(f"{name}: peak", peak / 1e9, "GB")
    try:
        estimate = estimated_bytes(shape, config)
    except ImportError:
        yield skipped(f"{name}: / estimate - 1", "no tools/memory.py")
        return
    if not CUDA:
        yield skipped(f"{name}: / estimate - 1", "only a GPU's allocator knows its peak")
        return
    yield figure(f"{name}: / estimate - 1", abs(peak / estimate - 1), most=0.1)


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
        wrong = sum(int(a != b) for a, b in zip(sums, expected))
        yield figure(f"{size} MB: buckets with a wrong checksum", wrong, most=0)
    sources = weights.bfloat16().split(MB)
    targets = [torch.empty_like(x) for x in sources]
    seconds, _ = measure(functools.partial(torch._foreach_copy_, targets, sources))
    yield figure("swap on the GPU (_foreach_copy_)", total / seconds / 1e9, "GB/s")
    seconds, _ = measure(functools.partial(checksum, weights.bfloat16()))
    yield figure("checksum", total / seconds / 1e9, "GB/s")
    yield skipped("broadcast over NCCL", "needs two GPUs")


def plan():
    """plumbing/plan.py on vLLM's model in GPU memory."""
    if importlib.util.find_spec("vllm") is None:
        yield skipped("Plan on vLLM's tensors", "vLLM is not installed")
        return
    yield skipped("Plan on vLLM's tensors", "not written")


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


def check(name, path):
    """One check, in this process: each figure is a line of the file as soon as it is there."""
    _, function, arguments = CHECKS[name]
    with open(path, "a") as file:
        for line in function(**arguments):
            file.write(json.dumps(line) + "\n")
            file.flush()


def run(name, limit, rehearse):
    """The lines of one check, in a process of its own; its last words if it breaks off."""
    path = WORK / "gpu" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
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
    p.add_argument("--check", choices=CHECKS, help="this one alone, in this process")
    a = p.parse_args(argv)
    a.quick |= a.rehearse
    if not CUDA and not a.rehearse:
        sys.exit("bench/gpu.py: torch sees no GPU: --rehearse runs the same lines on the CPU")
    if a.check:
        check(a.check, WORK / "gpu" / f"{a.check}.jsonl")
        return
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
            found[name] = run(name, min(CHECKS[name][0], left), a.rehearse)
        for line in found[name]:
            show(name, line)
        found[name][0]["seconds"] = round(time.monotonic() - start, 1)
        keep(result, dict(machine=f"{machine()}; {where}") | found)
    failed = [x for lines in found.values() for x in lines if x["status"].startswith("FAIL")]
    print(f"{os.path.relpath(result)}: {len(failed)} figures outside their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
