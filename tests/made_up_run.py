"""Run directories with invented numbers, for tests of the tools that read runs."""

import json

import numpy as np

from conftest import resolved
from plumbing import rundir
from plumbing.queues import publish_json

LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
# The values that are the same in every step
STEP = dict.fromkeys(
    "skipped tokens train_tok_s gen_tok_s success signal cut_off loss lr kl_behavior kl_ref "
    "clip_frac late versions_2 versions_3 wait_sync_s gather_s send_s sync_s ready_s pause_s "
    "save_s by_task".split(),
    0.01,
)
STEP |= dict(length_mean=12.0, length_p90=20, lengths={"12": 256}, ess_sample=0.9)
BUCKET = dict(tokens=30, loss=0.1, kl=1e-3, log_ratio=0.02, ess=0.98, clip_frac=0.01)
STEP |= dict(by_lag={"0": BUCKET, "1": BUCKET | dict(tokens=10, kl=2e-3)})
STEP |= dict(ess=0.99, lag_mean=0.6, lag_max=2, step_s=2.0, wait_data_s=0.6, gen_idle=0.1)


def made_up_run(folder, name, seed=0, steps=60, rollouts=0, slope=1.0, **knobs):
    """Make a run directory and return its path.

    slope: how fast the run learns; rollouts: the number of rollouts in samples.jsonl.
    """
    command_line = f"toy --out {folder} --run {name} --seed {seed} --dry_run True"
    changed = [f"--{knob}={value}" for knob, value in knobs.items()]
    c = resolved(*command_line.split(), *changed)
    run_dir = rundir.write(c)
    rng = np.random.default_rng(seed)
    lines = [made_up_step(rng, c, step, slope * step / steps) for step in range(1, steps + 1)]
    for version in range(0, steps + 1, max(steps // 5, 1)):
        score = 0.2 + 0.7 * slope * version / steps + rng.normal(0, 0.01)
        line = {"eval": {"toy": score}, "problems": 256, "version": version}
        lines.append(line | {"wall_s": 30.0 + 2 * version})
    lines.append({"mismatch": 3e-6, "tokens": 100, "version": 20})
    write_lines(run_dir / "metrics.jsonl", lines)
    samples = [made_up_rollout(rng, i, 1 + i * steps // rollouts) for i in range(rollouts)]
    write_lines(run_dir / "samples.jsonl", samples)
    (run_dir / "queues").mkdir(exist_ok=True)
    serving = dict(version=steps, served=steps, engines=["http://127.0.0.1:8500"])
    publish_json(run_dir / "queues" / "version.json", **serving)
    return run_dir


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def made_up_step(rng, c, step, done):
    """Return a line of metrics.jsonl; done: the share of the task that has been learnt."""
    line = dict(step=step, version=step, samples=c.batch_size * step, wall_s=30.0 + 2 * step)
    line |= dict(reward=0.2 + 0.7 * done + rng.normal(0, 0.03), entropy=1 - 0.5 * done)
    line |= dict(mismatch=None if step % 9 == 0 else 1e-7, dropped=16 * (step >= 7))
    drops = {"failed": {str(step): 16}} if step == 7 else {}
    line |= dict(grad_norm=2.0 + rng.normal(0, 0.1), problems={str(step): 16}, drops=drops)
    # In the first twelve steps no group has two different rewards
    return STEP | line | dict(signal=0.5 * (step > 12))


def made_up_rollout(rng, i, step):
    """Return a line of samples.jsonl whose tokens were sampled by two versions."""
    prompt = "".join(rng.choice(LETTERS, 8)) + "="
    n = int(rng.integers(4, 60))
    first = int(rng.integers(1, n))
    text = list(rng.choice(LETTERS, n))
    right = bool(rng.random() < 0.5)
    sample = dict(sample_id=16 * i, step=step, task="toy", problem=i, prompt=prompt)
    sample |= dict(completion="".join(text), reward=float(right), finished=True)
    sample |= dict(outcome="correct" if right else "wrong", advantage=right - 0.5)
    older = max(step - 2, 0)
    spans = [[-1, list(prompt)], [older, text[:first]], [step - 1, text[first:]]]
    sample["spans"] = [[*span, 0] for span in spans]
    sample["behavior_logprobs"] = (-rng.exponential(0.5, n)).round(4).tolist()
    sample["log_ratios"] = rng.normal(0, 0.05, n).round(4).tolist()
    return sample
