"""A run directory as a run leaves it, with invented numbers, and a browser to look at its report with."""

import contextlib
import json
import math
import os
import shutil

import numpy as np

import config as cfg
from plumbing import launch

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# it talks to nobody; as root it has no sandbox
FLAGS = "--disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))


def made_up_run(folder, name, seed=0, steps=60, rollouts=200, slope=1.0, **knobs):
    """A run directory as a run leaves it, with invented numbers; returns it. slope: how fast it learns."""
    argv = ["toy", "--out", str(folder), "--run", name, "--seed", str(seed)]
    for knob, value in knobs.items():
        argv += [f"--{knob}", str(value)]
    c = launch.resolve(cfg.parse([*argv, "--dry_run", "True"], 0), 0)
    run_dir = launch.write(c)
    rng = np.random.default_rng(seed)
    lines = [made_up_step(rng, c, step, slope * step / steps) for step in range(1, steps + 1)]
    for version in range(0, steps + 1, max(steps // 5, 1)):
        score = 0.2 + 0.7 * slope * version / steps + rng.normal(0, 0.01)
        scores = {"eval": {"toy": score}, "problems": 256, "version": version}
        lines.append(scores | {"wall_s": 30.0 + 2 * version})
    lines.append({"alarm": "no group of 10 steps had two different rewards", "version": 12})
    write_lines(run_dir / "metrics.jsonl", lines)
    samples = [made_up_rollout(rng, c, i, steps, rollouts) for i in range(rollouts)]
    write_lines(run_dir / "samples.jsonl", [sample for sample, _ in samples])
    write_lines(run_dir / "trained_0.jsonl", [trained for _, trained in samples if trained])
    (run_dir / "queues").mkdir(exist_ok=True)
    said = dict(version=steps, served=steps, engines=["http://127.0.0.1:8500"])
    (run_dir / "queues" / "version.json").write_text(json.dumps(said))
    (run_dir / "logs" / "engine0.log").write_text(
        "engine0 died with exit code 137, restart 1 of 3\n"
    )
    return run_dir


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_up_step(rng, c, step, done):
    """A line of metrics.jsonl; done: share of what is to be learnt."""
    by_lag = {"0": dict(tokens=4000, loss=0.1, kl=1e-4, ess=0.999, clip_frac=0.0)}
    by_lag["1"] = by_lag["0"] | dict(ess=0.99)
    line = dict(step=step, version=step, samples=c.batch_size * step, wall_s=30.0 + 2 * step)
    line |= dict(dropped=16 * (step >= 7), skipped=0, tokens=9000, train_tok_s=9e3, gen_tok_s=5e3)
    line |= dict(
        reward=0.2 + 0.7 * done + rng.normal(0, 0.03), success=0.5, signal=0.6, cut_off=0.01
    )
    line |= dict(loss=0.1, grad_norm=2.0 + rng.normal(0, 0.1), lr=c.lr, entropy=1 - 0.5 * done)
    line |= dict(
        ess=0.99, kl_behavior=1e-3, kl_ref=0.0, lag_mean=0.6, lag_max=2, clip_frac=0.0, late=0
    )
    line |= dict(mismatch=None if step % 9 == 0 else 1e-7, versions_2=0.4, versions_3=0.01)
    line |= dict(
        step_s=2.0, wait_data_s=0.6, wait_sync_s=0.01, gather_s=0.01, send_s=0.05, sync_s=0.2
    )
    line |= dict(ready_s=0.02, pause_s=0.03, save_s=0.0, gen_idle=0.1, by_lag=by_lag, by_task={})
    drops = {"failed": {str(step): 16}} if step == 7 else {}
    return line | dict(problems={str(step): 16}, drops=drops)


def made_up_rollout(rng, c, i, steps, rollouts):
    """A line of samples.jsonl and one of trained_0.jsonl; every tenth was not trained."""
    step = 1 + i * steps // rollouts
    # the how manieth of its step
    k = i - math.ceil((step - 1) * rollouts / steps)
    attempt, draw = divmod(k, c.groups_per_step)
    draw += (step - 1) * c.groups_per_step
    number = draw * c.attempts + attempt
    prompt = "".join(rng.choice(LETTERS, 8)) + "="
    n = int(rng.integers(4, 60))
    first = int(rng.integers(1, n))
    text = list(rng.choice(LETTERS, n))
    older = max(step - 2, 0)
    right = bool(rng.random() < 0.5)
    sample = dict(number=number, version=step - 1, index=draw, task="toy", prompt=prompt)
    sample |= dict(completion="".join(text), reward=float(right), finished=True, answer="abc")
    sample |= dict(outcome="correct" if right else "wrong")
    sample["spans"] = [[-1, list(prompt)], [older, text[:first]], [step - 1, text[first:]]]
    sample["behavior_logprobs"] = (-rng.exponential(0.5, n)).round(4).tolist()
    if i % 10 == 9:
        return sample, None
    ratios = rng.normal(0, 0.05, n).round(4).tolist()
    return sample, dict(number=number, step=step, advantage=right - 0.5, log_ratios=ratios)


@contextlib.contextmanager
def browser():
    """A headless Chromium, this machine's or playwright's own."""
    from playwright.sync_api import sync_playwright

    flags = FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()
