"""Stage 3: packed micro-batches -> policy-gradient loss -> optimizer step -> new weights into the engines.

One step: read micro-batches from queues/batches/rank_<r> until the one marked `last`, add up gradients, divide once by
the number of samples, clip, step, send the weights (weights.py), announce the new version. Ranks read equal numbers of
micro-batches, so FSDP2's collectives line up without any agreement between them.

Alone, on a run directory that has queues to read: `python train.py out/toy`. More ranks: `accelerate launch ... train.py`.
Deliberately absent: a Trainer class, callbacks, gradient accumulation settings (a step is a step, however it was packed).
"""
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict, StateDictOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import config as cfg
from bench.simulate import advice
from queues import Queue, notice, noticed
from weights import Sender

logging.disable_progress_bar()
HEAD_ELEMENTS = 1 << 26  # logits that exist at once, 256 MB in float32


# ------------------------------------------------------------------------------------------------ the mathematics

def flash_runs_on(x):
    """FlashAttention is for GPUs, in 16 bits."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def packed_attention(module, query, key, value, mask, scaling=None, sliding_window=None, cu_seq_lens_q=None, lengths=None, **_):
    """Causal attention within each sequence of a packed row: query [1, H, T, D], key, value [1, K, T, D] -> [1, T, H, D].

    cu_seq_lens_q [N+1] on the device, lengths [N] on the host. FlashAttention on GPUs (16 bits); elsewhere sequence by sequence:
    1.3 times as fast as one sdpa over the row with a mask [T, T] (bench/train.py). No dropout: what is trained is what sampled.
    """
    if flash_runs_on(query):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max(lengths), max(lengths), scale=scaling,
                          window_size=(sliding_window - 1 if sliding_window else -1, 0), enable_gqa=True)
        return out[None], None
    if sliding_window and max(lengths) > sliding_window:
        raise ValueError(f"train: sequences of {max(lengths)} tokens, beyond the model's sliding window of {sliding_window}, need a GPU")
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    out = [sdpa(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]) for q, k, v in parts]
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)


def load_model(config, dtype):
    """The causal LM of `config.model`, with attention for packed rows."""
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype, attn_implementation="packed")
    model.head_float32 = config.head_float32
    return model


def to_device(device, *tensors):
    """CPU tensors on `device`, without waiting for what it is doing."""
    return [x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x for x in tensors]


def head_logprobs(hidden, weight, targets, temperature):
    """Logprobs and entropy of one chunk: hidden [C, D], weight [V, D], targets [C] -> ([C], [C]), in float32."""
    logits = (hidden @ weight.T).float() / temperature  # [C, V]
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def token_logprobs(model, input_ids, position_ids, temperature):
    """log p(token | tokens before it in its sequence) for one packed row, and the entropy of the distribution it came from.

    input_ids, position_ids [T], numpy (FSDP2 moves tensors to the GPU; the sequences' boundaries must be known on the CPU) or
    CPU tensors -> (logprobs [T], entropy [T]), float32, on the model's device, both 0 at the row's first token. position_ids
    restart at 0 with every sequence, which is what keeps sequences from seeing each other; the first token of a sequence gets a
    meaningless value (it has no context) and must be masked out by the caller.
    """
    input_ids, position_ids = torch.as_tensor(input_ids).cpu(), torch.as_tensor(position_ids).cpu()
    starts = torch.cat([torch.nonzero(position_ids == 0)[:, 0], torch.tensor([len(position_ids)])])  # known on the CPU: no wait for the GPU
    weight = model.get_output_embeddings().weight
    input_ids, position_ids, boundaries = to_device(weight.device, input_ids, position_ids, starts.int())
    hidden = model.base_model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False,
                              cu_seq_lens_q=boundaries, lengths=starts.diff().tolist()).last_hidden_state[0, :-1]  # [T-1, D]
    targets = input_ids[1:]
    if getattr(model, "head_float32", False):
        hidden, weight = hidden.float(), weight.float()
    chunk = max(HEAD_ELEMENTS // weight.shape[0], 1)
    if len(targets) <= chunk:
        logprobs, entropy = head_logprobs(hidden, weight, targets, temperature)
    else:  # the logits of a chunk are recomputed in the backward pass, so [T, V] never exists
        parts = [checkpoint(head_logprobs, h, weight, t, temperature, use_reentrant=False)
                 for h, t in zip(hidden.split(chunk), targets.split(chunk))]
        logprobs, entropy = (torch.cat(x) for x in zip(*parts))
    zero = logprobs.new_zeros(1)
    return torch.cat([zero, logprobs]), torch.cat([zero, entropy])


def sequence_ratio(log_w, sequence_ids):
    """Geometric mean of a sequence's token ratios, at each of its tokens, and the number of its tokens: [T] -> ([T], [T]).

    sequence_ids [T], negative where the token was not sampled; such tokens take no part.
    """
    rows = sequence_ids + 1  # row 0 collects what was not sampled
    zeros = log_w.new_zeros(len(log_w) + 1)
    count = zeros.index_add(0, rows, torch.ones_like(log_w)).clamp(min=1)[rows]
    return (zeros.index_add(0, rows, log_w)[rows] / count).exp(), count


def policy_loss(kind, logprobs, behavior_logprobs, advantages, sequence_ids, config):
    """Loss per token, to be summed over the tokens that were sampled and minimised, [T] -> [T].

    logprobs under the policy being trained (pi), behavior_logprobs as the engine reported them (mu), sequence_ids >= 0 for
    sampled tokens. w = pi/mu is the importance weight; sg() stops the gradient.

    reinforce  -sg(min(w, c)) A log pi, c = clamp; truncated importance sampling, PipelineRL eq. 5 (arXiv 2509.19128)
    ppo        -min(w A, clip(w, 1 - ppo_low, 1 + ppo_high) A); Schulman et al. 2017 (arXiv 1707.06347) eq. 7
    gspo       -min(s A, clip(s, 1 - gspo_low, 1 + gspo_high) A) / |y|, s the sequence's geometric-mean ratio; GSPO 2025
               (arXiv 2507.18071) eq. 5. Divided by the length, so that a sequence's tokens add up to its one term.
    icepop     -sg(w 1[icepop_low <= w <= icepop_high]) A log pi; tokens outside are left out; IcePop 2025
    """
    log_w = logprobs - behavior_logprobs
    if kind == "reinforce":
        return -log_w.exp().clamp(max=config.clamp).detach() * advantages * logprobs
    if kind == "ppo":
        w = log_w.exp()
        return -torch.minimum(w * advantages, w.clamp(1 - config.ppo_low, 1 + config.ppo_high) * advantages)
    if kind == "gspo":
        s, length = sequence_ratio(log_w, sequence_ids)
        return -torch.minimum(s * advantages, s.clamp(1 - config.gspo_low, 1 + config.gspo_high) * advantages) / length
    if kind == "icepop":
        w = log_w.exp().detach()
        return -torch.where((w >= config.icepop_low) & (w <= config.icepop_high), w, 0.0) * advantages * logprobs
    raise ValueError(f"unknown loss '{kind}'")


def clipped(kind, log_w, sequence_ids, config):
    """Tokens [T] whose weight the loss cuts or drops."""
    w = sequence_ratio(log_w, sequence_ids)[0] if kind == "gspo" else log_w.exp()
    low, high = {"reinforce": (0.0, config.clamp), "ppo": (1 - config.ppo_low, 1 + config.ppo_high),
                 "gspo": (1 - config.gspo_low, 1 + config.gspo_high), "icepop": (config.icepop_low, config.icepop_high)}[kind]
    return (w < low) | (w > high)


def kl(logprobs, other):
    """KL(p || q) per token of a sample of p, k3 estimator: exp(d) - 1 - d with d = log q - log p, >= 0, [T] -> [T].

    Schulman, "Approximating KL divergence" 2020; as a penalty with p the policy, q the reference: GRPO (arXiv 2402.03300) eq. 4.
    """
    d = other - logprobs
    return d.exp() - 1 - d


def dpo_loss(log_ratios, pairs, beta):
    """DPO of pairs of answers to one prompt, log_ratios [S] of whole sequences, log pi(y) - log base(y), pairs [P, 2] of (better, worse) -> [P].

    -log sigmoid(beta (log_ratio of the better - that of the worse)); Rafailov et al. 2023 (arXiv 2305.18290) eq. 7. Its gradient has no
    importance weight, so it does not matter how old the samples are, only which of the two is better.
    """
    better, worse = log_ratios[pairs].unbind(1)
    return -torch.nn.functional.logsigmoid(beta * (better - worse))


def ess(ratios):
    """Normalised effective sample size (sum w)^2 / (N sum w^2) of the unclipped importance weights w [N], in (0, 1]."""
    return ess_of_sums(float(ratios.sum()), float((ratios ** 2).sum()), len(ratios))


def ess_of_sums(w, w2, n):
    """ess from sum w, sum w^2 and N, which add up over micro-batches and ranks; 1 if there is nothing."""
    return w ** 2 / (n * w2) if w2 else 1.0


def learning_rate(config, step):
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then constant or linear down to 10%."""
    rate = config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return rate * (1 - 0.9 * step / config.steps) if config.lr_schedule == "linear" else rate


# ------------------------------------------------------------------------------------------------ one micro-batch

LAG_BUCKETS = {"0": 0, "1": 1, "2": 2, "3-4": 4, "5-8": 8, "9+": None}  # name -> largest lag in it
LAG_SUMS = "tokens loss w w2 kl clipped".split()
SUMS = "late row_tokens tokens samples reward success loss entropy w w2 kl clipped lag mismatch mismatch_n versions_2 versions_3 kl_ref dpo pairs".split()


def check(record, name, config, version, vocabulary):
    """Refuse a micro-batch that cannot be trained on at `version`, naming it, before anything is computed from it."""
    if record["run_id"] != config.run_id or record["step"] != version:
        raise RuntimeError(f"train: {name} is for step {record['step']} of run {record['run_id']}, this is step {version} of run {config.run_id}: start over with --fresh True")
    for key in ("logprobs", "advantages", "rewards", "ref_logprobs"):
        if key in record and not np.isfinite(record[key]).all():
            raise ValueError(f"train: {name}: {key} has values that are not finite")
    if record["input_ids"].min() < 0 or record["input_ids"].max() >= vocabulary:
        raise ValueError(f"train: {name}: token ids from {record['input_ids'].min()} to {record['input_ids'].max()}, the vocabulary has {vocabulary}")


def micro_batch(model, record, version, config, device):
    """Forward and loss of one micro-batch record of preprocess.py; nothing here waits for the device.

    Returns the summed loss (a scalar to call backward on), sums over tokens or samples in the order of SUMS, the sums of
    LAG_SUMS by lag [6, 6], and the largest lag of a trained token.
    """
    logprobs, entropy = model.token_logprobs(record["input_ids"], record["position_ids"], config.temperature)
    names = [k for k, v in record.items() if isinstance(v, np.ndarray) and k not in ("input_ids", "position_ids")]
    t = dict(zip(names, to_device(device, *(torch.from_numpy(record[k]) for k in names))))
    lag = version - t["versions"]
    first, last = config.lags
    late = t["mask"] & ((lag < first) | (lag > (min(last, config.max_lag) if config.late == "mask" else last)))
    mask = t["mask"] & ~late  # [T] bool: tokens the engine sampled, and recently enough
    lag = lag * mask
    sequence_ids = torch.where(mask, t["sequence_ids"], -1)
    behavior = torch.where(mask, t["logprobs"], logprobs.detach())
    per_token = policy_loss(config.loss, logprobs, behavior, t["advantages"], sequence_ids, config)
    kl_ref = kl(logprobs, torch.where(mask, t["ref_logprobs"], logprobs.detach())) if config.kl_coef else torch.zeros_like(logprobs)
    per_token = per_token + config.kl_coef * kl_ref
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * entropy
    if config.normalizer == "sequence":
        per_token = per_token / sequence_ratio(torch.zeros_like(logprobs), sequence_ids)[1]
    per_token = torch.where(mask, per_token, 0.0)
    loss, dpo = per_token.sum(), logprobs.new_zeros(0)
    if config.dpo_coef:
        base = t["ref_logprobs"] if config.dpo_base == "reference" else t["logprobs"]
        log_ratios = logprobs.new_zeros(len(t["spans"])).index_add(0, t["sequence_ids"], torch.where(t["mask"], logprobs - base, 0.0))  # [S]
        dpo = dpo_loss(log_ratios, t["pairs"], config.dpo_beta)
        loss = loss + config.dpo_coef * dpo.sum()
    with torch.no_grad():
        log_w = logprobs - behavior
        w, cut = log_w.exp() * mask, clipped(config.loss, log_w, sequence_ids, config) & mask
        # The engine's logprob is of this version's forward only if all of the sequence was: its KV cache may be older.
        pure = mask & t["pure"] & (lag == 0)
        kl_behavior = kl(behavior, logprobs) * mask
        sums = torch.stack([x.float().sum() for x in (
            late, torch.full_like(log_w, record["samples"] > 0), mask, torch.ones_like(t["rewards"]), t["rewards"], t["successes"], loss,
            entropy * mask, w, w * w, kl_behavior, cut, lag, log_w.abs() * pure, pure, t["spans"] >= 2, t["spans"] >= 3, kl_ref * mask, dpo, torch.ones_like(dpo))])
        bucket = sum((lag > largest).long() for largest in LAG_BUCKETS.values() if largest is not None)
        columns = torch.stack([mask.float(), per_token, w, w * w, kl_behavior, cut.float()], dim=1)  # [T, 6]
        by_lag = columns.new_zeros(len(LAG_BUCKETS), len(LAG_SUMS)).index_add(0, bucket, columns)
    return loss, sums, by_lag, lag.max()


def lag_table(by_lag):
    """Sums by lag [6, 6] -> {bucket: {tokens, loss, kl, ess, clip_frac}} per token, for the buckets that have any."""
    table = {}
    for name, row in zip(LAG_BUCKETS, by_lag.tolist()):
        s = dict(zip(LAG_SUMS, row))
        if n := s["tokens"]:
            table[name] = {"tokens": int(n), "loss": s["loss"] / n, "kl": s["kl"] / n, "ess": ess_of_sums(s["w"], s["w2"], n), "clip_frac": s["clipped"] / n}
    return table


def train_step(model, optimizer, records, version, config, device):
    """One optimizer step on this rank's micro-batches: gradients summed over all, divided once, clipped, applied. Collective.

    Returns (metrics of the step over all ranks, totals). A gradient that is not finite leaves the weights as they are, on
    every rank alike, as the norm is of all of them.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    optimizer.zero_grad()
    sums, by_lag, lag_max = torch.zeros(len(SUMS), device=device), torch.zeros(len(LAG_BUCKETS), len(LAG_SUMS), device=device), torch.zeros((), device=device)
    for record in records:
        loss, s, b, m = micro_batch(model, record, version, config, device)
        (loss * world).backward()  # FSDP2 averages over ranks; the sum is wanted
        sums, by_lag, lag_max = sums + s, by_lag + b, torch.maximum(lag_max, m.float())
    if world > 1:
        dist.all_reduce(sums)
        dist.all_reduce(by_lag)
        dist.all_reduce(lag_max, op=dist.ReduceOp.MAX)
    total = dict(zip(SUMS, sums.tolist()))
    samples, tokens = max(total["samples"], 1), max(total["tokens"], 1)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= tokens if config.normalizer == "tokens" else samples
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    grad_norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, version)
    if math.isfinite(grad_norm):
        optimizer.step()
    return dict(
        tokens=int(total["row_tokens"]), reward=total["reward"] / samples, success=total["success"] / samples, loss=total["loss"] / samples,
        grad_norm=grad_norm, lr=group["lr"], entropy=total["entropy"] / tokens, ess=ess_of_sums(total["w"], total["w2"], tokens),
        kl_behavior=total["kl"] / tokens, kl_ref=total["kl_ref"] / tokens, mismatch=total["mismatch"] / total["mismatch_n"] if total["mismatch_n"] else None,
        lag_mean=total["lag"] / tokens, lag_max=int(lag_max), clip_frac=total["clipped"] / tokens, late=int(total["late"]),
        versions_2=total["versions_2"] / samples, versions_3=total["versions_3"] / samples,
        dpo=total["dpo"] / total["pairs"] if total["pairs"] else None, by_lag=lag_table(by_lag)), total


# ------------------------------------------------------------------------------------------------ model, checkpoints

def build(config, device, world):
    """The policy, a Hugging Face causal LM with float32 master weights, sharded if there is more than one rank; its optimizer."""
    model = load_model(config, torch.float32)
    model.train()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.token_logprobs = types.MethodType(token_logprobs, model)
    if world > 1 or config.dtype != "float32":
        mesh = dist.init_device_mesh(device.type, (world,))
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        register_fsdp_forward_method(model, "token_logprobs")
    model.to(device)
    decay, plain = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
                                    lr=config.lr, betas=(config.beta1, config.beta2), fused=device.type == "cuda")


def random_state():
    """States of the generators a model may draw from (dropout), as tensors."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def save(config, run_dir, model, optimizer, state, rank):
    """Write checkpoints/step_XXXXXX: HF weights and tokenizer, and trainer/ with what resuming needs; drop old ones.

    Collective over all ranks. Written under a temporary name and renamed, so a checkpoint is whole or absent.
    """
    final = Path(run_dir, "checkpoints", f"step_{state['version']:06d}")
    temporary = final.with_name(final.name + ".tmp")
    if rank == 0:
        for torn in final.parent.glob("*.tmp"):  # of a trainer that was killed while it wrote
            shutil.rmtree(torn)
        temporary.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=temporary / "trainer")
    torch.save(random_state(), temporary / "trainer" / f"random_{rank}.pt")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        dtype, named = getattr(torch, config.dtype), {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
        model.save_pretrained(temporary, state_dict={k: v.to(dtype) for k, v in full.items() if k in named})  # a tied head once, not twice
        AutoTokenizer.from_pretrained(config.model).save_pretrained(temporary)
        (temporary / "trainer" / "state.json").write_text(json.dumps(state))
        os.sync()  # a power cut leaves it whole, too
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in sorted(final.parent.glob("step_*[0-9]"))[:-config.keep_last]:
            if not config.keep_every or int(old.name[5:]) % config.keep_every:
                shutil.rmtree(old)
    if dist.is_initialized():
        dist.barrier()


def restore(run_dir, model, optimizer, rank):
    """Load the newest checkpoint into model and optimizer; returns its state, or that of a new run if there is none."""
    newest = max(Path(run_dir, "checkpoints").glob("step_*[0-9]"), default=None)
    if newest is None:
        return {"version": 0, "samples": 0, "wall_s": 0.0, "skipped": 0, "skipped_in_a_row": 0, "dropped": 0, "position": {"next": 0, "ahead": []}}
    weights, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=newest / "trainer")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    if (newest / "trainer" / f"random_{rank}.pt").exists():  # not if there are more ranks than before
        for device, random in torch.load(newest / "trainer" / f"random_{rank}.pt", weights_only=True).items():
            (torch if device == "cpu" else torch.cuda).set_rng_state(random)
    return {"dropped": 0} | json.loads((newest / "trainer" / "state.json").read_text())


class Stopped(Exception):
    """Told to stop (SIGTERM): what is done is to be saved, the step in progress is not."""


class Log:
    """metrics.jsonl (one line a step or an evaluation), the live line, and wandb if asked for."""

    def __init__(self, config, run_dir, version):
        path = Path(run_dir, "metrics.jsonl")
        if path.exists():  # a continued run does again what was done after the checkpoint
            lines = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]  # a crash may have cut the last one short
            kept = [x for x in lines if (line := json.loads(x))["version"] < version or line["version"] == version and "step" in line]
            path.with_suffix(".tmp").write_text("".join(kept))
            path.with_suffix(".tmp").replace(path)  # all of the curves are there, or all as they were
        self.file, self.wandb = open(path, "a"), None
        if config.wandb != "off":
            import wandb
            self.wandb = wandb.init(project="pipeline-rl", name=config.run, config=vars(config), mode=config.wandb, dir=run_dir)

    def write(self, line):
        short = lambda v: float(f"{v:.6g}") if isinstance(v, float) else {k: short(x) for k, x in v.items()} if isinstance(v, dict) else v
        self.file.write(json.dumps(short(line)) + "\n")
        self.file.flush()
        if self.wandb:
            scores = {f"eval/{task}": x for task, x in line.get("eval", {}).items()}
            curves = {k: v for k, v in line.items() if k not in ("problems", "drops")}  # every problem would be a curve of its own
            self.wandb.log(scores | {"version": line["version"]} if scores else curves)  # evaluations come late: no step=


def main(run_dir):
    config = cfg.load(run_dir)
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 or config.dtype != "float32":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1"), os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
    torch.manual_seed(config.seed + rank)

    model, optimizer = build(config, device, world)
    state = restore(run_dir, model, optimizer, rank)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    queues = Path(run_dir, "queues")
    batches, evals = Queue(queues / "batches" / f"rank_{rank}"), Queue(queues / "evals")
    log = Log(config, run_dir, state["version"]) if rank == 0 else None
    started, evaluated = time.time() - state["wall_s"], None
    waited, record = 0.0, None  # of the step in progress: seconds without data, its last record
    stopping = False

    def drain_evals(timeout=0.0):
        """Move the actor's evaluation results into metrics.jsonl; True once that of the last version has come, else None."""
        nonlocal evaluated
        with contextlib.suppress(TimeoutError):
            while rank == 0 and evaluated != config.steps:
                seq, line = evals.get(timeout)
                log.write(line | {"wall_s": line["wall_s"] - started})
                print(f"eval: version {line['version']} | " + " | ".join(f"{k} {v:.3f}" for k, v in line["eval"].items()) + f" | {line['problems']} held-out problems", flush=True)
                evals.ack(seq)
                evaluated = line["version"]
        return evaluated == config.steps or None

    def stop(*_):
        nonlocal stopping
        stopping = True
        sender.hurry()

    def announce(version, position):
        """Tell the other stages that `engines` serve `version` now, and which problems have been trained on."""
        return lambda engines: notice(queues / "version.json", version=version, position=position, engines=engines)

    def take_record():
        with contextlib.suppress(TimeoutError):
            return batches.get(1.0)

    def until(take, complaint):
        """Collective: wait until rank 0's take() gives something, and return it there. Engines that were started again meanwhile get the
        current version once more: what is waited for may never come without them.
        """
        start = time.time()
        while True:
            got = None
            while rank == 0 and not stopping and (got := take()) is None and not sender.missing():
                if time.time() - start > config.stall_timeout:
                    raise TimeoutError(f"train: {complaint} within {config.stall_timeout:.0f} s")
            said = sender.agree(2 if stopping else int(got is None))
            if said == 2:
                raise Stopped
            if not said:
                return got
            sender.wait()
            times = sender.last  # of the step's own update
            sender.prepare(state["version"])
            sender.send(state["version"], announce(state["version"], state["position"]))
            sender.wait()
            sender.last = times

    def records(version, due):
        """The micro-batches of this step; before the last one is trained, the engines are told to get ready for an update."""
        nonlocal waited, record
        waited, record = 0.0, {"last": False}
        while not record["last"]:
            start = time.time()
            seq, record = until(take_record, f"preprocess put no micro-batch into {batches.path}") or batches.get(config.stall_timeout)
            waited += time.time() - start
            check(record, f"record {seq} of {batches.path}", config, version, vocabulary)
            if record["last"] and due:
                sender.prepare(version + 1)
            yield record
            batches.ack(seq)

    sender = Sender(config, model, rank, device, queues)
    sender.prepare(state["version"])
    sender.send(state["version"], announce(state["version"], state["position"]))  # engines start from the base model; after a resume they need these weights
    sender.wait()
    sender.timing()
    line = None  # metrics of the last step, complete when its weight update is
    first_version, loop_start = state["version"], time.time()
    if rank == 0:
        print(f"train: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {world} x {device.type}, version {state['version']} is in the engines", flush=True)

    def checkpoint():
        nonlocal line, saved
        if line:  # a checkpoint's own step must be in the curves that a continued run finds
            log.write(line | sender.timing())
            line = None
        try:
            save(config, run_dir, model, optimizer, state, rank)
        except (Exception, CheckpointException) as e:  # torch hides the system's error, and derives its own from BaseException
            reason, free = (str(e).strip().splitlines() or [type(e).__name__])[-1], shutil.disk_usage(run_dir).free / 1e6
            raise RuntimeError(f"train: checkpoint {state['version']} cannot be written to {run_dir}/checkpoints ({reason}; {free:.0f} MB are free there); that of version {saved} is intact: "
                               "see to space and permissions, then the same command continues") from e
        saved = state["version"]

    saved, balance = state["version"], []  # (share of the step spent waiting for data, share of the engines' places empty) of the last steps
    signal.signal(signal.SIGTERM, stop)
    try:
        while (version := state["version"]) < config.steps:
            step_start = time.time()
            due = not config.conventional_g or (version + 1) % config.conventional_g == 0 or version + 1 == config.steps
            metrics, total = train_step(model, optimizer, records(version, due), version, config, device)
            finite = math.isfinite(metrics["grad_norm"])
            state |= {"version": version + 1, "samples": state["samples"] + int(total["samples"]), "position": record["position"],
                      "dropped": state["dropped"] + sum(n for problems in record["drops"].values() for n in problems.values()),
                      "skipped": state["skipped"] + (not finite), "skipped_in_a_row": 0 if finite else state["skipped_in_a_row"] + 1}
            if not finite:  # the step counts, so that data and versions stay aligned
                print(f"train: step {version + 1} has a gradient that is not finite (loss {metrics['loss']}): weights left as they are, {state['skipped']} steps so far", flush=True)
                if state["skipped_in_a_row"] == 3:
                    raise RuntimeError("train: three steps in a row had gradients that are not finite: lower --lr, or look at the samples")
            if line:
                log.write(line | sender.timing())
            if due:
                sender.send(state["version"], announce(state["version"], state["position"]))
                if device.type == "cpu":
                    sender.wait()  # engines share the cores: a trainer that went on would only prolong their pause
            elif rank == 0:
                sender.wait()  # it announces, too
                announce(state["version"], state["position"])(sender.members)
            now = time.time()
            state["wall_s"] = now - started
            if rank == 0:
                drain_evals()
                line = dict(step=state["version"], version=state["version"], samples=state["samples"], wall_s=state["wall_s"], **metrics,
                            dropped=state["dropped"], train_tok_s=metrics["tokens"] / (now - step_start), gen_tok_s=record["gen_tok_s"], gen_idle=record["gen_idle"], wait_data_s=waited,
                            skipped=state["skipped"], by_task=record["by_task"], problems=record["problems"], drops=record["drops"])
                left = (config.steps - state["version"]) * (now - loop_start) / (state["version"] - first_version)
                print(f"step {state['version']}/{config.steps} | reward {line['reward']:.3f} | ess {line['ess']:.3f} | lag {line['lag_mean']:.1f}/{line['lag_max']} | "
                      f"{line['train_tok_s'] / 1000:.1f}k tok/s | wait {100 * waited / (now - step_start):.0f}% | eta {left / 60:.1f}m", flush=True)
                balance.append((waited / (now - step_start), line["gen_idle"]))
                if len(balance) == 50:
                    words = advice(*np.mean(balance, axis=0), config.engines * config.tensor_parallel, config.trainers, config.tensor_parallel)
                    if words:
                        print(f"train: over the last 50 steps, {words}", flush=True)
                    balance.clear()
            if state["version"] == config.steps or config.save_every and state["version"] % config.save_every == 0:
                checkpoint()
        if line:
            log.write(line | sender.timing())
        until(lambda: drain_evals(1.0), f"the actor has not evaluated version {config.steps}")
    except Stopped:
        if state["version"] > saved:
            checkpoint()
        if rank == 0:
            print(f"train: told to stop, version {state['version']} is saved", flush=True)
    if log and log.wandb:
        log.wandb.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still wait for the interpreter's lock: its own way out then aborts now and then
