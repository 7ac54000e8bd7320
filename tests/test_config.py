"""Every mistake in a command line is one clear line, before anything starts."""
import fcntl
import json
import socket
import subprocess

import pytest

import config as cfg
import launch
from conftest import ROOT


def resolved(*argv, gpus=0):
    port = [] if "--port" in argv else ["--port", "8780"]  # the default one may be taken by a run
    return cfg.resolve(cfg.parse([*argv, *port], gpus), gpus)


@pytest.mark.parametrize("argv,gpus,message", [
    (["--stepz", "3"], 0, "unknown flag --stepz: did you mean --steps"),
    (["--steps", "many"], 0, "--steps: invalid literal for int"),
    (["--loss", "mse"], 0, "--loss"),
    (["chess"], 0, "unknown preset 'chess': choose from toy, countdown, guess, math"),
    (["--model", "/no/such/model"], 0, "--model /no/such/model: no config.json there"),
    (["--task", "chess"], 0, "--task chess: there is no tasks/chess.py"),
    (["--attempts", "9"], 0, "not a multiple of --attempts 9"),
    (["--attempts", "1", "--batch_size", "4"], 0, "needs at least 2 attempts"),
    (["--max_new_tokens", "128"], 0, "leaves no room for a prompt"),
    (["--ring", "10"], 0, "--ring 10 is less than"),
    (["--conventional_g", "4", "--ring", "800"], 0, "--ring 800 is less than"),
    (["--temperature", "0"], 0, "--temperature 0.0: must be above 0"),
    (["--engines", "3", "--tensor_parallel", "2", "--trainers", "4"], 8, "need 10 GPUs, this machine has 8"),
    (["--run", "a/b"], 0, "letters, digits"),
])
def test_mistakes_are_one_line(argv, gpus, message):
    with pytest.raises(cfg.ConfigError) as e:
        resolved(*(["toy"] if argv[0].startswith("-") else []), *argv, gpus=gpus)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_a_port_in_use_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(cfg.ConfigError, match=f"cannot listen on 127.0.0.1:{s.getsockname()[1]}"):
            resolved("toy", "--port", str(s.getsockname()[1]))


def test_the_launcher_says_it_and_starts_nothing(tmp_path):
    done = subprocess.run(["bash", "run.sh", "toy", "--out", str(tmp_path / "o"), "--stepz", "3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.strip().splitlines()) == 1 and "--stepz" in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("gpus,engines,trainers", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (4, 2, 2), (8, 4, 4)])
def test_placement_splits_the_gpus_in_halves(gpus, engines, trainers):
    c = resolved("toy", gpus=gpus)
    assert (c.engines, c.trainers, c.dtype, c.weight_backend) == (engines, trainers, "bfloat16" if gpus else "float32", "nccl" if gpus > 1 else "gloo")
    processes = launch.placement(c, gpus)
    assert [name for name, _, _ in processes] == [f"engine{i}" for i in range(engines)] + ["actor", "preprocess", "train"]
    if gpus > 1:
        used = [g for name, env, _ in processes if name.startswith(("engine", "train")) for g in env["CUDA_VISIBLE_DEVICES"].split(",")]
        assert sorted(used) == sorted(map(str, range(gpus)))  # every GPU once


def test_an_evaluation_has_every_gpu_for_engines():
    c = cfg.parse(["toy", "--port", "8780", "--engines", "8"], 8)
    c = cfg.resolve(c, 8, training=False)
    assert [env["CUDA_VISIBLE_DEVICES"] for name, env, _ in launch.placement(c, 8) if name.startswith("engine")] == list("01234567")
    assert not [name for name, _, _ in launch.placement(c, 8) if name == "train"]


def test_presets_and_help_show_every_knob():
    assert cfg.parse([], 0).task == "toy" and cfg.parse([], 8).task == "maths" and cfg.parse(["math"], 0).model == "Qwen/Qwen2.5-7B"
    done = subprocess.run(["bash", "run.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for field in cfg.fields(cfg.Config):
        assert f"--{field.name}" in done.stdout


def test_a_stopped_run_continues_a_complete_one_makes_room_and_fixed_knobs_are_refused(tmp_path):
    argv = ["toy", "--out", str(tmp_path), "--port", "8790"]
    c = resolved(*argv)
    assert "new run" in launch.open_run(c)
    first = c.run_id
    run_dir = launch.write(c)
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == c.steps
    assert cfg.load(str(run_dir)) == c
    (run_dir / "checkpoints" / "step_000130").mkdir(parents=True)
    (run_dir / "queues").mkdir()
    again = resolved(*argv, "--lr", "1e-5")
    assert "from step 130; changed: lr" in launch.open_run(again) and not (run_dir / "queues").exists() and again.run_id == first != ""
    with pytest.raises(cfg.ConfigError, match="--batch_size cannot change within a run"):
        launch.open_run(resolved(*argv, "--batch_size", "16"))
    (run_dir / "checkpoints" / f"step_{c.steps:06d}").mkdir()
    assert f"from step {c.steps}" in launch.open_run(resolved(*argv))  # it died before its last evaluation
    with open(run_dir / ".lock") as lock:  # or is it still at that?
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(cfg.ConfigError, match="are still at work"):
            launch.open_run(resolved(*argv))
    (run_dir / "metrics.jsonl").write_text(json.dumps({"eval": {"toy": 0.5}, "problems": 8, "version": c.steps, "wall_s": 1.0}) + "\n")
    assert "complete one before it is now" in launch.open_run(c) and c.run_id != first and (tmp_path / "toy.1" / "checkpoints").exists()
