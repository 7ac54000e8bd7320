"""tools/simulate_run.py: small runs worked out by hand, and what is read from a run's metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest

import config as cfg
from tools import simulate_run as sim

# A step of decoding takes 1 s, a token is trained in 0.1 s, and all else takes no time
PLAIN = sim.Speeds(
    request=0.0,
    decode_base=1.0,
    decode_each=0.0,
    train_token=0.1,
    train_step=0.0,
    gather=0.0,
    update=0.0,
    pause=0.0,
    save=0.0,
    prompt_tokens=0.0,
    latency=0.0,
)


def equal_lengths(length):
    return sim.Lengths(np.full(sim.QUANTILES, length), correlation=0.0)


def small_config(**knobs):
    defaults = dict(steps=4, batch_size=2, attempts=2, concurrency=2, engines=1, trainers=1)
    defaults |= dict(eval_every=0, eval_problems=0, save_every=0, row_tokens=1000)
    return cfg.Config(run="r", **defaults | knobs)


def steps_of(config, speeds=PLAIN, length=5):
    return sim.Simulation(config, speeds, equal_lengths(length)).run()


# ---- the engine


def test_a_step_of_decoding_gives_each_sequence_a_token():
    speeds = replace(PLAIN, decode_base=1.0, decode_each=0.5)
    engine = sim.Engine(2, speeds)
    for length in (2, 4, 3):
        engine.add(sim.Attempt(length))
    # two places: the third sequence waits. Two steps of 2 s
    assert (len(engine.running), len(engine.waiting), engine.next_end()) == (2, 1, 4.0)
    engine.advance(4.0)
    assert engine.pop_ended().length == 2
    # the second one has two more tokens, the third one three
    assert engine.next_end() == 8.0
    engine.advance(8.0)
    assert engine.pop_ended().length == 4
    # one token is missing, and one sequence is left: 1.5 s
    assert engine.next_end() == 9.5


def test_tokens_have_the_version_of_their_step():
    engine = sim.Engine(1, PLAIN)
    engine.add(sim.Attempt(6))
    engine.advance(2.5)
    # the third step has begun, its token is still the old version's
    engine.swap(1, pause=0.25)
    engine.advance(4.75)
    engine.swap(2, pause=0.0)
    assert engine.next_end() == pytest.approx(6.25)
    engine.advance(6.25)
    assert engine.pop_ended().versions == {0: 3, 1: 2, 2: 1}
    engine.add(sim.Attempt(2))
    engine.advance(8.25)
    assert engine.pop_ended().versions == {2: 2}


# ---- whole runs


def test_with_max_lag_0_engine_and_trainer_take_turns():
    # 5 s of decoding, then 10 tokens of 0.1 s each
    for line in steps_of(small_config(max_lag=0)):
        assert line["step_s"] == pytest.approx(6.0)
        assert line["wait_data_s"] == pytest.approx(5.0)
        assert line["lag_max"] == 0
        assert line["gen_idle"] == pytest.approx(1 / 6)
        assert line["gen_tok_s"] == pytest.approx(10 / 6)


def test_the_pipeline_generates_while_it_trains():
    first, *lines = steps_of(small_config(max_lag=1))
    assert first["step_s"] == pytest.approx(6.0)
    for line in lines[:-1]:
        assert line["step_s"] == pytest.approx(5.0)
        assert line["wait_data_s"] == pytest.approx(4.0)
        # the weights arrive in the second of the five steps, whose tokens are the old version's
        assert line["lag_mean"] == pytest.approx(0.2)
        assert line["gen_idle"] == pytest.approx(0.0)


def test_conventional_rl_trains_all_steps_of_a_phase_after_it():
    config = small_config(conventional_g=2, concurrency=4)
    lines = steps_of(config)
    # four sequences in 5 s, then two steps of 1 s
    assert [line["step_s"] for line in lines] == pytest.approx([6.0, 1.0, 6.0, 1.0])
    assert [line["lag_mean"] for line in lines] == [0, 1, 0, 1]


def test_hold_makes_every_lag_equal():
    lines = steps_of(small_config(late="hold", max_lag=1, concurrency=8))
    assert [line["lag_mean"] for line in lines] == [0, 1, 1, 1]
    assert [line["lag_max"] for line in lines] == [0, 1, 1, 1]


def test_full_rows_are_trained_before_their_step_is_complete():
    # Four groups a step, one after the other; rows of two attempts
    config = small_config(batch_size=8, max_lag=0, row_tokens=10)
    for line in steps_of(config):
        # 20 s for four groups. When the first two are there, two rows of 1 s go to the trainer, and
        # at the end two more
        assert line["step_s"] == pytest.approx(22.0)
        assert line["wait_data_s"] == pytest.approx(18.0)


def test_ranks_share_a_step_and_engines_the_attempts():
    config = small_config(max_lag=0, engines=2, trainers=2, concurrency=1)
    for line in steps_of(config):
        assert line["step_s"] == pytest.approx(5.5)


def test_an_update_takes_time_in_which_the_old_weights_are_served():
    speeds = replace(PLAIN, gather=0.5, update=2.0, pause=1.0)
    first, second, *_ = steps_of(small_config(max_lag=0), speeds)
    assert first["step_s"] == pytest.approx(6.0)
    # 2 s until the weights are served, 1 s of pause, 5 s of decoding, 1 s of training
    assert second["step_s"] == pytest.approx(9.0)
    assert second["lag_max"] == 0
    # the trainer waits from the end of its own part on
    assert second["wait_data_s"] == pytest.approx(7.5)


def test_checkpoints_and_evaluations_cost_time():
    speeds = replace(PLAIN, save=3.0)
    seconds = [line["step_s"] for line in steps_of(small_config(max_lag=0, save_every=2), speeds)]
    assert seconds == pytest.approx([6.0, 6.0, 6.0, 6.0])
    wait = [line["wait_data_s"] for line in steps_of(small_config(max_lag=0, save_every=2), speeds)]
    assert wait == pytest.approx([5.0, 5.0, 2.0, 5.0])
    config = small_config(max_lag=0, eval_every=2, eval_problems=2, eval_attempts=1)
    # the evaluation of version 0 comes first, that of version 2 before the third step
    assert [line["step_s"] for line in steps_of(config)] == pytest.approx([11.0, 6.0, 11.0, 6.0])


def test_the_oldest_groups_are_dropped_if_the_trainer_is_slow():
    speeds = replace(PLAIN, train_token=10.0)
    config = small_config(steps=6, max_lag=1000, on_full="drop_oldest", concurrency=2)
    run = sim.Simulation(config, speeds, equal_lengths(5))
    lines = run.run()
    assert run.dropped > 0
    # A step takes 100 s, in which 20 groups are made; the newest two wait
    assert lines[-1]["step_s"] == pytest.approx(100.0)
    kept = small_config(steps=6, max_lag=1000, concurrency=2)
    kept_lines = steps_of(kept, speeds)
    assert lines[2]["lag_max"] < kept_lines[5]["lag_max"] == 5


# ---- what is read from a run


def test_least_squares_are_those_above_zero():
    rng = np.random.default_rng(0)
    x = rng.random((50, 3))
    assert sim.least_squares(x.T @ x, x.T @ (x @ [1.0, 2.0, 3.0])) == pytest.approx([1, 2, 3])
    # the second coefficient would be below 0
    y = x @ [1.0, -0.5, 3.0]
    first, second, third = sim.least_squares(x.T @ x, x.T @ y)
    assert second == 0
    expected = np.linalg.lstsq(x[:, [0, 2]], y, rcond=None)[0]
    assert [first, third] == pytest.approx(expected)


def test_lengths_have_the_law_of_the_histogram():
    lines = [dict(lengths={"3": 30.0, "10-11": 10.0}), dict(lengths={"3": 20.0, "10-11": 40.0})]
    lengths = sim.measure_lengths(lines, [])
    values, counts = np.unique(lengths.quantiles, return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist())) == {3: 500, 10: 250, 11: 250}
    assert lengths.correlation == 0


def samples_of(pairs):
    for step, pair in enumerate(pairs):
        for length in pair:
            yield dict(step=step, task="t", problem=1, behavior_logprobs=[0.0] * length)


def test_attempts_at_one_problem_are_as_alike_as_in_the_run():
    rng = np.random.default_rng(0)
    equal = [[n, n] for n in rng.integers(1, 1000, 200)]
    assert sim.correlation_of_neighbours(list(samples_of(equal))) == pytest.approx(0.99)
    apart = [[a, b] for a, b in rng.integers(1, 1000, (400, 2))]
    assert sim.correlation_of_neighbours(list(samples_of(apart))) < 0.15
    assert sim.correlation_of_neighbours(list(samples_of(equal[:5]))) == 0
    lengths = sim.Lengths(np.arange(1, sim.QUANTILES + 1), correlation=0.81)
    drawn = np.array([lengths.draw(rng, 2) for _ in range(2000)])
    assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(0.8, abs=0.03)


def test_speeds_are_those_that_the_metrics_say():
    config = small_config()
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(30):
        tokens = int(rng.integers(100, 200))
        lines.append(
            dict(
                tokens=tokens,
                sampled_tokens=tokens - 20,
                problems={"0": 2, "1": 2},
                step_s=0.5 + 0.01 * tokens + 0.3,
                wait_data_s=0.2,
                wait_sync_s=0.1,
                save_s=0.0,
                gather_s=0.05,
                sync_s=0.4,
                pause_s=0.02,
            )
        )
    durations = np.zeros((3, 4))
    for _ in range(100):
        n = rng.integers(1, 50)
        h = rng.uniform(1, 64)
        x = np.array([1, n, n * h, 0.03 + n * (0.01 + 0.001 * h)])
        durations += np.outer(x[:3], x)
    speeds = sim.measure_speeds([(config, lines, durations.tolist())])
    assert [speeds.request, speeds.decode_base, speeds.decode_each] == pytest.approx(
        [0.03, 0.01, 0.001], rel=1e-3
    )
    assert [speeds.train_step, speeds.train_token] == pytest.approx([0.5, 0.01], rel=1e-3)
    assert (speeds.gather, speeds.update, speeds.pause, speeds.save) == (0.05, 0.4, 0.02, 0.0)
    assert speeds.prompt_tokens == pytest.approx(5.0)
    assert math.isfinite(speeds.decode_s(10))
