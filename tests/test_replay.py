"""--keep_steps and tools/replay.py: a replayed step equals the run's.

The runs are those of the real trainer; the weight sender is FAKE
(tests/train_without_engines.py).
"""

import pytest
from test_ranks import run_trainer, step_lines, write_run

import config as cfg
from tools import common, replay

# as run.sh fills it in
ALONE = dict(master_addr="127.0.0.1", engines=1, trainer_threads=1)


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory, base_model):
    """Six steps of one rank, checkpoints at 3 and 6, micro-batches of the last four kept."""
    run_dir = write_run(tmp_path_factory.mktemp("kept"), "kept", base_model, keep_steps=4, **ALONE)
    run_trainer(run_dir)
    return run_dir


def test_micro_batches_of_the_last_steps_are_kept(kept_run):
    samples = {line["step"]: line["samples"] for line in step_lines(kept_run)}
    for step in range(3, 7):
        found = sum(len(batch["lengths"]) for batch in common.kept_batches(kept_run, step))
        assert found == samples[step] - samples.get(step - 1, 0)


@pytest.mark.parametrize("step", [4, 6])
def test_replayed_step_equals_the_run_bit_for_bit(kept_run, step, capsys):
    assert replay.main([str(kept_run), "--step", str(step)]) == []
    printed = capsys.readouterr().out
    assert "step_000003" in printed
    assert ("are the same, bit for bit" in printed) == (step == 6)


def test_replay_shows_another_loss_beside_the_runs(kept_run, capsys):
    replay.main([str(kept_run), "--step", "4", "--loss=icepop"])
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert rows["run"] == ["again", "icepop"]
    # the weights have not moved by it
    assert rows["loss"][0] == rows["loss"][1] != rows["loss"][2]
    assert rows["clip_frac"][1] != rows["clip_frac"][2]


def test_another_loss_brings_its_own_ratio_bounds_and_normalizer():
    config = cfg.check(cfg.Config(run="r", loss="reinforce", clip_high=3.0))
    other = replay.with_knobs(config, ["--loss=gspo"])
    assert (other.ratio, other.normalizer) == ("sequence", "sequence")
    assert (other.clip_low, other.clip_high) == cfg.LOSSES["gspo"][1:]
    same = replay.with_knobs(config, ["--ratio", "sequence"])
    assert (same.normalizer, same.clip_high) == ("sequence", 3.0)
    kept = replay.with_knobs(config, ["--loss", "gspo", "--normalizer", "tokens"])
    assert kept.normalizer == "tokens"
    tokens = cfg.check(cfg.Config(run="r", normalizer="tokens"))
    assert replay.with_knobs(tokens, ["--loss", "cispo"]).normalizer == "tokens"


def test_replay_of_a_step_that_was_not_kept_is_refused(kept_run):
    with pytest.raises(SystemExit, match="replay: .*step 2: nothing is kept of .*keep_steps"):
        replay.main([str(kept_run), "--step", "2"])


def test_micro_batches_of_other_code_are_named(kept_run, monkeypatch):
    batch = common.kept_batches(kept_run, 4)[0]
    older = batch | dict(advantage=batch["advantage"][: len(batch["lengths"])])
    monkeypatch.setattr(replay, "kept_batches", lambda run_dir, step: [older])
    with pytest.raises(
        SystemExit, match=r"step 4: .*advantage has \d+ values .*another version of"
    ):
        replay.main([str(kept_run), "--step", "4"])


@pytest.mark.slow
def test_replay_of_two_ranks_equals_the_run(tmp_path, base_model):
    run_dir = write_run(tmp_path, "two", base_model, 2, keep_steps=9, **ALONE)
    run_trainer(run_dir, ranks=2)
    assert replay.main([str(run_dir), "--step", "5"]) == []
