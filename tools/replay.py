"""A step of a run once more, from the micro-batches that --keep_steps left and the newest checkpoint before it.

    python tools/replay.py out/toy --step 137                  # the same numbers; the same bits if there was one rank
    python tools/replay.py out/toy --step 137 --loss icepop    # and what another loss would have done
    python tools/replay.py out/toy --step 137 --samples 5      # so many rollouts in colour

Steps between the checkpoint and this one are trained again first. Any knob of the loss may differ; everything before
it is what the run itself computed. Runs on one device, also what several ranks have trained. A token's colour is its
weight pi / mu: blue below 0.8, green up to 1.25, red above; underlined where the loss clips or drops it, and in
reverse where two losses differ.
"""

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import config as cfg
import train
from plumbing import checkpoints
from plumbing.launch import gpu_count, share_cores
from plumbing.metrics import Sums
from plumbing.ranks import Ranks
from plumbing.samples import layout
from tools import report
from tools.show import GREY, harmless, paint
from tools.status import find_run

LOW, HIGH = 0.8, 1.25
BLUE, GREEN, RED = 34, 32, 31
UNDERLINED, REVERSE = "4;", "7;"
NUMBERS = "loss grad_norm entropy ess kl_behavior kl_ref mismatch clip_frac reward tokens".split()


# ---- the step again


def train_step(model, optimizers, batches, version, config, ranks):
    """train.train's loop for the micro-batches of one step; its metrics. Without optimizers the weights stay."""
    sums = Sums()
    for batch in batches:
        loss, metrics, _ = train.micro_batch(model, batch, version, config, ranks.device)
        loss.backward()
        sums.add(metrics)
    metrics = train.optimizer_step(model, optimizers, sums, version, config)
    model.zero_grad()
    return metrics


def train_until(run_dir, step, config, ranks):
    """(model, optimizers) as they were before `step`, trained again from the newest checkpoint before it."""
    saved = {int(path.name[5:]): path for path in checkpoints.all_of(run_dir)}
    version = max((version for version in saved if version < step), default=0)
    path = saved.get(version)
    # all of them, before anything is computed
    batches = {k: report.batches(run_dir, k) for k in range(version + 1, step)}
    model, optimizers = train.build(config, ranks.device, 1)
    checkpoints.restore(path, model, optimizers)
    print(f"replay: from {path or config.model}", flush=True)
    for k, of_step in batches.items():
        metrics = train_step(model, optimizers, of_step, k - 1, config, ranks)
        print(f"replay: step {k}: loss {metrics['loss']:.6g}", flush=True)
    return model, optimizers


def six_digits(value):
    """A float to six digits; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def print_numbers(columns, exact):
    """A table of {heading: metrics}. Returns the names that differ in the first two; exact: in any of six digits."""
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


def compare_weights(model, path, dtype):
    """The parameters that differ from the checkpoint that the run wrote after the step; prints by how much."""
    saved = load_file(path / "model.safetensors")
    differ = {}
    for name, p in model.named_parameters():
        ours = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        distance = (ours.cpu().to(dtype).float() - saved[name].float()).abs().max().item()
        if distance:
            differ[name] = distance
    words = f"differ by up to {max(differ.values())}" if differ else "are the same, bit for bit"
    print(f"replay: weights of {path} {words}")
    return [*differ]


# ---- its rollouts


def token_losses(logprobs, batch, config):
    """(loss [T], is it clipped or dropped? [T], weight [T]) under this config's loss; logprobs [T]: the model's."""
    _, sequence_ids = layout(batch["lengths"])
    mask = torch.from_numpy(batch["mask"])
    behavior_logprobs = torch.where(mask, torch.from_numpy(batch["behavior_logprobs"]), logprobs)
    advantages = torch.from_numpy(batch["advantage"][sequence_ids])
    ids = torch.where(mask, torch.from_numpy(sequence_ids), -1)
    values = (logprobs, behavior_logprobs, advantages, ids)
    loss, clipped = train.policy_loss(config.loss, *values, config)
    weight = (logprobs - behavior_logprobs).exp()
    return (loss * mask).numpy(), (clipped & mask).numpy(), weight.numpy()


def rollouts(model, batches, version, configs, tokenizer, ranks):
    """[(difference of two configs' losses, heading, tokens)] of the step's samples; tokens: [(text, weight, marks)].

    marks: is the token trained, does its loss differ, does one of them clip it?
    """
    found = []
    for batch in batches:
        with torch.no_grad():
            logprobs = train.micro_batch(model, batch, version, configs[0], ranks.device)[2].cpu()
        first, second = (token_losses(logprobs, batch, config) for config in configs)
        difference = np.abs(first[0] - second[0])
        marks = np.stack([batch["mask"], difference > 1e-6, first[1] | second[1]], 1)
        ends = np.cumsum(batch["lengths"])
        # a filler is no sample
        for k in np.flatnonzero(batch["outcome"] >= 0):
            own = slice(ends[k] - batch["lengths"][k], ends[k])
            texts = tokenizer.batch_decode(batch["tokens"][own][:, None])
            apart = float(difference[own].sum())
            heading = f"reward {batch['reward'][k]:.2f} | advantage {batch['advantage'][k]:+.2f} | difference {apart:.3g}"
            found.append((apart, heading, list(zip(texts, first[2][own], marks[own].tolist()))))
    return found


def show(found, n, config, other):
    """Print how far two losses are apart, and the rollouts in which they are farthest."""
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    marks = [marks for *_, tokens in found for _, _, marks in tokens if marks[0]]
    trained, differ, clipped = map(sum, zip(*marks))
    names = [f"{c.loss} [{c.clip_low:g}, {c.clip_high:g}]" for c in (config, other)]
    print(f"replay: {' and '.join(names)}: the loss of {differ} of {trained} tokens differs")
    print(f"replay: {clipped} are clipped or dropped by one of them\n")
    for _, heading, tokens in sorted(found, key=lambda rollout: -rollout[0])[:n]:
        text = ""
        for token, weight, (trained, differs, clipped) in tokens:
            code = BLUE if weight < LOW else RED if weight > HIGH else GREEN
            code = UNDERLINED * clipped + REVERSE * differs + str(code if trained else GREY)
            text += paint(code, harmless(token), colour)
        print(f"{heading}\n{text}\n")


def main(argv=None):
    """Returns the names of what differs."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run_dir", help="directory or name of a run that had --keep_steps")
    p.add_argument("--step", type=int, required=True, help="as metrics.jsonl counts them, from 1")
    p.add_argument("--samples", type=int, default=0, help="show so many rollouts")
    p.epilog = "Other flags are knobs: replays the step with them as well, e.g. --loss icepop"
    a, knobs = p.parse_known_args(argv)
    run_dir = find_run(a.run_dir)
    config = cfg.load(run_dir)
    try:
        # the loss's own ratio and bounds, unless they are given
        own = dict(ratio="", clip_low=-1.0, clip_high=-1.0) if "--loss" in knobs else {}
        other = cfg.check(cfg.parse(knobs, dataclasses.replace(config, **own)))
        batches = report.batches(run_dir, a.step)
        if not gpu_count():
            # sums come out alike only if they are split alike
            torch.set_num_threads(share_cores(config, 0, 0)[1])
        ranks = Ranks(config)
        model, optimizers = train_until(run_dir, a.step, config, ranks)
    except (cfg.ConfigError, FileNotFoundError) as e:
        sys.exit(f"replay: {e}")
    if knobs or a.samples:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        found = rollouts(model, batches, a.step - 1, (config, other), tokenizer, ranks)
        show(found, a.samples or 3, config, other)
    [lines] = report.read(run_dir, "step")
    columns = {"run": {line["step"]: line for line in lines}.get(a.step, {}), "again": {}}
    if knobs:
        columns[other.loss] = train_step(model, [], batches, a.step - 1, other, ranks)
    columns["again"] = train_step(model, optimizers, batches, a.step - 1, config, ranks)
    differ = print_numbers(columns, config.trainers == 1)
    after = Path(run_dir, "checkpoints", f"step_{a.step:06d}")
    if after.exists():
        differ += compare_weights(model, after, getattr(torch, config.dtype))
    ranks.close()
    return differ


if __name__ == "__main__":
    main()
