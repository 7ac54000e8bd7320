"""tools/memory.py: its estimates of the trainer's and the engines' memory.

They are compared with the peak of real processes, with tensors without contents that
bench/fake_step.py has counted (FAKE tensors), and with numbers that were computed by hand.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import config as cfg
from bench import fake_step
from conftest import ROOT, resolved, with_knobs
from tools import memory

# 60 million parameters, too many for an allocator's noise to matter
SMALL = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True)
SMALL |= dict(vocab_size=16384, hidden_size=640, intermediate_size=2048, num_hidden_layers=10)
SMALL |= dict(num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Directory of a model's config, without weights."""
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(SMALL))
    return str(path)


def config(model, gpus, words=""):
    return resolved("math", "--model", model, *words.split(), gpus=gpus)


def on_cpu(model, row, layers):
    words = f"toy --model {model} --row_tokens {row} --checkpointed_layers {layers}"
    return with_knobs(cfg.parse(words.split()), dtype="float32", trainers=1, engines=1)


def total(c):
    return sum(memory.trainer_gb(c).values())


@pytest.mark.parametrize(
    "row, layers, gb",
    [(512, 0, 1.407), (2048, 0, 2.599), (512, 10, 1.137), (4096, 10, 1.957), (2048, 5, 2.043)],
)
def test_estimate_equals_the_measured_peak_of_a_process(small, row, layers, gb):
    """The peak was measured as in test_estimate_equals_the_peak_of_a_process."""
    assert total(on_cpu(small, row, layers)) == pytest.approx(gb, rel=0.05)


EXPERTS = SMALL | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=80)
EXPERTS |= dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=384)


@pytest.fixture(scope="session")
def with_experts(tmp_path_factory):
    """Directory of the config of a model whose tokens go to 4 of 16 experts."""
    path = tmp_path_factory.mktemp("experts")
    (path / "config.json").write_text(json.dumps(EXPERTS))
    return str(path)


@pytest.mark.parametrize(
    "row, layers, gb",
    [(512, 0, 2.756), (2048, 0, 4.242), (2048, 10, 2.737), (2048, 5, 3.491), (4096, 10, 3.210)],
)
def test_estimate_with_experts_equals_the_measured_peak_of_a_process(with_experts, row, layers, gb):
    """The peak was measured as in test_estimate_equals_the_peak_of_a_process."""
    assert total(on_cpu(with_experts, row, layers)) == pytest.approx(gb, rel=0.05)


def test_a_token_passes_only_the_experts_that_it_goes_to(small, with_experts):
    assert memory.mlp_width(small) == 2048 and memory.experts(small) == (0, set())
    assert memory.mlp_width(with_experts) == 4 * 384
    # 10 layers: attention, norms, a router, 16 experts of three matrices; an embedding
    attention = 640 * 640 * 2 + 640 * 160 * 2 + 2 * 80
    layer = attention + 2 * 640 + 16 * 640 + 16 * 3 * 640 * 384
    assert memory.parameters(with_experts) == 10 * layer + 640 + 16384 * 640


# Prints by how much the resident memory of two steps exceeds that of the imports, in bytes
REAL_STEPS = """
import sys
import torch
import config as cfg
import train
from bench import fake_step
from transformers import AutoConfig, AutoModelForCausalLM

def load_model(config, dtype):
    shape = AutoConfig.from_pretrained(config.model)
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="packed")
    return model.eval()

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

config = cfg.load(sys.argv[1])
device = torch.device("cpu")
batches = [fake_step.micro_batch(8, 8)]
batches.append(fake_step.micro_batch(config.row_tokens, config.max_model_len))
train.load_model = load_model
before = status("VmRSS")
# The kernel forgets the peak of the imports.
open("/proc/self/clear_refs", "w").write("5")
policy, optimizers = train.build(config, device, 1)
for _ in range(2):
    fake_step.step(policy, optimizers, batches, config, device)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
def test_estimate_equals_the_peak_of_a_process(with_experts, tmp_path):
    """Half of the layers are computed again. A model with experts has all that a dense one has."""
    c = on_cpu(with_experts, 1024, 5)
    (tmp_path / "config.json").write_text(json.dumps({"config": dataclasses.asdict(c)}))
    done = subprocess.run(
        [sys.executable, "-c", REAL_STEPS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # The allocator gives back at once what is freed.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert total(c) == pytest.approx(int(done.stdout) / 1e9, rel=0.1)


def test_parameter_counts_are_the_published_ones():
    published = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086}
    published |= {"7B": 7.616, "14B": 14.770, "32B": 32.764}
    for name, billions in published.items():
        assert memory.parameters(f"Qwen2.5-{name}") / 1e9 == pytest.approx(billions, abs=1e-3)


# GB that bench/fake_step.py has counted for each of its rows
COUNTED_GB = (10.52, 9.43, 74.76, 130.57, 43.96, 485.97, 24.59, 6.59, 13.49, 3.43, 19.83)


@pytest.mark.parametrize("row, gb", zip(fake_step.ROWS, COUNTED_GB, strict=True))
def test_estimate_equals_the_counted_tensors_of_a_step(row, gb):
    """The storages of a step with FSDP2 that are alive at once."""
    assert total(fake_step.config_of(*row)) == pytest.approx(gb, rel=0.01)


@pytest.mark.slow
def test_storages_are_counted_as_they_were():
    config = fake_step.config_of("0.5B", 4, 0, 1024, 8)
    assert fake_step.counted_gb(config) == pytest.approx(3.43, abs=0.005)


def test_kv_cache_is_the_rest_of_the_engines_share(small):
    placed = memory.Placed(config(small, 2), 2, 80.0)
    engine = placed.roles["engine"]
    beside = engine["update buffers"] + engine["logits of prompts"]
    assert sum(engine.values()) - beside == pytest.approx(0.7 * 80)
    # 10 layers, keys and values, 2 heads of 80, 16 bits, 10240 tokens
    assert placed.sequence_gb == pytest.approx(10 * 2 * 2 * 80 * 2 * 10240 / 1e9)


def test_a_model_that_is_too_large_is_refused_with_advice_that_fits():
    placed = memory.Placed(config("Qwen/Qwen2.5-7B", 1), 1, 80.0)
    # 16 bytes for each of 7.616 billion parameters are too much already
    assert placed.lack[1] > 16 * 7.6 - 80
    verdict = placed.verdict()
    assert verdict.startswith("does not fit: engine and trainer: ")
    assert verdict.endswith(" GB too little; try --lora_rank 32")
    assert not placed.fits and placed.but(lora_rank=32).fits


def test_an_engine_without_room_for_one_sequence_does_not_fit(small):
    c = config(small, 2, "--gpu_memory_utilization 0.02")
    where, lack = memory.Placed(c, 2, 80.0).lack
    assert where == "the KV cache of one sequence" and lack > 0


def test_adam_8bit_and_offload_activations_save_the_computed_memory():
    c = config("Qwen/Qwen2.5-1.5B", 8, "--checkpointed_layers 99")
    before = memory.trainer_gb(c)
    eight = memory.trainer_gb(with_knobs(c, adam_8bit=True))
    assert eight["optimizer"] == pytest.approx(before["optimizer"] * 2.03 / 8, rel=1e-3)
    kept = memory.trainer_gb(with_knobs(c, offload_activations=True))
    # the inputs of 26 layers, 16,384 tokens of 1,536 in 16 bits
    gone = 26 * 16384 * 1536 * 2 / 1e9
    assert total(c) - sum(kept.values()) == pytest.approx(gone, rel=0.02)
    assert sum(eight.values()) < total(c)


def test_3b_with_adapters_and_an_engine_fits_48_gb():
    c = config("Qwen/Qwen2.5-3B", 1, "--lora_rank 32 --kv_cache_gb 8 --row_tokens 10240")
    assert memory.Placed(c, 1, 48.0).lack[1] < -3
    assert not memory.Placed(with_knobs(c, lora_rank=0), 1, 48.0).fits


BY_GPUS = [("math", 8, 80), ("math-1x80", 1, 80), ("math-1x24", 1, 24)]


@pytest.mark.parametrize("preset, gpus, gpu_gb", BY_GPUS)
def test_presets_fit_their_gpus(preset, gpus, gpu_gb):
    assert memory.Placed(resolved(preset, gpus=gpus), gpus, gpu_gb).fits


def test_a_reference_model_is_sharded(small):
    c = config(small, 8, "--kl_coef 0.1")
    parts = memory.Placed(c, 8, 80.0).roles["trainer rank"]
    assert parts["reference model"] == pytest.approx(
        2 * memory.parameters(small) / c.trainers / 1e9
    )


def test_as_few_layers_as_fit_are_computed_again():
    placed = memory.Placed(config("Qwen/Qwen2.5-7B", 8), 8, 80.0)
    fit = [placed.but(checkpointed_layers=k).fits for k in range(29)]
    n = fit.index(True)
    assert fit == [False] * n + [True] * (29 - n) and 0 < n < 28
    verdict = placed.but(checkpointed_layers=0).verdict()
    assert verdict.endswith(f"GB too little; try --checkpointed_layers {n}")
    verdict = placed.but(checkpointed_layers=1000).verdict()
    assert verdict.endswith(f"it would fit with --checkpointed_layers {n}, which is faster")
    assert "faster" not in placed.but(checkpointed_layers=n).verdict()


def test_command_prints_the_table_and_the_verdict(small, capsys):
    arguments = (
        f"math --gpus 1 --gpu_memory_gb 25.76 --model {small} --row_tokens 2048 "
        "--max_model_len 2048 --max_new_tokens 1024"
    ).split()
    memory.main(arguments)
    printed = capsys.readouterr().out
    for row in ("trainer rank", "optimizer", "KV cache", "checkpoint"):
        assert row in printed
    assert printed.splitlines()[-1].startswith(f"memory: {small} fits")
    with pytest.raises(SystemExit) as done:
        memory.main([*arguments, "--gpu_memory_utilization", "0.95"])
    assert done.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{small} does not fit: engine and trainer: " in last
    assert last.endswith("try --gpu_memory_utilization 0.6")
    memory.main(["math", "--model", "nobody/none"])
    assert capsys.readouterr().out.startswith("memory: not checked: nobody/none has no config")
