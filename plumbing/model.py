"""The model as the trainer runs it: packed attention, finished logits, weights loaded by rank 0 alone.

In a packed row several sequences lie end to end and none sees another (transformers' attention
implementation "packed"); how several of them begin is computed once (samples.share). A family of models that does something else ends the run at its first
update, as engines then differ (plumbing/guards.py). Deliberately absent: padding, dropout (what is
trained is what sampled), attention sinks, capped scores, a list of families (tests/test_model.py has one).
"""

import contextlib
import inspect

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

# torch 2.11 takes fewer key heads as they are, and knows no such argument
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def flash_runs_on(x):
    """FlashAttention is for GPUs, in 16 bits."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


@torch.compiler.disable
def packed_attention(module, query, key, value, mask, packing, scaling=None, **options):
    """Causal attention within each sequence of a packed row.

    query [1, H, Q, D], key, value [1, K, Q, D] -> [1, Q, H, D], of what is computed. packing: (place [T]:
    where each token of the row is among that; bounds of the sequences in both [N+1], on the device; the
    same as lengths [N], on the host). FlashAttention on GPUs (16 bits); elsewhere sequence by sequence,
    1.3 times as fast as one sdpa over the row with a mask [T, T] (bench/train.py).
    """
    place, own_bounds, bounds, *lengths = packing
    own, whole = (x.tolist() for x in lengths)
    window = options.get("sliding_window")
    if sum(own) < sum(whole):
        key = key.index_select(2, place)
        value = value.index_select(2, place)
    if flash_runs_on(query):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        # a sequence's last query is its last key's
        how = dict(scale=scaling, window_size=(window - 1 if window else -1, 0), **GROUPED)
        return varlen_attn(q, k, v, own_bounds, bounds, max(own), max(whole), **how)[None], None
    grouped = query.shape[1] != key.shape[1]
    out = []
    for q, k, v in zip(query.split(own, 2), key.split(whole, 2), value.split(whole, 2)):
        seen = causal_lower_right(q.shape[2], k.shape[2])
        if window and k.shape[2] > window:
            position = torch.arange(k.shape[2], device=k.device)
            ago = position[-q.shape[2] :, None] - position
            seen = (ago >= 0) & (ago < window)
        out.append(sdpa(q, k, v, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)


def finish_logits(logits, model_config):
    """What models do to the output of their head [.., V], as their Hugging Face config says."""
    # Granite divides by it, Cohere multiplies
    scale = getattr(model_config, "logit_scale", None) or 1.0
    scale = scale / (getattr(model_config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    return logits


def whole(tensor):
    """A tensor with the shards of all ranks. Collective if it has shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class FloatLogits(torch.autograd.Function):
    """hidden [C, D], weight [V, D] in 16 bits -> logits [C, V] in float32, as vLLM computes them."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        # only CUDA has such a product
        return hidden.float() @ weight.float().T

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        # as of a head in 16 bits
        gradient = gradient.to(hidden.dtype)
        return gradient @ weight, gradient.T @ hidden


def project(model):
    """The function of hidden [C, D] and the head's weight [V, D] to logits [C, V]."""
    in_float32 = getattr(model, "head_float32", False)
    return FloatLogits.apply if in_float32 else torch.nn.functional.linear


def keeping(config, device):
    """The context in which autograd keeps what the backward pass needs: on the device, or in host memory."""
    if config.offload_activations:
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    return contextlib.nullcontext()


def to_device(device, *tensors):
    """CPU tensors on `device`, without waiting for what it is doing."""
    if device.type != "cuda":
        return list(tensors)
    return [x.pin_memory().to(device, non_blocking=True) for x in tensors]


def empty_model(config, dtype):
    """As train.load_model, in memory that is not there before it is written to: see `hand_out`."""
    shape = AutoConfig.from_pretrained(config.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="packed")
    model.head_float32 = config.head_float32
    model.to_empty(device="cpu").tie_weights()
    # unlike a model that is loaded, it would train with dropout
    return model.eval()


@torch.no_grad()
def hand_out(part, device):
    """Put rank 0's parameters and buffers of a part on every rank's device; shards stay as they are. Collective."""
    for tensor in [*part.parameters(), *part.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            dist.broadcast(tensor.data, 0)
