"""What one GPU can prove in ten minutes, without the internet: parity, gradients, MFU, memory.

    bash bench/gpu.sh [--only parity mfu-1.5b-16k ...] [--minutes 9.5] [--rehearse] [--out DIR]

Each check is a function below whose docstring says what it proves. It has a process of its own, so that
memory that runs out or a crash costs the others nothing and peaks are its own, and a time limit. gpu.json
is written after every check; what a check says is in out/bench/gpu-<check>.log. All weights are random;
torch, transformers and this checkout are enough. `--rehearse` runs the same lines on the CPU with tiny
shapes; its times mean nothing. Deliberately absent: vLLM (`bash run.sh doctor` looks at that), several GPUs.
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

# before this folder, whose train.py is not the one meant
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import Qwen2ForCausalLM

# the trainer imports them to call engines and to count ranks, of which there are none and one
for name in ("requests", "accelerate"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.SimpleNamespace(PartialState=None)

import config as cfg
import train
from bench.common import WORK, keep, machine, parser, result_file
from bench.train import CUDA, DEVICE, PEAK_FLOPS, SMALL, WIDE, draw, flops, model_config, one_step
from plumbing.model import flash_runs_on, packed_attention
from plumbing.samples import TOKEN_FIELDS, join

TINY = SMALL | dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
# Qwen2.5-7B
SEVEN = WIDE | dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944)
SEVEN |= dict(num_attention_heads=28, num_key_value_heads=4)
# logits and attention scores about as sharp as a trained model's
SHARP = dict(initializer_range=0.04)
GROUPS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norm")


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
    return float(np.median(times)), peak


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
        backend = on_gpu("nccl", "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
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


# ---- attention, logprobs, gradients


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
    kernel = int(flash_runs_on(rounded[0]))
    yield figure(case, ": varlen_attn runs", kernel, least=on_gpu(1, 0))
    expected = sdpa(*exact, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    packing = (None, bounds, bounds, lengths, lengths)
    got, _ = packed_attention(None, *rounded, None, packing, sliding_window=window or None)
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


def parity():
    """bfloat16 token_logprobs of a packed row, on the model as train.build makes it, against the same
    sequences one by one: packing adds no more error than bfloat16 has anyway (sdpa, one by one,
    against float32). The last two begin alike.
    """
    shape = on_gpu(WIDE | dict(num_hidden_layers=4), TINY)
    lengths = on_gpu([1, 2, 3, 127, 128, 129, 1000, 2706], [1, 2, 3, 17, 40, 65])
    torch.manual_seed(1)
    sequences = [torch.randint(shape["vocab_size"], (n,)) for n in lengths]
    sequences[-1][: lengths[-2] // 2] = sequences[-2][: lengths[-2] // 2]
    _, model, _ = build(shape, "float32", SHARP)
    in_row = packed(model, sequences)
    model.set_attn_implementation("sdpa")
    exact = alone(model, sequences)
    yield from apart("float32: packed - alone", in_row, exact, torch.tensor([1e-4]))
    _, model, _ = build(shape, "bfloat16", SHARP)
    in_row = packed(model, sequences)
    one_by_one = alone(model, sequences)
    model.set_attn_implementation("sdpa")
    of_sdpa = alone(model, sequences)
    model.set_attn_implementation("packed")
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
    loss, _, _ = train.micro_batch(model, record, 0, config, DEVICE)
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


# ---- MFU and memory


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
            shape, "bfloat16", changed, checkpointed_layers=1000 * gradient_checkpointing
        )
        if size == "7b":
            optimizers = []
        step = functools.partial(one_step, model, optimizers, config, DEVICE, records)
        seconds, peak = measure(step, repeats=on_gpu(2, 1))
    except torch.OutOfMemoryError:
        yield skipped(case, "out of memory")
        return
    lengths = np.concatenate([record["lengths"] for record in records])
    share = flops(shape, lengths) / seconds / PEAK_FLOPS
    yield figure(case, ": MFU", share, least=on_gpu(goal, None))
    yield figure(case, ": tokens/s", rows * row_tokens / seconds)
    if CUDA:
        yield figure(case, ": peak", peak / 1e9, "GB")


# ---- running them

# {name: (seconds it may take, function, *arguments)}, what matters most first
CHECKS = {
    "attention": (90, attentions),
    "parity": (90, parity),
    "gradients": (90, gradients),
    "mfu-1.5b-16k": (90, mfu, "1.5b", 16384, False, 0.45),
    "mfu-1.5b-64k": (90, mfu, "1.5b", 65536, True),
    "mfu-7b-16k": (120, mfu, "7b", 16384, True),
    "mfu-7b-64k": (120, mfu, "7b", 65536, True),
    "mfu-1.5b-16k-checkpointing": (60, mfu, "1.5b", 16384, True),
    "mfu-7b-16k-keeping": (60, mfu, "7b", 16384, False),
}


def run(name, limit, rehearse):
    """The lines of one check, in a process of its own; its last words if it breaks off."""
    command = [sys.executable, __file__, "--check", name, *["--rehearse"] * rehearse]
    WORK.mkdir(parents=True, exist_ok=True)
    log = WORK / f"gpu-{name}.log"
    with open(log, "w") as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True)
        # its figures come as they are measured
        timer = threading.Timer(limit, process.kill)
        timer.start()
        lines = [json.loads(line) for line in process.stdout if line.startswith("{")]
        timer.cancel()
    if process.wait():
        last = (log.read_text().strip().splitlines() or ["no word"])[-1]
        if process.returncode < 0:
            last = f"ended by signal {-process.returncode}, the limit is {limit:.0f} s"
        lines.append(skipped("all of it", "") | dict(status=f"FAIL ({last})"))
    return lines


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    p.add_argument("--minutes", type=float, default=9.5, help="what is not done by then is skipped")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    p.add_argument("--check", choices=CHECKS, help="this one, in this process: a line of JSON each")
    a = p.parse_args(argv)
    a.quick |= a.rehearse
    if not CUDA and not a.rehearse:
        sys.exit("bench/gpu.py: torch sees no GPU: --rehearse runs the same lines on the CPU")
    if a.check:
        _, function, *arguments = CHECKS[a.check]
        for line in function(*arguments):
            print(json.dumps(line), flush=True)
        # as in train.py: threads of gloo and NCCL may still be at work
        os._exit(0)
    deadline = time.monotonic() + 60 * a.minutes
    where = torch.cuda.get_device_name() if CUDA else "rehearsal on the CPU"
    print(f"{machine()}; {where}")
    result = result_file(a, "gpu")
    found = {"machine": f"{machine()}; {where}"}
    for name in a.only:
        left = deadline - time.monotonic()
        lines = [skipped("all of it", f"{a.minutes:g} minutes are over")]
        if left > 10:
            limit = on_gpu(1, 10) * CHECKS[name][0]
            lines = run(name, min(limit, left), a.rehearse)
        for line in lines:
            value = "" if line["value"] is None else f"{line['value']:.4g} {line['unit']}"
            cells = f"{name:27} {line['what']:51} {value:>18} {line['limit']:>10}"
            print(f"{cells}  {line['status']}", flush=True)
        found[name] = lines
        keep(result, found)
    every = [line for name in a.only for line in found[name]]
    failed = sum(line["status"].startswith("FAIL") for line in every)
    print(f"{os.path.relpath(result)}: {failed} figures outside their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
