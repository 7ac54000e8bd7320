"""Estimate the memory that a run takes of every GPU: does it fit, and if not, what would?

    python tools/memory.py math --gpus 8 --gpu_memory_gb 80 [--model ... --any knob]

The program needs no GPU and no network: it knows the six SHAPES by name, and other models by their
config.json. The exit code is 1 if the run does not fit. All numbers are arithmetic on the model's
shape (`trainer_gb`, `Placed.roles`), within 5% of a real process on a CPU, and within 1% of one
measured step on a GPU (1.5B parameters, tensors alone). GB are 1e9 bytes. Deliberately absent:
vLLM's own accounting, which decides how large its KV cache really is.
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
from plumbing import checkpoints, engine_flags, guards, placement
from plumbing.model import decoder_of, layers_of
from plumbing.routing import expert_blocks
from train import head_chunk

GB = 1e9
# Assumed memory of a process that is neither weights nor activations: its CUDA context, NCCL's
# buffers, CUDA graphs, and what the allocator cannot use.
RESERVE_GB = 2.0
# parts of the names of parameters of feed-forward layers
FEED_FORWARD = r"\.(\w*mlp|feed_forward|block_sparse_moe|experts?)\."
# name of this memory in the output
ASSUMED = "CUDA, NCCL (assumed)"
# fields of a model's config, which are the columns of SHAPES
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
    """Return the transformers config of a model's text part, or None if it is not known here.

    name: a model directory, a model in the hub's cache, or one of SHAPES.
    """
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(name, local_files_only=True).get_text_config()
    match = re.fullmatch(r"(?:.*/)?Qwen2\.5-([\d.]+B)(?:-Instruct)?", name)
    if match and match[1] in SHAPES:
        shape = dict(zip(FIELDS, SHAPES[match[1]]))
        return Qwen2Config(**shape, max_position_embeddings=131072)
    return None


@functools.cache
def empty_model(name):
    """Return a model without the contents of its parameters."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(name))


@functools.cache
def shapes(name):
    """Return {name of a parameter: its shape} of a model."""
    return {key: p.shape for key, p in empty_model(name).named_parameters()}


def parameters(name, part=""):
    """Return the number of a model's parameters, or of those that have `part` in their names."""
    return sum(shape.numel() for key, shape in shapes(name).items() if part in key)


@functools.cache
def experts(name):
    """Return (number of experts that a token goes to, mean over all layers; the set of the numbers
    of experts that a layer has); (0, set()) for a model without experts.
    """
    layers = layers_of(decoder_of(empty_model(name)))
    counts = [count for layer in layers for _, count in expert_blocks(layer)]
    chosen = experts_per_token(model_config(name)) if counts else 0
    return chosen * len(counts) / max(len(layers), 1), set(counts)


def experts_per_token(model):
    """Return the number of experts that a token goes to in a layer of a model of this config."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    return next(getattr(model, name) for name in names if hasattr(model, name))


@functools.cache
def mlp_width(name):
    """Return the intermediate size of a dense model whose feed-forward layers have as many weights
    for each token as those of this model have on average.

    Of experts those count that a token goes to. Dense models of three matrices a layer have their
    own intermediate_size.
    """
    model = model_config(name)
    _, counts = experts(name)
    weights = 0
    for key, shape in shapes(name).items():
        if len(shape) == 3 and shape[0] in counts:
            weights += shape.numel() * experts_per_token(model) / shape[0]
        # A router's matrix has a row for each expert.
        elif re.search(FEED_FORWARD, key) and len(shape) == 2 and shape[0] not in counts:
            weights += shape.numel()
    width = weights / (3 * model.hidden_size * model.num_hidden_layers)
    return width or model.intermediate_size


def adapters(c):
    """Return the number of parameters of the adapters of --lora_rank."""
    matrices = [x for key, x in shapes(c.model).items() if ".layers." in key and len(x) == 2]
    return c.lora_rank * sum(map(sum, matrices))


def itemsize(c):
    return getattr(torch, c.dtype).itemsize


# ---- the trainer


def trainer_gb(c):
    """Return {part: GB} of a trainer rank at the peak of a step, whatever the engines are.

    A step (train.py) may have its peak where the gradient of the head's logits is computed, in the
    backward pass of the last layer or of the last layer that is computed again, or where the
    gradients of the parameters outside of layers are added up. The factors count what autograd
    keeps of a Qwen2 layer: norms, queries, attention, gate and up. With adapters the norms keep
    less, and each linear layer keeps its merged weights. The `copies` of experts were measured on
    a CPU (tests/test_memory.py).
    """
    model = model_config(c.model)
    D, V = model.hidden_size, model.vocab_size
    I = mlp_width(c.model)  # noqa: E741
    # What experts take and return: each token's state as often as it goes to an expert.
    copies = 3 * experts(c.model)[0] * D
    L = model.num_hidden_layers
    size = itemsize(c)
    # bytes of one value for each token of a row
    row_bytes = size * c.row_tokens
    total = parameters(c.model)
    in_layers = parameters(c.model, ".layers.")
    lora = c.lora_rank > 0
    trained = adapters(c) or total
    # Of a layer that is computed again only its input is kept.
    recomputed = min(c.checkpointed_layers, L)
    inputs = (min(recomputed, 2) if c.offload_activations else recomputed) * row_bytes * D
    # weights of one layer with its adapters merged into them
    merged = lora * size * in_layers / L
    # number of layers that keep all their activations on the device
    whole = min(L - recomputed, 1) if c.offload_activations else L - recomputed
    kept = inputs + whole * (row_bytes * (4 * I + copies + (10.5 - 2 * lora) * D) + merged)
    # FSDP2 gathers the weights that it computes with, in the compute dtype: a few layers, and the
    # parameters outside of layers (`root`).
    several_ranks = c.trainers > 1
    sharded = several_ranks or size < 4
    root = sharded * size * (total - in_layers)
    layer = sharded * size * in_layers / L
    # The head holds the logprobs of all tokens in float32, their gradient and that of the logits;
    # in 16 bits it also holds the gradient of its matrix.
    logit_bytes = (12 if size == 4 or lora else 16) + 8 * (c.entropy_coef > 0)
    head = logit_bytes * V * min(c.row_tokens, head_chunk(V, D))
    trained_head = size * V * D * (not lora)
    backward_gathered = root + ((1 if lora else 3) + several_ranks) * layer + 0.65 * merged
    last_layer = row_bytes * 2 * I * (recomputed < L)
    recomputed_layer = row_bytes * (6 * I + copies + (12 - 2 * lora) * D) * (recomputed > 0)
    # (activations, gathered, head) of each possible peak
    peaks = [
        (kept, root + several_ranks * layer, head),
        (kept + last_layer, backward_gathered, trained_head),
        (inputs + recomputed_layer, backward_gathered, trained_head),
        (0, 4 * root * (not lora), 3 * trained_head * (not sharded)),
    ]
    activations, gathered, head = max(peaks, key=sum)
    frozen = lora * size * total / c.trainers
    trained_per_rank = trained / c.trainers
    moment_bytes = 2 * (1 + 4 / 256) if c.adam_8bit else 8
    amounts = {
        "weights": frozen + 4 * trained_per_rank,
        "gradients": 4 * trained_per_rank,
        "optimizer": moment_bytes * trained_per_rank,
        "activations": activations,
        "gathered": gathered,
        "head": head,
    }
    return {part: amount / GB for part, amount in amounts.items()}


def checkpoint_gb(c):
    """Return (GB of a checkpoint on the disk, GB of host memory while it is saved).

    On the disk are the parameters as they are trained and as they are served, and the moments of
    the trained ones (plumbing/checkpoints.py); as it is trained, a tied head is there under both
    of its names. In memory rank 0 also has all parameters once more while it changes their dtype.
    """
    total = parameters(c.model)
    named = sum(x.numel() for x in empty_model(c.model).state_dict().values())
    trained = adapters(c) or total
    size = itemsize(c)
    as_trained = (size * named + 4 * trained) if c.lora_rank else 4 * named
    moments = (2 if c.adam_8bit else 8) * trained
    as_served = size * total
    disk = as_trained + moments + as_served
    return disk / GB, (disk + as_trained) / GB


# ---- all of a run


def forward_gb(model, width, tokens, sequences, parallel):
    """Estimate the GB of a forward pass of T tokens without gradients.

    width: see mlp_width. The MLP holds three [T, width] and three [T, D] of 16 bits. The logits of
    the last token of each sequence are there three times in float32.
    """
    trunk = 3 * (width / parallel + model.hidden_size)
    logits = 3 * 4 * sequences * model.vocab_size
    return (2 * tokens * trunk + logits) / GB


@dataclasses.dataclass
class Placed:
    """A resolved config on a number of GPUs with gpu_gb of memory each. All amounts are in GB."""

    c: cfg.Config
    gpus: int
    gpu_gb: float

    @functools.cached_property
    def roles(self):
        """Return {role: {part: GB}} of the trainer's ranks and of an engine."""
        c = self.c
        model = model_config(c.model)
        served = itemsize(c) * parameters(c.model) / GB / c.tensor_parallel
        draft_tokens = engine_flags.read(c, self.gpus).draft_tokens
        batched_tokens = max(8192, c.max_model_len + c.concurrency * (1 + draft_tokens))
        width = mlp_width(c.model)
        forward = forward_gb(model, width, batched_tokens, c.concurrency, c.tensor_parallel)
        engine = {"weights": served, "activations": forward, ASSUMED: RESERVE_GB}
        rest = c.gpu_memory_utilization * self.gpu_gb - sum(engine.values())
        engine["KV cache"] = c.kv_cache_gb or max(rest, 0)
        engine["update buffers"] = served
        # When the mismatch is measured, an engine has all logits of a prompt, in 16 and in 32 bits.
        prompt_tokens = min(guards.LONGEST, c.max_model_len)
        engine["logits of prompts"] = 6 * prompt_tokens * model.vocab_size / GB
        rank = trainer_gb(c) | {ASSUMED: RESERVE_GB}
        rank_0 = dict(rank)
        # With gloo the buckets of an update are in host memory.
        if c.weight_backend == "nccl":
            largest = itemsize(c) * max(shape.numel() for shape in shapes(c.model).values())
            bucket = max(c.bucket_mb << 20, largest) / GB
            rank_0["update buffers"] = 2 * bucket
            engine["update buffers"] += bucket
        # Of frozen models only the weights count: their forward passes end before that of the
        # policy begins. With adapters the reference is the policy's own base model.
        frozen_models = {}
        if c.kl_coef and not c.lora_rank:
            frozen_models["reference model"] = c.model
        if c.teacher:
            frozen_models["teacher"] = c.teacher
        for part, name in frozen_models.items():
            shard = itemsize(c) * parameters(name) / GB / c.trainers
            rank[part] = shard
            rank_0[part] = shard
        return {"trainer rank": rank, "rank 0": rank_0, "engine": engine}

    @property
    def totals(self):
        """Return {role: GB taken of its GPU}; on a single GPU, engine and trainer share it."""
        totals = {role: sum(parts.values()) for role, parts in self.roles.items()}
        if self.gpus > 1:
            return totals
        return {"engine and trainer": totals["engine"] + totals["rank 0"]}

    @property
    def sequence_gb(self):
        """Return the GB that keys and values of max_model_len tokens take of an engine's GPU."""
        c = self.c
        model = model_config(c.model)
        head_dim = model.hidden_size // model.num_attention_heads
        head_dim = getattr(model, "head_dim", None) or head_dim
        heads = max(model.num_key_value_heads / c.tensor_parallel, 1)
        per_token = 2 * model.num_hidden_layers * heads * head_dim * itemsize(c)
        return per_token * c.max_model_len / GB

    @property
    def lack(self):
        """Return (where, GB) of the greatest lack of memory; GB below 0 are to spare."""
        lacks = {role: total - self.gpu_gb for role, total in self.totals.items()}
        cache = self.roles["engine"]["KV cache"]
        lacks["the KV cache of one sequence"] = self.sequence_gb - cache
        return max(lacks.items(), key=lambda item: item[1])

    @property
    def fits(self):
        return self.lack[1] <= 0

    def but(self, **knobs):
        """Return a copy with other values of these knobs."""
        return dataclasses.replace(self, c=dataclasses.replace(self.c, **knobs))

    def changes(self):
        """Yield the changes that may help, {knob: value}, in the order in which they are tried."""
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
                saves_memory = parallel >= c.tensor_parallel and trainers >= c.trainers
                if saves_memory and heads % parallel == 0:
                    yield dict(engines=engines, tensor_parallel=parallel, trainers=trainers)
        if not c.lora_rank:
            yield dict(lora_rank=32)

    def fewest_layers(self):
        """Return the lowest checkpointed_layers with which the run fits; it must fit as it is."""
        all_layers = model_config(self.c.model).num_hidden_layers
        fewer = range(min(self.c.checkpointed_layers, all_layers))
        fit = (layers for layers in fewer if self.but(checkpointed_layers=layers).fits)
        return next(fit, self.c.checkpointed_layers)

    def verdict(self):
        """Return one line: whether the run fits, and the first change that makes it fit if it does
        not, or that makes it faster if it does.
        """
        where, lack = self.lack
        if lack <= 0:
            spare = f"fits, with {-lack:.1f} of {self.gpu_gb:.0f} GB to spare ({where})"
            layers = self.fewest_layers()
            if layers < self.c.checkpointed_layers:
                spare += f"; it would fit with --checkpointed_layers {layers}, which is faster"
            return spare
        advice = "it takes more GPUs, or larger ones"
        for knobs in self.changes():
            if self.but(**knobs).fits:
                advice = "try " + " ".join(f"--{name} {value}" for name, value in knobs.items())
                break
        return f"does not fit: {where}: {lack:.2f} GB too little; {advice}"

    def describe(self):
        """Print the memory that every role takes, part by part."""
        c = self.c
        print(f"{c.model}: {parameters(c.model) / 1e9:.2f} billion parameters, {c.dtype}")
        print(
            f"--trainers {c.trainers} --engines {c.engines} --tensor_parallel {c.tensor_parallel}"
        )
        for role, parts in self.roles.items():
            summands = " + ".join(f"{gb:.1f} {part}" for part, gb in parts.items())
            print(f"{role}: {sum(parts.values()):.1f} GB = {summands}")
        sequences = self.roles["engine"]["KV cache"] / self.sequence_gb
        print(
            f"KV cache of an engine: {sequences:.0f} sequences of {c.max_model_len} tokens fit, up "
            f"to {c.concurrency} are in progress"
        )
        disk, host = checkpoint_gb(c)
        count = checkpoints.most_to_come(c, 0, 0)
        print(
            f"checkpoint: {disk:.1f} GB; a new run needs room on the disk for {count}. While one "
            f"is saved, the trainer takes up to {host:.1f} GB of host memory, and weight updates "
            f"take {itemsize(c) * parameters(c.model) / GB:.1f} GB more"
        )


# ---- the command line


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=placement.gpu_count() or 8)
    parser.add_argument("--gpu_memory_gb", type=float, default=80.0)
    arguments, knobs = parser.parse_known_args(argv)
    # From here on this process must use no GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        c = placement.resolve(cfg.parse(knobs, about=__doc__), arguments.gpus)
    except cfg.ConfigError as e:
        sys.exit(f"memory: {e}")
    for name in {c.model, c.teacher} - {""}:
        if model_config(name) is None:
            print(
                f"memory: not checked: {name} has no config.json on this machine, and is no "
                "Qwen2.5 of a known size: download it, or give its directory"
            )
            return
    placed = Placed(c, arguments.gpus, arguments.gpu_memory_gb)
    placed.describe()
    print(f"memory: {c.model} {placed.verdict()}")
    if not placed.fits:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
