"""The advice of `run.sh status` and tools/report.py on the knobs of a run: values computed by hand.
The measurements are made up.
"""

import math
import re

import pytest
from test_simulate_run import write_run

import config as cfg
from config import Config
from tools import simulate_run
from tools.advice import advice_on, better_splits, stale_advice


@pytest.mark.parametrize(
    "shares,gain,splits",
    [
        # Unhindered, training is 1 / 0.62 = 1.61 times as fast as now with 4 GPUs, and 1.21 times
        # with 3; serving is 1.25 times as fast with 5
        ((0.38, 0.0, 0.0, 4, 4), 1.21, [5, 6]),
        # Unhindered, serving is 27 / (0.4 * 40) = 1.69 times as fast with 27 engines and training
        # 33 / 20 = 1.65 times with 33 trainers; serving with 26 is 1.63, training with 28 is 1.6
        ((0.0, 0.6, 0.0, 40, 20), 1.65, [27, 26, 28]),
        # An engine of two GPUs moves as a whole
        ((0.5, 0.0, 0.0, 2, 6, 2), 4 / 3, [4, 6]),
        # Both wait for each other
        ((0.3, 0.3, 0.0, 4, 4), 1.0, []),
        # Neither side waits for long
        ((0.02, 0.05, 0.0, 4, 4), 1.0, []),
        # There is one GPU on each side, so that none can move
        ((1.0, 0.0, 0.0, 1, 1), 1.0, []),
    ],
)
def test_better_splits_by_hand(shares, gain, splits):
    computed, tried = better_splits(*shares)
    assert computed == pytest.approx(gain, abs=0.005) and tried == splits


def made_up_step(waits, empty):
    step = dict(step_s=10.0, wait_data_s=10.0 * waits, gen_idle=empty, problems={"0": 16})
    return dict(step, drops={})


def test_advice_on_a_run_starts_after_ten_steps_and_counts_dropped_samples(tmp_path):
    step = made_up_step(0.0, 0.0)
    step["drops"] = {"buffer_full": {"1": 8}, "failed": {"0": 900}}
    # While the engines fill, the trainer waits; these steps do not count
    filling = dict(step, wait_data_s=9.0)
    steps = [filling] * 5 + [step] * 5
    config = Config(engines=4, trainers=4)
    assert advice_on(config, steps[:-1], tmp_path) == ""
    # Unhindered, serving is 3 / (0.667 * 4) = 1.12 times as fast with 3, training 5 / 4 with 5. The
    # directory has no run that could be simulated.
    assert re.search(
        "trainer .* 33% of samples dropped.: try --engines 3 --trainers 5, perhaps 1.12 .*"
        f"not simulated: {tmp_path}/config.json is absent",
        advice_on(config, steps, tmp_path),
    )
    # An engine of two GPUs moves as a whole.
    config = Config(engines=1, tensor_parallel=2, trainers=6)
    advised = advice_on(config, [made_up_step(0.5, 0.0)] * 12, tmp_path)
    assert "engines are the bottleneck" in advised and "try --engines 2 --trainers 4," in advised


def test_steps_before_a_run_was_continued_do_not_count(tmp_path):
    """They may have been made with another division of the GPUs."""
    steps = [dict(made_up_step(0.5, 0.0), step=step) for step in range(1, 31)]
    config = Config(engines=4, trainers=4)
    assert "engines are the bottleneck" in advice_on(config, steps, tmp_path)
    (tmp_path / "continued.jsonl").write_text('{"step": 25}\n')
    assert advice_on(config, steps, tmp_path) == ""


def simulated_advice(folder, name, steps, **knobs):
    """The advice on a made-up run, in which a decoding step takes 1 ms for each sequence."""
    run_dir = write_run(folder, name, **knobs)
    return advice_on(cfg.load(run_dir), steps, run_dir)


def test_a_simulation_decides_which_knobs_are_advised(tmp_path, monkeypatch):
    # Only the speeds of the run are used: the steps that it has logged are as fast as others.
    monkeypatch.setattr(simulate_run, "LARGEST_ERROR", math.inf)
    # If speeds were proportional to the number of GPUs, 4 engines would be 1.67 times as fast, and
    # 5 would be 1.25 times. In this run training takes nearly no time: 5 engines are at most 2.5
    # times as fast as 2, and less, as they have fewer sequences each.
    engines_lack = [made_up_step(0.6, 0.0)] * 12
    advised = simulated_advice(tmp_path, "engines", engines_lack, engines=2, trainers=6)
    assert "engines are the bottleneck (trainer waits 60%" in advised
    speedup = re.search(r": --engines 5 --trainers 3, (\S+) times as fast in a sim", advised)[1]
    assert 1.67 < float(speedup) <= 2.5
    # These steps say that engines wait, which the simulation does not find.
    trainer_lacks = [made_up_step(0.0, 0.55)] * 12
    advised = simulated_advice(tmp_path, "trainer", trainer_lacks, engines=4, trainers=4)
    tried = "--engines 3 --trainers 5, --engines 2 --trainers 6"
    assert advised.endswith(f"but in a simulation none of these is faster: {tried}")
    # All answers of a step are sampled before the next one begins, so that engines run empty.
    both_wait = [made_up_step(0.5, 0.5)] * 12
    advised = simulated_advice(tmp_path, "lag", both_wait, engines=2, trainers=2, max_lag=0)
    assert re.search(
        r"wait for each other .*: --max_lag 1, .*\(mean lag 0.0 -> [01]\.\d\)", advised
    )


def test_a_simulation_that_is_far_off_predicts_nothing(tmp_path):
    """A step has taken 0.7 s, and two engines with these speeds would need several seconds."""
    steps = [made_up_step(0.6, 0.0)] * 12
    advised = simulated_advice(tmp_path, "far", steps, engines=2, trainers=6)
    expected = r"try --engines 4 --trainers 4, perhaps 1.67 .*not simulated: a step takes 0\.\d+ s"
    assert re.search(expected, advised)


def test_a_higher_lag_is_not_advised_where_it_harms_or_changes_nothing(tmp_path):
    step = made_up_step(0.5, 0.5)
    old = dict(step, by_lag={"4-7": dict(tokens=100, kl=0.1)})
    config = Config(engines=1, trainers=1)
    expected = "wait for each other .*: try --max_lag 2, which may be faster .not simulated"
    assert re.search(expected, advice_on(config, [step] * 12, tmp_path))
    advised = advice_on(config, [old] * 12, tmp_path)
    assert "--max_lag 2" not in advised and "lower --max_lag" in advised
    # Without a limit on the lag, and where engines and trainer take turns
    for knobs in (dict(max_lag=1_000_000), dict(late="hold"), dict(conventional_g=4)):
        config = Config(engines=1, trainers=1, **knobs)
        assert advice_on(config, [step] * 12, tmp_path) == ""


def test_old_tokens_that_harm_are_named():
    def line(**buckets):
        table = {name: dict(tokens=n, kl=kl) for name, (n, kl) in buckets.items()}
        return dict(by_lag={name.replace("to", "-"): values for name, values in table.items()})

    fresh = {"0": (50, 0.5), "1": (40, 0.009)}
    # The KL of lag 0 is mismatch; a tenth of the tokens must be above the limit.
    assert stale_advice([line(**fresh)]) == ""
    assert stale_advice([line(**fresh, **{"8to15": (9, 0.05)})]) == ""
    advised = stale_advice([line(**fresh), line(**{"8to15": (30, 0.05), "4to7": (70, 0.008)})])
    expected = "16% of the tokens are so old that KL(mu || pi) is above 0.01 nats (lag 8-15: 0.050)"
    assert advised.startswith(expected)
    # runs of earlier versions of this code
    assert stale_advice([{"step": 1}]) == ""
