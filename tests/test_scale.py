"""The arithmetic of tools/scale.py, by hand; bench/pace.py's, and a short run of it with FAKE engines."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bench import pace
from conftest import ROOT
from tools import scale

RATES = scale.Rates(
    actor_tokens=[100, 4000],
    actor_s=[0.002, 0.02],
    rewards_s=500.0,
    preprocess_ranks=[8, 1000],
    preprocess_s=[2e-8, 4e-8],
    reader_s=1e-8,
    record_s=2e-4,
    byte_s=1e-9,
    sources=dict.fromkeys(("actor", "rewards", "preprocess", "queues"), "made up"),
)


def test_a_decode_step_reads_weights_and_caches_once():
    # 15.2 GB and 256 x 2,000 x 57,344 bytes at 3.35 TB/s
    seconds = scale.step_seconds(256, 2000)
    assert seconds == pytest.approx((15.2e9 + 29.36e9) / 3.35e12, rel=1e-3)
    assert scale.decode_rate(256, 2000) == pytest.approx(256 / seconds)
    # one that grows to 4 tokens holds 2 on average; longer ones are in progress more of the time
    assert scale.mean_context([4, 4]) == 2
    assert scale.mean_context([2, 6]) == pytest.approx(40 / 2 / 8)


def test_a_step_has_a_row_for_every_rank():
    assert scale.step_samples(8, 16384, 4000, 16, 1024) == 1024
    assert scale.step_samples(1024, 16384, 4000, 16, 1024) == 4208
    assert scale.step_samples(1, 16384, 4000, 16, 1001) == 1008


def test_the_actors_seconds_lie_between_what_was_measured():
    assert scale.actor_seconds(RATES, 4000) == 0.02
    assert scale.actor_seconds(RATES, 2050) == pytest.approx(0.011)
    assert scale.actor_seconds(RATES, 8000) == 0.04


def test_loads_by_hand():
    w = scale.parse(
        ["--serving", "0.5", "--prompt", "0", "--files_s", "100", "--update_gb_s", "15.2"]
    )
    f = scale.flow(16, w)
    # a step a second, in units of which all else is counted
    answers_s = f["answers_s"]
    assert answers_s == pytest.approx(8 * scale.decode_rate(256, 2560) / 4000)
    assert f["batch"] == 1024 and f["ranks"] == 8
    found = scale.loads(f, w, RATES)
    expected = dict(
        actor=0.02 * answers_s,
        rewards=answers_s / 8000,
        network=answers_s * 4000 * 28 / 12.5e9,
        preprocess=answers_s * 4000 * 2e-8,
        rollouts=answers_s / 16 * 2e-4 + answers_s * 4000 * 21e-9,
        batches=answers_s * 4000 / 16384 * 2e-4 + answers_s * 4000 * 21e-9,
        files=answers_s * (1 / 16 + 4000 / 16384) / 100,
        reader=answers_s * 4000 / 8 * 1e-8,
        update=answers_s / 1024,
    )
    assert found == pytest.approx(expected)
    assert found.keys() == scale.PARTS.keys()


def test_twice_the_gpus_are_twice_the_load():
    w = scale.parse(["--serving", "0.5"])
    rows = scale.table_rows(w, RATES, [64, 128])
    small, large = (found for _, _, found, _ in rows)
    for part in ("actor", "rewards", "network", "rollouts", "batches", "files", "update"):
        assert large[part] == pytest.approx(2 * small[part]), part
    # each rank reads as much as before
    assert large["reader"] == pytest.approx(small["reader"])
    assert rows[0][3] == "actor"
    assert scale.carries(rows, "actor") == pytest.approx(64 / small["actor"])
    assert scale.carries(rows, "preprocess") is None


def test_the_command_names_the_first_part_and_what_to_do(tmp_path, capsys):
    def keep(name, **values):
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(machine=f"of {name}") | values))

    with pytest.raises(FileNotFoundError, match="python bench/actor.py makes it"):
        scale.main(["--results", str(tmp_path)])
    keep("actor", lengths={"4000": dict(answers=50, cpu_s=1.0)})
    keep("rewards", cores=2, answers_s=dict(clean=[900, 1000, 1100]))
    keep("preprocess", ranks={"8": dict(tokens=10**7, cpu_s=0.5, readers_cpu_s=0.25)})
    rates = {"small records/s": [4000.0], "put + get + ack, two processes, MB/s": [2000.0]}
    keep("queues", **rates)
    scale.main(["--gpus", "8,4096", "--results", str(tmp_path)])
    told = capsys.readouterr().out
    assert [
        line.split()[-1] for line in told.splitlines() if line.lstrip()[:2] in ("8 ", "40")
    ] == ["actor"] * 2
    assert "50 answers, 200000 tokens a second of one core [of actor]" in told
    assert "16 workers x 500 answers/s" in told
    assert "several actors" in told


# ---- bench/pace.py


def test_lengths_have_their_mean_and_a_spread():
    lengths = pace.draw_lengths(4000, 4096)
    assert lengths.mean() == pytest.approx(4000, rel=0.02)
    assert lengths.std() == pytest.approx(2100, rel=0.1)
    assert lengths.max() <= 12000 and lengths.min() >= 100
    assert len(set(lengths.tolist())) < 121


def test_spans_cover_an_answer():
    for first, last, length in ((0, 0, 7), (2, 4, 10), (0, 9, 3)):
        spans = pace.version_spans(first, last, length)
        assert spans[0]["start"] == 0 and spans[-1]["end"] == length
        assert [s["end"] for s in spans[:-1]] == [s["start"] for s in spans[1:]]
        assert all(s["start"] < s["end"] for s in spans)
        assert spans[-1]["version"] == str(last)


def test_flat_and_growing_memory():
    minutes = np.arange(10.0)
    assert pace.slope(minutes, np.full(10, 300.0)) == pytest.approx(0)
    assert pace.slope(minutes, 300 + 2 * minutes) == pytest.approx(2)


@pytest.mark.slow
def test_a_short_run_keeps_up(base_model, tmp_path):
    command = "bench/pace.py --quick --port 8690 --name pace-test --out"
    done = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "pace-test.json").read_text())
    assert found["samples"][-1]["steps"] > 0
    assert found["samples"][-1]["trained"] > 0
    assert found["processes"]["actor"]["mb_end"] > 100
    assert "bad_" not in str(found["events"])
    # the run's own bookkeeping: no place is filled twice
    assert 0 <= found["empty"] < 1
