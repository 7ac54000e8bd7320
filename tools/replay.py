"""A step of a run once more, from the micro-batches that --keep_steps left and the newest checkpoint before it.

    python tools/replay.py out/toy --step 137                  # the same numbers; the same bits if there was one rank
    python tools/replay.py out/toy --step 137 --loss icepop    # and, token by token, what another loss would have done
    python tools/replay.py out/toy --step 137 --samples 5      # so many rollouts in colour

Steps between the checkpoint and this one are trained again first. Any knob of the loss may differ; everything before
it is what the run itself computed. Runs on one device, also what several ranks have trained. A token's colour is its
weight pi / mu: blue below 0.8, green up to 1.25, red above; underlined where the loss clips or drops it, and in
reverse where two losses differ. Deliberately absent: engines; samples are what they were.
"""

import argparse
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
from plumbing import archive, checkpoints
from plumbing.launch import gpu_count, share_cores
from plumbing.metrics import short
from plumbing.ranks import Ranks
from plumbing.samples import layout
from tools import report
from tools.show import GREY, harmless, paint
from tools.status import find_run

LOW, HIGH = 0.8, 1.25
BLUE, GREEN, RED = 34, 32, 31
UNDERLINED, REVERSE = "4;", "7;"
# of a step's line in metrics.jsonl
NUMBERS = "loss grad_norm entropy ess kl_behavior kl_ref mismatch clip_frac reward tokens".split()


def start_before(run_dir, step):
    """(directory of the newest checkpoint from which `step` can be trained, its version); (None, 0): the base model."""
    found = []
    for path in Path(run_dir, "checkpoints").glob("step_*[0-9]"):
        if int(path.name[5:]) < step:
            found.append(path)
    path = max(found, default=None)
    return path, int(path.name[5:]) if path else 0


def per_token(model, batch, version, config):
    """What the loss does to each token of a micro-batch [T]: {weight, clipped, loss}; 0 where nothing is trained."""
    positions, sequence_ids = layout(batch["lengths"])
    temperature = batch["temperature"][sequence_ids]
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(batch["tokens"], positions, temperature, batch["mask"])
    logprobs = logprobs.cpu()
    mask = torch.from_numpy(batch["mask"])
    if config.late == "mask":
        mask = mask & (version - torch.from_numpy(batch["versions"]) <= config.max_lag)
    behavior = torch.where(mask, torch.from_numpy(batch["behavior_logprobs"]), logprobs)
    advantages = torch.from_numpy(batch["advantage"][sequence_ids])
    ids = torch.where(mask, torch.from_numpy(sequence_ids), -1)
    loss, clipped = train.policy_loss(config.loss, logprobs, behavior, advantages, ids, config)
    weight = (logprobs - behavior).exp()
    return {
        "weight": weight.numpy(),
        "clipped": (clipped & mask).numpy(),
        "loss": torch.where(mask, loss, 0.0).numpy(),
    }


def rollouts(model, batches, version, ours, theirs, tokenizer):
    """Every sample of the step: {advantage, reward, difference, tokens: [(text, trained, weight, clipped, differs)]}."""
    found = []
    for batch in batches:
        a = per_token(model, batch, version, ours)
        b = per_token(model, batch, version, theirs)
        difference = np.abs(a["loss"] - b["loss"])
        ends = np.cumsum(batch["lengths"])
        for k, end in enumerate(ends):
            # a filler is no sample
            if batch["outcome"][k] < 0:
                continue
            tokens = []
            for t in range(end - batch["lengths"][k], end):
                text = tokenizer.decode([int(batch["tokens"][t])])
                differs = difference[t] > 1e-6
                trained = bool(batch["mask"][t])
                clipped = bool(a["clipped"][t] or b["clipped"][t])
                tokens.append((text, trained, float(a["weight"][t]), clipped, bool(differs)))
            of_sample = slice(end - batch["lengths"][k], end)
            found.append(
                dict(
                    advantage=float(batch["advantage"][k]),
                    reward=float(batch["reward"][k]),
                    difference=float(difference[of_sample].sum()),
                    tokens=tokens,
                )
            )
    return found


def in_colour(rollout, colour):
    """A rollout as text for a terminal."""
    text = ""
    for token, trained, weight, clipped, differs in rollout["tokens"]:
        code = GREY
        if trained:
            code = BLUE if weight < LOW else RED if weight > HIGH else GREEN
        code = UNDERLINED * clipped + REVERSE * differs + str(code)
        text += paint(code, harmless(token), colour)
    head = f"reward {rollout['reward']:.2f} | advantage {rollout['advantage']:+.2f} | difference {rollout['difference']:.3g}"
    return f"{head}\n{text}\n"


def line_of(run_dir, step):
    """What the run itself said of the step, {} if nothing."""
    steps, _ = report.read(run_dir)
    return {line["step"]: line for line in steps}.get(step, {})


def compare_numbers(metrics, line, exact):
    """Print both; returns the names of those that differ. exact: in any of their six digits."""
    differ = []
    print(f"{'':<14}{'run':>14}{'again':>14}")
    for name in NUMBERS:
        again = short(metrics[name])
        known = line.get(name)
        alike = known == again
        if not exact and None not in (known, again):
            # several ranks' sums came in another order
            alike = math.isclose(known, again, rel_tol=1e-3, abs_tol=1e-6)
        if not alike:
            differ.append(name)
        print(f"{name:<14}{line.get(name)!s:>14}{again!s:>14}{'   differs' * (name in differ)}")
    return differ


def compare_weights(model, path, dtype):
    """Of the checkpoint that the run wrote after the step: (parameters that differ, largest difference)."""
    saved = load_file(path / "model.safetensors")
    differ = []
    largest = 0.0
    for name, p in model.named_parameters():
        if name not in saved:
            continue
        ours = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        distance = (ours.cpu().to(dtype).float() - saved[name].float()).abs().max().item()
        if distance:
            differ.append(name)
        largest = max(largest, distance)
    return differ, largest


def train_to(run_dir, step, config, ranks):
    """(model, optimizers) as they were before `step`, trained again from the checkpoint before it."""
    path, version = start_before(run_dir, step)
    model, optimizers = train.build(config, ranks.device, 1)
    checkpoints.restore(path, model, optimizers)
    print(f"replay: from {path or config.model}", flush=True)
    for k in range(version + 1, step):
        batches = archive.batches(run_dir, k)
        metrics, _ = train.train_step(model, optimizers, batches, k - 1, config, ranks.device)
        print(f"replay: step {k}: loss {metrics['loss']:.6g}", flush=True)
    return model, optimizers


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run_dir", help="directory or name of a run that had --keep_steps")
    p.add_argument("--step", type=int, required=True, help="as metrics.jsonl counts them, from 1")
    p.add_argument("--samples", type=int, default=0, help="show so many rollouts")
    p.epilog = "Other flags are knobs: the step under this one, too, for example --loss icepop"
    a, knobs = p.parse_known_args(argv)
    a.run_dir = find_run(a.run_dir)
    try:
        config = cfg.load(a.run_dir)
        # the loss's own bounds, unless they are given
        own = dict(clip_low=-1.0, clip_high=-1.0) if "--loss" in knobs else {}
        default = cfg.from_json(vars(config) | own)
        other = cfg.check(cfg.parse(knobs, 0, default))
        batches = archive.batches(a.run_dir, a.step)
        # all of them, before anything is computed
        for k in range(start_before(a.run_dir, a.step)[1] + 1, a.step):
            archive.batches(a.run_dir, k)
    except (cfg.ConfigError, FileNotFoundError) as e:
        sys.exit(f"replay: {e}")
    if not gpu_count():
        # sums come out alike only if they are split alike
        torch.set_num_threads(share_cores(config, 0, 0)[2])
    ranks = Ranks(config)
    model, optimizers = train_to(a.run_dir, a.step, config, ranks)
    if knobs or a.samples:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        found = rollouts(model, batches, a.step - 1, config, other, tokenizer)
        show(found, a.samples or 3, config, other)
    metrics, _ = train.train_step(model, optimizers, batches, a.step - 1, config, ranks.device)
    differ = compare_numbers(metrics, line_of(a.run_dir, a.step), config.trainers == 1)
    after = Path(a.run_dir, "checkpoints", f"step_{a.step:06d}")
    if (after / "model.safetensors").exists():
        names, largest = compare_weights(model, after, getattr(torch, config.dtype))
        said = (
            f"differ in {len(names)} tensors, by up to {largest:.1e}"
            if names
            else "are the same, bit for bit"
        )
        print(f"replay: weights of {after} {said}")
        differ += names
    ranks.close()
    return differ


def show(found, n, config, other):
    """Print how far the losses are apart, and the rollouts in which they are farthest."""
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    tokens = [token for rollout in found for token in rollout["tokens"] if token[1]]
    differ = sum(token[4] for token in tokens)
    clipped = sum(token[3] for token in tokens)
    print(
        f"replay: {config.loss} [{config.clip_low:g}, {config.clip_high:g}] and {other.loss} "
        f"[{other.clip_low:g}, {other.clip_high:g}]: the loss of {differ} of {len(tokens)} tokens differs, "
        f"{clipped} are clipped or dropped by one of them\n"
    )
    for rollout in sorted(found, key=lambda rollout: -rollout["difference"])[:n]:
        print(in_colour(rollout, colour))


if __name__ == "__main__":
    main()
