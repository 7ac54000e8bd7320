"""tools/memory.py: a trainer's peak as a real process has it, and what the rest of a run takes."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import config as cfg
from conftest import ROOT
from plumbing import launch
from tools import memory

# 60 million parameters, too many for an allocator's noise to matter
SMALL = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    vocab_size=16384,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# Two steps; prints what the process has at its peak beyond its imports, bytes.
REAL_STEPS = """
import sys
import numpy as np
import torch
import train
from plumbing.metrics import Sums
from plumbing.samples import join
from tools import memory
from transformers import AutoModelForCausalLM

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def row(tokens):
    each = min(tokens, 512)
    per_token = dict.fromkeys(("behavior_logprobs", "ref_logprobs", "versions"), np.zeros(each))
    sample = per_token | dict(tokens=np.zeros(each, int), mask=np.ones(each), problem=0, task=0, number=0)
    sample |= dict(temperature=1, reward=0, outcome=0, finished=1, num_versions=1, advantage=0)
    return join([sample] * (tokens // each))

c = memory.cfg.load(sys.argv[1])
made = memory.model_config(c.model)
train.load_model = lambda config, dtype, *others: AutoModelForCausalLM.from_config(
    made, dtype=dtype, attn_implementation="packed"
)
before = status("VmRSS")
# the peak of the imports is forgotten
open("/proc/self/clear_refs", "w").write("5")
device = torch.device("cpu")
policy, optimizers = train.build(c, device, 1)
for step in range(2):
    sums = Sums()
    for batch in (row(8), row(c.row_tokens)):
        loss, metrics, _ = train.micro_batch(policy, batch, step, c, device)
        loss.backward()
        sums.add(metrics)
    train.optimizer_step(policy, optimizers, sums, step, c)
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Directory of a model's config, without weights."""
    path = tmp_path_factory.mktemp("model") / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL))
    return str(path)


def config(model, gpus, *words):
    return memory.resolved(["math", "--model", model, *map(str, words)], gpus, 80.0)


def total(c):
    return sum(memory.trainer_gb(c).values())


@pytest.mark.slow
@pytest.mark.parametrize("row, checkpointing", [(512, False), (2048, False), (2048, True)])
def test_a_real_process_takes_what_is_said(small, tmp_path, row, checkpointing):
    words = ["--model", small, "--row_tokens", row, "--gradient_checkpointing", checkpointing]
    c = cfg.parse(["toy", *map(str, words)], 0)
    c = dataclasses.replace(c, dtype="float32", trainers=1, engines=1, max_model_len=512)
    values = {"config": dataclasses.asdict(c)}
    (tmp_path / "config.json").write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, "-c", REAL_STEPS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # what is freed goes back to the system at once
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert total(c) == pytest.approx(int(done.stdout) / 1e9, rel=0.1)
    # more than what is trivially there: weights, gradients, two moments
    assert total(c) > 1.1 * 16 * 0.06


def test_parameter_counts_are_the_published_ones():
    published = {"0.5B": 0.494, "1.5B": 1.544, "7B": 7.616, "14B": 14.770, "32B": 32.764}
    for name, billions in published.items():
        assert memory.parameters(f"Qwen2.5-{name}") / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    "name, trainers, checkpointing, row, gb",
    [
        ("0.5B", 1, True, 16384, 10.52),
        ("0.5B", 4, False, 16384, 26.36),
        ("1.5B", 4, True, 8192, 9.90),
        ("1.5B", 1, False, 16384, 75.23),
        ("7B", 1, True, 8192, 130.57),
        ("7B", 4, True, 16384, 43.96),
        ("7B", 4, False, 8192, 90.55),
        ("32B", 1, True, 16384, 550.03),
        ("32B", 4, False, 16384, 487.53),
    ],
)
def test_a_step_takes_what_its_tensors_add_up_to(name, trainers, checkpointing, row, gb):
    """Known figures: the storages of a step that were alive at once, counted on tensors without contents, operation
    by operation with FSDP2 (commit 4931e45, tools/fake_step.py).
    """
    words = ["--row_tokens", row, "--gradient_checkpointing", checkpointing]
    c = config(f"Qwen/Qwen2.5-{name}", 8, *words)
    assert total(dataclasses.replace(c, trainers=trainers)) == pytest.approx(gb, rel=0.02)


def test_weights_gradients_and_optimizer_are_16_bytes_a_parameter_over_all_ranks(small):
    parts = memory.trainer_gb(dataclasses.replace(config(small, 8), trainers=4))
    static = sum(parts[what] for what in ("weights", "gradients", "optimizer"))
    assert static == pytest.approx(16 * memory.parameters(small) / 4 / 1e9)


def test_the_largest_row_is_one_that_just_fits(small):
    c = config(small, 8)
    placed = memory.Placed(c, 8, 20.0)
    rows = placed.largest_row()
    assert rows > 2 * c.row_tokens
    assert placed.but(row_tokens=rows).totals["rank 0"] <= 20.0
    assert placed.but(row_tokens=rows + 1024).totals["rank 0"] > 20.0


def test_the_kv_cache_is_what_the_engines_share_leaves(small):
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
    assert verdict.endswith(" GB too little; try --model Qwen/Qwen2.5-1.5B")
    assert not placed.fits and placed.but(model="Qwen/Qwen2.5-1.5B").fits


def test_an_engine_without_room_for_one_sequence_does_not_fit(small):
    c = config(small, 2, "--gpu_memory_utilization", 0.02)
    where, lack = memory.Placed(c, 2, 80.0).lack
    assert where == "the KV cache of one sequence" and lack > 0


def test_the_only_gpu_holds_engine_and_trainer(small):
    placed = memory.Placed(config(small, 1), 1, 80.0)
    engine, trainer = (sum(placed.roles[role].values()) for role in ("engine", "rank 0"))
    assert placed.totals == {"engine and trainer": pytest.approx(engine + trainer)}


@pytest.mark.parametrize(
    "gpus, gpu_gb, preset",
    [(8, 80, "math"), (2, 80, "math-1x80"), (1, 80, "math-1x80"), (1, 24, "math-1x24")]
    + [(16, 80, "math"), (8, 24, "math-1x24")],
)
def test_the_preset_follows_from_the_gpus_and_fits(gpus, gpu_gb, preset):
    c = memory.resolved([], gpus, gpu_gb)
    assert c.run == preset and memory.Placed(c, gpus, gpu_gb).fits


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A machine with one GPU of 24 GB, as far as nvidia-smi says."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: some" || echo 24564\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_table_and_the_verdict(nvidia_smi, small, capsys):
    assert launch.gpu_memory_gb() == pytest.approx(25.76, abs=0.01)
    words = ["math", "--gpus", 1, "--model", small, "--row_tokens", 2048, "--max_model_len", 2048]
    words = [*map(str, words), "--max_new_tokens", "1024"]
    memory.main(words)
    printed = capsys.readouterr().out
    for row in ("trainer rank", "optimizer", "KV cache", "largest --row_tokens that fits"):
        assert row in printed
    assert printed.splitlines()[-1].startswith(f"memory: {small} fits")
    with pytest.raises(SystemExit) as done:
        memory.main([*words, "--gpu_memory_utilization", "0.95"])
    assert done.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{small} does not fit: engine and trainer: " in last
    assert last.endswith("try --gpu_memory_utilization 0.6")
    memory.main(["math", "--model", "nobody/none"])
    assert capsys.readouterr().out.startswith("memory: not checked: nobody/none has no config")
