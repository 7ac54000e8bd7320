"""What the distance between behaviour policy and trained policy is made of, with --attribute_every.

Some sequences go through an engine once more, as prompts: that tells what its weights of now think of each of
their tokens, with a KV cache of nothing but these weights. So every part of the distance lies between two logprobs
of the same token that differ in one thing:

    stale      what was said when it was sampled, behind an update | the same version's prefill
    decode     the same of sequences of one version: what decoding and prefilling differ by
    age        what was said when it was sampled | the prefill of an engine that has the trainer's version
    numerics   that prefill | the trainer
    all        what was said when it was sampled | the trainer: `kl_behavior` of these tokens

The first two are the actor's, of the tokens that a group's last version sampled, as soon as it is done; the others
the trainer's, of some samples of a step, before their gradient is applied. `age` has in it what a stale cache did.
Each part: {tokens; nats: mean |difference|; kl: mean of the k3 estimator, train.kl}.

Of long sequences the first MOST tokens are looked at: vLLM computes all logits of a prompt at once. Turns of an
episode whose KV cache was computed anew count as stale, too. Deliberately absent: other temperatures than 1, at
which vLLM tells no logprobs of prompts.
"""

import asyncio
import random
import time
from pathlib import Path

import numpy as np

from plumbing import secret
from plumbing.queues import publish_json, read_json
from plumbing.samples import layout, split

# tokens of a sequence
MOST = 2048
# samples of a micro-batch that the trainer has an engine look at again
PER_BATCH = 2


def part(pairs):
    """[(logprobs [n], others [n])] -> {tokens, nats, kl}; None if there is no token."""
    d = [np.asarray(others, np.float64) - logprobs for logprobs, others in pairs]
    d = np.concatenate(d or [np.zeros(0)])
    if not len(d):
        return None
    # exp of what is not to be believed stays finite
    kl = np.exp(np.minimum(d, 100)) - 1 - d
    return dict(tokens=len(d), nats=float(np.abs(d).mean()), kl=float(kl.mean()))


async def prefills(engines, samples, longest):
    """[(sample's first tokens, their logprobs [n] in a prefill, its version)], of samples at temperature 1, where that worked.

    longest: an engine has room for so many tokens, one of which it samples.
    """
    samples = [sample for sample in samples if sample["temperature"] == 1]
    fields = ("tokens", "mask", "behavior_logprobs", "versions", "trainers")
    cut = []
    for sample in samples:
        first = {name: sample[name][: min(longest - 1, MOST)] for name in fields if name in sample}
        cut.append(sample | first)
    asked = [engines.prefill(sample["tokens"].tolist()) for sample in cut]
    found = []
    for sample, answer in zip(cut, await asyncio.gather(*asked)):
        if answer is not None:
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
    newest = max(int(sample["versions"].max()) for sample in samples)
    for sample, again, version in await prefills(engines, samples, config.max_model_len):
        # an engine that is behind or ahead says nothing
        if version != newest:
            continue
        mask = sample["mask"] & (sample["versions"] == version)
        kind = "stale" if sample["num_versions"] > 1 else "decode"
        pairs[kind].append((sample["behavior_logprobs"][mask], again[mask]))
    parts = {kind: part(of_kind) for kind, of_kind in pairs.items()}
    publish_json(Path(queues, "attribution.json"), version=newest, parts=parts)


# ---- the trainer's part


class Attribution:
    """Looks on while a step is trained. Made and called on every trainer rank; rank 0 asks engines and logs."""

    def __init__(self, config, run_dir, model, ranks, sender, log):
        self.config = config
        self.run_dir = run_dir
        self.model = model
        self.ranks = ranks
        self.sender = sender
        self.log = log
        # versions; conventional RL's engines get every G-th
        self.every = config.attribute_every * (config.conventional_g or 1)

    def watch(self, batches, version):
        """The micro-batches that this version trains, passed on; of some steps more is learnt on the way. Collective."""
        if self.every and version % self.every == 0:
            return self._watched(batches, version)
        return batches

    def _watched(self, batches, version):
        chosen = []
        for batch in batches:
            chosen += self._choose(batch, version)
            yield batch
        if self.ranks.rank == 0:
            self.sender.wait()
            self.log.attribution(version, self._parts(chosen, version))

    def _choose(self, batch, version):
        """Some samples of a micro-batch with the trainer's logprobs [T], `trainers`."""
        # only here: the actor needs no torch
        import torch

        positions, _ = layout(batch["lengths"])
        with torch.no_grad():
            logprobs, _ = self.model.token_logprobs(batch["tokens"], positions, 1.0, batch["mask"])
        parts = np.split(logprobs.cpu().numpy(), np.cumsum(batch["lengths"])[:-1])
        samples = [
            sample | {"trainers": own}
            for sample, own in zip(split(batch), parts)
            if sample["outcome"] >= 0
        ]
        return random.Random(version).sample(samples, min(PER_BATCH, len(samples)))

    def _parts(self, chosen, version):
        """{part: {tokens, nats, kl} or None}, with what the actor found since the last time."""
        pairs = {"age": [], "numerics": [], "all": []}
        for sample, again, of_engine in asyncio.run(self._ask(chosen)):
            if of_engine != version:
                continue
            mask = sample["mask"]
            said, own = sample["behavior_logprobs"][mask], sample["trainers"][mask]
            pairs["age"].append((said, again[mask]))
            pairs["numerics"].append((again[mask], own))
            pairs["all"].append((said, own))
        of_actor = read_json(Path(self.run_dir, "queues", "attribution.json"))
        is_new = of_actor.get("version", -1) > version - self.every
        parts = {kind: part(of_kind) for kind, of_kind in pairs.items()}
        return parts | (of_actor["parts"] if is_new else {})

    async def _ask(self, samples):
        """`prefills` by the engines that serve; [] if they do not answer in time, or the run is told to stop."""
        # only here: bench/gpu.sh trains where there may be no aiohttp
        from plumbing.client import Engines

        engines = Engines(self.config, [], 0, None, secret.header(self.run_dir), who="train")
        engines.serve(read_json(Path(self.run_dir, "queues", "version.json"))["engines"])
        deadline = time.monotonic() + self.config.sync_timeout
        work = asyncio.ensure_future(prefills(engines, samples, self.config.max_model_len))
        while not work.done() and time.monotonic() < deadline and not self.ranks.stop.is_set():
            await asyncio.wait({work}, timeout=0.2)
        in_time = work.done()
        work.cancel()
        await engines.close()
        return work.result() if in_time else []
