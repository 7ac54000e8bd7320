"""What bench/compare.py makes of its runs, on made-up curves; its command line; its task. Nothing here is timed."""

import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import common, compare, runs, studies
from conftest import ROOT
from tasks import tail
from tools import base_model


def made_up(scores, step_s=2.0):
    """A run with one score per step, every step as long."""
    n = len(scores)
    curve = dict(
        time=[step_s * (i + 1) for i in range(n)],
        samples=[64 * (i + 1) for i in range(n)],
        sampled=[100] * n,
        lag_max=[3] * n,
        lag_mean=[1.0] * n,
        ess=[0.9] * n,
        kl_behavior=[1e-3] * n,
        wait_data_s=[0.5] * n,
        wait_sync_s=[0.1] * n,
        gen_idle=[0.25] * n,
    )
    scores = [[i + 1, float(x)] for i, x in enumerate(scores)]
    return dict(curve=curve, scores=scores, by_lag={"0": [100, 1e-5], "1": [50, 1e-4]})


RISING = np.linspace(0, 1, 20)
FALLEN = np.r_[np.linspace(0, 1, 5), np.zeros(15)]


# ---- statistics


def test_time_to_a_score():
    # 0.1 at step 2, 4 s, and 0.1 more per step of 2 s
    run = made_up(np.arange(10) / 10)
    assert compare.time_to(run, 0.1) == pytest.approx(4)
    assert compare.time_to(run, 0.15) == pytest.approx(5)
    assert compare.time_to(run, 0.9) == pytest.approx(20)
    assert compare.time_to(run, 0.91) is None
    assert compare.time_to(run, 0.0) == 2
    assert compare.time_to(made_up([0.2, 0, 0, 0, 0, 1, 1, 1]), 0.3) == pytest.approx(10.6)


def test_stable_settings():
    assert compare.stable([made_up(RISING), made_up(RISING)])
    assert not compare.stable([made_up(RISING), made_up(FALLEN)])
    assert not compare.stable([made_up(np.full(20, 0.5))])


def test_the_ratio_is_that_of_the_best_stable_setting(capsys):
    found = compare.summary(
        {
            "pipeline": [made_up(RISING, 1.0), made_up(RISING, 2.0)],
            "G=1": [made_up(RISING, 6.0)] * 2,
            "G=2": [made_up(RISING, 3.0)] * 2,
            "G=4": [made_up(FALLEN, 0.1)] * 2,
        }
    )
    assert found["scores"] == pytest.approx([0.5, 0.75, 0.9])
    for best, faster, by_seed in found["ratios"]:
        assert best == "G=2"
        assert faster == pytest.approx(2.0)
        assert by_seed == pytest.approx([3.0, 1.5])
    row = found["rows"]["pipeline"]
    assert row["tok/s"] == pytest.approx((100 + 50) / 2)
    assert row["trainer waits"] == pytest.approx((0.5 + 0.25) / 2)
    assert row["engine idle"] == pytest.approx(0.25)
    assert row["max lag"] == 3
    compare.say(found)
    text = capsys.readouterr().out
    assert "2.00 times as fast as the best stable conventional setting (G=2)" in text
    assert "3.00 1.50" in text


def test_a_pipeline_that_never_gets_there_has_no_ratio(capsys):
    fallen = np.r_[np.linspace(0, 0.6, 5), np.zeros(15)]
    found = compare.summary({"pipeline": [made_up(fallen)], "G=1": [made_up(RISING)]})
    row = found["rows"]["pipeline"]
    assert not row["stable"]
    assert [None in times for times in row["times"]] == [False, True, True]
    assert found["ratios"][0]
    assert found["ratios"][1:] == [None, None]
    compare.say(found)
    assert "to 90%: the pipeline, or every stable" in capsys.readouterr().out


def test_time_starts_with_the_sampling_of_the_first_step():
    same = dict.fromkeys(runs.COLUMNS, 0.5)
    by_task = {"a": dict(tokens=3.0, samples=32), "b": dict(tokens=5.0, samples=32)}
    lines = [same | dict(wall_s=40.0 + 2 * i, step_s=3.5, by_task=by_task) for i in range(3)]
    curve = runs.curve_of(lines)
    assert curve["time"] == pytest.approx([3.5, 5.5, 7.5])
    assert curve["sampled"] == [256] * 3
    times = runs.places(dict(curve=curve, scores=[[0, 0.2], [3, 0.4]]), "time")
    assert times.tolist() == [0, pytest.approx(7.5)]


def test_kl_by_lag_is_a_mean_over_tokens():
    rows = [
        {"0": dict(tokens=10, kl=1.0)},
        {"0": dict(tokens=30, kl=2.0), "9+": dict(tokens=1, kl=5)},
    ]
    table = runs.lag_table([dict(by_lag=row) for row in rows])
    assert table == {"0": [40, 1.75], "9+": [1, 5.0]}
    found = [dict(by_lag=table), dict(by_lag={"0": [40, 0.25]})]
    assert studies.kl_by_lag(found) == {"0": 1.0, "9+": 5.0}


def test_the_score_is_the_probability_of_the_right_answer(tmp_path):
    base_model.make_model(["tail"], tmp_path / "model", 0, steps=2, layers=1, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    problems = sorted(tail.problems("test", 0), key=lambda p: len(p["answer"]))[:20:5]
    alone = []
    for problem in problems:
        prompt = tokenizer(problem["prompt"])["input_ids"]
        answer = tokenizer(problem["answer"])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        after = logprobs[len(prompt) - 1 : -1]
        alone.append(after.gather(1, torch.tensor(answer)[:, None]).sum().exp().item())
    assert runs.success(model, tokenizer, problems) == pytest.approx(np.mean(alone), rel=1e-4)


def test_rounds_take_turns():
    order = []
    contenders = {name: lambda i, name=name: order.append((name, i)) for name in ("old", "new")}
    assert common.in_turn(contenders, 2) == {"old": [None] * 2, "new": [None] * 2}
    assert order == [("old", 0), ("new", 0), ("new", 1), ("old", 1)]


# ---- the command line


@pytest.fixture
def started(monkeypatch):
    """Knobs of the runs that compare.py would have started, [(name, preset, knobs)]."""
    found = []

    def one_run(name, knobs, port, preset="toy"):
        found.append((name, preset, knobs))
        return made_up(np.linspace(0, 1, 8) + knobs["seed"] / 100)

    monkeypatch.setattr(runs, "one_run", one_run)
    monkeypatch.setattr(runs, "make_model", lambda: None)
    return found


def test_an_interrupted_comparison_goes_on(started, tmp_path):
    command = ["--settings", "pipeline,G=2", "--out", str(tmp_path)]
    compare.main([*command, "--seeds", "1"])
    compare.main([*command, "--seeds", "2"])
    names = [name for name, _, _ in started]
    assert names == [f"compare-tail-{s}-seed-{k}" for k in (0, 1) for s in ("pipeline", "G-2")]
    compare.main([*command, "--seeds", "2", "--plot"])
    assert len(started) == 4
    assert (tmp_path / "compare-tail.png").stat().st_size > 10000
    kept = json.loads((tmp_path / "compare-tail.json").read_text())
    assert list(kept) == [f"{s}, seed {k}" for k in (0, 1) for s in ("pipeline", "G=2")]


def test_other_knobs_are_measured_anew(started, tmp_path, monkeypatch):
    command = ["--settings", "pipeline", "--seeds", "1", "--out", str(tmp_path)]
    compare.main(command)
    compare.main([*command, "--steps", "9"])
    assert started[1][2] == started[0][2] | dict(steps="9")
    assert (tmp_path / "compare-tail-steps-9.json").exists()
    monkeypatch.setitem(runs.COMMON, "lr", 1.0)
    compare.main(command)
    assert len(started) == 3


def test_another_preset_keeps_its_own_knobs(started, tmp_path):
    command = ["--preset", "math", "--settings", "pipeline,G=32", "--seeds", "1", "--model", "a/b"]
    compare.main([*command, "--out", str(tmp_path)])
    knobs = dict(model="a/b", seed=0)
    assert [x[1:] for x in started] == [("math", knobs), ("math", knobs | dict(conventional_g=32))]


@pytest.mark.parametrize("wrong", (["--settings", "G=0"], ["--steps"], ["steps", "9"]))
def test_a_wrong_command_line_starts_nothing(started, tmp_path, wrong):
    with pytest.raises(SystemExit):
        compare.main([*wrong, "--out", str(tmp_path)])
    assert not started


def test_a_study_has_its_table_and_figure(started, tmp_path, capsys):
    studies.main(["kl", "--out", str(tmp_path), "--seeds", "2"])
    assert len(started) == 2 * len(studies.STUDIES["kl"])
    assert (tmp_path / "study-kl.png").stat().st_size > 10000
    row = next(
        x for x in capsys.readouterr().out.splitlines() if x.startswith("conventional, G = 12 ")
    )
    assert "1.0e-05" in row and "1.0e-04" in row


SCRIPTS = "actor against_trl compare generation pace preprocess queues rewards studies train weights".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_keeps_its_numbers(name, capsys):
    script = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out
    assert f"python bench/{name}.py" in script.__doc__


# ---- whole runs


@pytest.mark.slow
def test_the_quick_comparison_runs(tmp_path):
    command = "bench/compare.py --quick --settings G=4 --port 8790 --out"
    done = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"cores of .*: python bench/compare.py --quick --settings G=4", done.stdout)
    assert re.search(r"^G=4 ", done.stdout, re.M)
    assert (tmp_path / "compare-tail-quick.png").exists()
    kept = json.loads((tmp_path / "compare-tail-quick.json").read_text())
    run = kept["G=4, seed 0"]
    curve = run["curve"]
    assert curve["lag_max"] == [0, 1, 2, 3] * 3
    assert curve["samples"] == [64 * (i + 1) for i in range(12)]
    assert len(curve["time"]) == 12
    assert all(np.diff(curve["time"]) > 0)
    versions, found = zip(*run["scores"])
    assert versions == (0, 8, 12)
    assert all(0.01 < y < 1 for y in found)
    assert len(set(found)) == 3


# ---- the task


def test_the_task_has_long_tails_or_equal_lengths_and_the_same_average():
    tokenizer = base_model.make_tokenizer([tail])

    def lengths(data):
        answers = [p["answer"] for p in tail.problems("train", 0, data)[:4000]]
        return np.array([len(tokenizer(answer)["input_ids"]) + 1 for answer in answers])

    long_tailed = lengths("")
    equal = lengths("equal")
    assert len(set(equal)) == 1
    assert long_tailed.mean() == pytest.approx(equal.mean(), rel=0.1)
    assert long_tailed.max() > 10 * long_tailed.mean()
    assert np.median(long_tailed) < 0.6 * long_tailed.mean()
    assert max(long_tailed) + 5 <= runs.COMMON["max_model_len"]
    assert max(long_tailed) < runs.COMMON["max_new_tokens"]


@pytest.mark.parametrize("data", ("", "equal"))
def test_test_problems_are_not_trained(data):
    train = {p["prompt"] for p in tail.problems("train", 3, data)}
    test = tail.problems("test", 3, data)
    assert not train & {p["prompt"] for p in test}
    assert test == tail.problems("test", 3, data)
    assert test != tail.problems("test", 4, data)


def test_the_answer_counts_down():
    problems = tail.problems("train", 0)
    problem = next(p for p in problems if re.fullmatch("03[a-z]{2}:", p["prompt"]))
    a, b = (ord(letter) - 97 for letter in problem["prompt"][2:4])
    words = [f"{3 - i:02}{chr(97 + (a + i) % 26)}{chr(97 + (b - i) % 26)}" for i in (1, 2, 3)]
    assert problem["answer"] == "".join(words)
    assert tail.reward(problem, problem["answer"], True) == 1
    assert tail.reward(problem, problem["answer"], False) == 0
    assert tail.reward(problem, problem["answer"] + "00aa", True) == 0
    with pytest.raises(ValueError, match="equal"):
        tail.problems("train", 0, "short")
