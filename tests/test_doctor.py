"""tools/plain.py against the project's own computation; the doctor's checks with faults, without, and on forks."""

import copy
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from bench import faults
from config import Config
from plumbing import checkpoints
from preprocess import advantages
from tools import checks, doctor, plain

ATTEMPTS = 4


def ok_of(rows):
    """What each row says."""
    return [None if ok is None else bool(ok) for _, ok, _ in rows]


def make_sample(rng, versions, prompt=4, **fields):
    """One sequence of 50 words whose tokens these versions sampled."""
    n = prompt + len(versions)
    mask = np.arange(n) >= prompt
    every = np.concatenate([np.full(prompt, -1), versions])
    own = dict(tokens=rng.integers(0, 50, n), mask=mask, versions=every, temperature=0.7)
    own |= dict(behavior_logprobs=np.zeros(n, np.float32), num_versions=len(set(versions)))
    return own | dict(finished=True, reward=0.0) | fields


class FakeRun(SimpleNamespace):
    """In place of plain.Recording: what a test gives it."""

    samples = plain.Recording.samples
    parts = plain.Recording.parts


@pytest.fixture()
def models(tmp_path, base_model):
    """A run with the toy model as version 0, and with other weights as version 1."""
    config = Config(model=str(base_model), dtype="float32", temperature=0.7)
    found = {}
    torch.manual_seed(0)
    for version in (0, 1):
        found[version] = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
        for p in found[version].parameters():
            p.data += 0.02 * version * torch.randn_like(p)
    return FakeRun(config=config, device=torch.device("cpu"), model=found.get, groups={})


# ---- what engines report


def test_a_sequence_of_one_version_has_the_trainers_logprobs(models):
    one = make_sample(np.random.default_rng(0), [0] * 9)
    model, _ = train.build(models.config, models.device, 1)
    with torch.no_grad():
        logprobs, entropy = model.token_logprobs(one["tokens"], np.arange(13), 0.7)
    for recompute in (False, True):
        models.config.recompute_kv = recompute
        own, own_entropy, _ = plain.expected(models, one)
        assert own == pytest.approx(logprobs[4:].numpy(), abs=1e-4)
        assert own_entropy == pytest.approx(entropy[4:].numpy(), abs=1e-4)


def test_a_stale_cache_and_a_new_one_differ_after_an_update_alone(models):
    mixed = make_sample(np.random.default_rng(1), [0] * 5 + [1] * 5)
    stale = plain.expected(models, mixed)[0]
    models.config.recompute_kv = True
    again = plain.expected(models, mixed)[0]
    assert stale[:5] == pytest.approx(again[:5], abs=1e-5)
    assert np.abs(stale[5:] - again[5:]).min() > 1e-5
    # a cache that is computed again is that of version 1 from the beginning
    alone = plain.expected(models, mixed | {"versions": np.where(mixed["mask"], 1, -1)})[0]
    assert again[5:] == pytest.approx(alone[5:], abs=1e-5)


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_sequence_of_hundred_with_other_weights_is_found(models, wrong):
    """As one whose beginning came from an older version's KV cache."""
    rng = np.random.default_rng(4)
    for k in range(100):
        one = make_sample(rng, [0] * 5)
        by = one if k != 37 else one | {"versions": np.where(one["mask"], wrong, -1)}
        one["behavior_logprobs"][4:] = plain.expected(models, by)[0]
        models.groups[k] = dict(samples=[one])
    # of version 0; after updates none was seen, and some must be
    assert ok_of(checks.check_engine_logprobs(models)) == [wrong == 0, False]


@pytest.mark.parametrize(
    "sampled_at,recorded,seeds,expected",
    [
        (0.7, [0.7], "01", [True, True, True]),
        # not reported; recorded, but another one than the knob
        (0.5, [0.7], "01", [True, False, True]),
        (0.5, [0.5], "01", [False, True, True]),
        # each attempt's own is somebody's purpose
        (0.7, [0.7, 0.69], "01", [None, True, True]),
        (0.7, [0.7], "00", [True, True, False]),
    ],
)
def test_temperatures_and_seeds(sampled_at, recorded, seeds, expected, models, monkeypatch):
    commands = [("engine", {}, ["vllm", "--seed", seed]) for seed in seeds]
    monkeypatch.setattr(checks.launch, "engine_commands", lambda *_: commands)
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    for draw in range(60):
        one = make_sample(rng, [0] * 20, temperature=recorded[draw % len(recorded)])
        for t in range(4, 24):
            with torch.no_grad():
                logits = models.model(0)(torch.from_numpy(one["tokens"][None, :t])).logits[0, -1]
            one["tokens"][t] = torch.multinomial((logits / sampled_at).softmax(-1), 1).item()
        models.groups[draw] = dict(samples=[one])
    assert ok_of(checks.check_sampling(models)) == expected


@pytest.mark.parametrize("over", [True, False])
def test_an_episode_that_ends_before_its_environment_is_found(monkeypatch, over):
    task = SimpleNamespace(respond=lambda problem, turns: None if over else "go on")
    monkeypatch.setitem(sys.modules, "tasks.fake", task)
    one = make_sample(np.random.default_rng(5), [0] * 5)
    run = FakeRun(
        config=Config(),
        groups={0: dict(task="fake", problem=dict(prompt="?"), samples=[one])},
        prompt=lambda problem: one["tokens"][:4].tolist(),
        prompter=SimpleNamespace(decode=str, stop={one["tokens"][-1]}),
        is_reply=lambda tokens, reply: tokens is reply,
    )
    assert ok_of(checks.check_texts(run)) == [True, over, True]


# ---- what the trainer computes


@pytest.mark.parametrize("kind", ["loo", "mean", "mean_std", "none"])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.5], [0.3], [2.0, 2.0]])
def test_advantages_are_the_definitions(kind, rewards):
    for k, expected in enumerate(advantages(rewards, kind)):
        assert plain.advantage(np.array(rewards), k, kind) == pytest.approx(expected)


@pytest.mark.parametrize(
    "times,kind,changes,expected",
    [
        (1, "loo", {}, [True, True]),
        # two epochs; one lost and another one twice
        (2, "loo", {}, [True, True]),
        (1, "loo", {"sample_id": 0}, [False, False]),
        (1, "loo", {"mask": np.zeros(9, bool)}, [False, True]),
        (1, "loo", {"advantage": 0.5}, [True, False]),
        (1, "mean", {}, [True, False]),
        (1, "of_a_fork", {}, [True, None]),
    ],
)
def test_what_is_trained_is_what_was_sampled(times, kind, changes, expected):
    """A step of two groups, each sample trained so many times; changes: in one of them."""
    rng = np.random.default_rng(6)
    groups = {0: dict(samples=[]), 1: dict(samples=[])}
    trained = []
    for number in range(2 * ATTEMPTS):
        sample = make_sample(rng, [0] * 5, sample_id=number, reward=float(number % ATTEMPTS == 0))
        groups[number // ATTEMPTS]["samples"].append(sample)
        own = 1.0 if sample["reward"] else -1 / (ATTEMPTS - 1)
        trained += [sample | {"advantage": own}] * times
    trained[1] = trained[1] | changes
    config = Config(attempts=ATTEMPTS, advantage=kind)
    steps = {1: {"problems": {"0": ATTEMPTS, "1": ATTEMPTS}}}
    run = FakeRun(config=config, groups=groups, steps=steps, trained=lambda step: trained)
    assert ok_of(checks.check_packing(run)) == expected


def trained_by(optimizers_of, model, steps):
    """The state before and after each step, as a checkpoint keeps it; optimizers_of(parameters) -> optimizers."""
    optimizers = optimizers_of(list(model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    states = []
    for _ in range(steps + 1):
        kept = {"state": {}, "param_groups": []}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = [names[id(p)] for p in group["params"]]
                kept["param_groups"].append(group | {"params": own})
            kept["state"] |= {names[id(p)]: state for p, state in optimizer.state.items()}
        states.append(copy.deepcopy({"model": model.state_dict(), "optimizer": kept}))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for optimizer in optimizers:
            optimizer.step()
    return states


def trainer_rows(states, monkeypatch):
    """check_trainer's rows of a run with these states, of versions 0, 1, ...; its gradients are not looked at."""
    monkeypatch.setattr(plain, "trainer_state", lambda run, version: states[version])
    monkeypatch.setattr(checks, "first_gradient", lambda *_: [])
    return ok_of(checks.check_trainer(FakeRun(config=Config(), continued=2)))


def adamw(parameters):
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in parameters]
    return [torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))]


# (optimizers, their steps in a step of the run, what is said of them)
OPTIMIZERS = {
    "all": (adamw, 1, True),
    # smaller steps than bfloat16 knows
    "a subset": (lambda every: [torch.optim.AdamW(every[:1], lr=1e-6)], 1, True),
    "muon": (lambda every: [torch.optim.Muon(every[:1]), torch.optim.AdamW(every[1:])], 1, True),
    "sgd": (lambda every: [torch.optim.SGD(every)], 1, None),
    "two epochs": (adamw, 2, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adamw_is_repeated_and_what_is_not_known_is_no_fault(name, monkeypatch):
    optimizers_of, epochs, expected = OPTIMIZERS[name]
    states = trained_by(optimizers_of, torch.nn.Linear(8, 8), steps=3 * epochs)
    assert trainer_rows(states[::epochs], monkeypatch) == [expected, expected]


@pytest.mark.parametrize("count", [1, 3])
def test_lost_moments_are_found_also_if_their_count_goes_on(count, monkeypatch):
    model = torch.nn.Linear(8, 8)
    states = trained_by(adamw, model, steps=2) + trained_by(adamw, model, steps=1)[1:]
    for state in states[-1]["optimizer"]["state"].values():
        state["step"] = torch.tensor(float(count))
    assert trainer_rows(states, monkeypatch) == [True, False]


def test_a_gradient_with_another_sign_or_scale_is_found_and_a_forks_loss_is_not_known(models):
    rng = np.random.default_rng(7)
    samples = [make_sample(rng, [0] * 5, advantage=a) for a in (1.0, -0.5, 0.25)]
    models.trained = lambda step: samples
    own = plain.first_gradient(models, dict(models.model(0).named_parameters()))
    norm = plain.norm_of(own)
    assert norm > 0
    clipped = min(1, models.config.max_grad_norm / norm)
    for sign, scale, loss, expected in [
        (1, 1, "reinforce", [True, True]),
        (-1, 1, "ppo", [True, False]),
        (1, 2, "cispo", [False, True]),
        (1, 1, "of_a_fork", [None]),
    ]:
        models.config.loss = loss
        models.steps = {1: {"grad_norm": scale * norm}}
        given = {name: sign * clipped * g for name, g in own.items()}
        assert ok_of(checks.first_gradient(models, given, own)) == expected


# ---- everything


def test_of_the_trainers_states_those_stay_that_are_read(tmp_path):
    for version in range(1, 10):
        state = tmp_path / "checkpoints" / f"step_{version:06d}" / "trainer" / "__0_0.distcp"
        state.parent.mkdir(parents=True)
        state.touch()
    doctor.remove_states(tmp_path, {1, 4, 5})
    kept = sorted(str(path.parent.parent)[-1] for path in tmp_path.rglob("*.distcp"))
    assert kept == ["1", "4", "5", "8", "9"] and len(checkpoints.all_of(tmp_path)) == 9


def test_every_fault_is_one_of_todays_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "WORK", tmp_path)
    for fault in faults.FAULTS.values():
        faults.copy_with("test", fault)


@pytest.mark.slow
def test_the_doctor_finds_a_wrong_sign_and_nothing_else(tmp_path, monkeypatch, base_model):
    """Real engines, a kill, an interruption, a continuation; then once more in the same directory."""
    monkeypatch.setattr(faults, "WORK", tmp_path)
    folder = faults.copy_with("test", faults.FAULTS["advantages with the wrong sign"])
    command = ["bash", "run.sh", "doctor", "toy", "--port", "9700"]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
        assert done.returncode == 1, done.stdout
        saved = json.loads((folder / "out" / "doctor-toy" / "doctor.json").read_text())
        failed = [row["check"] for row in saved["findings"] if row["ok"] is False]
        assert failed == ["advantages = plain advantages"], done.stdout
        assert len(saved["findings"]) > 20
