"""What a trainer rank has in memory at the peak of a step: `train.train_step` on fake tensors, for
tools/memory.py.

`train.build` and two steps run on tensors that have shapes but no contents (FakeTensorMode), in a
fake process group, and `Tracker` adds up the storages that are alive. The second step counts: the
optimizer has its state, and of its two micro-batches the second one finds gradients. Layers are alike,
so peaks are linear in their number beyond the few that FSDP2 holds at a time: deep models are traced
with DEPTHS layers and extrapolated.

What is traced is what a GPU runs, but for the device: autograd refuses fake `cuda` tensors on a build
without CUDA, so they are fake CPU tensors that take the GPU's branch of plumbing/model.py, whose
`varlen_attn` tells FakeTensorMode what FlashAttention returns and keeps (q, k, v, out, lse). AdamW is not
the fused one here, and takes two parameters' size more while it steps. float32 on CPU is
compared with a real process in tests/test_memory.py; nothing of this has been compared with a GPU.
Deliberately absent: what an allocator cannot use, NCCL's and CUDA's own memory.
"""

import functools
import re
import sys
import weakref
from pathlib import Path
from unittest import mock

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
from plumbing.samples import join

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
        per_token = dict(
            tokens=np.zeros(n), behavior_logprobs=np.zeros(n), ref_logprobs=np.zeros(n)
        )
        per_token |= dict(mask=np.ones(n), versions=np.zeros(n))
        scalars = dict(task=0, temperature=1, reward=0, outcome=0, finished=1)
        samples.append(per_token | scalars | dict(num_versions=1, number=0, advantage=0))
    return join(samples)


def local_bytes(tensors):
    """Bytes of this rank's part of tensors."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return sum(x.numel() * x.element_size() for x in local)


def trace(c, model):
    """Bytes of a trainer rank by kind at the peak of a step, and by how much gathering the largest
    parameter for an update, when no activations are there, exceeds that (negative: it does not).

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
        mock.patch("plumbing.model.flash_runs_on", flash_runs_on),
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
    return found | step | {"gathering an update": gathering - sum(step.values())}


@functools.cache
def traced(knobs):
    """{kind: bytes} of `trace` for Config(*knobs); of a deep model extrapolated from shallow ones."""
    c = cfg.Config(*knobs)
    model = model_config(c.model)
    layers = model.num_hidden_layers
    low, high = (with_layers(model, min(layers, n)) for n in DEPTHS)
    found = trace(c, high)
    if layers > DEPTHS[1]:
        before = trace(c, low)
        times = (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
        found = {kind: size + times * (size - before[kind]) for kind, size in found.items()}
    return {kind: max(size, 0) for kind, size in found.items()}
