"""tools/simulate_run.py: small runs worked out by hand, and what is read from a run's metrics."""

import json
import math
from dataclasses import asdict, replace

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
    save=0.0,
    prompt_tokens=0.0,
)


@pytest.fixture(autouse=True)
def no_latency(monkeypatch):
    monkeypatch.setattr(sim, "LATENCY_S", 0.0)


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
    engine = sim.Engine(speeds)
    engine.add(sim.Attempt(2))
    engine.add(sim.Attempt(4))
    # two steps of 2 s
    assert engine.next_end() == 4.0
    engine.advance(4.0)
    assert engine.pop_ended().length == 2
    # The request that ends is still in progress. The second one has two more tokens
    assert engine.next_end() == 8.0
    engine.advance(6.0)
    engine.ending -= 1
    # one token is missing, and one sequence is left: 1.5 s
    assert engine.next_end() == 7.5
    engine.add(sim.Attempt(3))
    engine.advance(8.0)
    assert engine.pop_ended().length == 4
    # the other one has two more tokens
    engine.ending -= 1
    assert engine.next_end() == 11.0


def test_tokens_have_the_version_of_their_step():
    engine = sim.Engine(PLAIN)
    engine.add(sim.Attempt(6))
    engine.advance(2.5)
    # the third step has begun, its token is still the old version's
    engine.swap(1)
    engine.advance(4.5)
    engine.swap(2)
    engine.advance(6.0)
    assert engine.pop_ended().versions == {0: 3, 1: 2, 2: 1}
    engine.add(sim.Attempt(2))
    engine.advance(8.0)
    assert engine.pop_ended().versions == {2: 2}


# ---- whole runs


def test_with_max_lag_0_engine_and_trainer_take_turns():
    # 5 s of decoding, then 10 tokens of 0.1 s each
    for line in steps_of(small_config(max_lag=0)):
        assert line["step_s"] == pytest.approx(6.0)
        assert line["wait_data_s"] == pytest.approx(5.0)
        assert line["lag_max"] == 0


def test_the_pace_is_a_mean_over_ten_seconds_as_in_the_metrics():
    weight = 1 - math.exp(-0.6)
    first, second, *_ = steps_of(small_config(max_lag=0))
    # one of six seconds is idle, and ten tokens are sampled
    idle = 1 + weight * (1 / 6 - 1)
    assert first["gen_idle"] == pytest.approx(idle)
    assert second["gen_idle"] == pytest.approx(idle + weight * (1 / 6 - idle))
    assert first["gen_tok_s"] == pytest.approx(weight * 10 / 6)


def test_the_pipeline_generates_while_it_trains():
    first, *lines = steps_of(small_config(max_lag=1))
    assert first["step_s"] == pytest.approx(6.0)
    for line in lines[:-1]:
        assert line["step_s"] == pytest.approx(5.0)
        assert line["wait_data_s"] == pytest.approx(4.0)
        # the weights arrive in the second of the five steps, whose tokens are the old version's
        assert line["lag_mean"] == pytest.approx(0.2)
    assert lines[-1]["gen_idle"] < 0.3


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
    config = small_config(
        batch_size=4, max_lag=0, engines=2, trainers=2, concurrency=2, rows="padded"
    )
    # both groups at once in 5 s; a row for each rank has two attempts of 5 tokens
    for line in steps_of(replace(config, row_tokens=10)):
        assert line["step_s"] == pytest.approx(6.0)
    # one row for all: the other rank has nothing to do
    for line in steps_of(replace(config, row_tokens=20)):
        assert line["step_s"] == pytest.approx(7.0)


def test_attempts_at_one_problem_compute_their_prompt_once():
    speeds = replace(PLAIN, prompt_tokens=10.0)
    # two answers of 5 tokens, and a prompt of 10
    assert steps_of(small_config(max_lag=0), speeds)[0]["step_s"] == pytest.approx(7.0)
    padded = small_config(max_lag=0, rows="padded")
    assert steps_of(padded, speeds)[0]["step_s"] == pytest.approx(8.0)


def test_requests_take_time_beside_their_tokens():
    speeds = replace(PLAIN, request=2.0)
    assert steps_of(small_config(max_lag=0), speeds)[0]["step_s"] == pytest.approx(8.0)


def test_attempts_wait_for_a_free_slot_in_their_order():
    # three attempts, two slots: the third one begins when the first one ends
    config = small_config(batch_size=3, attempts=3, concurrency=2, max_lag=0)
    assert steps_of(config)[0]["step_s"] == pytest.approx(11.5)


def test_an_update_takes_time_in_which_the_old_weights_are_served():
    speeds = replace(PLAIN, gather=0.5, update=2.0)
    first, second, *_ = steps_of(small_config(max_lag=0), speeds)
    assert first["step_s"] == pytest.approx(6.0)
    # 2 s until the weights are served, 5 s of decoding, 1 s of training
    assert second["step_s"] == pytest.approx(8.0)
    assert second["lag_max"] == 0
    # the trainer waits from the end of its own part on
    assert second["wait_data_s"] == pytest.approx(6.5)


def test_a_push_waits_for_the_update_before_it():
    # a step takes 1 s, an update 4 s
    speeds = replace(PLAIN, gather=0.5, update=4.0)
    config = small_config(steps=8, max_lag=1000, concurrency=100)
    lines = steps_of(config, speeds)
    assert [line["step_s"] for line in lines[:3]] == pytest.approx([6.0, 1.5, 4.0])
    assert lines[-2]["step_s"] == pytest.approx(4.0)


def test_a_phase_of_conventional_rl_drops_nothing():
    config = small_config(steps=8, conventional_g=4, on_full="drop_oldest", concurrency=16)
    run = sim.Simulation(config, PLAIN, equal_lengths(5))
    run.run()
    assert run.dropped == 0


def test_steps_that_fill_no_last_phase_are_trained():
    config = small_config(steps=5, conventional_g=2, concurrency=4)
    assert [line["lag_mean"] for line in steps_of(config)] == [0, 1, 0, 1, 0]


def test_waiting_keeps_the_order_in_which_groups_were_started():
    class FirstIsLong:
        def draw(self, rng, attempts):
            self.drawn = getattr(self, "drawn", 0) + 1
            return [20 if self.drawn == 1 else 5] * attempts

    for late, first in (("keep", 1), ("wait", 0)):
        config = small_config(late=late, max_lag=1, concurrency=4, steps=4)
        run = sim.Simulation(config, PLAIN, FirstIsLong())
        run.run()
        waited = run.lines[0]["step_s"] > 10
        assert waited == (first == 0)


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
    kept = steps_of(small_config(steps=6, max_lag=1000, concurrency=2), speeds)
    # a step takes 100 s, in which 20 groups could be made
    assert kept[5]["step_s"] == lines[5]["step_s"] == pytest.approx(100.0)
    assert lines[5]["lag_max"] < kept[5]["lag_max"] == 5


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


def made_up(lines, rollouts=(), durations=None, **knobs):
    return sim.Run(small_config(**knobs), list(lines), durations, list(rollouts))


def test_lengths_are_those_of_the_histogram():
    filling = [dict(lengths={"900": 5.0}, length_mean=900.0)] * sim.FILLING
    lines = [
        dict(lengths={"3": 30.0, "10-11": 10.0}, length_mean=4.875),
        dict(lengths={"3": 20.0, "10-11": 40.0}, length_mean=8.0),
    ]
    lengths = sim.measure_lengths(made_up(filling + lines, max_new_tokens=100))
    values, counts = np.unique(lengths.quantiles, return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist())) == {3: 500, 10: 250, 11: 250}
    assert lengths.correlation == 0
    # answers that are cut off lie in the bucket of their limit, and the mean is exact
    lines = [dict(lengths={"38-44": 10.0, "20": 10.0}, length_mean=29.5)]
    lengths = sim.measure_lengths(made_up(filling + lines, max_new_tokens=40))
    assert lengths.quantiles.max() == 40
    assert lengths.quantiles.mean() == pytest.approx(29.5, abs=0.5)


def rollouts_of(pairs):
    for step, pair in enumerate(pairs):
        for length in pair:
            spans = [[-1, ["p"] * 7, 0], [step, ["t"] * int(length), 0]]
            yield dict(step=step, task="t", problem=1, spans=spans)


def test_attempts_at_one_problem_are_as_alike_as_in_the_run():
    rng = np.random.default_rng(0)
    equal = [[n, n] for n in rng.integers(1, 1000, 200)]
    assert sim.correlation_of_neighbours(list(rollouts_of(equal))) == pytest.approx(0.99)
    apart = [[a, b] for a, b in rng.integers(1, 1000, (400, 2))]
    assert sim.correlation_of_neighbours(list(rollouts_of(apart))) < 0.15
    # few different lengths are no sign of likeness
    few = [[a, b] for a, b in rng.integers(1, 3, (400, 2))]
    assert sim.correlation_of_neighbours(list(rollouts_of(few))) < 0.15
    assert sim.correlation_of_neighbours(list(rollouts_of([[4, 4]] * 20))) == 0
    assert sim.correlation_of_neighbours(list(rollouts_of(equal[:5]))) == 0
    # the correlation of normal scores is kept
    lengths = sim.Lengths(np.arange(1, sim.QUANTILES + 1), correlation=0.8)
    drawn = [lengths.draw(rng, 2) for _ in range(2000)]
    again = sim.correlation_of_neighbours(list(rollouts_of(drawn)))
    assert again == pytest.approx(0.8, abs=0.03)


def made_up_step(rng, waits=True):
    """A step of 28 groups of 16 samples: 0.2 s, and 20 us for each computed token."""
    mean = rng.uniform(20, 30)
    samples = 28 * 16
    tokens = samples * (mean + 10)
    computed = samples * mean + 28 * 10
    return dict(
        step=1,
        tokens=tokens,
        length_mean=mean,
        turns=1.0,
        problems={str(draw): 16 for draw in range(28)},
        step_s=0.2 + 2e-5 * computed + 0.3 * waits,
        wait_data_s=0.2 * waits,
        wait_sync_s=0.1 * waits,
        save_s=0.0,
        gather_s=0.05 * waits,
        sync_s=0.4 * waits,
    )


def made_up_durations(rng):
    """Requests of 30 ms, and 10 ms + 1 ms for each sequence in progress a token."""
    durations = np.zeros((3, 4))
    for _ in range(200):
        n = rng.integers(100, 5000)
        h = rng.uniform(100, 256)
        x = np.array([1, n, n * h, 0.03 + n * (0.01 + 0.001 * h)])
        durations += np.outer(x[:3], x)
    return durations.tolist()


def test_speeds_are_those_that_the_metrics_say():
    rng = np.random.default_rng(0)
    slow = [made_up_step(rng) | dict(step_s=99.0, sync_s=50.0, save_s=7.0)] * sim.FILLING
    lines = [made_up_step(rng, waits=k % 3 > 0) for k in range(30)]
    run = made_up(slow + lines, durations=made_up_durations(rng))
    speeds = sim.measure_speeds([run])
    assert [speeds.request, speeds.decode_base, speeds.decode_each] == pytest.approx(
        [0.03, 0.01, 0.001], rel=1e-3
    )
    assert [speeds.train_step, speeds.train_token] == pytest.approx([0.2, 2e-5], rel=1e-3)
    # 0.05 s of the update are a wait for the update before
    assert (speeds.gather, speeds.update, speeds.save) == (0.05, pytest.approx(0.35), 0.0)
    assert speeds.prompt_tokens == pytest.approx(10.0)


# ---- the command


def write_run(folder, name, steps=30, continued=None, **knobs):
    """A made-up run directory, from which everything can be read that the command needs."""
    rng = np.random.default_rng(0)
    run_dir = folder / name
    (run_dir / "queues").mkdir(parents=True)
    fields = dict(batch_size=448, attempts=16, concurrency=256, steps=steps)
    fields |= dict(max_new_tokens=40, max_model_len=128)
    config = cfg.check(small_config(**fields | knobs))
    config = replace(config, out=str(folder), run=name)
    (run_dir / "config.json").write_text(json.dumps(dict(config=asdict(config))))
    lines = []
    for step in range(1, steps + 1):
        shown = dict(step=step, lengths={"20": 200.0, "30": 248.0}, gen_idle=0.1, gen_tok_s=9e3)
        shown |= dict(lag_mean=0.8, lag_oldest=0.9, lag_max=2)
        lines.append(json.dumps(made_up_step(rng) | shown) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    durations = made_up_durations(rng)
    (run_dir / "queues" / "pace.json").write_text(json.dumps(dict(durations=durations)))
    if continued is not None:
        (run_dir / "continued.jsonl").write_text(json.dumps(dict(step=continued)) + "\n")
    return str(run_dir)


def test_the_command_predicts_other_knobs_and_other_runs(tmp_path, capsys):
    base = write_run(tmp_path, "base")
    columns = sim.main([base, "--max_lag", "0"])
    assert list(columns) == ["measured", "simulated", "with knobs"]
    assert columns["measured"]["lag_mean"] == pytest.approx(0.8)
    assert columns["with knobs"]["lag_max"] == 0 < columns["simulated"]["lag_max"]
    assert columns["with knobs"]["step_s"] > columns["simulated"]["step_s"]
    printed = capsys.readouterr().out
    assert "a decoding step 10.00 ms + 1.0000 ms for each" in printed
    assert len(printed.splitlines()) == 4 + 1 + len(sim.QUANTITIES)
    other = write_run(tmp_path, "other", max_lag=0)
    like = sim.main([base, "--like", other])
    assert like["simulated"] == columns["with knobs"]


def test_what_cannot_be_simulated_is_refused_by_name(tmp_path):
    base = write_run(tmp_path, "base")

    def refused(message, *arguments):
        with pytest.raises(SystemExit, match=f"simulate: .*{message}"):
            sim.main([*arguments])

    refused("--lr is not simulated; these knobs are: attempts, ", base, "--lr", "1")
    refused("--late mask is not simulated", base, "--late", "mask")
    refused("--steps must be at least 20", base, "--steps", "5")
    refused("there is no such knob", base, "--nonsense", "1")
    refused("short has 10 steps", write_run(tmp_path, "short", steps=10))
    refused("again has 5 steps", write_run(tmp_path, "again", continued=25))
    refused("drop has --no_signal drop", write_run(tmp_path, "drop", no_signal="drop"))
    other = write_run(tmp_path, "longer", max_new_tokens=50)
    refused("longer has --max_new_tokens 50, and .*base has 40", base, other)
    early = write_run(tmp_path, "early")
    (tmp_path / "early" / "queues" / "pace.json").write_text(json.dumps(dict(gen_idle=1.0)))
    refused("early/queues/pace.json has no durations, or those of fewer", early)
