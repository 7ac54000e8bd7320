"""The schema of a sample: records, fillers, fields, shared prefixes, and what is refused."""

import numpy as np
import pytest

from plumbing import samples as schema
from plumbing.samples import (
    check_record,
    credit,
    filler,
    join,
    layout,
    same_kind_of_rewards,
    share,
    split,
)


def make_sample(n=5, reward=0.0, version=0, prompt=2, **changed):
    """A sample of n tokens, of which `prompt` were not sampled, with its advantage."""
    mask = np.arange(n) >= prompt
    sample = {
        "tokens": np.arange(n) % 40,
        "mask": mask,
        "behavior_logprobs": np.where(mask, -0.5, 0.0),
        "versions": np.where(mask, version, -1),
        "segment": np.zeros(n),
        "experts": np.zeros((n, 0)),
        "task": 0,
        "problem": 0,
        "temperature": 1.0,
        "reward": reward,
        "outcome": 0 if reward >= 1 else 1,
        "finished": True,
        "num_versions": 1,
        "sample_id": 0,
        "part": np.where(mask, 0, -1),
        "reward_to_go": np.where(mask, reward, 0.0),
        "advantage": np.where(mask, reward, 0.0),
    }
    return sample | changed


def group_record(draw, samples, failed=0, **changed):
    """A group as actor.py puts it into queues/rollouts: the advantages are not there yet."""
    record = join([{k: v for k, v in s.items() if k != "advantage"} for s in samples])
    record |= {"run_id": "abc", "draw": draw, "failed": failed}
    return record | {"logged": [{} for _ in samples]} | changed


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "sequences,computed_index",
    [
        ([[7, 8, 1], [7, 8, 2]], [0, 1, 2, 0, 1, 3]),
        # A sequence also shares what the one before took over. Last tokens are never shared.
        ([[7, 8], [7, 8], [7, 8, 8, 1]], [0, 1, 0, 2, 0, 2, 3, 4]),
        # A sequence shares nothing with earlier ones.
        ([[7, 8], [6, 8], [7, 8]], [0, 1, 2, 3, 4, 5]),
        ([[7], [7]], [0, 1]),
        ([[7, 8, 9, 1]], [0, 1, 2, 3]),
    ],
)
def test_common_prefixes_are_computed_once(sequences, computed_index):
    lengths = list(map(len, sequences))
    assert share(np.concatenate(sequences), lengths).tolist() == computed_index


def test_samples_survive_a_record():
    lengths = (3, 1, 7)
    samples = [make_sample(n, reward=n / 8, version=n, task=n, finished=n > 2) for n in lengths]
    record = join(samples)
    assert record["lengths"].tolist() == [3, 1, 7]
    assert record["tokens"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]
    for name, dtype in (schema.TOKEN_FIELDS | schema.SAMPLE_FIELDS).items():
        assert record[name].dtype == dtype
    split_samples = split(record)
    for sample, expected in zip(split_samples, samples, strict=True):
        same(sample, expected)
    same(join(split_samples), record)


def test_fields_that_samples_lack_are_left_out():
    assert join([]).keys() == {"lengths"}
    assert split(join([])) == []
    record = join([{"tokens": np.arange(3)}, {"tokens": np.arange(2), "text": "not in the schema"}])
    assert record.keys() == {"lengths", "tokens"}
    assert [s.keys() for s in split(record)] == [{"tokens"}, {"tokens"}]


def test_layout_by_hand():
    positions, sequence_ids = layout([2, 1, 3])
    assert positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert [len(x) for x in layout(join([])["lengths"])] == [0, 0]


def test_a_filler_has_every_field_and_is_no_sample():
    record = join([filler()])
    assert record.keys() == {"lengths"} | schema.TOKEN_FIELDS.keys() | schema.SAMPLE_FIELDS.keys()
    assert record["outcome"].tolist() == [-1]
    assert not record["mask"].any()
    check_record(record, "file")


def test_record_that_no_stage_writes_ends_the_run_by_name():
    lacks = ("advantage",)
    check_record(group_record(0, [], failed=4), "the file", lacks, run_id="abc")
    record = group_record(0, [make_sample(5), make_sample(4)])
    check_record(record, "the file", lacks, run_id="abc")

    def refused(message, **changed):
        complaint = f"the file: {message}.*the same command continues"
        with pytest.raises(RuntimeError, match=complaint):
            check_record(record | changed, "the file", lacks, run_id="abc")

    refused("run_id is 'xyz', 'abc' was expected", run_id="xyz")
    refused("tokens has 8 values for 9 tokens", tokens=record["tokens"][1:])
    del record["mask"]
    refused("mask has 0 values for 9 tokens: the actor must set this field")
    record["mask"] = np.ones(9)
    del record["reward"]
    refused("reward has 0 values for 2 samples")
    with pytest.raises(RuntimeError, match="advantage has 0 values for 9 tokens"):
        check_record(group_record(0, [make_sample(5), make_sample(4)]), "the file", run_id="abc")


def test_rewards_go_to_the_attempt_its_turns_or_its_tokens():
    # Two branches: turn 1 lies behind turn 2, and turn 0 has two tokens.
    turns = np.array([-1, 0, 0, -1, 2, -1, 1, 1])
    sampled = turns >= 0

    def credited(*arguments):
        fields = credit(turns, *arguments)
        assert set(fields["part"][~sampled]) == {-1} and not fields["reward_to_go"][~sampled].any()
        return fields["part"][sampled].tolist(), fields["reward_to_go"][sampled].tolist()

    assert credited(0.5) == ([0] * 5, [0.5] * 5)
    assert credited([1.0, 2.0, 4.0]) == ([0, 0, 2, 1, 1], [7, 7, 4, 6, 6])
    # tokens are numbered turn after turn
    assert credited([1, 2, 3, 4, 5.0]) == ([0, 1, 4, 2, 3], [15, 14, 5, 12, 9])
    assert credited([1.0, 2.0, 4.0], -0.5)[1] == [6.5, 6.5, 3.5, 5.5, 5.5]
    for wrong in ([1.0], [1.0, 2.0], [1.0] * 8):
        with pytest.raises(ValueError, match=f"{len(wrong)} rewards for an attempt of 3 turns and"):
            credit(turns, wrong)


@pytest.mark.parametrize(
    "rewards_of_attempts,expected",
    [
        ([[1, 2, 4], [0, 0, 0], 0.5], True),
        ([[1, 2, 3, 4, 5], 0.5, [0, 0, 0, 0, 0]], True),
        ([[1, 2, 4], 0.5, [1, 2, 3, 4, 5]], False),
        ([0.5, 1.0], True),
    ],
)
def test_rewards_of_turns_are_not_compared_with_rewards_of_tokens(rewards_of_attempts, expected):
    turns = np.array([-1, 0, 0, -1, 2, -1, 1, 1])
    samples = [credit(turns, rewards) | {"turn_ids": turns} for rewards in rewards_of_attempts]
    # Its two turns have a token each, so that its rewards may be of both kinds.
    short = np.array([-1, 0, -1, 1])
    samples.append(credit(short, [1.0, 2.0]) | {"turn_ids": short})
    assert same_kind_of_rewards(samples) == expected
