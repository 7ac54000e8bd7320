"""What a run takes of every GPU, before it starts: does it fit, and if not, what would.

    python tools/memory.py math --gpus 8 --gpu_memory_gb 80 [--model ... --any knob]
    python tools/memory.py --table      # Qwen2.5 from 0.5B to 32B on 1 to 16 GPUs of 80 GB

No GPU, no network: the five shapes of SHAPES are known by name, other models by their config.json.
Exit code 3: it does not fit.

**The trainer is traced.** `train.build` and two steps of `train.train_step` run on fake tensors (shapes
without contents) in a fake process group, and `Tracker` adds up the storages that are alive. The
second step has two micro-batches, as gradients are there from the first one on. Layers are alike,
so that peaks are linear in their number beyond the few that FSDP2 holds at a time: deep models are
traced at two of DEPTHS. What is traced is what a GPU runs, but for the device: autograd refuses
fake `cuda` tensors on a build without CUDA, so they are fake CPU tensors that take the
GPU's branch of plumbing/attention.py. Its `varlen_attn` says which tensors FlashAttention returns
and keeps (q, k, v, out, lse). AdamW is not the fused one here, and needs a parameter more at a time.

**The rest is computed**: the engine's weights and KV cache, update buffers, and what RESERVE_GB and
`forward_gb` say, which are estimates. Nothing of this has been compared with a GPU; float32 on
CPU is compared with a process's real peak in tests/test_memory.py. GB are 1e9 bytes.
Deliberately absent: fragmentation of the allocator beyond RESERVE_GB, vLLM's own accounting.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
import weakref
from pathlib import Path
from unittest import mock

# nothing here may touch a GPU or a hub
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

import config as cfg
import train
from plumbing import attention, hardware
from plumbing.samples import join
from plumbing.wire import buckets

GB = 1e9
DOES_NOT_FIT = 3
# a process's CUDA context, NCCL's buffers, CUDA graphs, blocks the allocator cannot use: an assumption
RESERVE_GB = 2.0
# deeper models are traced with so many layers, and extrapolated
DEPTHS = (4, 6)
# tensors of fewer elements that do not come from fake ones keep their contents: these steer the code
SMALL = 1 << 16
# Qwen2.5: hidden, intermediate, layers, heads, KV heads, vocabulary, tied embeddings
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}


# ---------------------------------------------------------------------------- the model's shape


@functools.cache
def model_config(name):
    """The transformers config of a model directory, a hub model in the cache, or one of SHAPES; None
    if there is none of these.
    """
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        found = re.fullmatch(r"(?:.*/)?Qwen2\.5-([\d.]+B)(?:-Instruct)?", name)
    if not found or found[1] not in SHAPES:
        return None
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[found[1]]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


def with_layers(model, layers):
    """The same model with fewer layers."""
    values = model.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(model)(**values)


def empty_model(model, dtype):
    """A causal LM of fake tensors with attention for packed rows; call it in a FakeTensorMode."""
    return AutoModelForCausalLM.from_config(model, dtype=dtype, attn_implementation="packed")


@functools.cache
def parameter_shapes(name):
    """Shapes of all parameters of a model, in order."""
    with FakeTensorMode():
        model = empty_model(model_config(name), torch.bfloat16)
    return [list(p.shape) for p in model.parameters()]


# ---------------------------------------------------------------------------- the trainer, traced


def tensors_in(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


class Tracker(TorchDispatchMode):
    """Runs operations on fake tensors and adds up the storages that are alive.

    alive: {kind: bytes}; kinds are "head" (shapes with the vocabulary in them), "gathered" (FSDP2's flat
    buffers) and "activations" (all others). `at_peak` is a copy of it from when their sum was largest.
    A number that the code asks of a fake tensor is 1.
    """

    def __init__(self, vocabulary):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.vocabulary = vocabulary
        # storage -> (kind, bytes)
        self.storages = {}
        self.alive = dict.fromkeys(("activations", "gathered", "head"), 0)
        self.at_peak = dict(self.alive)

    def __torch_dispatch__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(c, DTensor) for c in classes):
            # what it does to its local tensors comes here, too
            return NotImplemented
        inputs = tensors_in((args, kwargs))
        fake = any(isinstance(x, FakeTensor) for x in inputs)
        if fake and func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=inputs[0].dtype).item()
        if inputs and not fake:
            out = func(*args, **kwargs)
        else:
            with self.fake:
                out = func(*args, **kwargs)
            if not inputs and sum(x.numel() for x in tensors_in(out)) < SMALL:
                out = func(*args, **kwargs)
        for x in tensors_in(out):
            self.count(x.untyped_storage(), self.kind(func, x.shape))
        return out

    def kind(self, func, shape):
        if self.vocabulary in shape:
            return "head"
        flat = len(shape) == 1 and func.overloadpacket is torch.ops.aten.empty
        return "gathered" if flat else "activations"

    def count(self, storage, kind):
        """It is alive, with the size that it has now."""
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = (kind, 0)
            weakref.finalize(storage, self.forget, key)
        kind, before = self.storages[key]
        self.storages[key] = (kind, storage.nbytes())
        self.alive[kind] += storage.nbytes() - before
        if sum(self.alive.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(self.alive)

    def forget(self, key):
        kind, size = self.storages.pop(key)
        self.alive[kind] -= size

    def resize(self, storage, size):
        """In place of UntypedStorage.resize_, with which FSDP2 frees memory and takes it again."""
        RESIZE(storage, size)
        self.count(storage, "gathered")


RESIZE = torch.UntypedStorage.resize_


def row(tokens, longest):
    """A micro-batch of so many tokens, in sequences of at most `longest`."""
    lengths = [longest] * (tokens // longest) + [tokens % longest]
    samples = []
    for n in filter(None, lengths):
        per_token = dict(tokens=np.zeros(n), logprobs=np.zeros(n), ref_logprobs=np.zeros(n))
        per_token |= dict(mask=np.ones(n), versions=np.zeros(n))
        scalars = dict(task=0, temperature=1, reward=0, outcome=0, finished=1)
        samples.append(per_token | scalars | dict(num_versions=1, advantage=0))
    return join(samples)


def local_bytes(tensors):
    """Bytes of this rank's part of tensors."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return sum(x.numel() * x.element_size() for x in local)


def trace(c, model):
    """Bytes of a trainer rank by kind at the peak of a step, and of `push`: what gathering the largest
    parameter adds to what stays between steps.

    c: resolved Config; model: its transformers config.
    """
    sharded = c.trainers > 1 or c.dtype != "float32"
    if sharded:
        dist.init_process_group("fake", rank=0, world_size=c.trainers)
    tracker = Tracker(model.vocab_size)

    def load_model(config, dtype):
        with tracker.fake:
            made = empty_model(model, dtype)
        made.head_float32 = config.head_float32
        # torch cannot move fake parameters; these are where they belong
        made.to = lambda device: made
        return made

    def flash_runs_on(x):
        return x.dtype != torch.float32

    device = torch.device("cpu")
    small = row(8, 8)
    large = row(c.row_tokens, min(c.row_tokens, c.max_model_len))
    with (
        mock.patch.object(train, "load_model", load_model),
        mock.patch.object(attention, "flash_runs_on", flash_runs_on),
        mock.patch.object(torch.UntypedStorage, "resize_", lambda s, n: tracker.resize(s, n)),
        tracker,
    ):
        policy, optimizers = train.build(c, device, c.trainers)
        for p in policy.parameters():
            local = p.to_local() if sharded else p
            tracker.count(local.untyped_storage(), "activations")
        # makes the optimizer's state, and DTensor's plans, for which it runs on unsharded shapes
        train.train_step(policy, optimizers, [small], 0, c, device)
        tracker.at_peak = dict(tracker.alive)
        train.train_step(policy, optimizers, [small, large], 1, c, device)
        peak = tracker.at_peak
        between = dict(tracker.alive)
        tracker.at_peak = between
        if sharded:
            max(policy.parameters(), key=torch.Tensor.numel).full_tensor()
        gathering = sum(tracker.at_peak.values()) - sum(between.values())
        found = {
            "weights": local_bytes(policy.parameters()),
            "gradients": local_bytes(p.grad for p in policy.parameters()),
            "optimizer": local_bytes(
                x for o in optimizers for s in o.state.values() for x in s.values()
            ),
        }
    if sharded:
        dist.destroy_process_group()
    step = {kind: peak[kind] - between[kind] for kind in peak}
    # if gathering an update needs more than a step, by so much
    step["gathering an update"] = max(gathering - sum(step.values()), 0)
    return found | step


@functools.cache
def traced(knobs):
    """`trace` of Config(*knobs); of a deep model extrapolated from two shallow ones."""
    c = cfg.Config(*knobs)
    model = model_config(c.model)
    layers = model.num_hidden_layers
    if layers <= DEPTHS[1]:
        return trace(c, model)
    low, high = (trace(c, with_layers(model, n)) for n in DEPTHS)
    times = (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    return {kind: high[kind] + times * (high[kind] - low[kind]) for kind in high}


def trainer_bytes(c):
    """What `traced` says of this config, whatever its engines are."""
    c = dataclasses.replace(c, engines=0, tensor_parallel=0, gpu_memory_utilization=0)
    return traced(dataclasses.astuple(c))


# ---------------------------------------------------------------------------- roles, computed


def forward_gb(model, tokens, sequences, parallel):
    """A forward pass without gradients, an estimate: the MLP's three [T, I], three [T, D] of 16 bits;
    logits of the last tokens, three times in float32.
    """
    trunk = 3 * (model.intermediate_size / parallel + model.hidden_size)
    return (2 * tokens * trunk + 12 * sequences * model.vocab_size) / GB


def kv_bytes(c, model):
    """Bytes of a token's keys and values in one of an engine's GPUs."""
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = max(model.num_key_value_heads / c.tensor_parallel, 1)
    return 2 * model.num_hidden_layers * heads * head * getattr(torch, c.dtype).itemsize


def roles(c, gpu_gb):
    """{role: {what: GB}} of every kind of GPU in a run. c: resolved Config."""
    model = model_config(c.model)
    itemsize = getattr(torch, c.dtype).itemsize
    shapes = parameter_shapes(c.model)
    plan = buckets(shapes, itemsize, c.bucket_mb << 20)
    weights = itemsize * sum(n for _, _, n in plan) / GB
    bucket = itemsize * max(n for _, _, n in plan) / GB
    over_nccl = c.weight_backend == "nccl"

    rank = {kind: size / GB for kind, size in trainer_bytes(c).items()}
    rank["CUDA, NCCL (assumed)"] = RESERVE_GB
    rank_0 = rank | {"update buffers": 2 * bucket if over_nccl else 0}
    served = weights / c.tensor_parallel
    engine = {
        "weights": served,
        "activations": forward_gb(
            model, max(8192, c.max_model_len), c.concurrency, c.tensor_parallel
        ),
        "CUDA, NCCL (assumed)": RESERVE_GB,
    }
    rest = c.gpu_memory_utilization * gpu_gb - sum(engine.values())
    engine["KV cache"] = c.kv_cache_gb or max(rest, 0)
    engine["update buffers"] = served + bucket if over_nccl else 0
    found = {"trainer rank": rank, "rank 0": rank_0, "engine": engine}
    if c.kl_coef:
        # preprocess.py has it on the last rank's GPU
        reference = weights + forward_gb(model, c.row_tokens, 0, 1) + RESERVE_GB
        found["last rank"] = rank | {"reference model": reference}
    return found


def on_one_gpu(c, gpus, found):
    """{GPU: GB} of every kind of GPU: engine and trainer share the only one."""
    totals = {role: sum(parts.values()) for role, parts in found.items()}
    if gpus > 1:
        return totals
    reference = found.get("last rank", {}).get("reference model", 0)
    return {"the shared GPU": totals["rank 0"] + totals["engine"] + reference}


def sequences(c, found):
    """How many sequences of max_model_len fit the KV cache of an engine."""
    cache = found["engine"]["KV cache"] * GB
    return cache / (kv_bytes(c, model_config(c.model)) * c.max_model_len)


def lacking(c, gpus, gpu_gb):
    """What does not fit: (where, GB that lack), the worst; (..., 0 or less) if all fits."""
    found = roles(c, gpu_gb)
    lacks = {gpu: total - gpu_gb for gpu, total in on_one_gpu(c, gpus, found).items()}
    cache = found["engine"]["KV cache"]
    one = cache / max(sequences(c, found), 1e-9)
    lacks["the KV cache of one sequence"] = one - cache if cache < one else -gpu_gb
    return max(lacks.items(), key=lambda item: item[1])


# ---------------------------------------------------------------------------- what would fit


def largest_row(c, gpus, gpu_gb):
    """The largest row_tokens that fits, a multiple of 1024, extrapolated from this row and half of it; 0
    if none does.
    """
    half = dataclasses.replace(c, row_tokens=c.row_tokens // 2)
    used, used_by_half = (
        max(on_one_gpu(x, gpus, trainers_only(roles(x, gpu_gb), gpus)).values()) for x in (c, half)
    )
    per_token = (used - used_by_half) / (c.row_tokens - half.row_tokens)
    rows = c.row_tokens + (gpu_gb - used) / per_token
    return max(int(rows // 1024) * 1024, 0)


def trainers_only(found, gpus):
    """The roles without engines that have GPUs of their own."""
    return found if gpus == 1 else {role: x for role, x in found.items() if role != "engine"}


def changes(c, gpus):
    """Knobs that may help, as dicts, in the order in which they are tried."""
    if not c.gradient_checkpointing:
        yield dict(gradient_checkpointing=True)
    for utilization in (0.6, 0.5, 0.4, 0.3, 0.2):
        if utilization < c.gpu_memory_utilization:
            yield dict(gpu_memory_utilization=utilization)
    if c.max_model_len < c.row_tokens:
        yield dict(row_tokens=c.max_model_len)
    for parallel in (2, 4, 8):
        if parallel > c.tensor_parallel:
            for engines in range(gpus // parallel, 0, -1):
                yield dict(tensor_parallel=parallel, engines=engines)
    for engines in range(c.engines - 1, 0, -1):
        yield dict(engines=engines)
    for name in reversed(SHAPES):
        if parameters(f"Qwen2.5-{name}") < parameters(c.model):
            yield dict(model=f"Qwen/Qwen2.5-{name}")


def parameters(name):
    return sum(int(np.prod(shape)) for shape in parameter_shapes(name))


def advice(c, gpus, gpu_gb):
    """The first of `changes` with which it fits, as flags."""
    for knobs in changes(c, gpus):
        tried = dataclasses.replace(c, **knobs)
        if gpus > 1:
            tried.trainers = gpus - tried.engines * tried.tensor_parallel
            knobs = knobs | {"trainers": tried.trainers} if "engines" in knobs else knobs
        # weights, gradients, optimizer: no need to trace what these alone make too large
        least = 16 * parameters(tried.model) / max(tried.trainers, 1) / GB + RESERVE_GB
        if tried.trainers >= 1 and least < gpu_gb and lacking(tried, gpus, gpu_gb)[1] <= 0:
            return " ".join(f"--{name} {value}" for name, value in knobs.items())
    return "more GPUs, or larger ones"


# ---------------------------------------------------------------------------- what is printed


def report(c, gpus, gpu_gb):
    """The tables' lines, the last of which is the verdict; and does it fit?"""
    found = roles(c, gpu_gb)
    size = parameters(c.model)
    lines = [
        f"{c.model}: {size / 1e9:.2f}G parameters, {c.dtype}; {c.trainers} trainer ranks, "
        f"{c.engines} engines of {c.tensor_parallel} GPUs; {gpus} GPUs of {gpu_gb:.0f} GB",
        f"{'GB':<28}" + "".join(f"{role:>14}" for role in found),
    ]
    for what in dict.fromkeys(what for parts in found.values() for what in parts):
        cells = [parts.get(what, 0) for parts in found.values()]
        if any(cells):
            lines.append(f"{what:<28}" + "".join(f"{x:14.1f}" if x else " " * 14 for x in cells))
    totals = [sum(parts.values()) for parts in found.values()]
    lines.append(f"{'total':<28}" + "".join(f"{x:14.1f}" for x in totals))
    if gpus == 1:
        both = on_one_gpu(c, gpus, found)
        lines += [f"{gpu + ', all of it':<28}{x:14.1f}" for gpu, x in both.items()]
    lines.append(
        f"an engine's KV cache holds {sequences(c, found):.0f} sequences of {c.max_model_len} tokens "
        f"({c.concurrency} in progress)"
    )
    copy = size * getattr(torch, c.dtype).itemsize / GB
    lines.append(
        f"host memory: {4 * size / GB:.0f} GB a trainer rank while it loads, then {copy:.0f} GB in rank 0"
    )
    lines.append(f"rows of up to {largest_row(c, gpus, gpu_gb)} tokens fit (--row_tokens)")
    where, lack = lacking(c, gpus, gpu_gb)
    verdict = f"fits, {-lack:.1f} GB to spare on the fullest GPU ({where})"
    if lack > 0:
        verdict = (
            f"does not fit: {where} lacks {lack:.1f} of {gpu_gb:.0f} GB; "
            f"try {advice(c, gpus, gpu_gb)}"
        )
    return [*lines, f"memory: {c.model} {verdict}"], lack <= 0


def table():
    """Markdown: each of SHAPES on 1 to 16 GPUs, half of which train, with the knobs of `math`."""
    counts = (1, 2, 4, 8, 16)
    print("| Qwen2.5 | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for name in SHAPES:
        cells = []
        for gpus in counts:
            c = resolved(["math", "--model", f"Qwen/Qwen2.5-{name}"], gpus, 80.0)
            used = max(on_one_gpu(c, gpus, trainers_only(roles(c, 80.0), gpus)).values())
            where, lack = lacking(c, gpus, 80.0)
            rows = largest_row(c, gpus, 80.0)
            verdict = "fits" if lack <= 0 else f"**lacks {lack:.0f}** ({where})"
            cells.append(f"{used:.0f} GB, {verdict}; rows of {rows}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


# ---------------------------------------------------------------------------- the command line


def resolved(words, gpus, gpu_gb):
    """The Config of a command line, as run.sh resolves it on these GPUs."""
    c = cfg.parse(words, gpus, gpu_gb=gpu_gb)
    # nothing is started: no ports are needed
    c.dry_run = True
    return hardware.resolve(c, gpus)


def main(argv):
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--gpus", type=int, default=hardware.gpu_count() or 8)
    options.add_argument("--gpu_memory_gb", type=float, default=hardware.gpu_memory_gb() or 80.0)
    options.add_argument("--table", action="store_true")
    # a resolved config as JSON on standard input, from run.sh
    options.add_argument("--resolved", action="store_true")
    given, words = options.parse_known_args(argv)
    gpus, gpu_gb = given.gpus, given.gpu_memory_gb
    try:
        cfg.need(gpus >= 1 and gpu_gb > 0, "--gpus and --gpu_memory_gb must be above 0")
        if given.table:
            return table()
        c = cfg.from_json(json.load(sys.stdin)) if given.resolved else resolved(words, gpus, gpu_gb)
    except cfg.ConfigError as e:
        sys.exit(f"memory: {e}")
    if model_config(c.model) is None:
        known = ", ".join(SHAPES)
        print(
            f"memory: not checked: {c.model} has no config.json here, and is no Qwen2.5 of {known}"
        )
        return
    lines, fits = report(c, gpus, gpu_gb)
    print("\n".join(lines))
    if not fits:
        sys.exit(DOES_NOT_FIT)


if __name__ == "__main__":
    main(sys.argv[1:])
