"""The advice of tools/status.py on --engines and --trainers, compared with values computed by
hand. The measurements are made up.
"""

import re

import pytest

from config import Config
from tools.common import advice, advice_on, stale_advice


@pytest.mark.parametrize(
    "shares,expected",
    [
        # Unhindered, training is 1 / 0.62 = 1.61 times as fast as now with 4 GPUs, and 1.21 times
        # with 3; serving is 1.25 times as fast with 5
        ((0.38, 0.0, 0.0, 4, 4), "engines .* waits 38%.*: --engines 5 --trainers 3, about 1.21"),
        # Unhindered, serving is 27 / (0.4 * 40) = 1.69 times as fast with 27 engines and training
        # 33 / 20 = 1.65 times with 33 trainers; serving with 26 is 1.63, training with 28 is 1.6
        ((0.0, 0.6, 0.0, 40, 20), "trainer .* 60% empty.*: --engines 27 --trainers 33, about 1.65"),
        # An engine of two GPUs moves as a whole
        ((0.5, 0.0, 0.0, 2, 6, 2), "--engines 2 --trainers 4"),
        # Both wait for each other
        ((0.3, 0.3, 0.0, 4, 4), "raise --max_lag"),
    ],
)
def test_advice_by_hand(shares, expected):
    assert re.search(expected, advice(*shares))


def test_no_advice_where_nothing_would_be_gained():
    # Neither side waits for long
    assert advice(0.02, 0.05, 0.0, 4, 4) == ""
    # There is one GPU on each side, so that none can move
    assert advice(1.0, 0.0, 0.0, 1, 1) == ""


def test_advice_on_a_run_starts_after_ten_steps_and_counts_dropped_samples():
    step = dict(step_s=10.0, wait_data_s=0.0, gen_idle=0.0, problems={"0": 16})
    step["drops"] = {"buffer_full": {"1": 8}, "failed": {"0": 900}}
    # While the engines fill, the trainer waits; these steps do not count
    filling = dict(step, wait_data_s=9.0)
    steps = [filling] * 5 + [step] * 5
    config = Config(engines=4, trainers=4)
    assert advice_on(config, steps[:-1]) == ""
    # Unhindered, serving is 3 / (0.667 * 4) = 1.12 times as fast with 3, training 5 / 4 with 5
    expected = "trainer .* 33% of samples dropped.*: --engines 3 --trainers 5, about 1.12"
    advised = advice_on(config, steps)
    assert re.search(expected, advised)
    assert f"tools/simulate.py {config.out}/{config.run} " in advised


def test_a_higher_lag_is_not_advised_where_it_harms_or_changes_nothing():
    step = dict(step_s=10.0, wait_data_s=5.0, gen_idle=0.5, problems={"0": 16}, drops={})
    old = dict(step, by_lag={"4-7": dict(tokens=100, kl=0.1)})
    assert "raise --max_lag" in advice_on(Config(engines=1, trainers=1), [step] * 12)
    advised = advice_on(Config(engines=1, trainers=1), [old] * 12)
    assert "raise --max_lag" not in advised and "lower --max_lag" in advised
    for knobs in (dict(late="hold"), dict(conventional_g=4)):
        assert advice_on(Config(engines=1, trainers=1, **knobs), [step] * 12) == ""


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
