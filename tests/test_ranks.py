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
from transformers import AutoModelForCausalLM

import config as cfg
import launch
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
        yield dict(index=i // 2, tokens=rng.integers(3, 50, n).astype(np.int32), mask=mask, logprobs=(rng.normal(-4, 0.3, n) * mask).astype(np.float32),
                   versions=np.where(mask, i // BATCH - rng.integers(0, 3), -1).astype(np.int32), advantage=float(rng.normal()), reward=float(i % 2), success=i % 2 == 1, task="toy", outcome="correct" if i % 2 else "wrong",
                   role="best" if i % 2 else "worst")


def train(out, name, base_model, ranks=1, row_tokens=128, order=None, steps=STEPS, checkpoint=None, first=0, largest_file_kb="unlimited", **knobs):
    """Emit the samples of steps first.. and run the trainer on them; returns (weights, step lines) of the run."""
    c = cfg.Config(run=name, out=str(out), model=str(base_model), dtype="float32", trainers=ranks, batch_size=BATCH, attempts=2, steps=steps, row_tokens=row_tokens,
                   lr=1e-3, save_every=3, keep_last=9, stall_timeout=60, **knobs)
    run_dir = launch.write(c)
    if checkpoint:
        shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
    emitter = Emitter(c, [Queue(run_dir / "queues" / "batches" / f"rank_{r}") for r in range(ranks)])
    emitter.step = first
    emitter.position.next = first * BATCH // 2
    for i in range(first * BATCH // 2, steps * BATCH // 2):
        emitter.position.arrive(i, 2)
    batch = list(samples())
    for step in range(first, steps):
        part = batch[step * BATCH:(step + 1) * BATCH]
        for i in order(len(part)) if order else range(len(part)):
            emitter.add(part[i], gen_tok_s=0.0, gen_idle=0.0)
    Queue(run_dir / "queues" / "evals").put(dict(eval={"toy": 0.0}, problems=0, version=steps, wall_s=0.0))
    start = [sys.executable] + (["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "8760"] if ranks > 1 else [])
    done = subprocess.run(["bash", "-c", f'ulimit -f {largest_file_kb}; exec "$@"', "", *start, "tests/train_without_engines.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
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


def plain_step(base_model, version=0):
    """Metrics and gradients of the first step, from its samples one by one: no packing, no ranks, numpy and the formulas."""
    model = AutoModelForCausalLM.from_pretrained(base_model)
    batch = list(samples())[:BATCH]
    w, d, lag, per_token, entropy = [], [], [], [], []
    for s in batch:
        ids = torch.from_numpy(s["tokens"].astype(np.int64))
        distribution = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        logprobs = distribution.gather(1, ids[1:, None])[:, 0][s["mask"][1:]]
        log_w = logprobs.detach().double() - torch.from_numpy(s["logprobs"][s["mask"]]).double()
        loss = -log_w.exp().clamp(max=5.0).float() * s["advantage"] * logprobs
        (loss.sum() / BATCH).backward()
        w.append(log_w.exp()), d.append(log_w), per_token.append(loss.detach()), lag.append(torch.from_numpy(version - s["versions"][s["mask"]]))
        entropy.append(-(distribution.exp() * distribution).sum(-1).detach()[s["mask"][1:]])
    w, d, lag, per_token, entropy = (torch.cat(x).numpy() for x in (w, d, lag, per_token, entropy))
    k3 = w - 1 - d
    bucket = lambda low, high: (lag >= low) & (lag <= high)
    by_lag = {name: dict(tokens=int(b.sum()), loss=per_token[b].mean(), kl=k3[b].mean(), ess=w[b].sum() ** 2 / (b.sum() * (w[b] ** 2).sum()), clip_frac=(w[b] > 5).mean())
              for name, b in (("0", bucket(0, 0)), ("1", bucket(1, 1)), ("2", bucket(2, 2))) if b.any()}
    spans = [len(set(s["versions"][s["mask"]])) for s in batch]
    metrics = dict(samples=BATCH, tokens=sum(len(s["tokens"]) for s in batch), reward=np.mean([s["reward"] for s in batch]), success=np.mean([s["success"] for s in batch]),
                   loss=per_token.sum() / BATCH, entropy=entropy.mean(), ess=w.sum() ** 2 / (len(w) * (w ** 2).sum()), kl_behavior=k3.mean(), lag_mean=lag.mean(),
                   lag_max=lag.max(), clip_frac=(w > 5).mean(), versions_2=np.mean([n >= 2 for n in spans]), versions_3=np.mean([n >= 3 for n in spans]))
    return metrics, by_lag, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name,knobs", [("one rank", {}), ("two ranks", dict(ranks=2)), ("four ranks", dict(ranks=4)), ("other rows", dict(row_tokens=64)),
                                        ("one sample a row", dict(row_tokens=60, order=lambda n: sorted(range(n), key=lambda i: -i)))])
def test_ranks_packing_and_order_change_nothing(name, knobs, tmp_path, base_model):
    """Every gradient and every number of a step equals those of a plain computation, sample by sample."""
    _, steps = train(tmp_path, "r", base_model, steps=1, **knobs)
    metrics, by_lag, gradients = plain_step(base_model)
    got = load_file(tmp_path / "r" / "gradients.safetensors")
    for i, g in enumerate(gradients):
        assert (got[str(i)] - g).norm() <= 1e-5 * g.norm(), i
    assert steps[0]["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in gradients]).double().norm().item(), rel=1e-5)
    for key, value in metrics.items():
        assert steps[0][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert steps[0]["by_lag"].keys() == by_lag.keys()
    for lag, row in by_lag.items():
        assert steps[0]["by_lag"][lag] == pytest.approx(row, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("ranks,row_tokens", [(1, 128), (2, 128), (1, 70)])
def test_dpo_pairs_add_their_gradient_however_they_are_packed(ranks, row_tokens, tmp_path, base_model):
    """Pairs lie in one row, unless they do not go into one; each adds what a plain computation says. On the policy loss they have no influence."""
    swapped = lambda n: [i ^ 1 for i in range(n)]  # the best one first, as preprocess.samples_of gives them
    _, steps = train(tmp_path, "r", base_model, steps=1, ranks=ranks, row_tokens=row_tokens, order=swapped, dpo_coef=0.5, dpo_beta=0.2)
    gradients = load_file(tmp_path / "r" / "gradients.safetensors")
    _, _, expected = plain_step(base_model)
    model = AutoModelForCausalLM.from_pretrained(base_model)
    batch, losses = list(samples())[:BATCH], []
    for worst_one, best_one in zip(batch[::2], batch[1::2]):
        if len(worst_one["tokens"]) + len(best_one["tokens"]) > row_tokens:
            continue
        ratios = []
        for s in (best_one, worst_one):
            ids, sampled = torch.from_numpy(s["tokens"].astype(np.int64)), torch.from_numpy(s["mask"][1:])
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            ratios.append((logprobs[sampled] - torch.from_numpy(s["logprobs"])[1:][sampled]).sum())
        losses.append(-torch.log(torch.sigmoid(0.2 * (ratios[0] - ratios[1]))))
    assert len(losses) > 1 and (row_tokens == 128) == (len(losses) == BATCH // 2)
    (0.5 * sum(losses) / BATCH).backward()
    assert steps[0]["dpo"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    for i, (p, q) in enumerate(zip(model.parameters(), expected)):
        assert (gradients[str(i)] - (p.grad + q)).norm() / (p.grad + q).norm() < 1e-5


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one_intact(reference, tmp_path, base_model):
    weights, _, run_dir = reference
    with pytest.raises(AssertionError, match=r"train: checkpoint 6 cannot be written to \S+/checkpoints \(.*; \d+ MB are free there\); that of version 3 is intact"):
        train(tmp_path, "full", base_model, checkpoint=run_dir / "checkpoints" / "step_000003", first=3, largest_file_kb=2500)  # weights and optimizer have 5 MB
    assert [p.name for p in (tmp_path / "full" / "checkpoints").glob("step_*[0-9]")] == ["step_000003"]
    again, _ = train(tmp_path, "again", base_model, checkpoint=tmp_path / "full" / "checkpoints" / "step_000003", first=3)
    assert all(torch.equal(again[k], weights[k]) for k in weights)


def test_a_checkpoint_directory_that_cannot_be_written_to_is_named(tmp_path, base_model):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").touch()  # permissions would not keep root out
    with pytest.raises(AssertionError, match=r"train: checkpoint 3 cannot be written to \S+/checkpoints \(.*Not a directory.*\); that of version 0 is intact: see to space and permissions"):
        train(tmp_path, "file", base_model)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(reference, tmp_path, base_model):
    weights, steps, run_dir = reference
    again, lines = train(tmp_path, "again", base_model, checkpoint=run_dir / "checkpoints" / "step_000003", first=3)
    assert all(torch.equal(again[k], weights[k]) for k in weights)
    assert [x["grad_norm"] for x in lines] == [x["grad_norm"] for x in steps[3:]] and [x["samples"] for x in lines] == [x["samples"] for x in steps[3:]]
    state = json.loads((tmp_path / "again" / "checkpoints" / "step_000006" / "trainer" / "state.json").read_text())
    assert state["position"] == {"next": STEPS * BATCH // 2, "ahead": [], "left": {}} and state["version"] == STEPS and state["samples"] == STEPS * BATCH


@pytest.mark.parametrize("ranks_before,ranks_after", [(2, 2), (1, 2), (2, 1)])
def test_resuming_on_any_number_of_ranks(ranks_before, ranks_after, reference, tmp_path, base_model):
    if ranks_before == 1:
        before, weights = reference[2], reference[0]
    else:
        weights, _ = train(tmp_path, "before", base_model, ranks=ranks_before)
        before = tmp_path / "before"
    again, _ = train(tmp_path, "after", base_model, ranks=ranks_after, checkpoint=before / "checkpoints" / "step_000003", first=3)
    assert worst(again, weights) < (1e-6 if ranks_before == ranks_after else 1e-4)
