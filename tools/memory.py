"""What a run takes of every GPU, before it starts: does it fit, and if not, what would?

    python tools/memory.py math --gpus 8 --gpu_memory_gb 80 [--model ... --any knob]

No GPU and no network: the six SHAPES are known by name, other models by their config.json. Exit
code 1: it does not fit. All of it is arithmetic on the model's shape (`trainer_gb`,
`Placed.roles`), within 5% of a real process on a CPU; nothing has been compared with a GPU. GB are
1e9 bytes. Deliberately absent: vLLM's own accounting, which decides how large its KV cache really
is.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

import config as cfg
from plumbing import guards, placement
from train import head_chunk

GB = 1e9
# a process's CUDA context, NCCL's buffers, CUDA graphs, what the allocator cannot use: an
# assumption
RESERVE_GB = 2.0
ASSUMED = "CUDA, NCCL (assumed)"
TRAINER_PARTS = ("weights", "gradients", "optimizer", "activations", "gathered", "head")
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}


# ---- the model


@functools.cache
def model_config(name):
    """The transformers config of a model directory, a hub model in the cache, or one of SHAPES;
    None if there is none of these.
    """
    found = re.fullmatch(r"(?:.*/)?Qwen2\.5-([\d.]+B)(?:-Instruct)?", name)
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(name, local_files_only=True)
    if found and found[1] in SHAPES:
        return Qwen2Config(**dict(zip(FIELDS, SHAPES[found[1]])), max_position_embeddings=131072)


@functools.cache
def shapes(name):
    """{name of a parameter: its shape}."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name))
    return {name: p.shape for name, p in model.named_parameters()}


def parameters(name, part=""):
    """How many a model has, or those in whose names this is."""
    return sum(shape.numel() for key, shape in shapes(name).items() if part in key)


def adapters(c):
    """How many parameters the adapters of --lora_rank have."""
    matrices = [x for key, x in shapes(c.model).items() if ".layers." in key and len(x) == 2]
    return c.lora_rank * sum(map(sum, matrices))


def itemsize(c):
    return getattr(torch, c.dtype).itemsize


# ---- the trainer


def trainer_gb(c):
    """{what: GB} of a trainer rank at the peak of a step, whatever the engines are.

    A step (train.py) may have its peak where the gradient of the head's logits is computed, in the
    backward pass of the last layer or of the last one that is computed again, or where the
    gradients of what is in no layer are added up. The factors count what autograd keeps of a Qwen2
    layer: norms, queries, attention, gate and up. With adapters the norms keep less, and each
    linear layer its merged weights.
    """
    model = model_config(c.model)
    D, I, V = model.hidden_size, model.intermediate_size, model.vocab_size
    L = model.num_hidden_layers
    size = itemsize(c)
    tokens = size * c.row_tokens
    every = parameters(c.model)
    lora = c.lora_rank > 0
    trained = adapters(c) or every
    in_layers = parameters(c.model, ".layers.")
    # of a layer that is computed again its input is kept
    again = min(c.checkpointed_layers, L)
    inputs = (min(again, 2) if c.offload_activations else again) * tokens * D
    merged = lora * size * in_layers / L
    whole = min(L - again, 1) if c.offload_activations else L - again
    kept = inputs + whole * (tokens * (4 * I + (10.5 - 2 * lora) * D) + merged)
    # FSDP2 holds in the compute dtype what it computes with: a few layers, and all that is in none
    several = c.trainers > 1
    sharded = several or size < 4
    root = sharded * size * (every - in_layers)
    layer = sharded * size * in_layers / L
    # logprobs of all tokens in float32, their gradient and that of the logits; in 16 bits that of
    # the head's matrix, too
    logits = (12 if size == 4 or lora else 16) + 8 * (c.entropy_coef > 0)
    head = logits * V * min(c.row_tokens, head_chunk(V, D))
    trained_head = size * V * D * (not lora)
    in_backward = (root + ((1 if lora else 3) + several) * layer + 0.65 * merged, trained_head)
    # activations, gathered, head
    peaks = [
        (kept, root + several * layer, head),
        (kept + tokens * 2 * I * (again < L), *in_backward),
        (inputs + tokens * (6 * I + (12 - 2 * lora) * D) * (again > 0), *in_backward),
        (0, 4 * root * (not lora), 3 * trained_head * (not sharded)),
    ]
    frozen = lora * size * every / c.trainers
    each = trained / c.trainers
    moments = 2 * (1 + 4 / 256) if c.adam_8bit else 8
    amounts = (frozen + 4 * each, 4 * each, moments * each, *max(peaks, key=sum))
    return {what: amount / GB for what, amount in zip(TRAINER_PARTS, amounts)}


# ---- all of a run


def forward_gb(model, tokens, sequences, parallel):
    """A forward pass without gradients, an estimate: the MLP's three [T, I], three [T, D] of 16
    bits; logits of the last tokens, three times in float32.
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
        weights = itemsize(c) * parameters(c.model) / GB
        served = weights / c.tensor_parallel
        batched = max(8192, c.max_model_len + c.concurrency)
        forward = forward_gb(model, batched, c.concurrency, c.tensor_parallel)
        engine = {"weights": served, "activations": forward, ASSUMED: RESERVE_GB}
        rest = c.gpu_memory_utilization * self.gpu_gb - sum(engine.values())
        engine["KV cache"] = c.kv_cache_gb or max(rest, 0)
        engine["update buffers"] = served
        # when the mismatch is measured, all logits of a prompt, in 16 and in 32 bits
        longest = min(guards.LONGEST, c.max_model_len)
        engine["logits of prompts"] = 6 * longest * model.vocab_size / GB
        rank = trainer_gb(c) | {ASSUMED: RESERVE_GB}
        rank_0 = dict(rank)
        if c.weight_backend == "nccl":
            # else buckets are in host memory
            largest = itemsize(c) * max(shape.numel() for shape in shapes(c.model).values())
            bucket = max(c.bucket_mb << 20, largest) / GB
            rank_0["update buffers"] = 2 * bucket
            engine["update buffers"] += bucket
        found = {"trainer rank": rank, "rank 0": rank_0, "engine": engine}
        # their own forward passes end before the policy's begins; under adapters the base model is
        # there
        others = {"reference model": c.model} if c.kl_coef and not c.lora_rank else {}
        if c.teacher:
            others["teacher"] = c.teacher
        for what, name in others.items():
            rank[what] = rank_0[what] = itemsize(c) * parameters(name) / GB / c.trainers
        return found

    @property
    def totals(self):
        """{GPU: GB taken}; engine and trainer share the only one."""
        found = {role: sum(parts.values()) for role, parts in self.roles.items()}
        both = found["engine"] + found["rank 0"]
        return found if self.gpus > 1 else {"engine and trainer": both}

    @property
    def sequence_gb(self):
        """Keys and values of max_model_len tokens in one of an engine's GPUs."""
        c = self.c
        model = model_config(c.model)
        head_dim = model.hidden_size // model.num_attention_heads
        head_dim = getattr(model, "head_dim", None) or head_dim
        heads = max(model.num_key_value_heads / c.tensor_parallel, 1)
        per_token = 2 * model.num_hidden_layers * heads * head_dim * itemsize(c)
        return per_token * c.max_model_len / GB

    @property
    def lack(self):
        """(where, GB) of what lacks most; GB below 0 is to spare."""
        lacks = {gpu: total - self.gpu_gb for gpu, total in self.totals.items()}
        cache = self.roles["engine"]["KV cache"]
        lacks["the KV cache of one sequence"] = self.sequence_gb - cache
        return max(lacks.items(), key=lambda item: item[1])

    @property
    def fits(self):
        return self.lack[1] <= 0

    def but(self, **knobs):
        """The same with other knobs."""
        return dataclasses.replace(self, c=dataclasses.replace(self.c, **knobs))

    def changes(self):
        """What may help, as knobs, in the order in which it is tried."""
        c = self.c
        for layers in range(model_config(c.model).num_hidden_layers + 1):
            yield dict(checkpointed_layers=layers)
        yield dict(row_tokens=min(c.max_model_len, c.row_tokens))
        for utilization in (0.6, 0.5, 0.4, 0.3, 0.2):
            if utilization < c.gpu_memory_utilization:
                yield dict(gpu_memory_utilization=utilization)
        heads = model_config(c.model).num_attention_heads
        for parallel in (1, 2, 4, 8):
            for engines in range(self.gpus // parallel, 0, -1):
                trainers = self.gpus - engines * parallel
                enough = parallel >= c.tensor_parallel and trainers >= c.trainers
                if enough and heads % parallel == 0:
                    yield dict(engines=engines, tensor_parallel=parallel, trainers=trainers)
        if not c.lora_rank:
            yield dict(lora_rank=32)

    def verdict(self):
        where, lack = self.lack
        if lack <= 0:
            return f"fits, with {-lack:.1f} of {self.gpu_gb:.0f} GB to spare ({where})"
        advice = "it takes more GPUs, or larger ones"
        for knobs in self.changes():
            if self.but(**knobs).fits:
                advice = "try " + " ".join(f"--{name} {value}" for name, value in knobs.items())
                break
        return f"does not fit: {where}: {lack:.2f} GB too little; {advice}"

    def describe(self):
        """Print what every role takes."""
        c = self.c
        print(f"{c.model}: {parameters(c.model) / 1e9:.2f} billion parameters, {c.dtype}")
        print(
            f"--trainers {c.trainers} --engines {c.engines} --tensor_parallel {c.tensor_parallel}"
        )
        for role, parts in self.roles.items():
            words = " + ".join(f"{gb:.1f} {what}" for what, gb in parts.items())
            print(f"{role}: {sum(parts.values()):.1f} GB = {words}")
        sequences = self.roles["engine"]["KV cache"] / self.sequence_gb
        of = f"of {c.max_model_len} tokens, of {c.concurrency} in progress"
        print(f"KV cache of an engine: {sequences:.0f} sequences {of}")


# ---- the command line


def main(argv):
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--gpus", type=int, default=placement.gpu_count() or 8)
    options.add_argument("--gpu_memory_gb", type=float, default=80.0)
    given, words = options.parse_known_args(argv)
    # from here on no GPU is to be touched
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        c = placement.resolve(cfg.parse(words, about=__doc__), given.gpus)
    except cfg.ConfigError as e:
        sys.exit(f"memory: {e}")
    for name in {c.model, c.teacher} - {""}:
        if model_config(name) is None:
            print(f"memory: not checked: {name} has no config.json here, and is no known Qwen2.5")
            return
    placed = Placed(c, given.gpus, given.gpu_memory_gb)
    placed.describe()
    print(f"memory: {c.model} {placed.verdict()}")
    if not placed.fits:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
