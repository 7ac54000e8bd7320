"""tools/memory.py: a trainer's peak as a real process has it, and what the rest of a run takes."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import config as cfg
from conftest import ROOT
from plumbing import hardware, launch
from tools import fake_step, memory

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
# few operations to trace
LIGHT = SMALL | dict(vocab_size=1024, hidden_size=256, intermediate_size=1024)
# Prints what the process has at its peak beyond its imports, bytes.
REAL_STEPS = """
import sys
import torch
import train
from tools import fake_step, memory

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

c = memory.cfg.load(sys.argv[1])
model = fake_step.model_config(c.model)
device = torch.device("cpu")
rows = [fake_step.row(8, 8), fake_step.row(c.row_tokens, c.max_model_len)]
train.load_model = lambda config, dtype: fake_step.empty_model(model, dtype)
before = status("VmRSS")
# the peak of the imports is forgotten
open("/proc/self/clear_refs", "w").write("5")
policy, optimizers = train.build(c, device, 1)
for step in range(2):
    train.train_step(policy, optimizers, rows, step, c, device)
print(status("VmHWM") - before)
"""


def directory(path, model):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model))
    return str(path)


@pytest.fixture(autouse=True)
def no_other_group():
    """The trace opens a process group; tests of another file may have left theirs open."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def small(tmp_path):
    """Directory of a model's config, without weights."""
    return directory(tmp_path / "small", SMALL)


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """The same for all tests: what is traced once is remembered."""
    return directory(tmp_path_factory.mktemp("model") / "light", LIGHT)


def config(model, gpus, *words):
    return memory.resolved(["math", "--model", model, *map(str, words)], gpus, 80.0)


def on_cpu(model, *words):
    """One trainer rank without GPUs, in float32."""
    c = cfg.parse(["toy", "--model", model, *map(str, words)], 0)
    return dataclasses.replace(c, dtype="float32", trainers=1, engines=1, max_model_len=512)


def total(c, model):
    """Bytes at the peak of a step of every layer of a transformers config."""
    found = fake_step.trace(c, model)
    return sum(size for kind, size in found.items() if kind != "gathering an update")


def extrapolated(c):
    return sum(memory.trainer_gb(c).values()) * 1e9


@pytest.mark.slow
@pytest.mark.parametrize("row, checkpointing", [(512, False), (2048, True)])
def test_the_trace_says_what_a_real_process_takes(small, tmp_path, row, checkpointing):
    c = on_cpu(small, "--row_tokens", row, "--gradient_checkpointing", checkpointing)
    expected = total(c, fake_step.model_config(small))
    (tmp_path / "run").mkdir()
    values = {"config": dataclasses.asdict(c)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, "-c", REAL_STEPS, str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # what is freed goes back to the system at once
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert expected == pytest.approx(int(done.stdout), rel=0.1)
    # more than what is trivially there: weights, gradients, two moments
    assert expected > 1.2 * 16 * 60e6


def test_parameter_counts_are_the_published_ones():
    published = {"0.5B": 0.494, "1.5B": 1.544, "7B": 7.616, "14B": 14.770, "32B": 32.764}
    for name, billions in published.items():
        assert memory.parameters(f"Qwen2.5-{name}") / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    "trainers, checkpointing", [(1, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_layers_beyond_those_traced_add_up_linearly(light, trainers, checkpointing):
    c = config(light, 8, "--row_tokens", 16384, "--gradient_checkpointing", checkpointing)
    c = dataclasses.replace(c, trainers=trainers)
    assert extrapolated(c) == pytest.approx(total(c, fake_step.model_config(light)), rel=0.01)


def test_weights_gradients_and_optimizer_are_16_bytes_a_parameter_over_all_ranks(light):
    parts = memory.trainer_gb(dataclasses.replace(config(light, 8), trainers=4))
    static = sum(parts[what] for what in ("weights", "gradients", "optimizer"))
    # and a step count for each parameter
    assert static == pytest.approx(16 * memory.parameters(light) / 4 / 1e9, rel=1e-3)


@pytest.mark.slow
def test_a_whole_model_is_what_its_first_layers_say():
    name = "Qwen/Qwen2.5-7B"
    c = dataclasses.replace(config(name, 8), trainers=4)
    assert extrapolated(c) == pytest.approx(total(c, fake_step.model_config(name)), rel=0.01)


@pytest.mark.slow
def test_the_largest_row_is_one_that_just_fits(light):
    c = config(light, 8)
    room = 3 * memory.Placed(c, 8, 80.0).on_trainers()
    rows = memory.Placed(c, 8, room).largest_row()
    assert rows > 2 * c.row_tokens
    used = memory.Placed(c, 8, room).but(row_tokens=rows).on_trainers()
    assert used == pytest.approx(room, rel=0.03)


def test_a_rank_holds_whole_layers_while_it_computes_them(light):
    c = dataclasses.replace(config(light, 8), trainers=4)
    gathered = memory.trainer_gb(c)["gathered"] * 1e9
    per_layer = LIGHT["hidden_size"] * (3 * LIGHT["intermediate_size"] + 2 * LIGHT["hidden_size"])
    # at least this layer in 16 bits; at most the next one, too, and the gradients in 32 bits
    root = 2 * LIGHT["vocab_size"] * LIGHT["hidden_size"]
    assert root + 2 * per_layer < gathered < root + 1.2 * (2 + 2 + 4) * per_layer


@pytest.mark.slow
def test_gradient_checkpointing_and_more_ranks_take_less(light):
    c = dataclasses.replace(config(light, 8), trainers=1)
    used = extrapolated(c)
    assert used < 0.7 * extrapolated(dataclasses.replace(c, gradient_checkpointing=False))
    assert extrapolated(dataclasses.replace(c, trainers=4)) < used


def test_the_kv_cache_is_what_the_engines_share_leaves(light):
    placed = memory.Placed(config(light, 2), 2, 80.0)
    engine = placed.roles["engine"]
    without_update = sum(engine.values()) - engine["update buffers"]
    assert without_update == pytest.approx(0.7 * 80)
    # 10 layers, keys and values, 2 heads of 32, 16 bits, 10240 tokens
    assert placed.sequence_gb == pytest.approx(10 * 2 * 2 * 32 * 2 * 10240 / 1e9)


@pytest.mark.slow
def test_a_model_that_is_too_large_is_refused_with_advice_that_fits():
    placed = memory.Placed(config("Qwen/Qwen2.5-7B", 1), 1, 80.0)
    verdict = placed.verdict()
    # 16 bytes for each of 7.616 billion parameters
    assert verdict.startswith("does not fit: weights, gradients and optimizer take 122 GB of each")
    assert verdict.endswith("; try --model Qwen/Qwen2.5-1.5B")
    assert not placed.fits
    assert placed.but(model="Qwen/Qwen2.5-1.5B").fits


def test_an_engine_without_room_for_one_sequence_does_not_fit(light):
    c = config(light, 2, "--gpu_memory_utilization", 0.02)
    where, lack = memory.Placed(c, 2, 80.0).lack
    assert where == "the KV cache of one sequence" and lack > 0


def test_the_only_gpu_holds_engine_and_trainer(light):
    placed = memory.Placed(config(light, 1), 1, 80.0)
    engine, trainer = (sum(placed.roles[role].values()) for role in ("engine", "rank 0"))
    # what waits for the swap is beside what vLLM counts
    assert engine == pytest.approx(0.3 * 80 + placed.roles["engine"]["update buffers"])
    assert placed.totals == {"engine and trainer": pytest.approx(engine + trainer)}


@pytest.mark.parametrize(
    "gpus, gpu_gb, preset",
    [(8, 80, "math"), (2, 80, "math-1x80"), (1, 80, "math-1x80"), (1, 24, "math-1x24")]
    + [(16, 80, "math"), (8, 24, "math-1x24"), (0, 0, "toy")],
)
def test_the_preset_follows_from_the_gpus(gpus, gpu_gb, preset):
    assert cfg.parse([], gpus, gpu_gb=gpu_gb).run == preset


@pytest.mark.slow
@pytest.mark.parametrize("gpus, gpu_gb", [(8, 80.0), (16, 80.0), (2, 80.0), (1, 80.0), (1, 24.0)])
def test_the_preset_that_is_chosen_fits(gpus, gpu_gb):
    assert memory.Placed(memory.resolved([], gpus, gpu_gb), gpus, gpu_gb).fits


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A machine with one GPU of 24 GB, as far as nvidia-smi says."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: some" || echo 24564\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_launcher_refuses_in_one_line_and_starts_nothing(nvidia_smi, light, tmp_path):
    assert hardware.gpu_memory_gb() == pytest.approx(25.76, abs=0.01)
    knobs = (
        "--row_tokens 2048 --max_model_len 2048 --max_new_tokens 9 --gpu_memory_utilization 0.95"
    )
    done = subprocess.run(
        ["bash", "run.sh", "math", "--model", light, "--out", tmp_path / "o", *knobs.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PIPELINE_PYTHON": sys.executable},
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"run.sh: memory: {light} does not fit: engine and trainer: ")
    assert "try --gpu_memory_utilization 0.6 (--memory_check False" in line
    # the run's name was taken, and nothing made
    assert [path.name for path in (tmp_path / "o").iterdir()] == [".math.lock"]


def test_a_model_nobody_knows_is_let_through_with_a_line(nvidia_smi, capsys):
    c = config("nobody/none", 1)
    launch.check_memory(c, 1)
    assert capsys.readouterr().out.startswith("memory: not checked: nobody/none has no config")
    # neither a line nor a wait
    launch.check_memory(dataclasses.replace(c, memory_check=False), 1)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_dry_run_has_the_whole_table(nvidia_smi, light, capsys):
    words = ["--row_tokens", 2048, "--max_model_len", 2048, "--max_new_tokens", 1024]
    launch.check_memory(config(light, 1, *words), 1)
    printed = capsys.readouterr().out
    for words in ("trainer rank", "optimizer", "KV cache", "largest --row_tokens that fits"):
        assert words in printed
    assert printed.splitlines()[-1].startswith(f"memory: {light} fits")
