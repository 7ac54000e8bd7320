"""One ratio for engine mismatch and staleness, or two? Steps of a real run, computed in both ways.

    python bench/two_ratios.py [--seeds 3] [--quick] [--plot] [--port 9300]

Asynchronous systems weigh a token by w = pi / mu, where mu is the engine's probability. It is a
product of staleness, pi / old, both computed by the trainer, at the version that is trained and at
the one that has sampled; and of mismatch, old / mu, the same weights computed by trainer and
engine. Systems that lack the old policy's logprobs cannot tell the two apart ("missing old logits",
arXiv 2605.12070).

A run of `smol` (bfloat16, real vLLM, `--late hold`, all data 1 or 8 versions old) keeps every
checkpoint, which takes 55 GB of disk until it is computed again, and every micro-batch. Some of its
steps are then computed again, as in tools/replay.py:

    one ratio     w = pi / mu, as in the run
    apart         the ratio pi / old in the loss; the advantage is multiplied by min(old / mu, 2)
    stale alone   the ratio pi / old; the mismatch is not corrected

Columns: the mean |log ratio| of both parts, the share of tokens outside of [0.8, 1.2] by w and by
pi / old, and the cosine between the gradient of one ratio and that of the others, for the losses
reinforce and ppo.
"""

import copy
import gc
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import train
from bench import runs
from bench.common import machine, measured, result_file, table
from bench.compare import interval_text, student
from plumbing import checkpoints
from plumbing.model import whole
from plumbing.ranks import Ranks
from plumbing.samples import layout
from tools.common import kept_batches, read_metrics

LAGS = (1, 8)
KNOBS = dict(steps=24, late="hold", save_every=1, keep_last=0, keep_steps=24)
KNOBS |= dict(eval_every=0, eval_problems=1, trainer_threads=2)
# the steps that are computed again, or the last ones before them that have a gradient
STEPS = (12, 16, 20, 24)
QUICK = dict(steps=12)
LOSSES = ("reinforce", "ppo")
# the largest weight of the mismatch
LARGEST = 2.0
CPU = torch.device("cpu")


def policy_of(config, run_dir, version):
    """The Policy of a version, as the trainer computes it."""
    version = max(version, 0)
    path = Path(run_dir, "checkpoints", f"step_{version:06}") if version else None
    policy, optimizers = train.build(config, CPU, 1)
    checkpoints.restore(path, policy.model, optimizers)
    return policy


@torch.no_grad()
def logprobs_of(policy, batch):
    """The trainer's logprobs of a micro-batch: [T]."""
    positions, ids = layout(batch["lengths"], batch["segment"])
    inputs = (batch["tokens"], positions, batch["temperature"][ids], batch["mask"])
    return policy.logprobs(*inputs)[0].numpy()


def gradient(policy, batches, version, config):
    """The gradient of a step's loss, as one vector."""
    policy.zero_grad()
    for batch in batches:
        loss, _, _ = train.micro_batch(policy, batch, version, config, CPU)
        loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return torch.cat([whole(grad).flatten() for grad in gradients])


def apart(batch, old, weigh):
    """A micro-batch whose ratio is pi / old. weigh: the advantages are weighted by the mismatch."""
    changed = copy.copy(batch)
    log_mismatch = np.where(batch["mask"], old - batch["behavior_logprobs"], 0.0)
    changed["behavior_logprobs"] = np.where(batch["mask"], old, 0.0).astype(np.float32)
    if weigh:
        weights = np.minimum(np.exp(log_mismatch), LARGEST)
        changed["advantage"] = (batch["advantage"] * weights).astype(np.float32)
    return changed


def outside(log_ratio):
    """The share of ratios outside of [0.8, 1.2]."""
    ratio = np.exp(log_ratio)
    return float(np.mean((ratio < 0.8) | (ratio > 1.2)))


def cosine(a, b):
    """The cosine between two long vectors, summed in double precision."""
    ab, aa, bb = (
        sum((x.double() @ y.double()).item() for x, y in zip(u.split(1 << 20), v.split(1 << 20)))
        for u, v in ((a, b), (a, a), (b, b))
    )
    return ab / (aa * bb) ** 0.5


def of_step(config, run_dir, step):
    """The figures of a step of a run."""
    version = step - 1
    old_policy = policy_of(config, run_dir, version - config.max_lag)
    batches = kept_batches(run_dir, step)
    olds = [logprobs_of(old_policy, batch) for batch in batches]
    del old_policy
    policy = policy_of(config, run_dir, version)
    masks = [batch["mask"] for batch in batches]
    new = np.concatenate([logprobs_of(policy, b)[m] for b, m in zip(batches, masks)])
    old = np.concatenate([old[m] for old, m in zip(olds, masks)])
    mu = np.concatenate([b["behavior_logprobs"][m] for b, m in zip(batches, masks)])
    figures = dict(
        tokens=len(mu),
        staleness=float(np.abs(new - old).mean()),
        mismatch=float(np.abs(old - mu).mean()),
        outside_one=outside(new - mu),
        outside_stale=outside(new - old),
    )
    ways = {
        "one": batches,
        "apart": [apart(b, o, True) for b, o in zip(batches, olds)],
        "stale": [apart(b, o, False) for b, o in zip(batches, olds)],
    }
    for loss in LOSSES:
        _, low, high = cfg.LOSSES[loss]
        config.loss, config.clip_low, config.clip_high = loss, low, high
        gradients = {way: gradient(policy, b, version, config) for way, b in ways.items()}
        for way in ("apart", "stale"):
            figures[f"{loss} {way}"] = cosine(gradients["one"], gradients[way])
    return figures


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=3, port=9300)
    a = p.parse_args(argv)
    if a.quick:
        a.seeds = 1
    knobs = KNOBS | (QUICK if a.quick else {})
    steps = [step for step in STEPS if step <= knobs["steps"]]
    wanted = {}
    for seed in range(a.first_seed, a.first_seed + a.seeds):
        for lag in LAGS:
            wanted[f"lag {lag}, seed {seed}"] = knobs | dict(max_lag=lag, seed=seed)

    def measure(key, run_knobs):
        run_dir = runs.run_to_its_end(
            f"two_ratios-lag{run_knobs['max_lag']}-seed{run_knobs['seed']}",
            run_knobs,
            a.port,
            preset="smol",
        )
        config = cfg.load(run_dir)
        torch.set_num_threads(2)
        ranks = Ranks(config)
        try:
            # A step whose advantages are all 0 has no gradient; then the last one before is taken.
            [lines] = read_metrics(run_dir, "step")
            with_gradient = [line["step"] for line in lines if line["grad_norm"] > 0]
            chosen = {max(x for x in with_gradient if x <= step) for step in steps}
            figures = {step: of_step(config, run_dir, step) for step in sorted(chosen)}
        finally:
            ranks.close()
            # FSDP's modules refer to each other, and would keep 4 GB beside the next run.
            gc.collect()
        shutil.rmtree(run_dir / "checkpoints")
        return dict(steps=figures)

    path = result_file(a, "two_ratios")
    results = measured(path, wanted, None if a.plot else measure, reuse=not a.quick)
    print(machine())
    print(f"means over steps {steps}, then over seeds")
    columns = {}
    for lag in LAGS:
        for key, result in results.items():
            if key.startswith(f"lag {lag},"):
                columns.setdefault(f"lag {lag}", []).append(list(result["steps"].values()))
    rows = []
    for name in next(iter(columns.values()))[0][0]:
        row = [name]
        for seeds in columns.values():
            by_seed = [np.mean([figures[name] for figures in steps]) for steps in seeds]
            row.append(interval_text(student(by_seed), ".4g"))
        rows.append(row)
    table(["", *columns], rows)


if __name__ == "__main__":
    main()
