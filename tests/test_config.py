"""Every mistake in a command line is one clear line, before anything starts."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

import config as cfg
from conftest import ROOT, resolved
from plumbing import launch
from plumbing.queues import publish_json
from tools import run


@pytest.mark.parametrize(
    "words,message",
    [
        ("toy --stepz 3", "Unrecognized options: --stepz, 3 Perhaps you meant: --steps"),
        ("toy --steps many", "--steps: invalid literal for int"),
        ("toy --loss mse", "--loss"),
        ("chess", "unknown preset 'chess': choose from toy, smol, guess, agent, math"),
        (
            "toy --task chess",
            "No module named 'tasks.chess'; tasks here: agent, guess, gym, judge, maths, python_tool, tail",
        ),
        ("toy --attempts 9", "--batch_size must be a multiple of --attempts; now batch_size 448"),
        ("toy --attempts 1 --batch_size 4", "--attempts: this --advantage needs 2; now attempts 1"),
        ("toy --max_new_tokens 128", "--max_new_tokens must be below --max_model_len"),
        ("toy --row_tokens 100", "--row_tokens must hold a sample"),
        ("toy --overlong_buffer 41", "--overlong_buffer must not exceed"),
        ("toy --late wait --on_full drop_oldest", "--late wait needs --on_full block"),
        (
            "toy --top_p 0.9",
            "--top_p: sampling from a part of the distribution is not supported: ratios",
        ),
        ("toy --repetition-penalty=1.1", "--repetition-penalty=1.1: sampling from a part"),
        ("toy --teacher self --temperature 0.7", "--teacher needs --temperature 1; now"),
        ("toy --teacher a/b --no_signal drop", "--teacher needs --no_signal keep; now"),
        ("guess --teacher self", "--teacher self --task guess: an attempt of several turns"),
        ("toy --adam_8bit True", "--adam_8bit needs torchao"),
        ("toy --clip_low 6", "--clip_low must be below --clip_high; now clip_low 6.0"),
        ("toy --max_lag -1", "--max_lag -1: must be from 0 to 1e+09"),
        ("toy --temperature 0", "--temperature 0.0: must be from 0.01 to 100"),
        ("toy --engines 3 --tensor_parallel 2 --trainers 4", "do not go into 1 nodes of 8 GPUs"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(cfg.ConfigError) as e:
        resolved(*words.split(), gpus=8)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value", ["inf", "nan", "-1e400"])
def test_every_number_is_finite_and_has_bounds(value):
    for name, kind in get_type_hints(cfg.Config).items():
        if kind in (float, tuple[float, float], tuple[float, float, float, float]):
            words = [value] * len(get_args(kind) or [kind])
            with pytest.raises(cfg.ConfigError, match=f"--{name} .*: must be from"):
                resolved("toy", f"--{name}", *words)


@pytest.mark.parametrize("name", [".", "a/b", "", "-x", "a\n", "a b", "\u00e9", "_a", "a" * 101])
def test_a_run_has_a_name_and_no_path(tmp_path, name):
    argv = [f"--run={name}", "--out", str(tmp_path)]
    for start in (lambda: resolved("toy", *argv), lambda: run.serve(argv)):
        with pytest.raises(cfg.ConfigError, match="--run .* letters, digits") as e:
            start()
        assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())
    for other in ("a", "toy.1", "A-b_c.D", "7", "a" * 100):
        assert resolved("toy", "--run", other).run == other


def test_a_loss_brings_its_own_clip_range_unless_one_is_given():
    c = resolved("toy", "--loss", "ppo")
    assert (c.clip_low, c.clip_high) == (0.8, 1.2)
    c = resolved("toy", "--loss", "ppo", "--clip_high", "1.28")
    assert (c.clip_low, c.clip_high) == (0.8, 1.28)
    assert resolved("toy").clip_high == 5.0
    # what is written is what is used: a continued run that changes the loss gets that one's range
    assert resolved("toy", "--loss", "icepop").clip_low == 0.5


def call(words, **environment):
    """A command line of the repository, with this Python and never an installation."""
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable} | environment
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    return subprocess.run(words.split(), **how)


def test_the_launcher_says_it_and_starts_nothing(tmp_path):
    done = call(f"bash run.sh toy --out {tmp_path}/o --stepz 3")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "--stepz" in done.stderr
    assert not (tmp_path / "o").exists()


def test_nccl_takes_two_gpus():
    for gpus, backend in ((0, "gloo"), (1, "gloo"), (2, "nccl")):
        assert resolved("toy", gpus=gpus).weight_backend == backend


def test_an_evaluation_has_every_gpu_for_engines():
    c = cfg.parse(["toy", "--engines", "8"])
    c = launch.resolve(c, 8, training=False)
    devices = [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in launch.engine_commands(c, 8)]
    assert devices == list("01234567")
    assert "train" not in [name for name, _, _ in launch.placement(c, 8)]


def test_presets_and_help_show_every_knob():
    assert cfg.parse([]).task == "toy"
    assert cfg.parse(["math"]).model == "Qwen/Qwen2.5-7B"
    done = call("bash run.sh math --help")
    assert done.returncode == 0
    shown = re.findall(r"^[^a-z]*--(\w+) ", done.stdout, re.M)
    assert shown == [f.name for f in fields(cfg.Config)]
    assert re.search(r"samples per optimizer step.*\(default: 1024\)", done.stdout, re.S)


def test_a_stopped_run_continues_a_complete_one_makes_room_and_fixed_knobs_are_refused(tmp_path):
    argv = ["toy", "--out", str(tmp_path)]
    c = resolved(*argv)
    assert "new run" in launch.open_run(c)
    first = c.run_id
    run_dir = launch.write(c)
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == c.steps
    assert cfg.load(str(run_dir)) == c
    (run_dir / "checkpoints" / "step_000130").mkdir(parents=True)
    (run_dir / "queues").mkdir()
    (run_dir / "engines").mkdir()
    again = resolved(*argv, "--lr", "1e-5")
    assert re.search(
        "from step_000130; from here on with other knobs .*: lr ", launch.open_run(again)
    )
    assert not (run_dir / "queues").exists()
    assert not (run_dir / "engines").exists()
    assert again.run_id == first
    refusal = "--batch_size cannot change within a run: .* It is 448 in .*, and 16 now"
    with pytest.raises(cfg.ConfigError, match=refusal):
        launch.open_run(resolved(*argv, "--batch_size", "16"))
    # it died before its last evaluation
    (run_dir / "checkpoints" / f"step_{c.steps:06d}").mkdir()
    assert f"from step_{c.steps:06d}" in launch.open_run(resolved(*argv))
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=c.steps, done=True)
    # a complete one goes on if there are more steps
    more = resolved(*argv, "--steps", str(c.steps + 30))
    words = f"continuing .* from step_{c.steps:06d}; .*: steps \\({c.steps} -> {c.steps + 30}"
    assert re.search(words, launch.open_run(more))
    assert more.run_id == first
    history = (run_dir / "continued.jsonl").read_text().splitlines()
    assert json.loads(history[0])["changed"] == {"lr": [c.lr, 1e-5]}
    changed = {"steps": [c.steps, c.steps + 30]}
    assert json.loads(history[-1]) == {"step": c.steps, "changed": changed}
    assert f"from step_{c.steps:06d}" in launch.open_run(resolved(*argv))
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=c.steps, done=True)
    assert "the one before it is now" in launch.open_run(c)
    assert c.run_id != first
    assert (tmp_path / "toy.1" / "checkpoints").exists()


def test_no_git_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    c = resolved("toy", "--out", str(tmp_path))
    assert json.loads((launch.write(c) / "config.json").read_text())["git"] == ""
