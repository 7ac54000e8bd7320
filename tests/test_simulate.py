"""The throughput model gives the paper's figures (arXiv 2509.19128, Appendix A), and the advice is what one computes by hand."""

import numpy as np
import pytest

from tools import simulate
from tools.report import advice

UNIFORM = simulate.draw_lengths("uniform", 2048)
PAPER = dict(gpus=128, batch=128, lengths=UNIFORM, tau=4.92, U=simulate.fitted)
EQUAL = dict(lengths=simulate.draw_lengths("equal", 2048))


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
    words = "max lag 132: serve with 44, train with 84, 192 sequences each: 1.57 times the best"
    assert words in simulate.verdict(row, **PAPER, concurrency=1024)


def test_a_batch_16_times_as_large_needs_a_16th_of_the_lag():
    large = PAPER | dict(batch=2048)
    # 8.2, which the paper rounds to ~8
    assert simulate.pipeline(192, 44, **large)[1] == 9
    assert simulate.conventional(8, **large) == simulate.conventional(128, **PAPER)


@pytest.mark.parametrize("lengths", [{}, EQUAL])
def test_a_looser_limit_never_costs_throughput(lengths):
    rows = simulate.best(64, **PAPER | lengths, concurrency=512)
    for key in ("conventional", "pipeline"):
        assert (np.diff([row[key] for row in rows]) >= 0).all()
    assert all(row["lag"] <= row["max_lag"] and row["G"] - 1 <= row["max_lag"] for row in rows)


def test_not_worth_it():
    for case, max_lag, why in [
        (EQUAL, 256, "reaches 92% of what these GPUs can do"),
        (dict(gpus=8), 133, "reaches 9"),
        (dict(gpus=4096), 133, "not worth it"),
        (dict(batch=1), 1, "not even one sequence on one GPU stays within it"),
    ]:
        case = PAPER | dict(concurrency=1024) | case
        row = simulate.best(max_lag, **case)[-1]
        text = simulate.verdict(row, **case)
        assert row["speedup"] < 1.1 and "not worth it for speed: " in text and why in text


def test_conventional_by_hand():
    U = lambda h: np.minimum(h / 4, 1)
    assert np.allclose(simulate.survival(np.array([3, 1, 3])), ([2 / 3, 1], [2, 1]))
    # 6 sequences on 2 GPUs: a step of 3 each takes 4 flashes, two steps of 2 each 4 flashes; 14 tokens
    found = simulate.conventional(2, 2, 3, np.array([3, 1, 3]), 5.0, U)
    assert np.allclose(found, (14 / 12, 0.4, 1 / (12 / 14 + 1 / 0.4)))
    r_gen = simulate.conventional(5, 8, 16, np.array([7]), 5.0, simulate.fitted)[0]
    assert np.isclose(r_gen, 8 * simulate.fitted(10.0))


def test_advice():
    waits = "the trainer waits 38% of the time, the gate keeps 0% of the engines' places empty"
    for case, words in [
        # unhindered: training 1 / 0.62 = 1.61 of now with 4 GPUs, 1.21 with 3; serving 1.25 with 5
        (
            (0.38, 0.0, 4, 4),
            f"{waits}: let 5 of 8 GPUs serve instead of 4, about 1.21 times the throughput",
        ),
        # unhindered: serving 27 / (0.4 x 40) = 1.69, training 33 / 20 = 1.65; with 26 serving 1.63, with 28 training 1.6
        ((0.0, 0.6, 40, 20), "let 27 of 60 GPUs serve instead of 40, about 1.65 times"),
        # whole engines only
        ((0.5, 0.0, 2, 6, 2), "let 4 of 8 GPUs serve instead of 2"),
        ((0.3, 0.3, 4, 4), "raise --max_lag"),
    ]:
        assert words in advice(*case)
    # neither waits for long; nothing to move
    assert advice(0.02, 0.05, 4, 4) == advice(1.0, 0.0, 1, 1) == ""


def test_the_command_reads_a_measured_table_and_lengths(tmp_path, capsys):
    table = tmp_path / "u.csv"
    table.write_text("h,utilisation\n64,0.2\n256,0.5\n")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n20\n90\n")
    U, last = simulate.measured(table)
    assert last == 256 and np.allclose(U([32, 160, 999]), [0.1, 0.35, 0.5])
    files = ["--lengths", str(lengths), "--utilisation", str(table)]
    simulate.main(["--gpus", "16", "--max_lag", "12", *files])
    assert "16 GPUs, batch 128, max lag 12: serve with" in capsys.readouterr().out
    table.write_text("64,1.2\n")
    with pytest.raises(SystemExit):
        simulate.main(files)
    assert f"{table}, --lengths {lengths}: every line must be" in capsys.readouterr().err
