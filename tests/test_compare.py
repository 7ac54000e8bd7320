"""What bench/compare.py makes of its runs, on made-up curves; its task; nothing here is timed."""
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compare
from tasks import _tiny, tail


def run_of(rewards, step_s=2.0, **columns):
    """A made-up run: one evaluation per step, every step as long."""
    n = len(rewards)
    curve = dict(reward=list(rewards), scores=[[i + 1, x] for i, x in enumerate(rewards)], time=[step_s * (i + 1) for i in range(n)], samples=[64 * (i + 1) for i in range(n)], tokens=[200] * n, sampled=[100] * n,
                 lag_max=[3] * n, lag_mean=[1.0] * n, ess=[0.9] * n, wait_data_s=[0.5] * n, sync_s=[0.1] * n) | columns
    return dict(curve=curve, cpu=dict(engine=n * 1.0, trainer=n * 0.5, rest=0.0))


def test_time_to_a_score():
    curve = run_of(np.arange(10) / 10)["curve"]  # 0.1 at step 2, 4 s, and 0.1 more per step of 2 s
    assert compare.time_to(curve, 0.1) == pytest.approx(4) and compare.time_to(curve, 0.15) == pytest.approx(5) and compare.time_to(curve, 0.9) == pytest.approx(20)
    assert compare.time_to(curve, 0.91) is None and compare.time_to(curve, 0.0) == 2
    assert compare.time_to(run_of([0.2, 0, 0, 0, 0, 1, 1, 1])["curve"], 0.3) == pytest.approx(10.6)


def test_the_score_is_the_probability_of_the_right_answer(tmp_path):
    _tiny.make_model(["tail"], tmp_path / "model", 0, steps=2, layers=1, hidden=32)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    problems = sorted(tail.problems("test", 0), key=lambda p: len(p["answer"]))[:20:5]

    def alone(p):
        prompt, answer = tokenizer(p["prompt"])["input_ids"], tokenizer(p["answer"])["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        return sum(logprobs[len(prompt) - 1 + k, t].item() for k, t in enumerate(answer))
    assert compare.success(model, tokenizer, problems) == pytest.approx(np.mean([np.exp(alone(p)) for p in problems]), rel=1e-4)


def test_stable_settings():
    rising, fallen, flat = np.linspace(0, 1, 20), np.r_[np.linspace(0, 1, 12), np.zeros(8)], np.full(20, 0.5)
    curves = lambda *kinds: [run_of(k)["curve"] for k in kinds]
    assert compare.stable(curves(rising, rising)) and not compare.stable(curves(rising, fallen)) and not compare.stable(curves(flat))


def test_the_ratio_is_that_of_the_best_stable_setting():
    rising, fallen = np.linspace(0, 1, 20), np.r_[np.linspace(0, 1, 5), np.zeros(15)]
    runs = {"pipeline": [run_of(rising, 1.0), run_of(rising, 2.0)], "G=1": [run_of(rising, 6.0)] * 2, "G=2": [run_of(rising, 3.0)] * 2, "G=4": [run_of(fallen, 0.1)] * 2}
    found = compare.summary(runs)
    begin, end = rising[0], rising[-1]
    assert found["scores"] == pytest.approx([begin + share * (end - begin) for share in (0.5, 0.75, 0.9)])
    assert [(best, ratio) for best, ratio, _ in found["ratios"]] == [("G=2", pytest.approx(2.0))] * 3 and found["ratios"][2][2] == pytest.approx([3.0, 1.5])
    row = found["rows"]["pipeline"]
    assert row["tokens_s"] == pytest.approx((100 + 50) / 2) and row["waits"] == pytest.approx((0.5 + 0.25) / 2) and row["engine_tok"] == pytest.approx(100) and row["lag_max"] == 3
    text = "\n".join(compare.words(found, "tail"))
    assert "2.00 times as fast" in text and "best stable conventional setting (G=2)" in text and "3.00 1.50" in text


def test_a_pipeline_that_never_gets_there_has_no_ratio():
    runs = {"pipeline": [run_of(np.r_[np.linspace(0, 0.6, 5), np.zeros(15)])], "G=1": [run_of(np.linspace(0, 1, 20))]}
    found = compare.summary(runs)
    assert found["rows"]["pipeline"]["stable"] is False and found["rows"]["pipeline"]["time"][0] is not None and found["rows"]["pipeline"]["time"][1:] == [None, None]
    assert found["ratios"][0] and found["ratios"][1:] == [None, None] and "to 90%: the pipeline, or every stable conventional setting, has runs that never get there" in "\n".join(compare.words(found, "tail"))


def test_time_starts_with_the_sampling_of_the_first_step():
    lines = [dict(wall_s=40.0 + 2 * i, tokens=300, train_tok_s=150.0, samples=64 * i, reward=0.5, lag_max=1, lag_mean=0.5, ess=1.0, wait_data_s=5.0 if i == 1 else 1.0, sync_s=0.1,
                  by_task={"a": dict(tokens=3.0, samples=32), "b": dict(tokens=5.0, samples=32)}) for i in range(1, 4)]
    curve = compare.curve_of(lines, 38.5)
    times = compare.scored(curve | dict(scores=[[0, 0.2], [3, 0.4]]))[1]
    assert times.tolist() == [0, pytest.approx(7.5)]
    assert curve["time"] == pytest.approx([3.5, 5.5, 7.5]) and curve["wait_data_s"] == pytest.approx([3.5, 1, 1]) and curve["sampled"] == [256] * 3


def test_an_interrupted_study_goes_on_and_other_knobs_are_measured_anew(tmp_path, monkeypatch, capsys):
    (tmp_path / "out" / "bench").mkdir(parents=True)
    done = []
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(compare, "MODEL", tmp_path)  # is there
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "one_run", lambda name, knobs, seed, port, out, preset: done.append((name, preset, knobs)) or run_of(np.linspace(0, 1, 8) + seed / 100))
    compare.main(["--settings", "pipeline,G=2", "--seeds", "1"])
    compare.main(["--settings", "pipeline,G=2", "--seeds", "2"])
    assert [name for name, _, _ in done] == [f"compare-tail-{s}-seed{k}" for k in (0, 1) for s in ("pipeline", "G-2")]
    compare.main(["--settings", "pipeline,G=2", "--seeds", "2", "--plot"])
    assert len(done) == 4 and (tmp_path / "out" / "bench" / "compare-tail.png").stat().st_size > 10000
    compare.main(["--settings", "pipeline", "--seeds", "1", "--steps", "9"])
    assert done[4][2] == done[0][2] | dict(steps="9") and (tmp_path / "out" / "bench" / "compare-tail-steps-9.json").exists()
    monkeypatch.setitem(compare.COMMON, "lr", 1.0)
    compare.main(["--settings", "pipeline,G=2", "--seeds", "1"])
    assert len(done) == 7 and set(json.loads((tmp_path / "out" / "bench" / "compare-tail.json").read_text())) == {f"{s}, seed {k}" for s in ("pipeline", "G=2") for k in (0, 1)}
    compare.main(["--preset", "math", "--settings", "pipeline,G=32", "--seeds", "1", "--model", "a/b"])
    assert [(preset, knobs) for _, preset, knobs in done[7:]] == [("math", dict(model="a/b")), ("math", dict(model="a/b", conventional_g=32))]
    for wrong in (["--settings", "G=0"], ["--steps"], ["steps", "9"]):
        with pytest.raises(SystemExit):
            compare.main(wrong)


def table_of(*command):
    """Output of a script of bench/, which has to end well."""
    done = subprocess.run([sys.executable, *command], cwd=compare.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_quick_comparison_runs():
    out = table_of("bench/compare.py", "--quick", "--settings", "G=4")
    assert re.search(r"cores of .*, torch .*, python bench/compare.py --quick --settings G=4\n", out) and re.search(r"^G=4 .* \| .* \|", out, re.M) and "figure out/bench/compare-tail-quick.png" in out
    (name, run), = json.loads((compare.ROOT / "out/bench/compare-tail-quick.json").read_text()).items()
    curve = run["curve"]
    assert name == "G=4, seed 0" and curve["lag_max"] == [0, 1, 2, 3] * 3 and curve["samples"] == [64 * (i + 1) for i in range(12)]
    assert [v for v, _ in curve["scores"]] == [0, 10, 12] and all(0.01 < y < 1 for _, y in curve["scores"]) and len({y for _, y in curve["scores"]}) == 3
    assert len(curve["time"]) == 12 and all(np.diff(curve["time"]) > 0) and min(run["cpu"].values()) > 0
    assert abs(curve["scores"][0][1] - np.mean(curve["reward"][:4])) < 0.15  # what is computed is what is sampled: the base model answered for the first four steps


def test_a_quick_study_runs():
    out = table_of("bench/studies.py", "dpo", "--quick")
    begin, end, dpo = re.search(r"^DPO alone +(\S+) -> (\S+) .* 100% +(\S+)", out, re.M).groups()
    assert begin != end and 0 < float(dpo) < 5 and "figure out/bench/study-dpo-quick.png" in out


def test_cpu_seconds_are_those_of_the_session():
    busy = subprocess.Popen(["bash", "-c", "while true; do :; done", "train.py"], start_new_session=True)
    try:
        deadline = time.time() + 60
        while (used := compare.cpu_seconds(busy.pid)[str(busy.pid)])[1] < 0.2 and time.time() < deadline:
            time.sleep(0.05)
        assert used[0] == "trainer" and used[1] >= 0.2
    finally:
        busy.kill()
        busy.wait()


def test_the_task_has_long_tails_or_equal_lengths_and_the_same_average():
    tokenizer = _tiny.make_tokenizer([tail])
    lengths = lambda data: np.array([len(tokenizer(p["answer"])["input_ids"]) + 1 for p in tail.problems("train", 0, data)[:4000]])
    long_tailed, equal = lengths(""), lengths("equal")
    assert len(set(equal)) == 1 and long_tailed.mean() == pytest.approx(equal.mean(), rel=0.1) and long_tailed.max() > 10 * long_tailed.mean() and np.median(long_tailed) < 0.6 * long_tailed.mean()
    assert max(long_tailed) + 5 <= compare.COMMON["max_model_len"] and max(long_tailed) < compare.COMMON["max_new_tokens"]
    for data in ("", "equal"):
        train, test = tail.problems("train", 3, data), tail.problems("test", 3, data)
        assert not {p["prompt"] for p in train} & {p["prompt"] for p in test} and test == tail.problems("test", 3, data) != tail.problems("test", 4, data)
    p = next(p for p in tail.problems("train", 0) if re.fullmatch("03[a-z]{2}:", p["prompt"]))
    a, b = (ord(x) - 97 for x in p["prompt"][2:4])
    assert p["answer"] == "".join(f"{3 - i:02}{chr(97 + (a + i) % 26)}{chr(97 + (b - i) % 26)}" for i in (1, 2, 3))
    assert tail.reward(p, p["answer"], True) == 1 and tail.reward(p, p["answer"], False) == tail.reward(p, p["answer"] + "00aa", True) == 0
    with pytest.raises(ValueError, match="equal"):
        tail.problems("train", 0, "short")
