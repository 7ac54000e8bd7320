"""A run on three tasks at once, its offline evaluation, and the statistics of evaluations by hand.

The slow tests run the real run.sh with a real vLLM engine; the new task of the README runs with a
FAKE engine.
"""

import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from test_config import call
from test_edits import copy_of_the_repository, run_in

import config as cfg
from conftest import ROOT, resolved
from fake_engine import fake_vllm
from plumbing import rundir
from test_run import leftovers, metrics, run
from tools import base_model, evaluate

MATHS = ROOT / "tests" / "maths.jsonl"


def tool(name, arguments, mark=""):
    return call(f"{sys.executable} tools/{name}.py {arguments}", RUN_MARK=str(mark))


def test_pass_at_k_by_hand():
    assert [evaluate.pass_at_k(4, c, k) for c, k in ((1, 1), (1, 2), (3, 2))] == [0.25, 0.5, 1]
    # By definition, k of n attempts are drawn without replacement.
    rng = np.random.default_rng(0)
    attempts = np.array([True] * 3 + [False] * 7)
    drawn = np.mean([rng.permutation(attempts)[:4].any() for _ in range(20000)])
    assert evaluate.pass_at_k(10, 3, 4) == pytest.approx(drawn, abs=0.01)


def test_majority_by_hand():
    assert evaluate.majority(["7", "8", "7"], [True, False, True]) == 1
    assert evaluate.majority(["7", "8", "8"], [True, False, False]) == 0
    # A tie
    assert evaluate.majority(["7", "8"], [True, False]) == 0.5
    # An attempt without an answer has no vote.
    assert evaluate.majority([None, None, "7"], [False, False, True]) == 1
    assert evaluate.majority([None], [False]) == 0


def test_table_of_metrics_by_hand():
    attempts = [[1, 1, 1, 0], [0, 0, 0, 0]]
    lines = {i: [dict(success=s, answer=str(s)) for s in tries] for i, tries in enumerate(attempts)}
    table = evaluate.table(lines)
    means = {name: mean for name, (mean, _, _) in table.items()}
    assert means == {"pass@1 = avg@4": 0.375, "pass@2": 0.5, "pass@4": 0.5, "maj@4": 0.5}
    # The interval of 0 and 0.75: 1.96 x 0.375 / sqrt(2)
    assert table["pass@1 = avg@4"][1:] == (0, pytest.approx(0.375 + 0.5197, abs=1e-4))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The directory of a short run on three tasks, with a model that has learnt little.

    One task has several turns, and one reads its problems from a file.
    """
    out = tmp_path_factory.mktemp("mixture")
    base_model.make_model(["maths", "toy", "guess"], out / "model", 0, steps=150)
    knobs = (
        "--task maths:0.25,toy:0.25,guess:0.5 --steps 4 --batch_size 64 --attempts 8 --late wait "
        "--max_new_tokens 60 --max_model_len 400 --row_tokens 1024 --eval_problems 16 "
        f"--samples_logged 64 --train_data {MATHS} --eval_data {MATHS} --model {out / 'model'}"
    )
    done = run(out, "m", 8740, *knobs.split())
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "m"


@pytest.mark.slow
def test_three_tasks_train_together(mixture):
    steps, evals = metrics(mixture)
    totals = dict(maths=0, toy=0, guess=0)
    for step in steps:
        task_metrics = step["by_task"].values()
        # With --late wait groups come in the order of their start; else short tasks come first.
        assert sum(x["samples"] for x in task_metrics) == 64
        reward = sum(x["samples"] * x["reward"] for x in task_metrics) / 64
        assert reward == pytest.approx(step["reward"], abs=1e-4)
        for task, x in step["by_task"].items():
            totals[task] += x["samples"]
            outcomes = [x.get(name, 0) for name in evaluate.cfg.OUTCOMES]
            assert sum(outcomes) == pytest.approx(1)
        # The trainer's logprobs equal the engine's, over several turns as well.
        assert step["mismatch"] is None or step["mismatch"] < 1e-3
        # In the order of the starts no token is older than --max_lag allows.
        assert 0 <= step["lag_mean"] <= step["lag_max"] <= cfg.load(mixture).max_lag
    assert all(totals.values()) and sum(totals.values()) == 256
    assert steps[0]["mismatch"] is not None
    assert sorted(x["version"] for x in evals) == [0, 4]
    for line in evals:
        assert line["eval"].keys() == totals.keys() and line["problems"] == line["answers"] == 48
    # --samples_logged is the batch size: every rollout is there.
    shown = [json.loads(x) for x in (mixture / "samples.jsonl").read_text().splitlines()]
    assert sorted(x["step"] for x in shown) == [1] * 64 + [2] * 64 + [3] * 64 + [4] * 64
    games = [x for x in shown if x["task"] == "guess" and len({v for v, *_ in x["spans"]}) == 2]
    assert any(len(x["spans"]) > 2 for x in games)
    for game in games:
        assert {version for version, *_ in game["spans"][::2]} == {-1}
        replies = ["".join(texts) for _, texts, _ in game["spans"][2::2]]
        assert all(text in ("higher\n", "lower\n") for text in replies)
    text = tool("show", f"{mixture} --n {len(shown)}").stdout
    assert text.count("| reward ") == len(shown) and "of guess" in text


@pytest.mark.slow
def test_offline_evaluation_twice_gives_the_same_numbers(mixture):
    evaluations = []
    for name in ("e1", "e2"):
        arguments = f"{mixture}/checkpoints/step_000004 --run {name} --port 8750 --eval_problems 12"
        done = tool("evaluate", f"{arguments} --eval_temperature 0 --eval_attempts 2", mark=mixture)
        assert done.returncode == 0, done.stdout + done.stderr
        run_dir = mixture.parent / name
        lines = (run_dir / "answers.jsonl").read_text().splitlines()
        evaluations.append((json.loads((run_dir / "results.json").read_text()), sorted(lines)))
    assert evaluations[0] == evaluations[1]
    results, lines = evaluations[0]
    lines = [json.loads(x) for x in lines]
    assert len(lines) == 36 * 2 and set(results["metrics"]) == {"maths", "toy", "guess"}
    for source, measured in results["metrics"].items():
        assert set(measured) == {"pass@1 = avg@2", "pass@2", "maj@2"}
        successes = [x["success"] for x in lines if x["source"] == source]
        assert measured["pass@1 = avg@2"][0] == pytest.approx(np.mean(successes))
    file_lines = [x for x in lines if x["source"] == "maths"]
    assert all(x["where"].startswith(str(MATHS)) and x["expected"] for x in file_lines)
    row = r"guess +12 +pass@1 = avg@2 +\d\.\d{4} +\d\.\d{4} to \d\.\d{4}"
    assert re.search(row, done.stdout)
    assert leftovers(mixture) == []


@pytest.mark.slow
def test_knobs_may_be_written_with_dashes(tmp_path, base_model):
    argv = [str(base_model), "--task=toy", f"--out={tmp_path}", "--gpu-memory-utilization", "0.5"]
    config = evaluate.configure([*argv, "--run=mine"], 0)
    assert (config.run, config.gpu_memory_utilization) == ("mine", 0.5)
    assert evaluate.configure([*argv, "--gpu_memory_utilization=0.4"], 0).run.startswith("eval-")


def test_a_checkpoint_of_a_run_with_family_is_evaluated(tmp_path):
    config = resolved("toy", "--family", "qwen3_moe", "--out", tmp_path)
    checkpoint = rundir.write(config) / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    assert evaluate.configure([str(checkpoint)], 0).model == str(checkpoint)
    with pytest.raises(cfg.ConfigError, match="--family gemma2 is for the tiny base model"):
        evaluate.configure([str(checkpoint), "--family", "gemma2"], 0)


def test_a_model_is_evaluated_with_the_knobs_of_a_preset(tmp_path, base_model):
    argv = [str(base_model), "guess", f"--out={tmp_path}", "--eval_attempts", "2"]
    config = evaluate.configure(argv, 0)
    assert (config.task, config.max_new_tokens, config.eval_attempts) == ("guess", 90, 2)
    run_dir = rundir.write(resolved("toy", "--out", tmp_path))
    (run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
    with pytest.raises(cfg.ConfigError, match="guess: the knobs are those of the run"):
        evaluate.configure([str(run_dir), "guess"], 0)


def test_mistakes_end_an_evaluation_in_one_line(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for argv, message in (
        ("", "the first argument must be a model"),
        (tmp_path, f"{tmp_path}: this run has no checkpoint yet"),
        ("nobody/nothing --tsak toy", "--task"),
    ):
        done = tool("evaluate", f"{argv} --port 8750")
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("evaluate: ")


@pytest.mark.slow
def test_new_task_of_the_readme_trains_as_written(tmp_path, base_model):
    """The test follows the section "A new task" to the letter, in a copy with a FAKE engine."""
    following_text = (ROOT / "README.md").read_text().partition("### A new task")[2]
    section = re.split(r"\n##+ ", following_text)[0]
    code, command, own_model, trial = re.findall(r"```(?:python|bash)\n(.*?)```", section, re.S)
    name = re.search(r"`tasks/(\w+)\.py`", section)[1]
    copy = copy_of_the_repository(tmp_path / "copy", base_model)
    (copy / "tasks" / f"{name}.py").write_text(code)
    assert len(code.splitlines()) <= 40
    trial = shlex.split(trial.replace(".venv/bin/python", sys.executable))
    assert subprocess.run(trial, cwd=copy, capture_output=True).stdout == b"1.0\n"
    command = command.splitlines()[0].partition("#")[0]
    assert command.startswith("bash run.sh toy --task")
    command += " --steps 4 --batch_size 64 --port 8745 --eval_problems 32"
    environment = dict(PYTHONPATH=str(fake_vllm(tmp_path / "fake")), RUN_MARK=str(tmp_path))
    run_in(copy, command.split(), 400, **environment)
    steps, evals = metrics(next((copy / "out").glob("*/metrics.jsonl")).parent)
    assert len(steps) == 4 and all(set(x["by_task"]) == {name} for x in steps)
    assert 0 < steps[0]["reward"] < 1 and set(evals[0]["eval"]) == {name}
    # The tiny model stands for one's own; it has no chat template and 256 positions.
    assert f"bash run.sh smol --task {name} " in own_model
    own_model = own_model.replace("DIRECTORY_OR_HUB_NAME", str(base_model))
    own_model += " --chat False --max_model_len 256 --dry_run True"
    run_in(copy, own_model.split(), 200, **environment)
    assert leftovers(tmp_path) == []
