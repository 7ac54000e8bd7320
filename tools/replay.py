"""A step of a run computed once more, from the micro-batches that --keep_steps left.

    python tools/replay.py out/toy --step 137
    python tools/replay.py out/toy --step 137 --loss icepop

The first prints the same numbers as the run (the same bits if it had one rank), the second also
what another loss would have done.

It begins from the newest checkpoint before the step; steps between them are trained again first.
Any knob of the loss may differ; everything before it is what the run itself computed. Runs on one
device, also what several ranks have trained. The step's rollouts, coloured by ratio, are in
report.html.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file

import config as cfg
import train
from plumbing import checkpoints, lora
from plumbing.metrics import Sums
from plumbing.model import whole
from plumbing.placement import gpu_count, share_cores
from plumbing.ranks import Ranks
from tools.common import find_run, kept_batches, read_metrics

NUMBERS = "loss grad_norm entropy ess kl_behavior kl_ref mismatch clip_frac reward tokens".split()


# ---- the step again


def train_step(policy, optimizers, batches, version, config, ranks):
    """train.train's loop for the micro-batches of one step; its metrics. Without optimizers the
    weights stay.
    """
    sums = Sums()
    for batch in batches:
        loss, metrics, _ = train.micro_batch(policy, batch, version, config, ranks.device)
        loss.backward()
        sums.add(metrics)
    metrics = train.optimizer_step(policy, optimizers, sums, version, config)
    policy.zero_grad()
    return metrics


def train_until(run_dir, step, config, ranks):
    """(policy, optimizers) as they were before `step`, trained again from the newest checkpoint
    before it.
    """
    saved = {int(path.name[5:]): path for path in checkpoints.all_of(run_dir)}
    version = max((version for version in saved if version < step), default=0)
    path = saved.get(version)
    # all of them, before anything is computed
    batches = {k: kept_batches(run_dir, k) for k in range(version + 1, step)}
    policy, optimizers = train.build(config, ranks.device, 1)
    checkpoints.restore(path, policy.model, optimizers)
    print(f"replay: from {path or config.model}", flush=True)
    for k, of_step in batches.items():
        metrics = train_step(policy, optimizers, of_step, k - 1, config, ranks)
        print(f"replay: step {k}: loss {metrics['loss']:.6g}", flush=True)
    return policy, optimizers


def six_digits(value):
    """A float to six digits; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def print_numbers(columns, exact):
    """A table of {heading: metrics}. Returns the names that differ in the first two; exact: in any
    of six digits.
    """
    differ = []
    print(" " * 14 + "".join(f"{heading:>14}" for heading in columns))
    for name in NUMBERS:
        values = [six_digits(metrics.get(name)) for metrics in columns.values()]
        alike = values[0] == values[1]
        if not exact and None not in values[:2]:
            # several ranks' sums came in another order
            alike = math.isclose(*values[:2], rel_tol=1e-3, abs_tol=1e-6)
        cells = "".join(f"{value!s:>14}" for value in values)
        print(f"{name:<14}{cells}{'' if alike else '   differs'}")
        differ += [] if alike else [name]
    return differ


@torch.no_grad()
def compare_weights(model, path, dtype):
    """The parameters that differ from the checkpoint that the run wrote after the step; prints by
    how much.
    """
    saved = load_file(path / "model.safetensors")
    differ = {}
    for name, (function, tensors) in lora.served(model).items():
        ours = function(*map(whole, tensors)).cpu().to(dtype).float()
        distance = (ours - saved[name].float()).abs().max().item()
        if distance:
            differ[name] = distance
    if differ:
        print(f"replay: weights of {path} differ by up to {max(differ.values())}")
    else:
        print(f"replay: weights of {path} are the same, bit for bit")
    return list(differ)


def main(argv=None):
    """Returns the names of what differs."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run_dir", help="directory or name of a run that had --keep_steps")
    p.add_argument("--step", type=int, required=True, help="as metrics.jsonl counts them, from 1")
    p.epilog = "Other flags are knobs: replays the step with them as well, e.g. --loss icepop"
    a, knobs = p.parse_known_args(argv)
    run_dir = find_run(a.run_dir)
    config = cfg.load(run_dir)
    try:
        # the loss's own ratio and bounds, unless they are given
        own = dict(ratio="", clip_low=-1.0, clip_high=-1.0) if "--loss" in knobs else {}
        other = cfg.check(cfg.parse(knobs, dataclasses.replace(config, **own)))
        batches = kept_batches(run_dir, a.step)
        if not gpu_count():
            # sums come out alike only if they are split alike
            torch.set_num_threads(share_cores(config, 0, 0)[1])
        ranks = Ranks(config)
        policy, optimizers = train_until(run_dir, a.step, config, ranks)
    except (cfg.ConfigError, FileNotFoundError) as e:
        sys.exit(f"replay: {e}")
    [lines] = read_metrics(run_dir, "step")
    columns = {"run": {line["step"]: line for line in lines}.get(a.step, {}), "again": {}}
    if knobs:
        columns[other.loss] = train_step(policy, [], batches, a.step - 1, other, ranks)
    columns["again"] = train_step(policy, optimizers, batches, a.step - 1, config, ranks)
    differ = print_numbers(columns, config.trainers == 1)
    after = Path(run_dir, "checkpoints", f"step_{a.step:06d}")
    if after.exists():
        differ += compare_weights(policy.model, after, getattr(torch, config.dtype))
    ranks.close()
    return differ


if __name__ == "__main__":
    main()
