"""What a run takes of every GPU, before it starts: does it fit, and if not, what would?

    python tools/memory.py math --gpus 8 --gpu_memory_gb 80 [--model ... --any knob]

No GPU and no network: the five shapes of fake_step.SHAPES are known by name, other models by their
config.json. Exit code 3: it does not fit. A trainer's step is traced (tools/fake_step.py); the engine's
weights and KV cache and the update buffers are computed; a forward pass of the engine and what
CUDA and NCCL take are estimates. Nothing of this has been compared with a GPU. GB are 1e9 bytes.
Deliberately absent: vLLM's own accounting, which decides how large its KV cache really is.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import config as cfg
from plumbing import hardware, mismatch
from plumbing.transport import buckets
from tools.fake_step import SHAPES, model_config, parameter_shapes, traced

GB = 1e9
DOES_NOT_FIT = 3
# a process's CUDA context, NCCL's buffers, CUDA graphs, what the allocator cannot use: an assumption
RESERVE_GB = 2.0
ASSUMED = "CUDA, NCCL (assumed)"


def trainer_gb(c):
    """{what: GB} of a trainer rank, whatever the engines are."""
    engines = dict(engines=0, tensor_parallel=0, gpu_memory_utilization=0, weight_backend="auto")
    c = dataclasses.replace(c, **engines)
    return {what: size / GB for what, size in traced(dataclasses.astuple(c)).items()}


def forward_gb(model, tokens, sequences, parallel):
    """A forward pass without gradients, an estimate: the MLP's three [T, I], three [T, D] of 16 bits;
    logits of the last tokens, three times in float32.
    """
    trunk = 3 * (model.intermediate_size / parallel + model.hidden_size)
    logits = 3 * 4 * sequences * model.vocab_size
    return (2 * tokens * trunk + logits) / GB


@dataclasses.dataclass
class Placed:
    """A resolved config on so many GPUs of so many GB. All amounts are in GB."""

    c: cfg.Config
    gpus: int
    gpu_gb: float

    @functools.cached_property
    def roles(self):
        """{role: {what: GB}}, see the module's docstring."""
        c = self.c
        model = model_config(c.model)
        sizes = bucket_sizes_gb(c)
        weights = sum(sizes)
        rank = trainer_gb(c) | {ASSUMED: RESERVE_GB}
        rank_0 = dict(rank)
        served = weights / c.tensor_parallel
        batched = max(8192, c.max_model_len + c.concurrency)
        forward = forward_gb(model, batched, c.concurrency, c.tensor_parallel)
        engine = {"weights": served, "activations": forward, ASSUMED: RESERVE_GB}
        rest = c.gpu_memory_utilization * self.gpu_gb - sum(engine.values())
        engine["KV cache"] = c.kv_cache_gb or max(rest, 0)
        engine["update buffers"] = served
        # when the mismatch is measured, all logits of a prompt, in 16 and in 32 bits
        longest = min(mismatch.LONGEST, c.max_model_len)
        engine["logits of prompts"] = 6 * longest * model.vocab_size / GB
        if c.weight_backend == "nccl":
            # else buckets are in host memory
            rank_0["update buffers"] = 2 * max(sizes)
            engine["update buffers"] += max(sizes)
        found = {"trainer rank": rank, "rank 0": rank_0, "engine": engine}
        if c.kl_coef:
            # preprocess.py has it on the last rank's GPU
            reference = weights + forward_gb(model, c.row_tokens, 0, 1) + RESERVE_GB
            last = rank if c.trainers > 1 else rank_0
            found["last rank"] = last | {"reference model": reference}
        return found

    @property
    def totals(self):
        """{GPU: GB taken}; engine and trainer share the only one."""
        found = {role: sum(parts.values()) for role, parts in self.roles.items()}
        if self.gpus > 1:
            return found
        trainer = found.get("last rank", found["rank 0"])
        return {"engine and trainer": found["engine"] + trainer}

    @property
    def sequence_gb(self):
        """Keys and values of max_model_len tokens in one of an engine's GPUs."""
        c = self.c
        model = model_config(c.model)
        head_dim = getattr(model, "head_dim", None)
        head_dim = head_dim or model.hidden_size // model.num_attention_heads
        heads = max(model.num_key_value_heads / c.tensor_parallel, 1)
        per_layer = 2 * heads * head_dim * getattr(torch, c.dtype).itemsize
        return model.num_hidden_layers * per_layer * c.max_model_len / GB

    @property
    def lack(self):
        """(where, GB) of what lacks most; GB below 0 is to spare."""
        lacks = {gpu: total - self.gpu_gb for gpu, total in self.totals.items()}
        cache = self.roles["engine"]["KV cache"]
        if cache < self.sequence_gb:
            lacks["the KV cache of one sequence"] = self.sequence_gb - cache
        return max(lacks.items(), key=lambda item: item[1])

    def on_trainers(self):
        """GB taken of the fullest GPU that trains."""
        return max(total for gpu, total in self.totals.items() if gpu != "engine")

    def largest_row(self):
        """The largest row_tokens that fits, a multiple of 1024, extrapolated from this and half of it;
        0 if none does.
        """
        tokens = self.c.row_tokens
        half = self.but(row_tokens=tokens // 2)
        per_token = (self.on_trainers() - half.on_trainers()) / (tokens - tokens // 2)
        rows = tokens + (self.gpu_gb - self.on_trainers()) / per_token
        return max(int(rows // 1024) * 1024, 0)

    def but(self, **knobs):
        """The same with other knobs."""
        return dataclasses.replace(self, c=dataclasses.replace(self.c, **knobs))

    @property
    def static_gb(self):
        """Weights, gradients, optimizer of a trainer rank: 16 bytes a parameter over all ranks."""
        return 16 * parameters(self.c.model) / self.c.trainers / GB

    def hopeless(self):
        """These alone are too much: no need to trace."""
        return self.static_gb + RESERVE_GB > self.gpu_gb

    @property
    def fits(self):
        return not self.hopeless() and self.lack[1] <= 0

    def changes(self):
        """What may help, as knobs, in the order in which it is tried."""
        c = self.c
        if not c.gradient_checkpointing:
            yield dict(gradient_checkpointing=True)
        if c.max_model_len < c.row_tokens:
            yield dict(row_tokens=c.max_model_len)
        for utilization in (0.6, 0.5, 0.4, 0.3, 0.2):
            if utilization < c.gpu_memory_utilization:
                yield dict(gpu_memory_utilization=utilization)
        heads = model_config(c.model).num_attention_heads
        for parallel in filter(lambda n: heads % n == 0, (1, 2, 4, 8)):
            for engines in range(self.gpus // parallel, 0, -1):
                trainers = self.gpus - engines * parallel
                if parallel >= c.tensor_parallel and trainers >= c.trainers:
                    yield dict(engines=engines, tensor_parallel=parallel, trainers=trainers)
        for name in reversed(SHAPES):
            if parameters(f"Qwen2.5-{name}") < parameters(c.model):
                yield dict(model=f"Qwen/Qwen2.5-{name}")

    def advice(self):
        """The first of `changes` with which it fits, as flags."""
        for knobs in self.changes():
            changed = self.but(**knobs)
            if changed.fits:
                return "try " + " ".join(f"--{name} {value}" for name, value in knobs.items())
        return "it takes more GPUs, or larger ones"

    def verdict(self):
        if self.hopeless():
            what = f"weights, gradients and optimizer take {self.static_gb:.0f} GB of each trainer's GPU"
            return f"does not fit: {what} of {self.gpu_gb:.0f}; {self.advice()}"
        where, lack = self.lack
        if lack > 0:
            return f"does not fit: {where}: {lack:.2f} GB too little; {self.advice()}"
        return f"fits, with {-lack:.1f} of {self.gpu_gb:.0f} GB to spare ({where})"


def parameters(name):
    return sum(math.prod(shape) for shape in parameter_shapes(name))


def bucket_sizes_gb(c):
    """Of the buckets that weights travel in."""
    itemsize = getattr(torch, c.dtype).itemsize
    plan = buckets(parameter_shapes(c.model), itemsize, c.bucket_mb << 20)
    return [n * itemsize / GB for _, _, n in plan]


# ---------------------------------------------------------------------------- what is printed


def show(placed):
    """Print what every role takes."""
    c = placed.c
    billions = parameters(c.model) / 1e9
    print(
        f"{c.model}: {billions:.2f} billion parameters, {c.dtype}; {placed.gpus} x {placed.gpu_gb:.0f} GB: "
        f"--trainers {c.trainers} --engines {c.engines} --tensor_parallel {c.tensor_parallel}"
    )
    columns = [parts | {"total": sum(parts.values())} for parts in placed.roles.values()]
    print(f"{'GB':<24}" + "".join(f"{role:>14}" for role in placed.roles))
    lines = dict.fromkeys(what for parts in columns for what in parts if what != "total")
    for what in [*lines, "total"]:
        cells = [f"{parts[what]:.1f}" if parts.get(what) else "" for parts in columns]
        if any(cells):
            print(f"{what:<24}" + "".join(f"{cell:>14}" for cell in cells))
    sequences = placed.roles["engine"]["KV cache"] / placed.sequence_gb
    copy = billions * getattr(torch, c.dtype).itemsize
    print(
        f"KV cache of an engine: {sequences:.0f} sequences of {c.max_model_len} tokens, "
        f"of {c.concurrency} in progress"
    )
    print(f"host: {4 * billions:.0f} GB in every rank while it loads, then {copy:.0f} GB in rank 0")
    if not placed.hopeless():
        print(f"largest --row_tokens that fits: {placed.largest_row()}")


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
    # for run.sh: a resolved config as JSON on standard input; the verdict alone
    options.add_argument("--resolved", action="store_true")
    options.add_argument("--brief", action="store_true")
    given, words = options.parse_known_args(argv)
    gpus, gpu_gb = given.gpus, given.gpu_memory_gb
    # from here on no GPU is to be touched
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        cfg.require(gpus >= 1 and gpu_gb > 0, "--gpus and --gpu_memory_gb must be above 0")
        c = cfg.from_json(json.load(sys.stdin)) if given.resolved else resolved(words, gpus, gpu_gb)
    except cfg.ConfigError as e:
        sys.exit(f"memory: {e}")
    if model_config(c.model) is None:
        known = ", ".join(SHAPES)
        print(
            f"memory: not checked: {c.model} has no config.json here, and is no Qwen2.5 of {known}"
        )
        return
    placed = Placed(c, gpus, gpu_gb)
    if not given.brief:
        show(placed)
    print(f"memory: {c.model} {placed.verdict()}")
    if not placed.fits:
        sys.exit(DOES_NOT_FIT)


if __name__ == "__main__":
    main(sys.argv[1:])
