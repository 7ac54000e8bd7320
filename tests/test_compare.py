"""What bench/compare.py makes of its runs, on made-up curves; its command line; its task. Nothing here is timed."""

import functools
import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import common, compare, curves, old_tokens, runs
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
        tokens=[100] * n,
        lag_max=[3] * n,
        lag_mean=[1.0] * n,
        ess=[0.9] * n,
        kl_behavior=[1e-3] * n,
        wait_data_s=[0.5] * n,
        wait_sync_s=[0.1] * n,
        save_s=[0.0] * n,
        gen_idle=[0.25] * n,
    )
    scores = [[i + 1, float(x)] for i, x in enumerate(scores)]
    return dict(curve=curve, scores=scores)


RISING = np.linspace(0, 1, 20)
FALLEN = np.r_[np.linspace(0, 1, 5), np.zeros(15)]


# ---- statistics


def times(scores, level, step_s=2.0):
    """Of one run, and of its resamples, which are all the same."""
    grid, lines = curves.lines({"a": [made_up(scores, step_s)]})
    found = curves.times_to(grid, lines["a"], level)
    assert len(found) == 1 + curves.RESAMPLES and len(set(found)) == 1
    return found[0]


def test_time_to_a_score():
    # 0.1 at step 2, 4 s, and 0.1 more per step of 2 s; points are 20 s / 1,000 apart
    rising = np.arange(10) / 10
    close = functools.partial(pytest.approx, abs=0.03)
    assert times(rising, 0.1) == close(4)
    assert times(rising, 0.15) == close(5)
    assert times(rising, 0.899) == close(20)
    assert times(rising, 0.91) == np.inf
    assert times([0.2, 0, 0, 0, 0, 1, 1, 1], 0.3) == close(10.6)


def test_the_mean_over_seeds_keeps_what_has_ended():
    grid, lines = curves.lines({"a": [made_up([0, 1], 1.0), made_up([0, 1], 5.0)]})
    assert grid[-1] == 10
    assert np.allclose(lines["a"][0][grid >= 2], 1)
    mean = lines["a"].mean(0)
    assert np.interp(2, grid, mean) == pytest.approx(0.5, abs=0.01)
    assert np.interp(7.5, grid, mean) == pytest.approx(0.75, abs=0.01)


def test_unstable_runs():
    settings = {
        "pipeline": [made_up(RISING)] * 4,
        "G=1": [made_up(RISING)] * 3 + [made_up(FALLEN)],
        "G=2": [made_up(RISING)] * 2 + [made_up(FALLEN), made_up(np.full(20, 0.5))],
    }
    assert [compare.unstable(found) for found in settings.values()] == [0, 1, 2]
    assert list(compare.comparable(settings)) == ["pipeline", "G=1"]


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
    for share, (best, faster) in zip(compare.SHARES, found["ratios"]):
        assert best == "G=2"
        value, low, high = curves.interval(faster)
        # every resample has two runs of either kind, or one of both
        assert (low, high) == pytest.approx((1.5, 3.0), rel=0.03)
        # the mean of both runs: the fast one has ended by then
        assert 1.5 < value < 3.0
    value, low, high = curves.interval(found["ratios"][0][1])
    both = [made_up(RISING, step) for step in (1.0, 2.0)]
    mean = lambda t: np.mean(
        [np.interp(t, runs.places(r, "time"), runs.scores_of(r)) for r in both]
    )
    ours = next(t for t in np.arange(0, 40, 0.01) if mean(t) >= 0.5)
    level = np.interp(0.5, RISING, 3.0 * np.arange(1, 21))
    assert value == pytest.approx(level / ours, rel=0.03)
    row = found["rows"]["pipeline"]
    assert row["tok/s"] == pytest.approx((100 + 50) / 2)
    assert row["trainer waits"] == pytest.approx((0.5 + 0.25) / 2)
    assert row["engine idle"] == pytest.approx(0.25)
    assert row["max lag"] == 3
    compare.say(found)
    text = capsys.readouterr().out
    assert re.search(r"to 90%: the pipeline is \d\.\d\d \(1\.\d\d-[23]\.\d\d\) times", text)
    assert "per sample, end: the pipeline's is +0.000 (+0.000 to +0.000) from G=1's" in text


def test_another_pipeline_is_nothing_to_be_compared_with():
    settings = {
        "pipeline": [made_up(RISING, 2.0)] * 2,
        "pipeline+max_lag=1": [made_up(RISING + 0.5, 1.0)] * 2,
        "G=8": [made_up(RISING, 4.0)] * 2,
    }
    found = compare.summary(settings)
    assert found["scores"][0] == pytest.approx(np.mean([0, 0.5, 0]) / 2 + 0.5)
    assert [best for best, _ in found["ratios"]] == ["G=8"] * 3


def test_intervals_are_over_seeds_and_paired():
    rng = np.random.default_rng(0)
    speeds = rng.uniform(1, 10, 8)
    settings = {
        "pipeline": [made_up(RISING, s) for s in speeds],
        "G=1": [made_up(RISING, 2 * s) for s in speeds],
    }
    for _, faster in compare.summary(settings)["ratios"]:
        # a slow seed is slow for both: all resamples have the same ratio
        assert curves.interval(faster) == pytest.approx((2.0, 2.0, 2.0), rel=0.05)


def test_a_pipeline_that_never_gets_there_is_not_faster(capsys):
    short = np.linspace(0, 0.6, 20)
    found = compare.summary({"pipeline": [made_up(short)] * 2, "G=1": [made_up(RISING)] * 2})
    assert curves.interval(found["ratios"][0][1])[0] > 0
    assert [curves.interval(faster)[0] for _, faster in found["ratios"][1:]] == [0, 0]
    for what, expected in {"end": -0.4, "mean score": -0.4 * 0.5}.items():
        best, difference = found["per_sample"][what]
        assert best == "G=1"
        assert curves.interval(difference) == pytest.approx([expected] * 3, rel=0.1)
    compare.say(found)
    assert "never" in capsys.readouterr().out


def test_time_starts_with_the_sampling_of_the_first_step():
    same = dict.fromkeys(runs.COLUMNS, 0.5)
    by_task = {"a": dict(tokens=3.0, samples=32), "b": dict(tokens=5.0, samples=32)}
    lines = [same | dict(wall_s=40.0 + 2 * i, step_s=3.5, by_task=by_task) for i in range(3)]
    curve = runs.curve_of(lines, 0)
    assert curve["time"] == pytest.approx([3.5, 5.5, 7.5])
    # all of conventional RL stands still while a checkpoint is written
    assert runs.curve_of(lines, 4)["time"] == pytest.approx([3.0, 4.5, 6.0])
    assert curve["sampled"] == [256] * 3
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
    for seed in (0, 1):
        of_seed = {f"compare-tail-{s}-seed-{seed}" for s in ("pipeline", "G-2")}
        assert set(names[2 * seed : 2 * seed + 2]) == of_seed
    compare.main([*command, "--seeds", "2", "--plot"])
    assert len(started) == 4
    assert (tmp_path / "compare-tail.png").stat().st_size > 10000
    kept = json.loads((tmp_path / "compare-tail.json").read_text())
    assert set(kept) == {f"{s}, seed {k}" for k in (0, 1) for s in ("pipeline", "G=2")}


def test_every_seed_has_its_own_order(started, tmp_path):
    command = ["--settings", "pipeline,G=1,G=2,G=4", "--out", str(tmp_path)]
    compare.main([*command, "--seeds", "4", "--first_seed", "10"])
    names = [name.rpartition("-seed-") for name, _, _ in started]
    assert [seed for _, _, seed in names] == [str(10 + k // 4) for k in range(16)]
    orders = {tuple(setting for setting, _, _ in names[k : k + 4]) for k in range(0, 16, 4)}
    assert len(orders) > 1


def test_other_knobs_are_measured_anew(started, tmp_path, monkeypatch):
    command = ["--settings", "pipeline", "--seeds", "1", "--out", str(tmp_path)]
    compare.main(command)
    compare.main([*command, "--steps", "9"])
    assert started[1][2] == started[0][2] | dict(steps="9")
    assert (tmp_path / "compare-tail-steps-9.json").exists()
    monkeypatch.setitem(runs.COMMON, "lr", 1.0)
    compare.main(command)
    assert len(started) == 3


def test_a_setting_may_have_knobs_of_its_own(started, tmp_path, capsys):
    settings = "pipeline,pipeline+late=wait+clip_high=1.5,G=4+lr=1e-4"
    command = ["--settings", settings, "--seeds", "1", "--max_lag", "2", "--out", str(tmp_path)]
    compare.main(command)
    found = {name.partition("2-")[2]: knobs for name, _, knobs in started}
    plain = found["pipeline-seed-0"]
    assert plain["max_lag"] == "2"
    assert found["pipeline-late-wait-clip_high-1-5-seed-0"] == plain | dict(
        late="wait", clip_high="1.5"
    )
    conventional = found["G-4-lr-1e-4-seed-0"]
    assert conventional["conventional_g"] == 4 and conventional["lr"] == "1e-4"
    assert re.search(r"pipeline\+late=wait\+clip_high=1.5 .*\+0.000 \(", capsys.readouterr().out)


def test_another_preset_keeps_its_own_knobs(started, tmp_path):
    command = ["--preset", "math", "--settings", "pipeline,G=32", "--seeds", "1", "--model", "a/b"]
    compare.main([*command, "--out", str(tmp_path)])
    knobs = dict(model="a/b", seed=0)
    by_setting = {x[2].get("conventional_g"): x[1:] for x in started}
    assert by_setting == {None: ("math", knobs), 32: ("math", knobs | dict(conventional_g=32))}


@pytest.mark.parametrize("wrong", (["--settings", "G=0"], ["--steps"], ["steps", "9"]))
def test_a_wrong_command_line_starts_nothing(started, tmp_path, wrong):
    with pytest.raises(SystemExit):
        compare.main([*wrong, "--out", str(tmp_path)])
    assert not started


SCRIPTS = "actor against_trl compare faults generation kl limit old_tokens pace preprocess queues rewards train utilisation weights".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_keeps_its_numbers(name, capsys):
    script = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out
    assert f"python bench/{name}.py" in script.__doc__


def test_the_choice_of_tokens_is_by_age_or_place(tmp_path, monkeypatch):
    monkeypatch.setattr(old_tokens, "WORK", tmp_path)
    folder = old_tokens.patched_copy()
    # in a process of its own: its config and train are others
    command = [sys.executable, "-c", CHOICE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "": 6,
        "recent 1": 4,
        "old 1": 2,
        "late 1": 2,
        "early 1": 4,
    }


CHOICE = """
import json
import numpy as np, torch
import config as cfg, train
lengths = np.array([5, 3])
batch = dict(
    tokens=np.ones(8, int),
    mask=np.array([0, 1, 1, 1, 1, 0, 1, 1], bool),
    versions=np.array([-1, 0, 1, 3, 3, -1, 3, 3]),
    behavior_logprobs=np.zeros(8, np.float32),
    lengths=lengths,
    temperature=np.ones(2, np.float32),
    advantage=np.ones(2, np.float32),
    reward=np.ones(2, np.float32),
    outcome=np.zeros(2, int),
    num_versions=np.ones(2, int),
    finished=np.ones(2, bool),
)
class Model:
    def token_logprobs(self, tokens, positions, temperature, mask):
        return torch.zeros(8, requires_grad=True), torch.zeros(8)
found = {}
for chosen in ("", "recent 1", "old 1", "late 1", "early 1"):
    c = cfg.Config(tokens_trained=chosen, clip_low=0.0, clip_high=5.0)
    _, sums = train.micro_batch(Model(), batch, 3, c, torch.device("cpu"))
    found[chosen] = int(sums["tokens"])
print(json.dumps(found))
"""


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
