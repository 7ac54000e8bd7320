"""A step of a run once more, from the micro-batches that --keep_steps left and the newest checkpoint before it.

    python tools/replay.py out/toy --step 137                  # the same numbers; the same bits if there was one rank
    python tools/replay.py out/toy --step 137 --loss icepop    # and what another loss would have done
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
from plumbing.metrics import Sums, short, token_texts
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
# what several ranks' sums in another order may change of a number, relatively, and of a weight
RELATIVE, WEIGHT = 1e-3, 1e-5


# ---- the step again


def checkpoint_before(run_dir, step):
    """(directory of the newest checkpoint from which `step` can be trained, its version); (None, 0): the base model."""
    found = [path for path in Path(run_dir, "checkpoints").glob("step_*[0-9]")]
    path = max((path for path in found if int(path.name[5:]) < step), default=None)
    return path, int(path.name[5:]) if path else 0


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
    """(model, optimizers) as they were before `step`, trained again from the checkpoint before it."""
    path, version = checkpoint_before(run_dir, step)
    # all of them, before anything is computed
    batches = {k: archive.batches(run_dir, k) for k in range(version + 1, step)}
    model, optimizers = train.build(config, ranks.device, 1)
    checkpoints.restore(path, model, optimizers)
    print(f"replay: from {path or config.model}", flush=True)
    for k, of_step in batches.items():
        metrics = train_step(model, optimizers, of_step, k - 1, config, ranks)
        print(f"replay: step {k}: loss {metrics['loss']:.6g}", flush=True)
    return model, optimizers


def print_numbers(line, again, other, exact):
    """The table: a step's line of metrics.jsonl, its metrics again, and those of another loss, None if there is none.

    Returns the names of those that differ; exact: in any of their six digits.
    """
    differ = []
    print(f"{'':<14}{'run':>14}{'again':>14}" + ("" if other is None else f"{'other':>14}"))
    for name in NUMBERS:
        values = [line.get(name), short(again[name])]
        alike = values[0] == values[1]
        if not exact and None not in values:
            alike = math.isclose(*values, rel_tol=RELATIVE, abs_tol=1e-6)
        if not alike:
            differ.append(name)
        if other is not None:
            values.append(short(other[name]))
        cells = "".join(f"{value!s:>14}" for value in values)
        print(f"{name:<14}{cells}{'' if alike else '   differs'}")
    return differ


def compare_weights(model, path, dtype, exact):
    """Of the checkpoint that the run wrote after the step: the parameters that differ, printed in one line."""
    saved = load_file(path / "model.safetensors")
    distances = {}
    for name, p in model.named_parameters():
        if name in saved:
            ours = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
            difference = ours.cpu().to(dtype).float() - saved[name].float()
            distances[name] = difference.abs().max().item()
    largest = max(distances.values())
    same = f"differ by up to {largest:.1e}" if largest else "are the same, bit for bit"
    print(f"replay: weights of {path} {same}")
    return [name for name, x in distances.items() if x > (0 if exact else WEIGHT)]


# ---- its rollouts


@torch.no_grad()
def token_losses(logprobs, batch, version, config):
    """(loss [T], clipped [T], weight [T]) under this config's loss, 0 where nothing is trained; logprobs [T]."""
    _, sequence_ids = layout(batch["lengths"])
    mask = torch.from_numpy(batch["mask"])
    if config.late == "mask":
        mask = mask & (version - torch.from_numpy(batch["versions"]) <= config.max_lag)
    behavior_logprobs = torch.where(mask, torch.from_numpy(batch["behavior_logprobs"]), logprobs)
    advantages = torch.from_numpy(batch["advantage"][sequence_ids])
    ids = torch.where(mask, torch.from_numpy(sequence_ids), -1)
    loss, clipped = train.policy_loss(
        config.loss, logprobs, behavior_logprobs, advantages, ids, config
    )
    weight = (logprobs - behavior_logprobs).exp()
    return (loss * mask).numpy(), (clipped & mask).numpy(), weight.numpy()


def rollouts(model, batches, version, configs, tokenizer, ranks):
    """(samples of the step, the farthest apart first: (difference of the two configs' losses, heading, tokens), counts).

    tokens: [(text, trained, weight, clipped, differs)]; counts: [tokens trained, that differ, that one of them clips].
    """
    found = []
    counts = np.zeros(3, int)
    for batch in batches:
        with torch.no_grad():
            logprobs = train.micro_batch(model, batch, version, configs[0], ranks.device)[2].cpu()
        (a, clips, weight), (b, others, _) = (
            token_losses(logprobs, batch, version, config) for config in configs
        )
        difference = np.abs(a - b)
        marks = np.stack([batch["mask"], difference > 1e-6, clips | others], 1)
        counts += marks[batch["mask"]].sum(0)
        ends = np.cumsum(batch["lengths"])
        # a filler is no sample
        for k in np.flatnonzero(batch["outcome"] >= 0):
            own = slice(ends[k] - batch["lengths"][k], ends[k])
            texts = token_texts(tokenizer, batch["tokens"][own].tolist())
            apart = float(difference[own].sum())
            heading = f"reward {batch['reward'][k]:.2f} | advantage {batch['advantage'][k]:+.2f} | difference {apart:.3g}"
            found.append((apart, heading, list(zip(texts, weight[own], marks[own]))))
    return sorted(found, key=lambda rollout: -rollout[0]), counts


def in_colour(tokens, colour):
    """Tokens as text for a terminal."""
    text = ""
    for token, weight, (trained, differs, clipped) in tokens:
        code = GREY
        if trained:
            code = BLUE if weight < LOW else RED if weight > HIGH else GREEN
        code = UNDERLINED * bool(clipped) + REVERSE * bool(differs) + str(code)
        text += paint(code, harmless(token), colour)
    return text


def main(argv=None):
    """Returns the names of what differs."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run_dir", help="directory or name of a run that had --keep_steps")
    p.add_argument("--step", type=int, required=True, help="as metrics.jsonl counts them, from 1")
    p.add_argument("--samples", type=int, default=0, help="show so many rollouts")
    p.epilog = "Other flags are knobs: the step under this one, too, for example --loss icepop"
    a, knobs = p.parse_known_args(argv)
    run_dir = find_run(a.run_dir)
    config = cfg.load(run_dir)
    exact = config.trainers == 1
    try:
        # the loss's own bounds, unless they are given
        own = dict(clip_low=-1.0, clip_high=-1.0) if "--loss" in knobs else {}
        other = cfg.check(cfg.parse(knobs, 0, cfg.from_json(vars(config) | own)))
        batches = archive.batches(run_dir, a.step)
        if not gpu_count():
            # sums come out alike only if they are split alike
            torch.set_num_threads(share_cores(config, 0, 0)[2])
        ranks = Ranks(config)
        model, optimizers = train_until(run_dir, a.step, config, ranks)
    except (cfg.ConfigError, FileNotFoundError) as e:
        sys.exit(f"replay: {e}")
    step = (model, batches, a.step - 1)
    others = None
    if knobs or a.samples:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        found, (trained, differ, clipped) = rollouts(*step, (config, other), tokenizer, ranks)
        names = [f"{c.loss} [{c.clip_low:g}, {c.clip_high:g}]" for c in (config, other)]
        print(
            f"replay: {' and '.join(names)}: the loss of {differ} of {trained} tokens differs, "
            f"{clipped} are clipped or dropped by one of them\n"
        )
        colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
        for _, heading, tokens in found[: a.samples or 3]:
            print(f"{heading}\n{in_colour(tokens, colour)}\n")
    if knobs:
        others = train_step(model, [], batches, a.step - 1, other, ranks)
    again = train_step(model, optimizers, batches, a.step - 1, config, ranks)
    lines, _ = report.read(run_dir)
    line = {line["step"]: line for line in lines}.get(a.step, {})
    differ = print_numbers(line, again, others, exact)
    after = Path(run_dir, "checkpoints", f"step_{a.step:06d}")
    if after.exists():
        differ += compare_weights(model, after, getattr(torch, config.dtype), exact)
    ranks.close()
    return differ


if __name__ == "__main__":
    main()
