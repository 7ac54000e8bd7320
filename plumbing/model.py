"""The model in the trainer: how it computes a row of sequences, its output head, how it is loaded.

A row is a micro-batch of several sequences. No sequence may see another one. `last_hidden_states`
can compute a row in three ways (the knob `rows`). Before a run starts, tools/model_check.py
measures them, and takes the first one that gives the results of transformers:

    packed  sequences lie end to end, and our attention keeps them apart (transformers' attention
            implementation "packed"). A beginning that neighbouring sequences share is computed once
            (`shared_prefixes`).
    native  sequences lie end to end, and transformers' own attention and kernels keep them apart.
            This is for models whose attention cannot be replaced and, on GPUs that have the
            kernels, for models with state (Mamba, linear attention, short convolutions)
    padded  a batch of sequences, each one followed by padding up to the length of the longest one;
            right for all models in which no token sees a later one

A family whose head does something of its own gets a line in `finish_logits`, one whose attention
does, in `packed_attention`. Deliberately absent: dropout (what is trained is what sampled), a list
of families (docs/models.md has a table of measurements).
"""

import contextlib
import inspect
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from plumbing.samples import share

# newer versions than torch 2.11 must be told that there are fewer key heads than query heads
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# the dtypes that a model's tensors may have; ranks tell each other a dtype by its place here
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class Packing(NamedTuple):
    """How the Q computed tokens of a packed row stand for its T tokens, in N sequences.

    A beginning that two sequences share is computed once, so the second sequence has fewer queries
    than keys.
    """

    # [T] on the device: for each token of the row, the index of the computed token with its key
    computed_index: torch.Tensor
    # where sequences begin and end, among the queries and among the keys [N + 1], on the device
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    # the same as lengths [N], on the host
    query_lengths: torch.Tensor
    key_lengths: torch.Tensor


class SharedPrefixes(NamedTuple):
    """Which tokens of a packed row of T tokens, in N sequences, are computed; numpy arrays."""

    # the Q tokens of the row that are computed [Q]
    computed: np.ndarray
    # at which computed token the hidden state of each token of the row is found [T]
    computed_index: np.ndarray
    query_bounds: np.ndarray
    key_bounds: np.ndarray

    def packing(self, device):
        """The same as `packed_attention` takes it."""
        index, query_bounds, key_bounds = to_device(
            device,
            self.computed_index,
            self.query_bounds.astype(np.int32),
            self.key_bounds.astype(np.int32),
        )
        query_lengths = torch.from_numpy(np.diff(self.query_bounds))
        key_lengths = torch.from_numpy(np.diff(self.key_bounds))
        return Packing(index, query_bounds, key_bounds, query_lengths, key_lengths)


def shared_prefixes(ids, positions, may_share=True):
    """SharedPrefixes of a packed row, ids and positions [T] (positions are 0 where a sequence
    begins). What a sequence and the one before it begin with in common is computed once
    (samples.share), unless may_share is False: then every token is computed.
    """
    key_bounds = np.append(np.flatnonzero(positions == 0), len(ids))
    computed_index = np.arange(len(ids))
    if may_share:
        computed_index = share(ids, np.diff(key_bounds))
    computed = np.unique(computed_index, return_index=True)[1]
    query_bounds = np.searchsorted(computed, key_bounds)
    return SharedPrefixes(computed, computed_index, query_bounds, key_bounds)


def decoder_of(model):
    """The part of a language model that computes hidden states; for one that sees images, too, the
    part that reads text.
    """
    decoder = model.get_decoder()
    # transformers does not find that of Llama 4.
    return model.model if decoder is model else decoder


def layers_of(decoder):
    """The layers of a decoder, in order."""
    return [x for x in decoder.modules() if isinstance(x, GradientCheckpointingLayer)]


def last_hidden_states(model, ids, positions, prefixes, rows, routing=None, experts=None):
    """The hidden states [Q, D] of the last layer for the computed tokens of a row.

    ids, positions [T], prefixes: SharedPrefixes of the row, rows: how the row is computed, see the
    top of this file. If the row is not packed all its tokens are computed, Q = T. routing: the
    model's plumbing.routing.Routing, or None; experts [T, layers * k]: the experts that it is to
    choose, -1 where it decides, or None.
    """
    decoder = decoder_of(model)
    device = model.get_output_embeddings().weight.device
    if rows == "padded":
        lengths = np.diff(prefixes.key_bounds)
        is_token = np.arange(lengths.max()) < lengths[:, None]  # [N, L]
        batch = np.zeros(is_token.shape, np.int64)
        batch[is_token] = ids
        if routing is not None:
            # where the tokens of the row are in the batch; padding stands for token -1
            tokens = np.full(is_token.size, -1)
            tokens[is_token.flatten()] = np.arange(len(ids))
            routing.prescribe(experts, tokens, device)
        batch, index = to_device(device, batch, np.flatnonzero(is_token))
        hidden = decoder(input_ids=batch, use_cache=False).last_hidden_state  # [N, L, D]
        return hidden.flatten(0, 1).index_select(0, index)
    computed = prefixes.computed
    if routing is not None:
        routing.prescribe(experts, computed, device)
    row_ids, row_positions = to_device(device, ids[computed], positions[computed])
    options = {"packing": prefixes.packing(device)}
    if rows == "native":
        options = native_packing(prefixes, device)
    hidden = decoder(
        input_ids=row_ids[None], position_ids=row_positions[None], use_cache=False, **options
    )
    return hidden.last_hidden_state[0]


def native_packing(prefixes, device):
    """Where the sequences of a row begin and end, in the arguments of transformers' own kernels."""
    lengths = np.diff(prefixes.key_bounds)
    sequence_numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    bounds, numbers = to_device(device, prefixes.key_bounds.astype(np.int32), sequence_numbers)
    longest = int(lengths.max())
    return dict(
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=numbers[None],
    )


def visible_tokens(queries, keys, window, device):
    """Which keys each query sees, bool [queries, keys].

    The queries are the last tokens of a sequence of `keys` tokens. window: the number of tokens
    that a query sees, itself included; None: all tokens before it.
    """
    position = torch.arange(keys, device=device)
    distance = position[-queries:, None] - position
    return (distance >= 0) & (distance < (window or keys))


def scores_attention(q, k, v, visible, scaling, softcap, sinks):
    """Attention of one sequence whose scores have a cap, or whose heads have sinks.

    q [1, H, Q, D], k, v [1, K, T, D], visible [Q, T] -> [1, H, Q, D]. softcap: scores are bent to
    (-softcap, softcap), or None. sinks [H]: the score of a further key without a value, or None.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf).float()
    if sinks is not None:
        sink_scores = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]].to(q.dtype) @ v


# the largest size of a head that FlashAttention takes, and what the size must be a multiple of
LARGEST_HEAD = 256
HEAD_MULTIPLE = 8


def flash_runs_on(query, value):
    """Does FlashAttention run on these tensors [.., D], D the size of a head?

    It is for GPUs, in 16 bits, and queries and values must have heads of the same size.
    """
    size = query.shape[-1]
    in_16_bits = query.dtype in (torch.float16, torch.bfloat16)
    fits = size == value.shape[-1] and size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0
    return query.is_cuda and in_16_bits and fits


def flash_backward(*arguments):
    """The backward pass of varlen_attn, as torch's own autograd calls it."""
    return torch.ops.torch_attn._varlen_attn_backward(*arguments)


class AttentionWithSinks(torch.autograd.Function):
    """FlashAttention whose heads have sinks. A sink is one more key, with a score and no value.

    q [Q, H, D], k, v [T, K, D], sinks [H] (the scores of the sinks) -> [Q, H, D]. bounds, longest,
    options: the other arguments of varlen_attn.

    Let O be a query's output without the sink, and L the log-sum-exp of its scores. With a sink of
    score s the log-sum-exp is L' = log(exp L + exp s), and the output is O' = O exp(L - L').
    FlashAttention's backward pass is given an output and a log-sum-exp. From O and L it computes
    P = exp(scores - L) and dS = P * (dO V^T - rowsum(dO * O)), which are the probabilities and the
    gradient of the scores. From O' and L' it computes those of the attention with sinks. torch's
    own autograd would not do: it leaves out the gradient that comes back through L.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, bounds, longest, options):
        from torch.nn.attention.varlen import AuxRequest

        aux = AuxRequest(lse=True)
        out, lse = varlen_attn(q, k, v, *bounds, *longest, return_aux=aux, **options)
        lse_with_sink = torch.logaddexp(lse, sinks.float()[:, None])  # [H, Q]
        left = (lse - lse_with_sink).exp().T[..., None]  # [Q, H, 1]
        out = (out * left).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse_with_sink, *bounds)
        ctx.longest = longest
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, sinks, out, lse, *bounds = ctx.saved_tensors
        window = ctx.options["window_size"]
        is_causal = window == (-1, 0)
        # The state of dropout's random numbers. There is no dropout, so any value will do.
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradient = gradient.contiguous()
        arguments = (gradient, q, k, v, out, lse, *bounds, *ctx.longest, is_causal, random_state)
        dq, dk, dv = flash_backward(*arguments, ctx.options["scale"], list(window))
        sink_probabilities = (sinks.float()[:, None] - lse).exp().T  # [Q, H]
        d_scores = -sink_probabilities * (gradient.float() * out.float()).sum(-1)
        return dq, dk, dv, d_scores.sum(0).to(sinks.dtype), None, None, None


@torch.compiler.disable
def packed_attention(module, query, key, value, mask, packing, scaling=None, **options):
    """Causal attention within each sequence of a packed row.

    query [1, H, Q, D], key, value [1, K, Q, D] of the computed tokens, packing: Packing -> [1, Q,
    H, D]. FlashAttention where it runs (flash_runs_on), unless scores have a cap; elsewhere
    sequence by sequence, 1.3 times as fast as one sdpa over the row with a mask [T, T]
    (bench/train.py).
    """
    query_lengths = packing.query_lengths.tolist()
    key_lengths = packing.key_lengths.tolist()
    window = options.get("sliding_window")
    softcap = options.get("softcap")
    sinks = options.get("s_aux")
    if sum(query_lengths) < sum(key_lengths):
        key = key.index_select(2, packing.computed_index)
        value = value.index_select(2, packing.computed_index)
    if flash_runs_on(query, value) and not softcap:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [Q or T, heads, D]
        # The mask is aligned at the end: the last query of a sequence is that of its last key.
        bounds = (packing.query_bounds, packing.key_bounds)
        longest = (max(query_lengths), max(key_lengths))
        window_size = (window - 1 if window else -1, 0)
        options = dict(scale=scaling, window_size=window_size, **GROUPED)
        if sinks is None:
            out = varlen_attn(q, k, v, *bounds, *longest, **options)
        else:
            out = AttentionWithSinks.apply(q, k, v, sinks, bounds, longest, options)
        return out[None], None
    grouped = query.shape[1] != key.shape[1]
    out = []
    parts = zip(
        query.split(query_lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2)
    )
    for q, k, v in parts:
        lengths = (q.shape[2], k.shape[2])
        if softcap or sinks is not None:
            visible = visible_tokens(*lengths, window, k.device)
            out.append(scores_attention(q, k, v, visible, scaling, softcap, sinks))
            continue
        visible = causal_lower_right(*lengths)
        if window and k.shape[2] > window:
            visible = visible_tokens(*lengths, window, k.device)
        out.append(sdpa(q, k, v, visible, scale=scaling, enable_gqa=grouped))
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)


def finish_logits(logits, model_config):
    """Scale and cap the output of a head [.., V] as its family does; its Hugging Face config says
    how.
    """
    # Cohere multiplies by logit_scale, Granite divides by logits_scaling
    scale = getattr(model_config, "logit_scale", None) or 1.0
    scale = scale / (getattr(model_config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    # Gemma 2 bends logits to (-cap, cap).
    cap = getattr(model_config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def whole(tensor):
    """A tensor with the shards of all ranks. Collective if it has shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class FloatLogits(torch.autograd.Function):
    """hidden [C, D], weight [V, D] in 16 bits -> logits [C, V] in float32, as in vLLM."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        # Only CUDA has a product of 16-bit matrices with a result in 32 bits.
        return hidden.float() @ weight.float().T

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        # The gradient is rounded as that of a head in 16 bits is.
        gradient = gradient.to(hidden.dtype)
        return gradient @ weight, gradient.T @ hidden


def head_product(in_float32):
    """The function of hidden states [C, D] and the head's weight [V, D] to logits [C, V]."""
    return FloatLogits.apply if in_float32 else torch.nn.functional.linear


def keeping(config, device):
    """The context of a forward pass: autograd keeps what the backward pass needs on the device, or,
    with --offload_activations, in host memory.
    """
    if config.offload_activations:
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    return contextlib.nullcontext()


def to_device(device, *arrays):
    """Numpy arrays as a list of tensors on `device`, without waiting for its pending work."""
    tensors = [torch.from_numpy(x) for x in arrays]
    if device.type != "cuda":
        return tensors
    return [x.pin_memory().to(device, non_blocking=True) for x in tensors]


def model_class(shape):
    """The class of transformers that loads a model with this configuration.

    Some models that also see images are no causal language models for transformers.
    """
    is_causal = type(shape) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def attention_of(rows):
    """The attention implementation for rows of this kind; None: transformers chooses."""
    return None if rows in ("native", "padded") else "packed"


def freeze_all_but_text(model):
    """What sees images is not trained: only the decoder and the output head are. Returns model."""
    model.requires_grad_(False)
    decoder_of(model).requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
    return model


def load_model(config, dtype):
    """The language model of `config.model`, with attention for its rows and without dropout."""
    shape = AutoConfig.from_pretrained(config.model)
    attention = attention_of(config.rows)
    model = model_class(shape).from_pretrained(
        config.model, dtype=dtype, attn_implementation=attention
    )
    return freeze_all_but_text(model)


def empty_model(config, dtype):
    """The model of load_model without values; memory is taken when it is first written to."""
    shape = AutoConfig.from_pretrained(config.model)
    attention = attention_of(config.rows)
    with torch.device("meta"):
        model = model_class(shape).from_config(shape, dtype=dtype, attn_implementation=attention)
    model.to_empty(device="cpu").tie_weights()
    # Unlike a model that is loaded it is made in training mode, with dropout.
    return freeze_all_but_text(model.eval())


@torch.no_grad()
def hand_out(part, device):
    """Copy rank 0's parameters and buffers of a part to every rank's device. Collective.

    Tensors that are sharded already stay as they are.
    """
    tensors = [x for x in (*part.parameters(), *part.buffers()) if not isinstance(x, DTensor)]
    # transformers loads some tensors in float32, whatever the model's dtype is: the correction
    # biases of routers, for one. A model that is made empty has them in the model's dtype.
    dtypes = torch.tensor([DTYPES.index(x.dtype) for x in tensors], device=device)
    dist.broadcast(dtypes, 0)
    for tensor, number in zip(tensors, dtypes.tolist()):
        tensor.data = tensor.data.to(device, DTYPES[number])
        dist.broadcast(tensor.data, 0)
