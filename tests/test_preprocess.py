"""The preprocess stage: advantages, packing, the buffer of groups, the ledger, and the
micro-batches of a step.

Tests of "the real stage" run preprocess.py as a process on real queues. Actor and trainer are
played by the test.
"""

import json
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from test_samples import group_record, make_sample

import config as cfg
from conftest import ROOT, register, wait_until
from plumbing import rundir
from plumbing.ledger import Ledger
from plumbing.patience import Patience
from plumbing.queues import Queue, publish_json, read_json
from plumbing.samples import split
from preprocess import GroupBuffer, Packer, advantages, computed_tokens, keep_together, pack


def test_advantages_by_hand():
    third = 1 / 3
    by_hand = {
        "loo": [1, -third, -third, -third],
        "mean": [0.75, -0.25, -0.25, -0.25],
        "mean_std": np.array([0.75, -0.25, -0.25, -0.25]) / 0.4330127,
        "none": [1, 0, 0, 0],
    }
    for kind, expected in by_hand.items():
        assert advantages([1, 0, 0, 0], kind) == pytest.approx(expected, rel=1e-5)
        # Equal rewards tell nothing, and a single attempt has no baseline
        assert kind == "none" or advantages([1, 1, 1], kind) == pytest.approx([0, 0, 0])
        assert advantages([0.7], kind) == pytest.approx([0.7 if kind == "none" else 0])
    # The mean reward is a quarter; a mean of 0 has no advantages.
    assert advantages([1, 0, 0, 0], "max_rl") == pytest.approx([3, -1, -1, -1])
    assert advantages([0, 0], "max_rl").tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"a reward-to-go of -0.5 is negative; choose"):
        advantages([1, -0.5], "max_rl")
    assert advantages([2, 4, 9], "loo") == pytest.approx([2 - 6.5, 4 - 5.5, 9 - 3])
    with pytest.raises(ValueError, match="--advantage median has no branch in"):
        advantages([1, 0], "median")


def test_parts_are_compared_with_the_same_part_of_the_others():
    """Three attempts of three, two and one turns."""
    to_go = [[3, 2, 5], [1, 6, np.nan], [2, np.nan, np.nan]]
    expected = {
        "none": to_go,
        "mean": [[1, -2, 0], [-1, 2, np.nan], [0, np.nan, np.nan]],
        "loo": [[1.5, -4, 0], [-1.5, 4, np.nan], [0, np.nan, np.nan]],
        "mean_std": [[1.5**0.5, -1, 0], [-(1.5**0.5), 1, np.nan], [0, np.nan, np.nan]],
        "max_rl": [[0.5, -0.5, 0], [-0.5, 0.5, np.nan], [0, np.nan, np.nan]],
    }
    for kind, table in expected.items():
        assert advantages(to_go, kind) == pytest.approx(np.array(table), rel=1e-5, nan_ok=True)


def test_tokens_have_the_advantage_of_their_part(tmp_path):
    """Of three attempts one has rewards for its two turns, one for its three tokens, one a number.

    A number is the reward to go of the first part. Tokens that were not sampled have no advantage.
    """
    turns = make_sample(6, part=np.array([-1, 0, 0, -1, 1, 1]))
    turns["reward_to_go"] = np.array([0, 4.0, 4.0, 0, 1.0, 1.0])
    tokens = make_sample(5, part=np.array([-1, -1, 0, 1, 2]))
    tokens["reward_to_go"] = np.array([0, 0, 2.0, 3.0, 7.0])
    whole = make_sample(4, reward=3.0)
    waiting, rollouts = make_buffer(tmp_path, advantage="mean")
    rollouts.put(group_record(0, [turns, tokens, whole], logged=[{"x": 1.0}, {}, {"x": 3.0}]))
    waiting.receive()
    [group] = waiting.groups
    found = [sample["advantage"].tolist() for sample in group["samples"]]
    assert found == [[0, 1, 1, 0, -1, -1], [0, 0, -1, 1, 0], [0, 0, 0, 0]]
    packer, [queue] = make_packer(tmp_path, batch_size=3, attempts=3, row_tokens=64)
    packer.add(group)
    [record] = read_step(queue)
    assert sorted(record["advantage"].tolist()) == sorted(sum(found, []))
    assert record["by_task"]["toy"]["logged"] == {"x": 2.0}


@pytest.mark.parametrize("seed", range(5))
def test_packing_puts_every_index_in_one_row_within_capacity(seed):
    rng = random.Random(seed)
    capacity = rng.randint(10, 3000)
    drawn = [int(rng.lognormvariate(4, 1)) for _ in range(rng.randint(0, 400))]
    lengths = [min(capacity, max(1, n)) for n in drawn]
    rows = pack(lengths, capacity)
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    for row in rows:
        assert 0 < sum(lengths[i] for i in row) <= capacity
    # no two rows are half empty
    assert len(rows) <= 2 * sum(lengths) / capacity + 1
    with pytest.raises(
        ValueError,
        match="an attempt of 9 tokens does not fit into a row of 8 tokens: raise --row_tokens",
    ):
        pack([3, 9], 8)


def test_padded_rows_are_bounded_with_their_padding():
    assert pack([5, 3, 2, 4], 7, [1, 1, 1, 1]) == [[0], [3], [1, 2]]
    # Two attempts of three and of one sequence, the longest of 4 tokens.
    assert pack([4, 3], 16, [3, 1]) == [[0, 1]]
    assert pack([4, 3], 15, [3, 1]) == [[0], [1]]
    with pytest.raises(ValueError, match="an attempt of 18 tokens does not fit into a row of 17"):
        pack([6], 17, [3])
    rng = random.Random(0)
    lengths = [min(400, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(300)]
    counts = [rng.choice([1, 1, 1, 2]) for _ in lengths]
    rows = pack(lengths, 1000, counts)
    assert sorted(sum(rows, [])) == list(range(300))
    for row in rows:
        assert sum(counts[i] for i in row) * max(lengths[i] for i in row) <= 1000
    assert len(rows) < 300 / 2


# ---- the packer


def make_packer(folder, ranks=1, **knobs):
    """(Packer, the queues it fills)."""
    config = cfg.Config(stall_timeout=5, run_id="abc", **knobs)
    queues = [Queue(folder / f"rank_{r}") for r in range(ranks)]
    return Packer(config, queues, Ledger(0, []), 0), queues


def alone(n, k, **others):
    """A sample that has no beginning in common with one of another k."""
    return make_sample(n, tokens=np.arange(n) + k, **others)


def a_group(draw, samples):
    """As GroupBuffer gives them."""
    return {"draw": draw, "samples": samples, "logged": [{} for _ in samples]}


def read_step(queue, timeout=0):
    """The records of one step of one rank, acknowledged."""
    records = []
    while not records or not records[-1]["last"]:
        seq, record = queue.get(timeout)
        queue.ack(seq)
        records.append(record)
    return records


@pytest.mark.parametrize("ranks,seed", [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_steps_are_whole_ranks_get_equal_numbers_and_nothing_is_lost(tmp_path, ranks, seed):
    """Groups are of one to four samples: attempts that failed make a step smaller."""
    rng = random.Random(seed)
    packer, queues = make_packer(tmp_path, ranks, batch_size=40, attempts=4, row_tokens=64)
    sent = {}
    for index in range(30):
        numbers = range(4 * index, 4 * index + rng.choice([1, 3, 4, 4, 4]))
        sent |= {k: rng.randint(3, 60) for k in numbers}
        packer.add(a_group(index, [alone(sent[k], k, reward=float(k)) for k in numbers]))
    for step in range(3):
        of_ranks = [read_step(queue) for queue in queues]
        assert len({len(records) for records in of_ranks}) == 1
        trained = []
        for record in sum(of_ranks, []):
            assert (record["step"], record["run_id"]) == (step, "abc")
            assert record["lengths"].sum() <= 64
            # fillers are none
            real = record["outcome"] >= 0
            trained += zip(record["reward"][real], record["lengths"][real])
        of_step = [k for k in sent if k // 40 == step]
        assert sorted(trained) == [(k, sent[k]) for k in of_step]
        # every rank is told what became of the step
        problems = Counter(str(k // 4) for k in of_step)
        assert all(records[-1]["problems"] == problems for records in of_ranks)
    assert all(len(q) == 0 for q in queues)


def test_a_padded_step_has_all_samples_and_no_row_above_its_size(tmp_path):
    """Two ranks get equally many rows; attempts at one problem share nothing."""
    knobs = dict(row_tokens=64, batch_size=32, attempts=4, rows="padded")
    packer, queues = make_packer(tmp_path, 2, **knobs)
    rng = random.Random(0)
    for draw in range(8):
        packer.add(a_group(draw, [make_sample(rng.randint(3, 32)) for _ in range(4)]))
    steps = [read_step(queue) for queue in queues]
    assert len(steps[0]) == len(steps[1]) > 2
    rows = sum(steps, [])
    assert all(len(row["lengths"]) * row["lengths"].max() <= 64 for row in rows)
    assert sum((row["outcome"] >= 0).sum() for row in rows) == 32


def test_a_micro_batch_keeps_tokens_and_their_stamps_together(tmp_path):
    packer, [queue] = make_packer(tmp_path, batch_size=2, attempts=2, row_tokens=64)
    first = make_sample(4, reward=1.0, version=3, tokens=np.array([7, 7, 8, 8]))
    second = make_sample(5, version=4, num_versions=2)
    second["versions"][-1] = 5
    packer.add(a_group(7, [first, second]))
    [record] = read_step(queue)
    assert record["lengths"].tolist() == [4, 5]
    assert record["tokens"].tolist() == [7, 7, 8, 8, 0, 1, 2, 3, 4]
    assert record["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 4, 4, 5]
    assert record["mask"].tolist() == [False, False, True, True, False, False, True, True, True]
    assert record["advantage"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert record["num_versions"].tolist() == [1, 2]
    assert record["problems"] == {"7": 2}


def test_attempts_at_a_problem_share_a_row_and_their_prompt(tmp_path):
    packer, [queue] = make_packer(tmp_path, batch_size=12, attempts=6, row_tokens=64)
    for draw in (0, 1):
        prompt = np.full(8, draw)
        samples = [
            make_sample(10, prompt=8, sample_id=6 * draw + k, tokens=np.append(prompt, [k + 2, 9]))
            for k in range(6)
        ]
        assert computed_tokens(samples) == 8 + 6 * 2
        packer.add(a_group(draw, samples))
    # 8 + 4 * 2 tokens are a quarter of a row; 120 tokens in a row of 64
    [record] = read_step(queue)
    assert record["sample_id"].tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11]
    assert computed_tokens(split(record)) == 2 * (8 + 4 * 2) + 2 * (8 + 2 * 2)


def test_segments_that_begin_alike_are_computed_once_and_counted_so():
    """Every turn is a segment of its own, as with a template that drops old thoughts."""
    turns = [np.arange(20 + 10 * k) for k in range(6)]
    own = dict(
        tokens=np.concatenate(turns), segment=np.repeat(np.arange(6), [len(x) for x in turns])
    )
    samples = [make_sample(len(own["tokens"]), prompt=20) | own for _ in range(8)]
    found = keep_together(samples, 300)
    assert sum(len(together) for _, together in found) == 8 and len(found) > 1
    for tokens, together in found:
        assert tokens == computed_tokens(together) <= 300


def test_rows_of_a_round_take_equally_long(tmp_path):
    # Rows: 602 + 300, 601 + 399, 600 + 400, 599 + 401; many short sequences cost less than two long
    # ones
    lengths = [602, 601, 600, 599, 401, 399] + [100] * 7
    knobs = dict(batch_size=len(lengths), attempts=len(lengths), row_tokens=1000)
    packer, queues = make_packer(tmp_path, 2, **knobs)
    packer.add(a_group(1, [alone(n, k) for k, n in enumerate(lengths)]))
    of_ranks = [read_step(queue) for queue in queues]
    longest = [[max(record["lengths"]) for record in records] for records in of_ranks]
    assert longest == [[601, 600], [599, 602]]
    for first, last in of_ranks:
        assert "position" not in first
        assert last["position"] == {"next": 0, "ahead": [1]}


# ---- groups that wait


def make_buffer(folder, **knobs):
    """(GroupBuffer, its input)."""
    config = cfg.Config(stall_timeout=5, run_id="abc", **knobs)
    rollouts = Queue(folder / "rollouts")
    buffer = GroupBuffer(config, rollouts, Ledger(0, []), Patience(config, folder))
    return buffer, rollouts


def test_groups_get_their_advantages_and_cut_off_answers_leave_the_loss(tmp_path):
    waiting, rollouts = make_buffer(tmp_path, overlong_mask=True)
    samples = [make_sample(4, reward=1.0), make_sample(5, finished=False)]
    rollouts.put(group_record(0, samples))
    waiting.receive()
    [group] = waiting.groups
    finished, cut_off = group["samples"]
    assert finished["advantage"].tolist() == [0, 0, 1, 1]
    assert cut_off["advantage"].tolist() == [0, 0, -1, -1, -1]
    assert finished["mask"].tolist() == [False, False, True, True]
    # it is a sample of the batch all the same
    assert not cut_off["mask"].any()
    assert group["draw"] == 0


def test_attempts_that_failed_make_their_group_smaller(tmp_path):
    waiting, rollouts = make_buffer(tmp_path, attempts=4)
    samples = [make_sample(4, reward=1.0), make_sample(9), make_sample(5)]
    rollouts.put(group_record(0, samples, failed=1))
    # nothing came back at all
    rollouts.put(group_record(1, [], failed=4))
    waiting.receive()
    [group] = waiting.groups
    assert [len(s["tokens"]) for s in group["samples"]] == [4, 9, 5]
    # the baseline is that of all that came back
    assert [s["advantage"][-1] for s in group["samples"]] == [1.0, -0.5, -0.5]
    ledger = waiting.ledger
    assert ledger.dropped == {"failed": {0: 1, 1: 4}}
    assert (ledger.dropped_groups, ledger.ahead) == (1, {1})


def test_groups_wait_for_their_turn_with_late_wait(tmp_path):
    waiting, rollouts = make_buffer(tmp_path, late="wait", no_signal="drop")
    waiting.early = {1: None}
    two = [make_sample(4, reward=1.0), make_sample(5)]
    for index in (2, 3):
        rollouts.put(group_record(index, two))
    waiting.receive()
    assert not waiting.groups
    rollouts.put(group_record(5, two))
    # dropped, which must not hold the others up
    rollouts.put(group_record(0, [], failed=2))
    waiting.receive()
    assert [group["draw"] for group in waiting.groups] == [2, 3]
    rollouts.put(group_record(4, two))
    waiting.receive()
    assert [group["draw"] for group in waiting.groups] == [2, 3, 4, 5]


def test_buffer_that_receives_nothing_raises_a_timeout(tmp_path):
    waiting, rollouts = make_buffer(tmp_path)
    register(tmp_path, "engine0", "http://127.0.0.1:1")
    complaint = "actor.py put no rollouts into .*/rollouts for 5 s"
    waiting.patience.looked -= 6
    with pytest.raises(TimeoutError, match=complaint):
        waiting.receive()
    # as long as groups are waiting here, the trainer is the slower one
    rollouts.put(group_record(0, [make_sample(4), make_sample(4)]))
    waiting.receive()
    waiting.patience.looked -= 6
    waiting.receive()
    waiting.groups.clear()
    waiting.receive()
    waiting.patience.looked -= 6
    with pytest.raises(TimeoutError, match=complaint):
        waiting.receive()


def test_generation_phase_alone_is_shuffled(tmp_path):
    waiting, rollouts = make_buffer(tmp_path, conventional_g=4, batch_size=8, attempts=2)
    for index in range(14):
        rollouts.put(group_record(index, [make_sample(reward=1.0), make_sample()]))
    waiting.receive()
    waiting.shuffle_phase(10, random.Random(0))
    order = [group["draw"] for group in waiting.groups]
    assert sorted(order[:10]) == list(range(10))
    assert order[:10] != list(range(10))
    assert order[10:] == [10, 11, 12, 13]


# ---- the ledger


def test_ledger_counts_draws_drops_and_the_position_of_a_step():
    ledger = Ledger(0, [])
    for index in (1, 3):
        ledger.trained[index] = 4
        ledger.done(index)
    ledger.drop(1, 2, "failed")
    ledger.drop(1, 1, "failed")
    ledger.drop(1, 0, "buffer_full")
    drops = {"failed": {1: 3}}
    position = {"next": 0, "ahead": [1, 3]}
    of_step = {"problems": {1: 4, 3: 4}, "drops": drops, "position": position}
    assert ledger.close_step() == of_step
    again = Ledger(**json.loads(json.dumps(position)))
    for index in (0, 2):
        again.done(index)
    assert again.close_step()["position"] == {"next": 4, "ahead": []}
    # of the step, and of the run since it was started
    assert ledger.close_step()["drops"] == {}
    assert ledger.reasons == {"failed": 3}


# ---- the stage itself


def write_run(out, **knobs):
    """A run directory as the launcher makes it; the trainer stands at version 0."""
    common = dict(batch_size=8, attempts=4, steps=3, row_tokens=64, trainers=1, run_id="abc")
    limits = dict(stall_timeout=300, start_timeout=300)
    config = cfg.Config(run="r", out=str(out), **common | limits | knobs)
    run_dir = rundir.write(config)
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=0)
    return run_dir


def run_stage(run_dir):
    """To its end."""
    command = [sys.executable, "preprocess.py", str(run_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_full_buffer_drops_the_oldest_groups_and_counts_them(tmp_path):
    """The real stage; the test plays the trainer, which stands still at version 0."""
    run_dir = write_run(tmp_path, on_full="drop_oldest", advantage="none")
    queues = run_dir / "queues"
    rollouts = Queue(queues / "rollouts")
    batches = Queue(queues / "batches" / "rank_0")

    def feed(draws):
        # one attempt has failed
        for draw in draws:
            failed = int(draw == 0)
            samples = [make_sample(5) for _ in range(4 - failed)]
            rollouts.put(group_record(draw, samples, failed=failed))

    def train():
        """What became of which draws: trained, dropped, and the first that is not done with."""
        last = read_step(batches, 300)[-1]
        assert last["position"]["ahead"] == []
        return last["problems"], last["drops"], last["position"]["next"]

    # more than the buffer's four groups at once: the oldest goes
    feed(range(5))
    stage = subprocess.Popen([sys.executable, "preprocess.py", str(run_dir)], cwd=ROOT)
    try:
        dropped = {"failed": {"0": 1}, "buffer_full": {"0": 3}}
        assert train() == ({"1": 4, "2": 4}, dropped, 3)
        assert train() == ({"3": 4, "4": 4}, {}, 5)
        # step 2 may not be emitted before the trainer is at version 1: meanwhile two more must go
        feed(range(5, 11))
        wait_until(lambda: read_json(queues / "dropped.json").get("groups", 0) == 3)
        publish_json(queues / "version.json", version=1)
        # two groups are left when the last step is full
        assert train() == ({"7": 4, "8": 4}, {"buffer_full": {"5": 4, "6": 4}}, 9)
        assert stage.wait(300) == 0
    finally:
        stage.kill()
    assert read_json(queues / "dropped.json") == {"groups": 3}


def test_printed_totals_of_dropped_samples_are_right_and_complete(tmp_path):
    """The real stage: an attempt of each group fails, and each third group has no signal."""
    run_dir = write_run(tmp_path, steps=20, no_signal="drop")
    rollouts = Queue(run_dir / "queues" / "rollouts")
    rewards = ([1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.5])

    def feed(draws):
        for draw in draws:
            samples = [make_sample(5, reward) for reward in rewards[draw % 3]]
            rollouts.put(group_record(draw, samples, failed=1))

    # more than 20 steps of two groups, and the trainer has trained all but one of them
    feed(range(75))
    publish_json(run_dir / "queues" / "version.json", version=19)
    said = run_stage(run_dir).stdout
    so_far = re.findall(r"so far: (\d+) failed(?:, (\d+) no_signal)?\n", said)
    at_end = re.findall(r"20 of 20 steps emitted, samples dropped: (\d+) failed, (\d+) no_s", said)
    totals = [(int(failed), int(no_signal or 0)) for failed, no_signal in so_far + at_end]
    assert len(at_end) == 1 and len(so_far) > 1
    for failed, no_signal in totals:
        # groups come in the order of their draws
        assert no_signal == failed // 3 * 3
    sums = [sum(of_line) for of_line in totals]
    assert all(later >= 2 * earlier for earlier, later in zip(sums[:-1], sums[1:-1]))
    dropped = Counter()
    batches = Queue(run_dir / "queues" / "batches" / "rank_0")
    for _ in range(20):
        for reason, draws in read_step(batches)[-1]["drops"].items():
            dropped[reason] += sum(draws.values())
    assert totals[-1] >= (dropped["failed"], dropped["no_signal"]) and sums[-1] >= sums[-2]


def test_stopped_stage_prints_its_dropped_samples(tmp_path):
    run_dir = write_run(tmp_path, no_signal="drop")
    rollouts = Queue(run_dir / "queues" / "rollouts")
    for draw in range(3):
        rollouts.put(group_record(draw, [make_sample(5)] * 4))
    command = [sys.executable, "preprocess.py", str(run_dir)]
    stage = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: read_json(run_dir / "queues" / "dropped.json").get("groups", 0) == 3)
    stage.terminate()
    said, _ = stage.communicate(timeout=30)
    assert said.endswith("preprocess: 0 of 3 steps emitted, samples dropped: 12 no_signal\n")


def test_a_step_of_a_held_run_waits_for_all_groups_that_may_start(tmp_path):
    """`--late hold --max_lag 2`, steps of one group: a step is put when it and the next two are
    there; the last steps have no more groups to wait for.
    """
    run_dir = write_run(tmp_path, late="hold", max_lag=2, steps=4, batch_size=2, attempts=2)
    queues = run_dir / "queues"
    batches = queues / "batches" / "rank_0"
    rollouts = Queue(queues / "rollouts")
    two = [make_sample(4, reward=1.0), make_sample(5)]
    put = Queue(batches)
    stage = subprocess.Popen([sys.executable, "preprocess.py", str(run_dir)], cwd=ROOT)
    try:
        # the second one comes first
        for draw in (1, 0):
            rollouts.put(group_record(draw, two))
        wait_until(lambda: not len(rollouts))
        assert not len(put)
        rollouts.put(group_record(2, two))
        wait_until(lambda: len(put) == 1)
        publish_json(queues / "version.json", version=1)
        rollouts.put(group_record(3, two))
        wait_until(lambda: len(put) == 3)
        publish_json(queues / "version.json", version=3)
        assert stage.wait(300) == 0
    finally:
        stage.kill()
    steps = [put.get()[1] for _ in range(4)]
    assert [list(record["problems"]) for record in steps] == [["0"], ["1"], ["2"], ["3"]]


def test_rewards_that_the_advantage_does_not_allow_are_one_line(tmp_path):
    """The real stage."""
    run_dir = write_run(tmp_path, steps=1, advantage="max_rl")
    two = [make_sample(4, reward=1.0), make_sample(5, reward=-0.5)]
    Queue(run_dir / "queues" / "rollouts").put(group_record(3, two))
    done = run_stage(run_dir)
    assert done.returncode == 1
    line = "preprocess: tasks/toy.py: training problem 0: --advantage max_rl divides by the mean"
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("case", ["another run", "damaged"])
def test_a_record_that_the_actor_does_not_write_ends_the_stage_by_name(tmp_path, case):
    """The real stage; test_samples.py has what else is refused."""
    run_dir = write_run(tmp_path, steps=1)
    rollouts = Queue(run_dir / "queues" / "rollouts")
    rollouts.put(group_record(0, [make_sample()], run_id="xyz"))
    if case == "damaged":
        rollouts.file(0).write_bytes(b"damaged")
    done = run_stage(run_dir)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "rollouts/0000000000.safetensors" in last
    assert "the same command continues the run" in last


@pytest.mark.parametrize("no_signal", ["keep", "drop"])
def test_groups_without_signal_are_kept_or_dropped(tmp_path, no_signal):
    """The real stage: of six groups, of two tasks in turn, every second has four equal rewards."""
    knobs = dict(task="toy,tail", batch_size=12, steps=1, no_signal=no_signal)
    run_dir = write_run(tmp_path, **knobs)
    rollouts = Queue(run_dir / "queues" / "rollouts")
    no_answer = cfg.OUTCOMES.index("no_answer")
    for i in range(6):
        samples = []
        for reward in [0.1] * 4 if i % 2 else [0.1, 1.0, 1.0, 0.1]:
            outcome = 0 if reward == 1 else no_answer
            samples.append(make_sample(5, reward, prompt=1, task=i % 2, outcome=outcome))
        rollouts.put(group_record(i, samples))
    assert run_stage(run_dir).returncode == 0
    last = read_step(Queue(run_dir / "queues" / "batches" / "rank_0"))[-1]
    of_toy = dict(samples=12, reward=0.55, tokens=4, correct=0.5, no_answer=0.5)
    of_tail = dict(samples=4, reward=0.1, tokens=4, no_answer=1)
    dropped = read_json(run_dir / "queues" / "dropped.json")
    if no_signal == "drop":
        assert last["by_task"] == {"toy": pytest.approx(of_toy)}
        assert last["position"] == {"next": 6, "ahead": []}
        assert last["drops"] == {"no_signal": {"1": 4, "3": 4, "5": 4}}
        assert dropped == {"groups": 3}
    else:
        of_toy["samples"] = 8
        assert last["by_task"]["toy"] == pytest.approx(of_toy)
        assert last["by_task"]["tail"] == pytest.approx(of_tail)
        assert last["position"] == {"next": 3, "ahead": []}
        assert last["drops"] == dropped == {}
