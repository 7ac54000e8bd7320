"""What the distance between behaviour policy and trained policy is made of, with --attribute_every.

A sequence that is done goes through an engine once more, as a prompt: that tells what the engine's weights of
now think of each of its tokens, with a KV cache of nothing but these weights. So every part of the distance
lies between two logprobs of the same token that differ in one thing:

    stale      what was said when it was sampled, behind an update | the same version's prefill
    decode     the same of sequences of one version: what decoding and prefilling differ by
    age        what was said when it was sampled | the prefill of an engine that has the trainer's version
    numerics   that prefill | the trainer
    all        what was said when it was sampled | the trainer

The first two are the actor's, as soon as a group is done; the others the trainer's, whose newest weights the
engines have just got. `age` has in it what a stale cache did. Each part: {tokens; nats: mean |difference|; kl: mean of the
k3 estimator, train.kl}. Deliberately absent: other temperatures than 1, at which vLLM tells no logprobs of prompts.
"""

import asyncio
from pathlib import Path

import numpy as np

from plumbing import secret
from plumbing.queues import notice, noticed
from plumbing.samples import layout, split

# sequences of a micro-batch that the trainer has an engine look at again
SEQUENCES = 8


def part(pairs):
    """[(logprobs [n], others [n])] -> {tokens, nats, kl}; None if there is no token."""
    d = [np.asarray(others, np.float64) - logprobs for logprobs, others in pairs]
    d = np.concatenate(d or [np.zeros(0)])
    if not len(d):
        return None
    return dict(tokens=len(d), nats=float(np.abs(d).mean()), kl=float((np.exp(d) - 1 - d).mean()))


async def prefills(engines, samples, longest):
    """[(sample up to where an engine has room for one token more, its prefill's logprobs [T], version)], of those that worked."""
    sequences = [sample["tokens"][: longest - 1] for sample in samples]
    asked = [engines.prefill(tokens.tolist()) for tokens in sequences]
    found = []
    for sample, answer in zip(samples, await asyncio.gather(*asked)):
        if answer is None:
            continue
        # the first token has no logprob
        logprobs = np.array([0.0, *answer["logprobs"]])
        found.append((sample, logprobs, int(answer["versions"][0])))
    return found


# ---- the actor's part


def is_due(config, draw):
    """Is a group looked at again? One of every `attribute_every` steps."""
    every = config.attribute_every * config.groups_per_step
    return bool(every) and draw % every == 0


async def after_sampling(engines, samples, config, queues):
    """Compare a group's samples, just done, with prefills by the version that sampled their last tokens."""
    pairs = {"stale": [], "decode": []}
    for sample, again, version in await prefills(engines, samples, config.max_model_len):
        n = len(again)
        mask = sample["mask"][:n] & (sample["versions"][:n] == version)
        kind = "stale" if sample["num_versions"] > 1 else "decode"
        pairs[kind].append((sample["logprobs"][:n][mask], again[mask]))
    notice(
        Path(queues, "attribution.json"), **{kind: part(of_kind) for kind, of_kind in pairs.items()}
    )


# ---- the trainer's part


def after_update(model, batch, version, config, run_dir, rank):
    """Compare a micro-batch with the prefills of engines that have just got the trainer's weights.

    Collective. -> {part: {tokens, nats, kl} or None} on rank 0, with what the actor found last.
    """
    # only here: the actor needs no torch
    import torch

    positions, _ = layout(batch["lengths"])
    with torch.no_grad():
        trainers = model.token_logprobs(batch["tokens"], positions, 1.0)[0].cpu().numpy()
    if rank != 0:
        return {}
    ends = np.cumsum(batch["lengths"])
    samples = []
    for sample, end in zip(split(batch), ends):
        own = trainers[end - len(sample["tokens"]) : end]
        if sample["outcome"] >= 0:
            samples.append(sample | {"trainers": own})
    found = asyncio.run(_of_engines(samples[:SEQUENCES], config, run_dir))
    pairs = {"age": [], "numerics": [], "all": []}
    for sample, again, of_engine in found:
        # an engine that is behind or ahead says nothing
        if of_engine != version:
            continue
        n = len(again)
        mask = sample["mask"][:n]
        said, own = sample["logprobs"][:n][mask], sample["trainers"][:n][mask]
        pairs["age"].append((said, again[mask]))
        pairs["numerics"].append((again[mask], own))
        pairs["all"].append((said, own))
    of_actor = noticed(Path(run_dir, "queues", "attribution.json"))
    return {kind: part(of_kind) for kind, of_kind in pairs.items()} | of_actor


async def _of_engines(samples, config, run_dir):
    """`prefills` by the engines that serve the trainer's weights."""
    # only here: bench/gpu.sh trains where there may be no aiohttp
    from plumbing.client import Engines

    engines = Engines(config, [], 0, None, secret.header(run_dir))
    engines.serve(noticed(Path(run_dir, "queues", "version.json"))["engines"])
    try:
        return await prefills(engines, samples, config.max_model_len)
    finally:
        await engines.close()
