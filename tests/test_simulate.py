"""The throughput model gives the paper's figures (arXiv 2509.19128, Appendix A), and the advice is what one computes by hand."""

import re

import numpy as np

from config import Config
from tools import simulate
from tools.status import advice, advice_on

UNIFORM = simulate.draw_lengths("uniform", 2048)
PAPER = dict(gpus=128, batch=128, lengths=UNIFORM, tau=4.92, U=simulate.fitted)


def test_the_papers_case():
    """Appendix A: H = 192, I = 44 of 128 GPUs, 16.9 against 10.7 tokens per flash, by the same lag on both sides."""
    row = simulate.best(132, **PAPER, concurrency=1024)[-1]
    assert (row["G"], row["H"], row["I"], row["lag"]) == (133, 192, 44, 132)
    assert round(row["pipeline"], 3) == 16.896
    assert round(row["conventional"], 3) == 10.743
    assert round(row["speedup"], 3) == 1.573
    # what U and tau were solved from
    assert round(float(simulate.fitted(192)), 3) == 0.384
    r_gen, r_train, _ = simulate.conventional(133, **PAPER)
    assert round(r_gen, 1) == 18.3 and round(r_train, 2) == 26.02


def test_a_batch_16_times_as_large_needs_a_16th_of_the_lag():
    large = PAPER | dict(batch=2048)
    # 8.2, which the paper rounds to ~8
    assert simulate.pipeline(192, 44, **large)[1] == 9
    assert simulate.conventional(8, **large) == simulate.conventional(128, **PAPER)


def test_conventional_by_hand():
    U = lambda h: np.minimum(h / 4, 1)
    assert np.allclose(simulate.survival(np.array([3, 1, 3])), ([2 / 3, 1], [2, 1]))
    # 6 sequences on 2 GPUs: a step of 3 each takes 4 flashes, two steps of 2 each 4 flashes; 14 tokens
    found = simulate.conventional(2, 2, 3, np.array([3, 1, 3]), 5.0, U)
    assert np.allclose(found, (14 / 12, 0.4, 1 / (12 / 14 + 1 / 0.4)))
    r_gen = simulate.conventional(5, 8, 16, np.array([7]), 5.0, simulate.fitted)[0]
    assert np.isclose(r_gen, 8 * simulate.fitted(10.0))


def test_advice():
    for case, words in [
        # unhindered: training 1 / 0.62 = 1.61 of now with 4 GPUs, 1.21 with 3; serving 1.25 with 5
        ((0.38, 0.0, 0.0, 4, 4), "engines .* waits 38%.*: --engines 5 --trainers 3, about 1.21"),
        # unhindered: serving 27 / (0.4 x 40) = 1.69, training 33 / 20 = 1.65; with 26 serving 1.63, with 28 training 1.6
        ((0.0, 0.6, 0.0, 40, 20), "trainer .* 60% empty.*: --engines 27 --trainers 33, about 1.65"),
        # whole engines only
        ((0.5, 0.0, 0.0, 2, 6, 2), "--engines 2 --trainers 4"),
        ((0.3, 0.3, 0.0, 4, 4), "raise --max_lag"),
    ]:
        assert re.search(words, advice(*case))
    # neither waits for long; nothing to move
    assert advice(0.02, 0.05, 0.0, 4, 4) == advice(1.0, 0.0, 0.0, 1, 1) == ""
    # after ten steps, and with what was dropped for want of room
    line = dict(step_s=10.0, wait_data_s=0.0, gen_idle=0.0, problems={"0": 16})
    line["drops"] = {"buffer_full": {"1": 8}, "failed": {"0": 900}}
    # while engines fill, the trainer waits
    steps = [line | {"wait_data_s": 9.0}] * 5 + [line] * 5
    config = Config(engines=4, trainers=4)
    # unhindered: serving 3 / (0.667 x 4) = 1.12, training 5 / 4
    words = "trainer .* 33% of samples dropped.*: --engines 3 --trainers 5, about 1.12"
    assert advice_on(config, steps[:-1]) == "" and re.search(words, advice_on(config, steps))
