"""Many tasks at once, end to end, and the offline evaluation of what comes out; its statistics by hand."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT
from fake_engine import fake_vllm
from test_run import leftovers, metrics, run
from tools import base_model, evaluate

MATHS = ROOT / "tests" / "maths.jsonl"


def test_pass_at_k_by_hand():
    assert (
        evaluate.pass_at_k(4, 1, 1) == 0.25
        and evaluate.pass_at_k(4, 1, 2) == pytest.approx(0.5)
        and evaluate.pass_at_k(4, 3, 2) == 1.0
    )
    # against its definition: k of n attempts, drawn without replacement
    rng = np.random.default_rng(0)
    attempts = np.array([True] * 3 + [False] * 7)
    drawn = np.mean([rng.permutation(attempts)[:4].any() for _ in range(20000)])
    assert evaluate.pass_at_k(10, 3, 4) == pytest.approx(drawn, abs=0.01)


def test_majority_by_hand():
    assert (
        evaluate.majority(["7", "8", "7"], [True, False, True]) == 1
        and evaluate.majority(["7", "8", "8"], [True, False, False]) == 0
    )
    assert evaluate.majority(["7", "8"], [True, False]) == 0.5  # a tie
    assert (
        evaluate.majority([None, None, "7"], [False, False, True]) == 1
        and evaluate.majority([None], [False]) == 0
    )


def test_the_interval_is_the_bootstraps():
    scores = [1.0] * 30 + [0.0] * 70
    low, high = evaluate.interval(scores)
    assert (
        (low, high) == evaluate.interval(scores)
        and abs(low - (0.3 - 1.96 * np.sqrt(0.21 / 100))) < 0.02
        and abs(high - (0.3 + 1.96 * np.sqrt(0.21 / 100))) < 0.02
    )
    assert evaluate.interval([1.0] * 5) == (1.0, 1.0)


def test_a_table_by_hand():
    answers = {
        i: [dict(success=s, answer=str(s)) for s in tries]
        for i, tries in enumerate([[1, 1, 1, 0], [0, 0, 0, 0]])
    }
    assert {name: mean for name, mean, _, _ in evaluate.table(answers, 0)} == {
        "pass@1 = avg@4": 0.375,
        "pass@2": 0.5,
        "pass@4": 0.5,
        "maj@4": 0.5,
    }


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Directory of a short run on three tasks at once, one of several turns, one from a file, with a barely warmed-up model."""
    out = tmp_path_factory.mktemp("mixture")
    base_model.make_model(["maths", "countdown", "guess"], out / "model", 0, steps=150)
    knobs = (
        "--task maths:0.25,countdown:0.25,guess:0.5 --steps 4 --batch_size 64 --attempts 8 --late wait "
        "--max_new_tokens 60 --max_model_len 400 --row_tokens 1024 --eval_problems 16 --samples_logged 64"
    )
    files = ["--train_data", MATHS, "--eval_data", MATHS, "--model", out / "model"]
    done = run(out, "m", 8740, *knobs.split(), *files)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "m"


@pytest.mark.slow
def test_tasks_train_together(mixture):
    steps, evals = metrics(mixture)
    assert [sum(t["samples"] for t in x["by_task"].values()) for x in steps] == [64] * 4
    totals = {
        task: sum(x["by_task"].get(task, {"samples": 0})["samples"] for x in steps)
        for task in ("maths", "countdown", "guess")
    }
    # in the order they were started (late = wait): by itself a short task comes first
    assert all(totals.values()) and sum(totals.values()) == 256
    for x in steps:
        assert sum(t["samples"] * t["reward"] for t in x["by_task"].values()) / 64 == pytest.approx(
            x["reward"], abs=1e-4
        )
        assert all(
            sum(v for k, v in t.items() if k in ("correct", "wrong", "no_answer", "unparsable"))
            == pytest.approx(1)
            for t in x["by_task"].values()
        )
    # what the engine sampled is what the trainer sees, over several turns as well
    assert (
        all(x["mismatch"] is None or x["mismatch"] < 1e-3 for x in steps)
        and steps[0]["mismatch"] is not None
    )
    assert all(
        set(e["eval"]) == {"maths", "countdown", "guess"} and e["problems"] == e["answers"] == 48
        for e in evals
    ) and [e["version"] for e in evals] == [0, 4]
    shown = [json.loads(x) for x in (mixture / "samples.jsonl").read_text().splitlines()]
    # --samples_logged is the batch: every rollout of the four steps is there, and maybe some begun after
    assert len(shown) >= 256
    games = [s for s in shown if s["task"] == "guess" and len(s["completion"]) > 1]
    assert games and all(
        {v for v, _ in g["spans"][::2]} == {-1}
        and "".join(g["spans"][2][1]) in ("higher\n", "lower\n")
        for g in games
        if len({v for v, _ in g["spans"]}) == 2
    )
    text = subprocess.run(
        [sys.executable, "tools/show.py", str(mixture), "--n", str(len(shown))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert text.count("| reward ") == len(shown) and "of guess" in text


@pytest.mark.slow
def test_offline_evaluation_twice_gives_the_same_numbers(mixture):
    def score(name, *knobs):
        checkpoint = mixture / "checkpoints" / "step_000004"
        done = subprocess.run(
            [
                sys.executable,
                "tools/evaluate.py",
                str(checkpoint),
                "--run",
                name,
                "--port",
                "8750",
                "--eval_problems",
                "12",
                *knobs,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"RUN_MARK": str(mixture)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        run_dir = mixture.parent / name
        answers = sorted(
            (run_dir / "answers.jsonl").read_text().splitlines(),
            key=lambda x: [json.loads(x)[k] for k in ("source", "problem", "attempt")],
        )
        return done.stdout, json.loads((run_dir / "results.json").read_text()), answers

    first, again = (
        score(name, "--eval_temperature", "0", "--eval_attempts", "2") for name in ("e1", "e2")
    )
    assert first[1] == again[1] and first[2] == again[2] and len(first[2]) == 36 * 2
    assert set(first[1]["metrics"]) == {"maths", "countdown", "guess"} and set(
        first[1]["metrics"]["maths"]
    ) == {"pass@1 = avg@2", "pass@2", "maj@2"}
    lines = [json.loads(x) for x in first[2]]
    for source, measured in first[1]["metrics"].items():
        assert measured["pass@1 = avg@2"][0] == pytest.approx(
            np.mean([x["success"] for x in lines if x["source"] == source])
        )
    assert all(
        x["where"].startswith(str(MATHS)) and x["expected"] for x in lines if x["source"] == "maths"
    )
    assert re.search(r"guess +12 +pass@1 = avg@2 +\d\.\d{4} +\d\.\d{4} to \d\.\d{4}", first[0])
    assert leftovers(mixture) == []


@pytest.mark.slow
def test_mistakes_end_an_evaluation_in_one_line(tmp_path):
    for argv, words in (
        ([], "the first argument must be a model"),
        ([str(tmp_path)], "no config.json there"),
        (["nobody/nothing", "--tsak", "toy"], "Perhaps you meant: --task"),
    ):
        done = subprocess.run(
            [sys.executable, "tools/evaluate.py", *argv, "--port", "8750"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (
            done.returncode == 1
            and words in done.stderr
            and len(done.stderr.splitlines()) == 1
            and done.stderr.startswith("evaluate: ")
        ), done.stderr


@pytest.mark.slow
def test_the_readmes_new_task(tmp_path):
    """The section "A new task" to the letter, in a copy of the repository; with a FAKE engine, to save the real one's start."""
    after = (ROOT / "README.md").read_text().partition("### A new task")[2]
    section = re.split(r"\n##+ ", after)[0]
    code, command = re.findall(r"```(?:python|bash)\n(.*?)```", section, re.S)
    name = re.search(r"`tasks/(\w+)\.py`", section)[1]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    (copy / "tasks" / f"{name}.py").write_text(code)
    assert len(code.splitlines()) <= 40
    command = command.strip().splitlines()[0].partition("#")[0].strip()
    assert command.startswith("bash run.sh toy --task")
    done = subprocess.run(
        f"{command} --steps 4 --batch_size 64 --port 8745 --eval_problems 32",
        shell=True,
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ
        | {
            "PYTHONPATH": str(fake_vllm(tmp_path / "fake")),
            "PIPELINE_PYTHON": sys.executable,
            "RUN_MARK": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, evals = metrics(next((copy / "out").glob("*/metrics.jsonl")).parent)
    assert (
        len(steps) == 4
        and all(set(x["by_task"]) == {name} for x in steps)
        and 0 < steps[0]["reward"] < 1
        and set(evals[0]["eval"]) == {name}
    )
    assert leftovers(tmp_path) == []
