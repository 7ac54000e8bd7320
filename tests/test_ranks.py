"""The real trainer on real gloo ranks (only the weight sender is a fake): sharding, packing and resuming change nothing."""
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import config as cfg
from conftest import ROOT
from preprocess import Emitter
from queues import Queue

STEPS, BATCH = 6, 12


def samples(seed=0):
    """STEPS x BATCH samples of random lengths, with plausible engine logprobs and mixed versions."""
    rng = np.random.default_rng(seed)
    for i in range(STEPS * BATCH):
        n = int(rng.integers(5, 60))
        mask = np.arange(n) >= 3
        yield dict(tokens=rng.integers(3, 50, n).astype(np.int32), mask=mask, logprobs=(rng.normal(-4, 0.3, n) * mask).astype(np.float32),
                   versions=np.where(mask, i // BATCH - rng.integers(0, 3), -1).astype(np.int32), advantage=float(rng.normal()), reward=float(i % 2), success=i % 2 == 1)


def train(out, name, base_model, ranks=1, row_tokens=128, order=None, steps=STEPS, checkpoint=None, first=0, **knobs):
    """Emit the samples of steps first.. and run the trainer on them; returns (weights, step lines) of the run."""
    c = cfg.Config(run=name, out=str(out), model=str(base_model), dtype="float32", trainers=ranks, batch_size=BATCH, attempts=2, steps=steps, row_tokens=row_tokens,
                   lr=1e-3, save_every=3, keep_last=9, stall_timeout=60, **knobs)
    run_dir = cfg.write(c)
    if checkpoint:
        shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
    emitter = Emitter(c, [Queue(run_dir / "queues" / "batches" / f"rank_{r}") for r in range(ranks)])
    emitter.step = first
    batch = list(samples())
    for step in range(first, steps):
        part = batch[step * BATCH:(step + 1) * BATCH]
        for i in order(len(part)) if order else range(len(part)):
            emitter.add(part[i], dropped=0, gen_tok_s=0.0)
    Queue(run_dir / "queues" / "evals").put(dict(eval={"toy": 0.0}, problems=0, version=steps, wall_s=0.0))
    launch = [sys.executable] + (["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "8760"] if ranks > 1 else [])
    done = subprocess.run([*launch, "tests/train_without_engines.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return load_file(run_dir / "checkpoints" / f"step_{steps:06d}" / "model.safetensors"), [x for x in lines if "step" in x]


def worst(a, b):
    """Largest relative difference of two sets of weights."""
    return max(((a[k] - b[k]).norm() / b[k].norm()).item() for k in b)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, base_model):
    """Uninterrupted, one rank."""
    out = tmp_path_factory.mktemp("reference")
    return (*train(out, "one", base_model), out / "one")


@pytest.mark.parametrize("name,knobs", [("two ranks", dict(ranks=2)), ("four ranks", dict(ranks=4)), ("other rows", dict(row_tokens=64)), ("other order", dict(order=lambda n: reversed(range(n))))])
def test_ranks_packing_and_order_change_nothing(name, knobs, reference, tmp_path, base_model):
    # One step: the gradient's norm, and every number of the step, are the same to rounding.
    _, steps = train(tmp_path, "r", base_model, steps=1, **knobs)
    got, expected = steps[0], reference[1][0]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for key in "samples tokens reward success loss entropy ess kl_behavior lag_mean lag_max clip_frac versions_2 versions_3".split():
        assert got[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), key
    assert got["by_lag"].keys() == expected["by_lag"].keys()
    for lag, row in expected["by_lag"].items():
        assert got["by_lag"][lag] == pytest.approx(row, rel=1e-4, abs=1e-7)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(reference, tmp_path, base_model):
    weights, steps, run_dir = reference
    again, lines = train(tmp_path, "again", base_model, checkpoint=run_dir / "checkpoints" / "step_000003", first=3)
    assert all(torch.equal(again[k], weights[k]) for k in weights)
    assert [x["grad_norm"] for x in lines] == [x["grad_norm"] for x in steps[3:]] and [x["samples"] for x in lines] == [x["samples"] for x in steps[3:]]


@pytest.mark.parametrize("ranks_before,ranks_after", [(2, 2), (1, 2), (2, 1)])
def test_resuming_on_any_number_of_ranks(ranks_before, ranks_after, reference, tmp_path, base_model):
    if ranks_before == 1:
        before, weights = reference[2], reference[0]
    else:
        weights, _ = train(tmp_path, "before", base_model, ranks=ranks_before)
        before = tmp_path / "before"
    again, _ = train(tmp_path, "after", base_model, ranks=ranks_after, checkpoint=before / "checkpoints" / "step_000003", first=3)
    assert worst(again, weights) < (1e-6 if ranks_before == ranks_after else 1e-4)
