"""The throughput model gives the paper's figures (arXiv 2509.19128, Appendix A), and the advice is what one computes by hand."""

import json

import numpy as np
import pytest

from tools import simulate
from tools.report import advice

PAPER = dict(
    gpus=128, batch=128, lengths=simulate.draw_lengths("uniform", 2048), tau=4.92, U=simulate.fitted
)


def test_the_papers_case():
    """Appendix A: H = 192, I = 44 of 128 GPUs, 16.9 against 10.7 tokens per flash, by the same lag on both sides."""
    rows = simulate.best(256, **PAPER, concurrency=1024)
    row = rows[132 - 1]
    assert (row["G"], row["H"], row["I"], row["lag"]) == (133, 192, 44, 132)
    assert round(row["pipeline"], 3) == 16.896
    assert round(row["conventional"], 3) == 10.743
    assert round(row["speedup"], 3) == 1.573
    # what U and tau were solved from
    assert round(float(simulate.fitted(192)), 3) == 0.384
    r_gen, r_train, _ = simulate.conventional(133, **PAPER)
    assert round(r_gen, 1) == 18.3 and round(r_train, 2) == 26.02
    assert round(84 / 4.92, 1) == 17.1
    text = simulate.verdict(rows, 132, "uniform", **PAPER, concurrency=1024)
    assert (
        "serve with 44, train with 84, 192 sequences each; 1.57 times the best conventional" in text
    )


def test_a_batch_16_times_as_large_needs_a_16th_of_the_lag():
    # 8.2, which the paper rounds to ~8
    assert simulate.pipeline(192, 44, **PAPER | dict(batch=2048))[1] == 9
    assert simulate.conventional(8, **PAPER | dict(batch=2048)) == simulate.conventional(
        128, **PAPER
    )


@pytest.mark.parametrize("kind", ["uniform", "equal", "lognormal"])
def test_a_looser_limit_never_costs_throughput(kind):
    rows = simulate.best(
        64, **PAPER | dict(lengths=simulate.draw_lengths(kind, 2048)), concurrency=512
    )
    for key in ("conventional", "pipeline"):
        assert (np.diff([r[key] for r in rows]) >= 0).all()
    assert all(
        r["lag"] <= r["max_lag"] and r["G"] - 1 <= r["max_lag"] and 0 < r["I"] < 128 for r in rows
    )


def test_not_worth_it():
    def at(max_lag, **case):
        case = PAPER | dict(concurrency=1024) | case
        rows = simulate.best(256, **case)
        return rows[max_lag - 1]["speedup"], simulate.verdict(rows, max_lag, "", **case)

    equal = dict(lengths=simulate.draw_lengths("equal", 2048))
    for speedup, text, why in [
        (*at(256, **equal), "already reaches 92%"),
        (*at(133, gpus=8), "already reaches 9"),
        (*at(133, gpus=4096), "too many GPUs"),
    ]:
        assert speedup < 1.1 and "not worth it" in text and why in text
    assert at(256)[0] > 1.3  # where lengths are uniform, the same lag still gains
    # equal lengths gain as much as uniform ones at twice the lag: where U is linear only B G mean / L counts
    assert abs(at(64, **equal)[0] / at(128)[0] - 1) < 0.01
    assert at(8, gpus=8)[0] > 1.4  # few GPUs do gain, at a small lag


def test_conventional_by_hand():
    U = lambda h: np.minimum(h / 4, 1)
    assert np.allclose(simulate.survival(np.array([3, 1, 3])), ([2 / 3, 1], [2, 1]))
    # 6 sequences on 2 GPUs: a step of 3 each takes 4 flashes, two steps of 2 each 4 flashes; 14 tokens
    assert np.allclose(
        simulate.conventional(2, 2, 3, np.array([3, 1, 3]), 5.0, U),
        (14 / 12, 0.4, 1 / (12 / 14 + 1 / 0.4)),
    )
    r_gen = simulate.conventional(5, 8, 16, np.array([7]), 5.0, simulate.fitted)[0]
    assert np.isclose(r_gen, 8 * simulate.fitted(10.0))


def test_advice():
    assert advice(0.0, 0.0, 4, 4) == ""
    assert advice(0.02, 0.05, 4, 4) == ""
    # unhindered: training 1 / 0.62 = 1.61 of now with 4 GPUs, 1.21 with 3; serving 1.25 with 5
    assert (
        advice(0.38, 0.0, 4, 4)
        == "trainer waits 38% of the time: move 1 GPU from training to serving (5 serve, 3 train), about 1.21 times the throughput"
    )
    # unhindered: serving 27 / (0.4 x 40) = 1.69, training 33 / 20 = 1.65; with 26 serving 1.63, with 28 training 1.6
    assert "move 13 GPUs from serving to training (27 serve, 33 train), about 1.65 times" in advice(
        0.0, 0.6, 40, 20
    )
    assert "(4 serve, 4 train)" in advice(0.5, 0.0, 2, 6, per_engine=2)  # whole engines only
    assert advice(0.3, 0.3, 4, 4).endswith("raise --max_lag")
    assert advice(1.0, 0.0, 1, 1) == ""  # nothing to move


def test_the_command_reads_a_measured_table_and_lengths(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "u.csv").write_text("h,utilisation\n64,0.2\n256,0.5\n")
    (tmp_path / "lengths.txt").write_text("10\n20\n90\n")
    U, last = simulate.measured("u.csv")
    assert last == 256 and np.allclose(U([32, 160, 999]), [0.1, 0.35, 0.5])
    simulate.main(
        ["--gpus", "16", "--lengths", "lengths.txt", "--utilisation", "u.csv", "--max_lag", "12"]
    )
    assert (
        "16 GPUs, lengths.txt lengths to 90, batch 128, max lag 12: serve with"
        in capsys.readouterr().out
    )
    saved = json.loads((tmp_path / "out/bench/simulate.json").read_text())
    assert (
        len(saved["rows"]) == 256
        and saved["mean"] == 40
        and max(r["H"] for r in saved["rows"]) <= 256
    )
    assert (tmp_path / "out/bench/simulate.png").stat().st_size > 10000
    (tmp_path / "u.csv").write_text("64,1.2\n")
    with pytest.raises(SystemExit):
        simulate.main(["--utilisation", "u.csv"])
    assert "utilisation above 0 and at most 1" in capsys.readouterr().err
