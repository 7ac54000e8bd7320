"""Attention for packed rows: several sequences end to end, none of which sees another.

Registered with transformers as attention implementation "packed". Deliberately absent: padding,
dropout (what is trained is what sampled), attention sinks. What is absent is refused by name.
"""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

# torch 2.11 takes fewer key heads as they are, and knows no such argument
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def flash_runs_on(x):
    """FlashAttention is for GPUs, in 16 bits."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


# handed to every attention function, without a bearing on the result
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}


def refuse_unknown(module, arguments):
    """Raise ValueError, by name, if a model hands its attention something that is not known here."""
    for name, value in arguments.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"train: {type(module).__name__} hands its attention '{name}', which plumbing/attention.py does not know: "
                "choose another model, or add it there"
            )


def plain_attention(query, key, value, scaling, window, softcap):
    """Causal attention of one sequence with all of its scores, for what sdpa cannot do.

    query [1, H, T, D], key, value [1, K, T, D] -> [1, H, T, D]. window: how many tokens are seen,
    itself included, or None; softcap: scores are bent to (-softcap, softcap), or None.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = (query @ key.mT) * scaling  # [1, H, T, T]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(query.shape[2], device=query.device)
    ago = place[:, None] - place
    hidden = (ago < 0) | (ago >= (window or len(place)))
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def packed_attention(
    module,
    query,
    key,
    value,
    mask,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    cu_seq_lens_q=None,
    lengths=None,
    **others,
):
    """Causal attention within each sequence of a packed row.

    query [1, H, T, D], key, value [1, K, T, D] -> [1, T, H, D]; cu_seq_lens_q [N+1] on the device,
    lengths [N] on the host. FlashAttention on GPUs (16 bits); elsewhere sequence by sequence, 1.3
    times as fast as one sdpa over the row with a mask [T, T] (bench/train.py). Raises ValueError,
    by name, for arguments that would change the result and are not known here.
    """
    both_ways = is_causal is False or getattr(module, "is_causal", True) is False
    refuse_unknown(module, others | {"mask": mask, "is_causal=False": both_ways})
    if lengths is None:
        raise ValueError(
            f"train: {type(module).__name__} is not told where sequences end, as its model hands no arguments on: choose another model"
        )
    longest = max(lengths)
    if flash_runs_on(query):
        if softcap:
            raise ValueError(
                f"train: {type(module).__name__} caps its scores, which FlashAttention in 16 bits does not do here: "
                "choose another model, or --dtype float32"
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        window = sliding_window - 1 if sliding_window else -1
        bounds = cu_seq_lens_q
        out = varlen_attn(
            q,
            k,
            v,
            bounds,
            bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(window, 0),
            **GROUPED,
        )
        return out[None], None
    plain = softcap or (sliding_window and longest > sliding_window)
    grouped = query.shape[1] != key.shape[1]
    out = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value))):
        if plain:
            out.append(plain_attention(q, k, v, scaling, sliding_window, softcap))
        else:
            out.append(sdpa(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped))
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)


def to_device(device, *tensors):
    """CPU tensors on `device`, without waiting for what it is doing."""
    if device.type != "cuda":
        return list(tensors)
    return [x.pin_memory().to(device, non_blocking=True) for x in tensors]
