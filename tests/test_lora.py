"""Adapters: engines, checkpoints, other programs and the trainer have the same weights, bit for
bit.

The trainer, peft and vLLM are real. The weight sender is FAKE (tests/train_without_engines.py).
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from test_model import CPU, tiny
from test_ranks import resume, run_trainer, same, write_run
from test_replay import ALONE
from transformers import AutoModelForCausalLM

import config as cfg
import train
from plumbing import lora
from plumbing.checkpoints import newest
from tools import replay

IDS = np.arange(3, 40)
POSITIONS = np.arange(len(IDS))


def build(folder, **knobs):
    """Return (config, policy, optimizers) of the trainer, with adapters that are no longer 0."""
    config = cfg.Config(model=str(folder), dtype="float32", lora_rank=4, **knobs)
    policy, optimizers = train.build(config, CPU, 1)
    model = policy.model
    torch.manual_seed(1)
    for layer in lora.adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    return config, policy, optimizers


def logprobs_of(model):
    with torch.no_grad():
        return train.token_logprobs(model, IDS, POSITIONS, 1.0)[0]


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="packed")


def test_adapters_begin_as_the_base_model_and_are_trained_alone(base_model):
    config = cfg.Config(model=str(base_model), dtype="float32", lora_rank=4)
    policy, [optimizer] = train.build(config, CPU, 1)
    model = policy.model
    assert torch.equal(logprobs_of(model), logprobs_of(plain(base_model)))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 2 * 7 and all(".lora_" in name for name in names)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(trained) == len(names)
    assert all(group["lr_scale"] == 10 for group in optimizer.param_groups)


def test_served_saved_and_trained_weights_are_the_same(base_model, tmp_path):
    config, policy, _ = build(base_model)
    model = policy.model
    state = dict(model.state_dict())
    adapters = lora.split(model, state)
    with torch.no_grad():
        served = {
            name: compute(*tensors) for name, (compute, tensors) in lora.served(model).items()
        }
    assert len(served) == 14 and len(adapters) == 28
    assert all(torch.equal(x, state[name]) for name, x in served.items())
    merged = plain(base_model)
    merged.load_state_dict(state)
    assert torch.equal(logprobs_of(merged), logprobs_of(model))
    assert not torch.allclose(logprobs_of(model), logprobs_of(plain(base_model)))
    name = "model.layers.0.mlp.up_proj"
    A, B = (adapters[f"{name}.lora_{factor}"] for factor in "AB")
    expected = plain(base_model).get_submodule(name).weight + 32 / 4 * B @ A
    assert torch.allclose(state[f"{name}.weight"], expected, atol=1e-6)


def test_the_reference_is_the_model_without_its_adapters(base_model):
    _, policy, _ = build(base_model, kl_coef=0.1)
    model = policy.model
    expected = logprobs_of(plain(base_model))
    adapted = logprobs_of(model)
    assert torch.equal(policy.reference_logprobs(IDS, POSITIONS, 1.0), expected)
    assert torch.equal(logprobs_of(model), adapted)


@pytest.mark.parametrize("size,expected", [(1e-4, 0.0), (1.0, 1.0)])
def test_merge_survival_is_the_share_that_rounding_leaves(size, expected):
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(torch.full((8, 8), 1.5, dtype=torch.bfloat16))
    model = torch.nn.Sequential(layer)
    model.get_decoder = lambda: model[:]
    model.config = SimpleNamespace(model_type="x")
    lora.add(model, cfg.Config(lora_rank=1, lora_alpha=1.0))
    assert lora.survival(model) == {}
    torch.nn.init.ones_(layer.lora_A)
    torch.nn.init.constant_(layer.lora_B, size)
    assert lora.survival(model)["merge_survival"] == pytest.approx(expected, abs=1e-3)


def test_a_model_without_linear_layers_is_refused(tmp_path):
    folder = tiny("gpt2", tmp_path / "gpt2")
    with pytest.raises(cfg.ConfigError, match="--lora_rank: gpt2 has no torch.nn.Linear"):
        build(folder)


# ---- checkpoints

KNOBS = dict(lora_rank=4, kl_coef=0.1)


@pytest.fixture(scope="module")
def trained(base_model, tmp_path_factory):
    """A run of six steps in float32."""
    folder = tmp_path_factory.mktemp("lora")
    run_dir = write_run(folder, "lora", base_model, keep_steps=4, **ALONE, **KNOBS)
    run_trainer(run_dir)
    return run_dir


def test_resumed_run_equals_the_uninterrupted_one(trained, tmp_path, base_model):
    halfway = trained / "checkpoints" / "step_000003"
    resume(tmp_path, "again", base_model, halfway, knobs=KNOBS)
    resumed = newest(tmp_path / "again")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert same(load_file(resumed / file), load_file(newest(trained) / file))


def test_step_with_adapters_is_replayed_bit_for_bit(trained, capsys):
    assert replay.main([str(trained), "--step", "6"]) == []
    assert "are the same, bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "dtype,rank", [pytest.param("float32", 4, marks=pytest.mark.slow), ("bfloat16", 1)]
)
def test_two_ranks_save_what_they_train(dtype, rank, trained, tmp_path, base_model):
    knobs = KNOBS | dict(lora_rank=rank, dtype=dtype)
    run_dir = write_run(tmp_path, "two", base_model, 2, **knobs)
    weights, _ = run_trainer(run_dir, ranks=2)
    halfway = run_dir / "checkpoints" / "step_000003"
    resumed, _ = resume(tmp_path, "again", base_model, halfway, 2, knobs)
    assert same(resumed, weights)
    if dtype == "float32":
        for name, w in load_file(newest(trained) / "model.safetensors").items():
            assert (weights[name] - w).norm() < 1e-4 * w.norm()
    base = load_file(base_model / "model.safetensors")
    adapter = load_file(newest(run_dir) / "adapter" / "adapter_model.safetensors")
    for name, w in weights.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" not in adapter:
            assert torch.equal(w, base[name].to(w.dtype))
            continue
        A, B = (adapter[f"{layer}.lora_{factor}.weight"].to(w.dtype).float() for factor in "AB")
        merged = base[name].to(w.dtype) + 32 / rank * B @ A
        assert torch.allclose(w.float(), merged.to(w.dtype).float(), rtol=1e-5, atol=1e-6)


# This program prints a prompt's logprobs, under vLLM with the base model and the adapter.
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, adapter, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(base, enable_lora=True, max_lora_rank=8, dtype="float32", max_model_len=64,
          enforce_eager=True, kv_cache_memory_bytes=10**8)
params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
[out] = llm.generate([{"prompt_token_ids": ids}], params, lora_request=LoRARequest("a", 1, adapter))
print("FOUND", json.dumps([x[i].logprob for i, x in zip(ids[1:], out.prompt_logprobs[1:])]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["peft", "vllm"])
def test_peft_and_vllm_read_the_adapter(program, trained, base_model):
    folder = newest(trained)
    expected = logprobs_of(plain(folder))[1:]
    if program == "peft":
        adapted = peft.PeftModel.from_pretrained(plain(base_model), folder / "adapter")
        logprobs = logprobs_of(adapted.merge_and_unload())[1:]
    else:
        arguments = [base_model, folder / "adapter", json.dumps(IDS.tolist())]
        command = [sys.executable, "-c", VLLM, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert "FOUND" in done.stdout, done.stderr[-3000:]
        logprobs = torch.tensor(json.loads(done.stdout.partition("FOUND")[2].splitlines()[0]))
    assert (logprobs - expected).abs().max() < 1e-4
    assert (logprobs_of(plain(base_model))[1:] - expected).abs().mean() > 1e-3
