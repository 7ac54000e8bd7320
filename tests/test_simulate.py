"""tools/simulate.py: its figures are those of Appendix A of arXiv 2509.19128, or by hand."""

import numpy as np
import pytest

from tools import simulate

# The paper's case
PAPER = dict(
    gpus=128,
    batch=128,
    lengths=simulate.draw_lengths("uniform", 2048),
    tau=4.92,
    U=simulate.fitted,
)


def test_simulate_gives_the_papers_optimum():
    """At the same max lag: H = 192, I = 44 of 128 GPUs, 16.9 against 10.7 tokens per flash."""
    row = simulate.best(132, **PAPER, concurrency=1024)[-1]
    assert (row["G"], row["H"], row["I"], row["lag"]) == (133, 192, 44, 132)
    assert round(row["pipeline"], 3) == 16.896
    assert round(row["conventional"], 3) == 10.743
    assert round(row["speedup"], 3) == 1.573


def test_fitted_utilisation_gives_the_papers_two_figures():
    assert round(float(simulate.fitted(192)), 3) == 0.384
    r_gen, r_train, _ = simulate.conventional(133, **PAPER)
    assert round(r_gen, 1) == 18.3
    assert round(r_train, 2) == 26.02


def test_a_batch_16_times_as_large_has_a_16th_of_the_lag():
    large = dict(PAPER, batch=2048)
    _, lag = simulate.pipeline(192, 44, **large)
    # 132 / 16 is 8.2, which the paper rounds to about 8
    assert lag == 9
    assert simulate.conventional(8, **large) == simulate.conventional(128, **PAPER)


def test_survival_counts_the_steps_of_each_share():
    share, steps = simulate.survival(np.array([3, 1, 3]))
    assert share == pytest.approx([2 / 3, 1])
    assert steps.tolist() == [2, 1]


def test_conventional_throughput_by_hand():
    # 6 sequences of 14 tokens in all on 2 GPUs. The first step has 3 sequences on each GPU and
    # takes 4 flashes; the next two have 2 on each and take 4 flashes each
    rates = simulate.conventional(
        2, gpus=2, batch=3, lengths=np.array([3, 1, 3]), tau=5.0, U=lambda h: np.minimum(h / 4, 1)
    )
    assert rates == pytest.approx((14 / 12, 0.4, 1 / (12 / 14 + 1 / 0.4)))


def test_equal_lengths_are_generated_at_the_speed_of_one_step():
    r_gen, _, _ = simulate.conventional(
        5, gpus=8, batch=16, lengths=np.array([7]), tau=5.0, U=simulate.fitted
    )
    assert r_gen == pytest.approx(8 * simulate.fitted(10.0))


def test_command_prints_limits_of_powers_of_two_and_the_last(capsys):
    simulate.main([])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("max lag | conventional G ")
    limits = [int(line.split("|")[0]) for line in lines]
    assert limits == [1, 2, 4, 8, 16, 32, 64, 128, 132]
    assert lines[-1].split() == "132 | 133 10.74 | 192 44 132 16.9 | 1.57".split()


def test_command_refuses_one_gpu(capsys):
    with pytest.raises(SystemExit):
        simulate.main(["--gpus", "1"])
    assert "--gpus must be at least 2" in capsys.readouterr().err
