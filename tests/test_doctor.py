"""tools/plain.py against the project's own computation, and the doctor on a run with a fault and without."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from bench import faults
from config import Config
from plumbing.samples import layout
from preprocess import advantages
from tools import checks, plain


@pytest.mark.parametrize("kind", ["loo", "mean", "mean_std", "none"])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.5], [0.3], [2.0, 2.0]])
def test_advantages_are_the_definitions(kind, rewards):
    assert plain.plain_advantages(rewards, kind) == pytest.approx(advantages(rewards, kind))


def sample(rng, versions, prompt=4, **fields):
    """One sequence of 50 words whose tokens these versions sampled."""
    n = prompt + len(versions)
    mask = np.arange(n) >= prompt
    every = np.concatenate([np.full(prompt, -1), versions])
    own = dict(tokens=rng.integers(0, 50, n), mask=mask, versions=every, temperature=0.7)
    own |= dict(
        behavior_logprobs=np.zeros(n, np.float32), num_versions=len(set(versions)), finished=True
    )
    return own | fields


@pytest.fixture()
def weights(tmp_path, base_model):
    """The toy model as version 0, and with other weights as version 1."""
    config = Config(model=str(base_model), dtype="float32")
    found = plain.Weights(config, tmp_path, torch.device("cpu"))
    torch.manual_seed(0)
    after = plain.Weights(config, tmp_path, torch.device("cpu")).load(0)
    with torch.no_grad():
        for p in after.parameters():
            p += 0.02 * torch.randn_like(p)
    after.save_pretrained(tmp_path / "checkpoints" / "step_000001")
    return found


def test_a_sequence_of_one_version_has_the_trainers_logprobs(weights):
    rng = np.random.default_rng(0)
    one = sample(rng, [0] * 9)
    config = weights.config
    model, _ = train.build(config, torch.device("cpu"), 1)
    positions, _ = layout([len(one["tokens"])])
    with torch.no_grad():
        logprobs, entropy = model.token_logprobs(one["tokens"], positions, 0.7)
    for recompute in (False, True):
        own = plain.expected(weights, one, recompute)
        assert own.logprobs == pytest.approx(logprobs[4:].numpy(), abs=1e-4)
        assert own.entropy == pytest.approx(entropy[4:].numpy(), abs=1e-4)


def test_a_stale_cache_and_a_new_one_differ_after_an_update_alone(weights):
    rng = np.random.default_rng(1)
    mixed = sample(rng, [0] * 5 + [1] * 5)
    stale = plain.expected(weights, mixed, False).logprobs
    again = plain.expected(weights, mixed, True).logprobs
    assert stale[:5] == pytest.approx(again[:5], abs=1e-5)
    assert np.abs(stale[5:] - again[5:]).min() > 1e-5
    # a cache that is computed again is that of version 1 from the beginning
    alone = plain.expected(weights, mixed | {"versions": np.where(mixed["mask"], 1, -1)}, True)
    assert again[5:] == pytest.approx(alone.logprobs[5:], abs=1e-5)


@pytest.mark.parametrize("temperature,wrong", [(0.7, False), (0.5, True)])
def test_another_temperature_of_sampling_is_seen(temperature, wrong, weights):
    """Sampled by the model itself, told to have been at 0.7."""
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    groups = {}
    for draw in range(60):
        one = sample(rng, [0] * 20)
        for t in range(4, 24):
            with torch.no_grad():
                logits = weights.logits(0, one["tokens"][:t])[-1]
            one["tokens"][t] = torch.multinomial((logits / temperature).softmax(-1), 1).item()
        groups[draw] = dict(samples=[one])
    found = SimpleNamespace(weights=weights, first_draws=lambda: list(groups))
    found.samples = lambda draws: [(draw, groups[draw]["samples"][0]) for draw in draws]
    [row] = checks.check_sampling(SimpleNamespace(found=found))
    assert row.ok is not wrong, row


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_sequence_of_hundred_with_other_weights_is_found(weights, wrong):
    """As one whose beginning came from an older version's KV cache."""
    rng = np.random.default_rng(4)
    samples = []
    for k in range(100):
        one = sample(rng, [0] * 5)
        by = one if k != 37 else one | {"versions": np.where(one["mask"], wrong, -1)}
        one["behavior_logprobs"][4:] = plain.expected(weights, by, True).logprobs
        samples.append((k, one))
    found = SimpleNamespace(weights=weights, samples=lambda: samples)
    case = checks.Case(weights.config, None, found, 0, {})
    assert checks.check_engine_logprobs(case)[0].ok is (wrong == 0)


@pytest.mark.parametrize("over", [True, False])
def test_an_episode_that_ends_before_its_environment_is_found(monkeypatch, over):
    task = SimpleNamespace(respond=lambda problem, turns: None if over else "go on")
    monkeypatch.setitem(sys.modules, "tasks.fake", task)
    one = sample(np.random.default_rng(5), [0] * 5)
    found = SimpleNamespace(
        groups={0: dict(task_name="fake", problem=dict(prompt="?"))},
        samples=lambda: [(0, one)],
        turns=lambda one: ([one["tokens"][4:].tolist()], [one["tokens"][:4].tolist()]),
        prompter=SimpleNamespace(decode=str),
    )
    [row] = checks.check_turns(SimpleNamespace(found=found))
    assert row.ok is over, row


@pytest.mark.parametrize("seeds", [["0", "1"], ["0", "0"]])
def test_engines_of_one_seed_are_found(seeds):
    case = SimpleNamespace(found=SimpleNamespace(groups={}), watched=dict(seeds=seeds))
    assert checks.check_independence(case)[-1].ok is (seeds == ["0", "1"])


def test_every_fault_is_one_of_todays_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "WORK", tmp_path)
    for fault in faults.FAULTS.values():
        faults.copy_with("test", fault)


@pytest.mark.slow
def test_the_doctor_finds_a_wrong_sign_and_nothing_else(tmp_path, monkeypatch, base_model):
    """Real engines, a kill, an interruption, a continuation."""
    monkeypatch.setattr(faults, "WORK", tmp_path)
    folder = faults.copy_with("test", faults.FAULTS["advantages with the wrong sign"])
    command = ["bash", "run.sh", "doctor", "toy", "--port", "9700"]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    saved = json.loads((folder / "out" / "doctor-toy" / "doctor.json").read_text())
    failed = [f["check"] for f in saved["findings"] if f["ok"] is False]
    assert failed == ["trained = sampled, with plain advantages", "first step: loss", *failed[2:]]
    assert failed[2:] in ([], ["first step: weights go against the gradient"]), done.stdout
    assert len(saved["findings"]) > 20
