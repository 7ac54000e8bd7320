"""Stage 3: packed micro-batches -> policy-gradient loss -> optimizer step -> weights to engines.

In one step the micro-batches of queues/batches/rank_<r> are read, their gradients are added up,
divided once by the number of samples, clipped and applied, and the new weights are pushed to the
engines (weights.py). The loop is `train()`.

To start it alone, on a run directory that has queues to read: `accelerate launch train.py out/toy`;
with two ranks: `accelerate launch --multi_gpu --num_processes 2 train.py out/toy`. Deliberately
absent: a Trainer class, callbacks, a setting for the number of micro-batches of a step: it follows
from how the samples of the step were packed.
"""

import dataclasses
import functools
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

import config as cfg
from plumbing import checkpoints, lora
from plumbing.guards import Guards
from plumbing.metrics import (
    MetricsLog,
    Sums,
    by_lag,
    lag_buckets,
    largest,
    length_counts,
    length_p90,
    lengths_table,
    oldest_lags,
    sums_by_lag,
)
from plumbing.model import (
    decoder_of,
    empty_model,
    finish_logits,
    hand_out,
    head_product,
    keeping,
    last_hidden_states,
    layers_of,
    load_model,
    shared_prefixes,
    to_device,
    whole,
)
from plumbing.queues import publish_json
from plumbing.ranks import Ranks, Stopped
from plumbing.reader import Reader
from plumbing.routing import Routing
from plumbing.samples import layout
from weights import Sender

logging.disable_progress_bar()


# ---------------------------------------------------------------------------- the model's logprobs


def head_chunk(vocabulary, width):
    """The number of tokens whose logits exist at once.

    Their logits take 256 MB in float32, or the memory of the head's matrix in bfloat16, whichever
    is more. Each chunk adds to the gradient of that matrix, so small chunks cost time and
    precision.
    """
    return max((1 << 26) // vocabulary, width // 2)


def head_logprobs(hidden, targets, temperature, head, model_config, entropy_grad):
    """Logprobs and entropy of one chunk of C tokens, in float32.

    hidden [C, D], targets [C], temperature [C], head: (to_logits, weight [V, D], bias [V] or None),
    where to_logits(hidden, weight) -> logits [C, V]. Returns (logprobs [C], entropy [C]). Only with
    entropy_grad has the entropy a gradient.
    """
    to_logits, weight, bias = head
    # Mamba's last hidden states are in float32, whatever the dtype of its weights is.
    logits = to_logits(hidden.to(weight.dtype), weight)  # [C, V]
    if bias is not None:
        logits = logits + bias
    # The division promotes the logits to float32, the dtype of temperature.
    logits = finish_logits(logits, model_config) / temperature[:, None]
    logp = torch.log_softmax(logits, dim=-1)
    del logits
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    # The entropy is computed last. When the backward pass recomputes this function (checkpointing),
    # torch stops as soon as it has the tensors that gradients need: then it skips the entropy.
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logp.exp() * logp).sum(-1)
    return logprobs, entropy


def token_logprobs(
    model,
    input_ids,
    position_ids,
    temperature,
    wanted=None,
    entropy_grad=False,
    to_logits=torch.nn.functional.linear,
    chunk_logprobs=head_logprobs,
    rows=None,
    routing=None,
    experts=None,
):
    """log p(token | tokens before it in its sequence) for one row of T tokens, and the entropy of
    the distribution that each token came from: (logprobs [T], entropy [T]), float32, on the model's
    device.

    model: a Hugging Face causal LM. input_ids, position_ids [T]: numpy arrays or CPU tensors. With
    FSDP2 they must be arrays: it moves tensors to the GPU, but the boundaries of sequences must be
    known on the CPU. Positions restart at 0 with every sequence. The result is the same as if each
    sequence were alone in the row.
    temperature: a number, or one per token [T]. wanted [T] bool: the tokens whose values are asked
    for (None: all of them). entropy_grad: the entropy has a gradient, too. to_logits: the product
    of hidden states and the head's weight; chunk_logprobs: head_logprobs, perhaps compiled. rows:
    "packed", "native" or "padded", see plumbing/model.py; None: "packed" if the model was loaded
    with our attention, else "native". routing, experts [T, layers * k]: see last_hidden_states.

    Both values are 0 at the row's first token and at tokens that are not wanted, which the head
    does not see. The first token of any other sequence has no context: the caller must mask its
    value out. With packed rows, a beginning that neighbouring sequences share is computed once, and
    all of them use it.
    """
    ids, positions, temperature = map(np.asarray, (input_ids, position_ids, temperature))
    temperature = np.broadcast_to(temperature.astype(np.float32), ids.shape)
    if rows is None:
        rows = "packed" if model.config._attn_implementation == "packed" else "native"
    # Only our attention lets a sequence use a beginning that was computed for another one.
    prefixes = shared_prefixes(ids, positions, may_share=rows == "packed")
    # The distribution of a token comes from the hidden state of the token before it.
    target_index = np.arange(1, len(ids)) if wanted is None else np.flatnonzero(wanted[1:]) + 1
    context_index = prefixes.computed_index[target_index - 1]
    head = model.get_output_embeddings()
    weight = head.weight
    device = weight.device
    targets, target_temperature = to_device(device, ids[target_index], temperature[target_index])
    target_index, context_index = to_device(device, target_index, context_index)
    # [Q, D]: Q <= T tokens are computed
    hidden = last_hidden_states(model, ids, positions, prefixes, rows, routing, experts)
    hidden = hidden.index_select(0, context_index)  # [N, D]: N tokens are wanted
    head_function = (to_logits, weight, getattr(head, "bias", None))
    head_arguments = (head_function, model.config.get_text_config(), entropy_grad)
    chunks = [x.split(head_chunk(*weight.shape)) for x in (hidden, targets, target_temperature)]
    if len(chunks[0]) > 1:
        # The logits of a chunk are recomputed in the backward pass, so that [T, V] never exists.
        chunk_logprobs = functools.partial(checkpoint, chunk_logprobs, use_reentrant=False)
    parts = [chunk_logprobs(*chunk, *head_arguments) for chunk in zip(*chunks)]
    logprobs, entropy = (torch.cat(x) for x in zip(*parts))
    zeros = logprobs.new_zeros(len(ids))
    logprobs = zeros.index_copy(0, target_index, logprobs)
    entropy = zeros.index_copy(0, target_index, entropy)
    return logprobs, entropy


class Policy(torch.nn.Module):
    """The model that is trained, and the frozen models that the loss needs.

    Its methods give the loss all that it needs of these models. model: a Hugging Face causal LM,
    whose parameters are the only ones of this module.
    """

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        self.config = config
        self.chunk_logprobs = head_logprobs
        self.rows = "packed" if config.rows == "auto" else config.rows
        # Records which experts the routers choose, or makes them choose the engine's experts
        # (--replay_routing). None for a model without experts, and if layers are compiled, as the
        # recording would slow them down, unless --replay_routing needs it.
        self.routing = None
        if config.replay_routing or not config.compile:
            routing = Routing(decoder_of(model), config.replay_routing)
            self.routing = routing if routing.blocks else None
        # The Policy of a frozen model by its role, "reference" or "teacher". They lie in a dict,
        # where torch does not look for parameters.
        self.frozen = {}

    def logprobs(self, *inputs, entropy_grad=False, experts=None):
        """(logprobs [T], entropy [T]) under the policy; inputs: those of `token_logprobs`."""
        return token_logprobs(
            self.model,
            *inputs,
            entropy_grad=entropy_grad,
            to_logits=head_product(self.config.head_float32),
            chunk_logprobs=self.chunk_logprobs,
            rows=self.rows,
            routing=self.routing,
            experts=experts,
        )

    @torch.no_grad()
    def reference_logprobs(self, *inputs):
        """Logprobs [T] under the model of --model as it was before training; for --kl_coef."""
        if "reference" in self.frozen:
            return self.frozen["reference"].logprobs(*inputs)[0]
        # With adapters the base model is this one without them.
        with lora.adapters_off():
            return self.logprobs(*inputs)[0]

    @torch.no_grad()
    def teacher_logprobs(self, *inputs):
        """Logprobs [T] under the model of --teacher."""
        return self.frozen["teacher"].logprobs(*inputs)[0]


# ---------------------------------------------------------------------------- the loss


def sum_for_each_token(values, sample_index):
    """For each token: `values` of its sample, summed over the tokens in the loss: [T] -> [T].

    sample_index [T]: the index of each token's sample; -1 for a token that is not in the loss. Such
    tokens take no part, and the result means nothing for them.
    """
    # Element 0 collects the tokens that are not in the loss.
    element = sample_index + 1
    return values.new_zeros(len(values) + 1).index_add(0, element, values)[element]


def sum_for_each_sample(values, sample_index, samples):
    """For each of S samples the sum of the values of its tokens: [T] -> [S]."""
    return values.new_zeros(samples).index_add(0, sample_index, values)


def policy_loss(kind, logprobs, behavior_logprobs, advantages, sample_index, config):
    """Loss per token, to be summed over sampled tokens and minimised: [T] -> (loss [T], clipped [T]
    bool). clipped: tokens whose weight is outside of its bounds; with dppo, tokens that are left
    out.

    logprobs are log pi, pi the policy being trained; behavior_logprobs are log mu, as the engine
    reported them when it sampled the tokens; sample_index: see `sum_for_each_token`. w = pi/mu is
    the importance weight, [low, high] are the knobs clip_low and clip_high, A is the advantage;
    sg() stops the gradient, so that w weighs the gradient of log pi and is not differentiated
    itself. With --ratio sequence, a name from GSPO, all tokens of a sample have the geometric mean
    of their weights, with --ratio product the product of them: the weight of the sample as a whole,
    with all its segments.

    reinforce  -sg(min(w, high)) A log pi; truncated importance sampling, PipelineRL eq. 5
               (arXiv 2509.19128), token by token; the paper subtracts a learned baseline, while
               here A comes from preprocess.advantages
    ppo        -min(w A, clip(w, low, high) A); Schulman et al. 2017 (arXiv 1707.06347) eq. 7
    cispo      -sg(clip(w, low, high)) A log pi; MiniMax-M1 2025 (arXiv 2506.13585) eq. 4
    gspo       ppo with --ratio sequence and --normalizer sequence: the terms of a sequence, which
               have one common weight, are averaged; GSPO 2025 (arXiv 2507.18071) eq. 5
    icepop     -sg(w 1[low <= w <= high]) A log pi; tokens outside have no gradient; IcePop 2025
    dppo       -sg(w m) A log pi; m = 0 where |pi - mu| > high and the gradient leads further away
               (A > 0 and w > 1, or A < 0 and w < 1), else 1. The bound is one of total variation:
               a rare token is kept, however large its w is; DPPO 2026 (arXiv 2602.04879)
    """
    low = config.clip_low
    high = config.clip_high
    log_w = logprobs - behavior_logprobs
    if config.ratio == "sequence":
        lengths = sum_for_each_token(torch.ones_like(log_w), sample_index)
        log_w = sum_for_each_token(log_w, sample_index) / lengths
    elif config.ratio == "product":
        log_w = sum_for_each_token(log_w, sample_index)
    w = log_w.exp()
    outside = (w < low) | (w > high)
    if kind == "reinforce":
        loss = -w.clamp(max=high).detach() * advantages * logprobs
    elif kind in ("ppo", "gspo"):
        loss = -torch.minimum(w * advantages, w.clamp(low, high) * advantages)
    elif kind == "cispo":
        loss = -w.clamp(low, high).detach() * advantages * logprobs
    elif kind == "icepop":
        loss = -torch.where(outside, 0.0, w).detach() * advantages * logprobs
    elif kind == "dppo":
        is_far = (logprobs.exp() - behavior_logprobs.exp()).abs() > high
        outside = is_far & (advantages * log_w > 0)
        loss = -torch.where(outside, 0.0, w).detach() * advantages * logprobs
    else:
        raise ValueError(
            f"--loss {kind} has no branch in the function policy_loss of train.py: add one"
        )
    return loss, outside


def kl(log_p, log_q):
    """Estimate KL(p || q) at each token: log p [T], log q [T] -> [T], all >= 0.

    This is the k3 estimator exp(d) - 1 - d with d = log q - log p; its mean over tokens that p
    sampled is the KL (Schulman, "Approximating KL divergence", 2020). As a penalty p is the policy
    and q the reference, GRPO (arXiv 2402.03300) eq. 4, though mu has sampled the tokens.
    """
    d = log_q - log_p
    return d.exp() - 1 - d


def ess(w, w2, n):
    """Normalised effective sample size (sum w)^2 / (N sum w^2) of the unclipped importance weights,
    in (0, 1]; 1 if there are none.

    w, w2: the sums of the weights and of their squares, n: their number. Sums add up over
    micro-batches and ranks.
    """
    return w**2 / (n * w2) if w2 else 1.0


def learning_rate(config, step):
    """Learning rate of a step (0-based): with a linear warm-up; constant, or falling linearly over
    the whole run to 10%.
    """
    rate = config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))
    if config.lr_schedule == "linear":
        rate *= 1 - 0.9 * step / config.steps
    return rate


# ---------------------------------------------------------------------------- one step

# number of the outcome "correct" in config.OUTCOMES
CORRECT = cfg.OUTCOMES.index("correct")
# Each of these functions makes a metric of its sums over the micro-batches of a step.
count = int


def mean(total, n):
    """The mean per token, per sample, ...; 0 if there is none of them."""
    return total / max(n, 1)


def mean_if_any(total, n):
    """The mean per token, per sample, ...; None if there is none of them."""
    return total / n if n else None


def micro_batch(policy, batch, version, config, device):
    """Forward pass, loss and metrics of one micro-batch of T tokens and S samples.

    batch: a record of plumbing/samples.py with the advantages of preprocess.py. Returns the summed
    loss (a scalar to call backward on), the metrics of `metric_sums`, which plumbing.metrics.Sums
    adds up over the step, and the logprobs [T] of the trained policy. The loss of a token is

        policy_loss + kl_coef KL(pi || base) + kl_behavior_coef (log w)^2 - entropy_coef H

    Nothing here waits for the device.
    """
    positions, sample_index = layout(batch["lengths"], batch["segment"])
    inputs = (batch["tokens"], positions, batch["temperature"][sample_index], batch["mask"])
    # The frozen models come first: much memory of the policy's forward pass is kept until backward.
    ref_logprobs = policy.reference_logprobs(*inputs) if config.kl_coef else None
    teacher_logprobs = policy.teacher_logprobs(*inputs) if config.teacher else None
    # A filler has no choices of experts, nor have micro-batches that older code kept for replay.py.
    experts = batch.get("experts") if config.replay_routing else None
    experts = None if experts is None or not experts.shape[1] else experts
    with keeping(config, device):
        logprobs, entropy = policy.logprobs(
            *inputs, entropy_grad=config.entropy_coef > 0, experts=experts
        )
    b = on_device(batch, positions, sample_index, version, device)

    lag = version - b["versions"]
    late = torch.zeros_like(b["mask"])
    if config.late == "mask":
        late = b["mask"] & (lag > config.max_lag)
    # [T] bool: the tokens in the loss. An engine sampled them, --overlong_mask has not left out
    # their attempt, and they are not late.
    in_loss = b["mask"] & ~late
    loss_sample_index = torch.where(in_loss, b["sample_index"], -1)
    # Of tokens that are not in the loss mu is set to pi, so that w = 1, which is always finite.
    behavior_logprobs = torch.where(in_loss, b["behavior_logprobs"], logprobs.detach())
    # log teacher - log mu of each sampled token; its mean over tokens estimates -KL(mu || teacher).
    teacher_log_ratio = torch.zeros_like(logprobs)
    if config.teacher:
        teacher_log_ratio = (teacher_logprobs - behavior_logprobs) * in_loss
    advantages = b["advantage"] + config.teacher_coef * teacher_log_ratio

    per_token, clipped = policy_loss(
        config.loss, logprobs, behavior_logprobs, advantages, loss_sample_index, config
    )
    kl_ref = torch.zeros_like(logprobs)
    if config.kl_coef:
        kl_ref = kl(logprobs, torch.where(in_loss, ref_logprobs, logprobs.detach()))
        per_token = per_token + config.kl_coef * kl_ref
    log_w = logprobs - behavior_logprobs
    if config.kl_behavior_coef:
        # Its gradient, 2 log w grad log pi, pulls the policy back to the one that sampled the data.
        per_token = per_token + config.kl_behavior_coef * log_w**2
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * entropy
    # The other two normalizers divide by a number of the whole step, in `optimizer_step`.
    if config.normalizer == "sequence":
        per_token = per_token / sum_for_each_token(torch.ones_like(per_token), loss_sample_index)
    per_token = torch.where(in_loss, per_token, 0.0)
    loss = per_token.sum()

    terms = dict(
        in_loss=in_loss,
        late=late,
        lag=lag * in_loss,
        clipped=clipped & in_loss,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        entropy=entropy,
        kl_ref=kl_ref,
        teacher_log_ratio=teacher_log_ratio,
        per_token=per_token,
        advantages=advantages,
        loss=loss,
    )
    with torch.no_grad():
        metrics = metric_sums(b, terms)
        if policy.routing:
            metrics |= {name: (mean, *sums) for name, sums in policy.routing.sums().items()}
    return loss, metrics, logprobs.detach()


def on_device(batch, positions, sample_index, version, device):
    """The arrays of a micro-batch, and what follows from them on the CPU: {name: tensor}."""
    arrays = {k: v for k, v in batch.items() if isinstance(v, np.ndarray) and k != "experts"}
    arrays |= dict(sample_index=sample_index, positions=positions)
    arrays["lag_buckets"] = lag_buckets(version - batch["versions"])
    arrays["oldest_lags"] = oldest_lags(batch, version)
    arrays["length_counts"] = length_counts(batch)
    return dict(zip(arrays, to_device(device, *arrays.values())))


def metric_sums(b, terms):
    """The metrics of a micro-batch: {name: (function, sum, ...)}.

    The function makes the metric of the sums, which are added up over a step and all ranks. So
    every micro-batch of every rank must have the same names, with sums of the same shapes. b: the
    fields of the micro-batch (plumbing/samples.py). terms: those of its loss, see the end of
    `micro_batch`.
    """
    in_loss = terms["in_loss"]
    log_w = terms["logprobs"] - terms["behavior_logprobs"]
    w = log_w.exp() * in_loss
    kl_behavior = kl(terms["behavior_logprobs"], terms["logprobs"]) * in_loss
    # [S] bool: False for a filler, the micro-batch of a rank for which no samples are left.
    is_sample = b["outcome"] >= 0
    samples = is_sample.sum()
    # the number of tokens in the loss
    tokens = in_loss.sum()
    # The tokens whose logprobs the engine computed with the very version that is trained. If
    # several versions sampled a sequence, a part of its KV cache is from an older one.
    pure = in_loss & (terms["lag"] == 0) & (b["num_versions"] == 1)[b["sample_index"]]
    is_real = is_sample[b["sample_index"]]
    by_sample = (b["sample_index"], len(is_sample))
    # [S]: the samples that have an advantage at any token, and those with a token in the loss.
    has_signal = sum_for_each_sample(terms["advantages"].abs(), *by_sample) > 0
    has_loss = sum_for_each_sample(in_loss.float(), *by_sample) > 0
    # [S]: the weights of whole samples, products over their tokens. The clamp keeps them and
    # their squares finite and above 0 in float64. Samples without a token in the loss have 0.
    log_w_sample = sum_for_each_sample((log_w * in_loss).double(), *by_sample)
    w_sample = log_w_sample.clamp(-300, 300).exp() * has_loss
    # The tokens that an engine sampled, also those of attempts that --overlong_mask leaves out
    is_sampled = (b["versions"] >= 0) & is_real
    # A turn begins with a sampled token that follows one that was not sampled.
    turns = (is_sampled[1:] & ~is_sampled[:-1]).sum()
    segments = ((b["positions"] == 0) & is_real).sum()
    bucket_sums = sums_by_lag(
        b["lag_buckets"],
        in_loss,
        terms["per_token"],
        kl_behavior,
        log_w.abs(),
        w,
        terms["clipped"],
    )
    return {
        "samples": (count, samples),
        "turns": (mean, turns, samples),
        "segments": (mean, segments, samples),
        "tokens": (count, is_real.sum()),
        "sampled_tokens": (count, tokens),
        "reward": (mean, b["reward"].sum(), samples),
        "success": (mean, (b["outcome"] == CORRECT).sum(), samples),
        "signal": (mean, has_signal.sum(), samples),
        "cut_off": (mean, (~b["finished"] & is_sample).sum(), samples),
        "length_mean": (mean, is_sampled.sum(), samples),
        "length_p90": (length_p90, b["length_counts"]),
        "lengths": (lengths_table, b["length_counts"]),
        "loss": (mean, terms["loss"], samples),
        "entropy": (mean, (terms["entropy"] * in_loss).sum(), tokens),
        "ess": (ess, w.sum(), (w * w).sum(), tokens),
        "ess_sample": (ess, w_sample.sum(), (w_sample * w_sample).sum(), has_loss.sum()),
        "kl_behavior": (mean, kl_behavior.sum(), tokens),
        "kl_ref": (mean, (terms["kl_ref"] * in_loss).sum(), tokens),
        "kl_teacher": (mean, -(terms["teacher_log_ratio"] * in_loss).sum(), tokens),
        "mismatch": (mean_if_any, (log_w.abs() * pure).sum(), pure.sum()),
        "lag_mean": (mean, terms["lag"].sum(), tokens),
        "lag_max": (largest, terms["lag"].max()),
        "lag_oldest": (mean, (b["oldest_lags"] * is_sample).sum(), samples),
        "clip_frac": (mean, terms["clipped"].sum(), tokens),
        "late": (count, terms["late"].sum()),
        "by_lag": (functools.partial(by_lag, ess), *bucket_sums),
        "versions_2": (mean, (b["num_versions"] >= 2).sum(), samples),
        "versions_3": (mean, (b["num_versions"] >= 3).sum(), samples),
    }


def optimizer_step(model, optimizers, sums, version, config):
    """Divide the gradients, summed over a step's micro-batches, once; clip and apply them.

    The divisor is the number of samples that the step has on all ranks, those without a token in
    the loss included; with --normalizer tokens it is the number of tokens in the loss. So it does
    not matter how samples were packed into micro-batches. sums: plumbing.metrics.Sums of the step.
    Returns the step's metrics over all ranks. A gradient that is not finite leaves the weights as
    they are, on every rank alike, as the norm is that of all ranks. Collective.
    """
    metrics = sums.reduce()
    n = metrics["sampled_tokens"] if config.normalizer == "tokens" else metrics["samples"]
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= max(n, 1)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    grad_norm = whole(grad_norm)
    lr = learning_rate(config, version)
    if config.lr_by_ess:
        # VCPO 2026 (arXiv 2602.17616) scales the rate with the effective sample size. With AdamW
        # it takes the square root, because AdamW's steps do not grow with the gradient.
        lr *= metrics["ess_sample"] ** 0.5
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if torch.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad()
    # lr is the rate before lr_scale: adapters of LoRA have ten times this rate.
    return metrics | {"grad_norm": float(grad_norm), "lr": lr}


# ---------------------------------------------------------------------------- model and optimizer


def make_optimizers(model, config, device):
    """A list of the optimizers of a module's parameters.

    The learning rate of a group of parameters is `learning_rate` multiplied by the group's
    lr_scale.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() <= 1]
    lr_scale = 10.0 if config.lora_rank else 1.0
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "lr_scale": lr_scale},
        {"params": vectors, "weight_decay": 0.0, "lr_scale": lr_scale},
    ]
    if config.adam_8bit:
        from plumbing.adam_8bit import AdamW8bit

        return [AdamW8bit(groups, lr=config.lr, betas=tuple(config.betas))]
    fused = device.type == "cuda"
    return [torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), fused=fused)]


def load_policy(config, dtype, device, world, trained=False):
    """The Policy of `config.model` on all ranks: rank 0 alone reads the model, then it is sharded.

    trained: with --lora_rank it gets adapters. Collective if there is more than one rank.
    """
    # FSDP2 also makes the bfloat16 weights of each forward pass, even for a single rank.
    is_sharded = world > 1 or config.dtype != "float32"
    if is_sharded and dist.get_rank() > 0:
        model = empty_model(config, dtype)
    else:
        model = load_model(config, dtype)
    if not trained:
        # It may have parameters of two dtypes, with which FSDP2 computes no gradients.
        model.requires_grad_(False)
    elif config.lora_rank:
        lora.add(model, config)
    policy = Policy(model, config)
    layers = layers_of(decoder_of(model))
    if config.checkpointed_layers:
        # Without dropout no random numbers have to be drawn again.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        for layer in layers[: config.checkpointed_layers]:
            # transformers checkpoints the layers that are in training mode. The modules within a
            # layer stay in evaluation mode, without dropout: the engines use none.
            layer.training = True
    if config.compile:
        # A layer is compiled several times: for rows of one sequence and of several, for rows of a
        # single token, with gradients and without.
        torch._dynamo.config.recompile_limit = 64
        policy.chunk_logprobs = torch.compile(head_logprobs, dynamic=True)
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if is_sharded:
        mesh = dist.init_device_mesh(device.type, (world,))
        compute = getattr(torch, config.dtype)
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        # The parts are sharded one after the other, so that no rank but 0 ever holds more than a
        # layer and its shards.
        for part in [*layers, policy]:
            hand_out(part, device)
            fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        register_fsdp_forward_method(policy, "logprobs")
    return policy.to(device)


def build(config, device, world):
    """The Policy to be trained, with the frozen models that its loss needs, and its optimizers.

    What is trained is in float32.
    """
    compute = getattr(torch, config.dtype)
    dtype = compute if config.lora_rank else torch.float32
    policy = load_policy(config, dtype, device, world, trained=True)
    if config.kl_coef and not config.lora_rank:
        policy.frozen["reference"] = load_policy(config, compute, device, world)
    if config.teacher:
        teacher = dataclasses.replace(config, model=config.teacher)
        policy.frozen["teacher"] = load_policy(teacher, compute, device, world)
    return policy, make_optimizers(policy, config, device)


# ---------------------------------------------------------------------------- the run


def updates_engines(config, version):
    """Do the engines get this version? In the pipeline each one, in conventional RL every G-th."""
    g = config.conventional_g
    return not g or version % g == 0 or version == config.steps


def publish_position(run_dir, state, ranks):
    """Tell the actor, in queues/position.json, which draws are done (plumbing/ledger.py)."""
    if ranks.rank == 0:
        publish_json(Path(run_dir, "queues", "position.json"), **state["position"])


def send_first_weights(policy, state, sender, ranks):
    """Send the run's weights to the engines, which have started from the base model, and wait."""
    if ranks.rank == 0:
        size = sum(p.numel() for p in policy.parameters()) / 1e6
        print(
            f"train: {size:.2f}M parameters on {ranks.world} x {ranks.device.type}; waiting for "
            "engines",
            flush=True,
        )
    sender.push(state["version"])
    sender.wait()
    # This update waited for engines to start: its times are not those of an update.
    sender.take_timing()
    if ranks.rank == 0:
        print(f"train: version {state['version']} is in the engines", flush=True)


# exit code of rank 0 if it was told to stop and has saved: the one of SIGTERM
STOPPED = 143


def train(config, run_dir, ranks):
    """The run, from its newest checkpoint to its last step. When it is asked to stop, it saves.

    At the end it waits for the actor's evaluation of the last version, and writes it down. Returns
    the exit code of this process.
    """
    policy, optimizers = build(config, ranks.device, ranks.world)
    newest = checkpoints.agreed_newest(run_dir, ranks)
    state = checkpoints.restore(newest, policy.model, optimizers, ranks.saving)
    saver = checkpoints.Saver(config, run_dir, policy.model, optimizers, ranks, state)
    sender = Sender(config, policy.model, ranks, run_dir)
    reader = Reader(config, run_dir, ranks)
    guards = Guards(config, run_dir, ranks)
    publish_position(run_dir, state, ranks)
    send_first_weights(policy, state, sender, ranks)
    log = MetricsLog(config, run_dir, state, ranks.rank)
    ranks.listen_for_stop()
    version = first = state["version"]
    exit_code = 0
    try:
        while version < config.steps:
            sums = Sums()
            for batch in reader.step(version):
                loss, metrics, logprobs = micro_batch(policy, batch, version, config, ranks.device)
                # FSDP2 averages gradients over ranks. Multiplied by their number, they are a sum.
                (loss * ranks.world).backward()
                sums.add(metrics)
                log.samples(batch, logprobs, version)
            if version == first:
                # Engines and trainer are compared before the first step. If no engine answers,
                # training begins all the same; Guards ends the run if that happens again and again.
                log.mismatch(version, guards.measure(policy, batch, sender, version))
                # The others wait here for rank 0, longer than they would in the next reduction.
                ranks.check_stop()
            metrics = optimizer_step(policy, optimizers, sums, version, config)
            state = checkpoints.next_state(state, metrics, reader.last, log.wall_s())
            version = state["version"]
            log.step(state, metrics, reader, sender.take_timing())
            guards.check(version, metrics)
            saver.check()
            publish_position(run_dir, state, ranks)
            if updates_engines(config, version):
                sender.push(version)
            else:
                sender.announce(version)
            if guards.is_due(version):
                log.mismatch(version, guards.measure(policy, batch, sender, version))
            log.evaluations(reader.evaluations())
            if saver.is_due(version):
                log.save_s = saver.save(state)
        sender.wait()
        log.evaluations(reader.evaluations_until(config.steps))
        ranks.check_stop()
        saver.finish()
        sender.announce(config.steps, done=True)
        sender.close()
    except Stopped as e:
        if version > saver.saved:
            saver.save(state)
        saver.finish()
        if ranks.rank == 0:
            saved = f"version {version} is saved" if version else "no step is made yet"
            print(f"{e}; {saved}", flush=True)
        if ranks.error:
            raise
        # When a rank ends with an error, the launcher ends the others. Rank 0, which writes the
        # checkpoint, ends last.
        exit_code = STOPPED if ranks.rank == 0 else 0
    log.close()
    return exit_code


def main(run_dir):
    try:
        config = cfg.load(run_dir)
        ranks = Ranks(config)
        cfg.require(
            ranks.world == config.trainers,
            f"{ranks.world} ranks were started, and the run has --trainers {config.trainers}, for "
            f"which micro-batches are packed: start {config.trainers} ranks",
        )
        torch.manual_seed(config.seed + ranks.rank)
        exit_code = train(config, run_dir, ranks)
    # A machine or a model that is not as it should be is reported in one line, without a traceback.
    except cfg.ConfigError as e:
        sys.exit(f"train: {e}")
    ranks.close()
    return exit_code


if __name__ == "__main__":
    exit_code = main(sys.argv[1])
    sys.stdout.flush()
    # Threads of gloo may still wait for the interpreter's lock: Python's own exit aborts at times.
    os._exit(exit_code)
