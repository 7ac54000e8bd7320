"""Compute a step of a run once more, from the micro-batches that --keep_steps kept.

    python tools/replay.py out/toy --step 137
    python tools/replay.py out/toy --step 137 --loss icepop

The first command prints the same numbers as the run (the same bits if the run had one rank). The
second command also prints what another loss would have done.

The program begins from the newest checkpoint before the step, and first trains the steps between
them again. Any knob of the loss may differ; the samples and their advantages are those of the run.
One device computes the step, even if several ranks trained it. report.html shows the rollouts of
the step, coloured by ratio.
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
from plumbing.samples import record_faults
from tools.common import find_run, kept_batches, read_metrics

# the metrics that are printed and compared
METRICS = "loss grad_norm entropy ess kl_behavior kl_ref mismatch clip_frac reward tokens".split()


def with_knobs(config, knobs):
    """Return the Config of a run with the knobs of a command line. Raises ConfigError.

    Another loss comes with its own ratio and clip range, and another ratio with its own normalizer,
    unless the command line sets them.
    """
    run_ratio = config.ratio
    if cfg.parse(knobs, config).loss != config.loss:
        config = dataclasses.replace(config, ratio="", clip_low=-1.0, clip_high=-1.0)
    if cfg.check(cfg.parse(knobs, config)).ratio != run_ratio:
        config = dataclasses.replace(config, normalizer="")
    return cfg.check(cfg.parse(knobs, config))


# ---- the step again


def train_step(policy, optimizers, batches, version, config, ranks):
    """Train on the micro-batches of one step, as train.train does; returns the step's metrics.

    Without optimizers the weights stay as they are.
    """
    sums = Sums()
    for batch in batches:
        loss, metrics, _ = train.micro_batch(policy, batch, version, config, ranks.device)
        loss.backward()
        sums.add(metrics)
    metrics = train.optimizer_step(policy, optimizers, sums, version, config)
    policy.zero_grad()
    return metrics


def read_batches(run_dir, step):
    """Return the micro-batches of a step, rank by rank.

    Raises FileNotFoundError if they are not kept, and ConfigError if another version of this code
    has written them.
    """
    batches = kept_batches(run_dir, step)
    faults = [fault for batch in batches for fault in record_faults(batch)]
    cfg.require(
        not faults,
        f"{run_dir}: step {step}: {''.join(faults[:1])}: another version of this code has written "
        f"these micro-batches: replay them with the commit that is in {run_dir}/config.json",
    )
    return batches


def train_until(run_dir, step, config, ranks):
    """Return (policy, optimizers) as they were before `step`.

    The newest checkpoint before the step is loaded, and the steps between them are trained again.
    Raises FileNotFoundError if the micro-batches of one of them are not kept, and ConfigError if
    another version of this code has written them.
    """
    saved = {checkpoints.version_of(path): path for path in checkpoints.all_of(run_dir)}
    version = max((version for version in saved if version < step), default=0)
    path = saved.get(version)
    # All steps are read before one is computed, so that a missing step is reported at once.
    batches = {k: read_batches(run_dir, k) for k in range(version + 1, step)}
    policy, optimizers = train.build(config, ranks.device, 1)
    checkpoints.restore(path, policy.model, optimizers)
    print(f"replay: from {path or config.model}", flush=True)
    for k, step_batches in batches.items():
        metrics = train_step(policy, optimizers, step_batches, k - 1, config, ranks)
        print(f"replay: step {k}: loss {metrics['loss']:.6g}", flush=True)
    return policy, optimizers


def six_digits(value):
    """Return a float rounded to six digits, and anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def print_numbers(columns, exact):
    """Print a table of {heading: metrics}; returns the names that differ in the first two columns.

    exact: any difference in the first six digits counts. If it is False, the relative difference
    must exceed 0.001.
    """
    differing = []
    print(" " * 14 + "".join(f"{heading:>14}" for heading in columns))
    for name in METRICS:
        values = [six_digits(metrics.get(name)) for metrics in columns.values()]
        is_same = values[0] == values[1]
        if not exact and None not in values[:2]:
            # The sums of several ranks were added up in another order.
            is_same = math.isclose(*values[:2], rel_tol=1e-3, abs_tol=1e-6)
        if not is_same:
            differing.append(name)
        cells = "".join(f"{value!s:>14}" for value in values)
        print(f"{name:<14}{cells}{'' if is_same else '   differs'}")
    return differing


@torch.no_grad()
def compare_weights(model, path, dtype):
    """Compare the weights with the checkpoint that the run wrote after the step.

    Prints the largest difference; returns the names of the parameters that differ.
    """
    saved = load_file(path / "model.safetensors")
    differences = {}
    for name, (function, tensors) in lora.served(model).items():
        replayed = function(*map(whole, tensors)).cpu().to(dtype).float()
        difference = (replayed - saved[name].float()).abs().max().item()
        if difference:
            differences[name] = difference
    if differences:
        print(f"replay: weights of {path} differ by up to {max(differences.values())}")
    else:
        print(f"replay: weights of {path} are the same, bit for bit")
    return list(differences)


def main(argv=None):
    """Replay a step; returns the names of the metrics and the parameters that differ."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Other flags are knobs, e.g. --loss icepop: the step is replayed with them as well",
    )
    parser.add_argument("run_dir", help="directory or name of a run that had --keep_steps")
    parser.add_argument(
        "--step", type=int, required=True, help="number of the step in metrics.jsonl, from 1"
    )
    arguments, knobs = parser.parse_known_args(argv)
    step = arguments.step
    run_dir = find_run(arguments.run_dir)
    config = cfg.load(run_dir)
    try:
        other = with_knobs(config, knobs)
        batches = read_batches(run_dir, step)
        if not gpu_count():
            # Sums have the same bits only with as many threads as the run had.
            torch.set_num_threads(share_cores(config, 0, 0)[1])
        ranks = Ranks(config)
        policy, optimizers = train_until(run_dir, step, config, ranks)
    except (cfg.ConfigError, FileNotFoundError) as e:
        sys.exit(f"replay: {e}")
    [lines] = read_metrics(run_dir, "step")
    run_metrics = {line["step"]: line for line in lines}.get(step, {})
    # "again" is the second column, but it is computed last, as it changes the weights.
    columns = {"run": run_metrics, "again": {}}
    if knobs:
        columns[other.loss] = train_step(policy, [], batches, step - 1, other, ranks)
    columns["again"] = train_step(policy, optimizers, batches, step - 1, config, ranks)
    differing = print_numbers(columns, exact=config.trainers == 1)
    checkpoint = checkpoints.path_of(run_dir, step)
    if checkpoint.exists():
        differing += compare_weights(policy.model, checkpoint, getattr(torch, config.dtype))
    ranks.close()
    return differing


if __name__ == "__main__":
    main()
