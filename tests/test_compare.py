"""bench/: statistics of runs, its command lines, and the score on the task `tail`.

The runs are made up, except in the slow test, which does a short comparison with a real engine.
"""

import functools
import importlib
import json
import re
import sys

import numpy as np
import pytest
import torch
from test_config import call
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import compare, rounding, runs
from tasks import tail
from tools import base_model


def made_up(scores, step_s=2.0):
    """Return a made-up run with one score per step; every step takes equally long."""
    steps = np.arange(1, len(scores) + 1)
    same = dict(lag_max=3, lag_mean=1.0, ess=0.9, wait_data_s=0.5, save_s=0.0, gen_idle=0.25)
    curve = {name: [value] * len(scores) for name, value in same.items()}
    curve |= dict(time=(step_s * steps).tolist(), samples=(64 * steps).tolist())
    return dict(curve=curve, scores=[[i, float(x)] for i, x in enumerate(scores, 1)])


RISING = np.linspace(0, 1, 20)


# ---- statistics


def times(scores, level, step_s=2.0):
    """Return the time to a score of runs that are alike, whose resamples are all the same."""
    times = compare.times_to([made_up(scores, step_s)] * compare.ENOUGH, level)
    assert len(times) == 1 + compare.RESAMPLES and len(set(times)) == 1
    return times[0]


def test_time_to_a_score_by_hand():
    # 0.1 at step 2, 4 s, and 0.1 more per step of 2 s; points are 20 s / 1,000 apart
    rising = np.arange(10) / 10
    close = functools.partial(pytest.approx, abs=0.03)
    assert times(rising, 0.1) == close(4)
    assert times(rising, 0.15) == close(5)
    assert times(rising, 0.899) == close(20)
    assert times(rising, 0.91) == np.inf
    assert times([0.2, 0, 0, 0, 0, 1, 1, 1], 0.3) == close(10.6)


def test_a_mean_curve_ends_with_the_first_run():
    two_runs = [made_up([0, 1], 1.0), made_up([0, 1], 5.0)]
    grid, curves = compare.mean_curves(two_runs)
    assert grid[-1] == 2
    # Only the first score of the slow run is known, and half of the way of the fast one
    assert curves.mean(0)[-1] == pytest.approx(0.5)
    assert compare.times_to(two_runs, 0.25) == pytest.approx([1.5], abs=0.01)
    assert compare.times_to(two_runs, 0.6) == [np.inf]


def test_intervals_of_few_seeds_are_students_t_or_absent():
    # The interval of three values is 2 +- 4.303 * 1 / sqrt(3)
    assert compare.student([1, 2, 3]) == pytest.approx((2, 2 - 2.484, 2 + 2.484), abs=1e-3)
    assert compare.interval_text(compare.student([1.0]), ".1f") == "1.0"
    mean, low, high = compare.student(np.arange(16.0))
    assert (high - mean) / (np.arange(16).std(ddof=1) / 4) == pytest.approx(2.131, rel=0.003)
    few = compare.times_to([made_up(RISING)] * (compare.ENOUGH - 1), 0.5)
    assert compare.interval_text(compare.bootstrap(few), ".0f") == "21"
    assert compare.interval_text((2.0, 1.5, np.inf), ".1f") == "2.0 (1.5 to never)"


def test_runs_whose_scores_do_not_rise_are_unstable():
    fallen = np.r_[np.linspace(0, 1, 5), np.zeros(15)]
    unstable = [compare.is_unstable(made_up(x)) for x in (RISING, fallen, np.full(20, 0.5))]
    assert unstable == [False, True, True]


def test_speed_ratio_is_against_the_best_conventional_setting(capsys):
    speeds = np.array([1.0, 2.0] * 4)
    settings = {
        "pipeline": [made_up(RISING, s) for s in speeds],
        "G=1": [made_up(RISING, 6.0)] * 8,
        "G=2": [made_up(RISING, 3.0)] * 8,
        # This setting is not compared with, and is no part of the scores
        "pipeline+lr=1": [made_up(2 * RISING, 0.1)] * 8,
    }
    found = compare.summary(settings)
    assert found["scores"] == pytest.approx([0.5, 0.75])
    best, faster = found["ratios"][0]
    assert best == "G=2"
    value, low, high = compare.bootstrap(faster)
    # By hand: the mean of i/19 at t - 1 and at t/2 - 1 is 0.5 at t = 2 (9.5 + 1) / 1.5 = 14 s;
    # that of G=2 is 0.5 at 3 * 10.5 s
    assert value == pytest.approx(31.5 / 14, rel=0.01)
    assert 1.5 < low < value < high < 3.0
    # At the second score the fast runs have ended
    assert compare.bootstrap(found["ratios"][1][1])[0] == 0
    row = found["rows"]["pipeline"]
    assert row["samples/s"] == pytest.approx((64 + 32) / 2)
    assert row["max lag"] == 3
    # A sample teaches as much in G=1, and twice as much in the last setting: 0.5 on average from
    # the first score on
    assert found["rows"]["G=1"]["difference"] == pytest.approx((0, 0, 0))
    assert found["rows"]["pipeline+lr=1"]["difference"] == pytest.approx(3 * [0.5 * 19 / 20])
    compare.say(found, 8)
    text = capsys.readouterr().out
    assert re.search(r"^pipeline +14\.\d \(.*\) +never ", text, re.M)
    assert re.search(r"to 50%: the pipeline is 2\.2\d \(\d\.\d\d to \d\.\d\d\) times", text)
    assert "to 75%: the mean of the pipeline does not reach this score before the first" in text


def test_intervals_are_over_seeds_and_paired():
    rng = np.random.default_rng(0)
    speeds = rng.uniform(1, 1.3, 8)
    settings = {
        "pipeline": [made_up(RISING, s) for s in speeds],
        "G=1": [made_up(RISING, 2 * s) for s in speeds],
    }
    for _, faster in compare.summary(settings)["ratios"]:
        # A slow seed is slow for both settings: all resamples have the same ratio
        assert compare.bootstrap(faster) == pytest.approx((2.0, 2.0, 2.0), rel=0.05)


def test_seeds_on_machines_of_different_speeds_weigh_the_same(capsys):
    """The second seed's runs take ten times as long, and the pipeline gains less in it."""
    settings = {
        "pipeline": [made_up(RISING, 1.0), made_up(RISING, 20.0)],
        "G=1": [made_up(RISING, 3.0), made_up(RISING, 20.0)],
        "G=2": [made_up(RISING, 2.0), made_up(RISING, 20.0)],
    }
    scaled = compare.alike(settings)
    ends = {setting: [run["curve"]["time"][-1] for run in x] for setting, x in scaled.items()}
    assert ends == {
        "pipeline": pytest.approx([110, 220]),
        "G=1": pytest.approx([330, 220]),
        "G=2": pytest.approx([220, 220]),
    }
    assert settings["pipeline"][0]["curve"]["time"][-1] == 20
    for by_setting in (settings, scaled):
        within = compare.within_seeds(by_setting)
        assert within == pytest.approx(np.array(2 * [[2.0, 1.0]]), rel=1e-3)
    compare.say_seeds(within)
    # The mean of log 2 and log 1 is log 1.41; the interval of two values is +- 12.71 * 0.347
    text = "within each seed: 2.00, 1.00; mean 1.41 (0.02 to 115.7"
    assert text in capsys.readouterr().out
    compare.say_seeds(np.array([[2.0, 0.0]]))
    assert capsys.readouterr().out == "to 50%, within each seed: 2.00, never\n"


def test_without_a_gain_of_conventional_rl_there_is_no_ratio(capsys):
    """The time to a score that runs have at the beginning is 0, and 0 / 0 is no ratio."""
    settings = {
        "pipeline": [made_up(RISING), made_up(RISING)],
        "G=1": [made_up(RISING, 4.0), made_up(-RISING)],
    }
    within = compare.within_seeds(settings)
    assert within == pytest.approx(np.array(2 * [[2.0, np.nan]]), rel=1e-3, nan_ok=True)
    compare.say_seeds(within)
    text = capsys.readouterr().out
    assert "to 50%, within each seed: 2.00, no conventional run gained\n" in text
    assert "mean" not in text and "nan" not in text
    # Over both seeds the mean of G=1 ends where it begins
    found = compare.summary(settings)
    assert found["ratios"] == [None, None]
    compare.say(found, 2)
    assert "to 75%: there is nothing to compare the pipeline with" in capsys.readouterr().out


def test_what_rounding_leaves_by_hand():
    """Numbers of bfloat16 between 1 and 2 are 1 / 128 apart."""
    first = {"a": torch.full((2, 2), 1.5)}
    for change, share, left in ((0.003, 0.0, 0.0), (0.006, 1.0, 1 / 128 / 0.006), (0.25, 1.0, 1.0)):
        now = {"a": first["a"] + change}
        figures = rounding.left_after_rounding(first, now, torch.bfloat16)
        assert figures == pytest.approx((change, share, left), rel=1e-4)
    # Half of the weights change by 3 / 128, the others by too little
    now = {"a": first["a"] + torch.tensor([[3 / 128, 0.003], [3 / 128, -0.003]])}
    figures = rounding.left_after_rounding(first, now, torch.bfloat16)
    squares = (3 / 128) ** 2 + 0.003**2
    assert figures == pytest.approx(((squares / 2) ** 0.5, 0.5, (3 / 128) ** 2 / squares), rel=1e-4)
    # Without rounding all is left
    assert rounding.left_after_rounding(first, now, torch.float32)[1:] == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    "knobs,message",
    [
        (dict(lora_rank=8), r"trains adapters \(--lora_rank 8\)"),
        (dict(), "has no checkpoint; --save_every says"),
    ],
)
def test_a_run_whose_rounding_cannot_be_measured_is_refused(knobs, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict(config=knobs)))
    result = tmp_path / "rounding.json"
    result.write_text("the figures of another run")
    with pytest.raises(SystemExit):
        rounding.main([str(tmp_path), "--out", str(tmp_path)])
    assert re.search(message, capsys.readouterr().err)
    assert result.read_text() == "the figures of another run"


def test_time_starts_with_the_sampling_of_the_first_step():
    same = dict.fromkeys(runs.COLUMNS, 0.5)
    lines = [same | dict(wall_s=40.0 + 2 * i, step_s=3.5) for i in range(3)]
    curve = runs.curve_of(lines, 0)
    assert curve["time"] == pytest.approx([3.5, 5.5, 7.5])
    # Conventional RL stands still while a checkpoint is written
    assert runs.curve_of(lines, 4)["time"] == pytest.approx([3.0, 4.5, 6.0])
    times = runs.places(dict(curve=curve, scores=[[0, 0.2], [3, 0.4]]), "time")
    assert times.tolist() == [0, pytest.approx(7.5)]


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


# ---- the command line


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that calls compare.py and returns all runs so far, (name, preset, knobs)."""
    started = []

    def one_run(name, knobs, port, preset="toy"):
        started.append((name, preset, knobs))
        return made_up(np.linspace(0, 1, 8) + knobs["seed"] / 100)

    def start(arguments):
        compare.main([*arguments.split(), "--out", str(tmp_path)])
        return started

    monkeypatch.setattr(runs, "one_run", one_run)
    monkeypatch.setattr(runs, "make_model", lambda: None)
    return start


def test_interrupted_comparison_continues(start, tmp_path):
    start("--settings pipeline,G=2 --seeds 1")
    names = [name for name, _, _ in start("--settings pipeline,G=2 --seeds 2")]
    for seed in (0, 1):
        expected = {f"compare-tail-{s}-seed-{seed}" for s in ("pipeline", "G-2")}
        assert set(names[2 * seed : 2 * seed + 2]) == expected
    assert len(start("--settings pipeline,G=2 --seeds 2 --plot")) == 4
    assert (tmp_path / "compare-tail.png").stat().st_size > 10000
    kept = json.loads((tmp_path / "compare-tail.json").read_text())
    assert set(kept) == {f"{s}, seed {k}" for k in (0, 1) for s in ("pipeline", "G=2")}


def test_a_setting_may_have_knobs_of_its_own(start, capsys):
    settings = "pipeline,pipeline+late=wait+clip_high=1.5,G=4+lr=1e-4"
    started = start(f"--settings {settings} --seeds 1 --max_lag 2")
    knobs_of = {name.partition("2-")[2]: knobs for name, _, knobs in started}
    plain = knobs_of["pipeline-seed-0"]
    assert plain["max_lag"] == "2"
    changed = dict(late="wait", clip_high="1.5")
    assert knobs_of["pipeline-late-wait-clip_high-1-5-seed-0"] == plain | changed
    conventional = knobs_of["G-4-lr-1e-4-seed-0"]
    assert conventional["conventional_g"] == 4 and conventional["lr"] == "1e-4"
    assert re.search(r"pipeline\+late=wait\+clip_high=1.5 .*\+0.000 ", capsys.readouterr().out)


def test_another_preset_keeps_its_own_knobs(start):
    started = start("--preset math --settings pipeline,G=32 --seeds 1 --model a/b")
    knobs = dict(model="a/b", seed=0)
    by_setting = {x[2].get("conventional_g"): x[1:] for x in started}
    assert by_setting == {None: ("math", knobs), 32: ("math", knobs | dict(conventional_g=32))}


@pytest.mark.parametrize("name", "against_trl compare cost faults train weights".split())
def test_every_bench_script_has_out_and_names_its_command(name, capsys):
    script = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out
    assert f"python bench/{name}.py" in script.__doc__


# ---- whole runs


@pytest.mark.slow
def test_the_quick_comparison_runs(tmp_path):
    command = f"bench/compare.py --quick --settings G=4 --port 8790 --out {tmp_path}"
    done = call(f"{sys.executable} {command}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"cores of .*: python bench/compare.py --quick --settings G=4", done.stdout)
    assert re.search(r"^G=4 ", done.stdout, re.M)
    assert (tmp_path / "compare-tail-quick.png").exists()
    kept = json.loads((tmp_path / "compare-tail-quick.json").read_text())
    curve = kept["G=4, seed 0"]["curve"]
    assert curve["lag_max"] == [0, 1, 2, 3] * 3
    assert curve["samples"] == [64 * (i + 1) for i in range(12)]
    assert all(np.diff(curve["time"]) > 0)
    versions, scores = zip(*kept["G=4, seed 0"]["scores"])
    assert versions == (0, 8, 12)
    assert all(0.01 < y < 1 for y in scores) and len(set(scores)) == 3
