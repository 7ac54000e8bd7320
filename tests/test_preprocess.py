"""Advantages, packing, and the rounds of micro-batches that a step is made of."""
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

import launch
from preprocess import Emitter, Position, advantages, pack, row_record, samples_of
from queues import Queue


def test_advantages_by_hand():
    assert advantages([1, 0, 0, 0], "loo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages([1, 0, 0, 0], "mean") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages([1, 0, 0, 0], "mean_std") == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / 0.4330127, rel=1e-5)
    assert advantages([1, 0, 0, 0], "none") == pytest.approx([1, 0, 0, 0])
    assert advantages([2, 4, 9], "loo") == pytest.approx([2 - 6.5, 4 - 5.5, 9 - 3])
    for kind in ("loo", "mean", "mean_std"):
        assert advantages([0.7], kind) == pytest.approx([0])  # one sample: nothing to compare with
        assert advantages([1, 1, 1], kind) == pytest.approx([0, 0, 0])
    with pytest.raises(ValueError, match="unknown advantage"):
        advantages([1, 0], "median")


@pytest.mark.parametrize("seed", range(30))
def test_packing_puts_every_index_in_one_row_within_capacity(seed):
    rng = random.Random(seed)
    capacity = rng.randint(10, 3000)
    lengths = [min(capacity, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(rng.randint(0, 400))]
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) <= 2 * sum(lengths) / capacity + 1  # no two rows are half empty


def test_emitted_rows_are_full_when_there_is_a_backlog(tmp_path):
    rng, queue = np.random.default_rng(0), Queue(tmp_path / "q")
    emitter = Emitter(SimpleNamespace(batch_size=1000, row_tokens=4096, stall_timeout=5, run_id="r"), [queue])
    for n in np.minimum(rng.lognormal(5.5, 0.8, 1000).astype(int) + 3, 4096):
        emitter.add(sample(n))
    fill = [len(queue.get(0)[1]["input_ids"]) / 4096 for _ in range(len(queue))]
    assert len(fill) > 50 and np.mean(fill) >= 0.95 and np.mean(fill[:-1]) >= 0.96, f"{np.mean(fill):.3f}"


def test_packing_refuses_what_cannot_fit():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, a row has 8"):
        pack([3, 9], 8)


def sample(n, reward=0.0, version=0):
    return dict(tokens=np.arange(n, dtype=np.int32), mask=np.arange(n) >= 2, logprobs=np.zeros(n, np.float32),
                versions=np.where(np.arange(n) >= 2, version, -1).astype(np.int32), advantage=reward, reward=reward, success=reward >= 1, index=0, task="toy", outcome="correct" if reward >= 1 else "wrong", signal=True)


def test_a_row_record_keeps_tokens_and_their_stamps_together():
    a, b = sample(4, 1.0, 3), sample(5, 0.0, 4)
    b["versions"][-1] = 5
    r = row_record([a, b])
    assert r["input_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4] and r["position_ids"].tolist() == r["input_ids"].tolist()
    assert r["sequence_ids"].tolist() == [0] * 4 + [1] * 5 and r["mask"].tolist() == [False, False, True, True] + [False, False, True, True, True]
    assert r["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 4, 4, 5]
    assert r["pure"].tolist() == [True] * 4 + [False] * 5 and r["spans"].tolist() == [1, 2]
    assert r["advantages"].tolist() == [1] * 4 + [0] * 5 and r["samples"] == 2
    empty = row_record([])
    assert empty["samples"] == 0 and not empty["mask"].any() and len(empty["rewards"]) == 0


@pytest.mark.parametrize("ranks,seed", [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_steps_are_whole_ranks_get_equal_numbers_and_nothing_is_lost(tmp_path, ranks, seed):
    rng = random.Random(seed)
    config = SimpleNamespace(batch_size=40, row_tokens=64, stall_timeout=5, run_id="r")
    queues = [Queue(tmp_path / f"rank_{r}") for r in range(ranks)]
    emitter, sent = Emitter(config, queues), []
    for i in range(120):
        s = sample(rng.randint(3, 60), reward=float(i))
        sent.append(len(s["tokens"]))
        emitter.add(s)
    rewards, lengths = [], []
    for step in range(3):
        counts, trained = [], 0
        for q in queues:
            n, last = 0, False
            while not last:
                seq, r = q.get(0)
                q.ack(seq)
                assert r["step"] == step and len(r["input_ids"]) <= 64
                n, last, trained = n + 1, r["last"], trained + r["samples"]
                rewards += r["rewards"].tolist()
                lengths += np.bincount(r["sequence_ids"]).tolist() if r["samples"] else []
            counts.append(n)
        assert len(set(counts)) == 1 and trained == 40
    assert sorted(rewards) == [float(i) for i in range(120)] and sorted(lengths) == sorted(sent)
    assert all(len(q) == 0 for q in queues)


def test_groups_are_cut_back_into_their_samples():
    group = dict(tokens=np.arange(7), mask=np.arange(7) > 1, logprobs=np.zeros(7), versions=np.zeros(7, int), lengths=np.array([3, 4]),
                 rewards=np.array([1.0, 0.0]), finished=np.array([True, False]), index=6, task="toy", outcomes=["correct", "wrong"])
    a, b = samples_of(group, SimpleNamespace(advantage="loo", overlong_mask=False, dpo_coef=0.0))
    assert a["tokens"].tolist() == [0, 1, 2] and b["tokens"].tolist() == [3, 4, 5, 6]
    assert (a["advantage"], b["advantage"]) == (1.0, -1.0) and a["index"] == 6 and a["mask"].tolist() == [False, False, True] and b["mask"].all()
    assert a["signal"] and not any(s["signal"] for s in samples_of(group | dict(rewards=np.array([0.1, 0.1])), SimpleNamespace(advantage="loo", overlong_mask=False, dpo_coef=0.0)))
    one = group | dict(lengths=np.array([7]), rewards=np.array([1.0]))  # a group of one makes up for a lost sample: it must not be dropped for its lack of signal
    assert next(samples_of(one, SimpleNamespace(advantage="loo", overlong_mask=False, dpo_coef=0.0)))["signal"]
    a, b = samples_of(group, SimpleNamespace(advantage="loo", overlong_mask=True, dpo_coef=0.0))  # the second was cut off: in the batch, out of the loss
    assert a["mask"].tolist() == [False, False, True] and not b["mask"].any() and b["reward"] == 0.0 and row_record([a, b])["samples"] == 2


def test_problems_are_done_with_when_their_last_sample_is():
    p = Position()
    for index in (1, 0, 3, 2):
        p.arrive(index, 2)
    for index in (1, 1, 3, 0):
        p.leave(index)
    assert p.state() == {"next": 0, "ahead": [1], "left": {0: 1, 3: 1}}  # half of 0 and of 3 is left, and all of 2
    for index in (0, 3):
        p.leave(index)
    assert p.state() == {"next": 2, "ahead": [3], "left": {}}
    p.arrive(4, 2), p.arrive(5, 3)
    for index in (4, 4, 5):
        p.leave(index)
    again = Position(**json.loads(json.dumps(p.state())))  # after a crash: 2 and the two samples that 5 has left are drawn again
    assert again.state() == {"next": 2, "ahead": [3, 4], "left": {5: 2}}
    again.arrive(5, 2), again.arrive(2, 1), again.leave(5), again.leave(2)
    assert again.state() == {"next": 5, "ahead": [], "left": {5: 1}}
    again.leave(5)
    assert again.state() == {"next": 6, "ahead": [], "left": {}}


def test_rows_of_a_round_take_equally_long(tmp_path):
    # four rows of 1000 tokens: two of one long sequence, two of many short ones. Rounds pair what costs the same.
    queues = [Queue(tmp_path / f"rank_{r}") for r in range(2)]
    lengths = [1000] + [100] * 10 + [1000] + [100] * 10
    emitter = Emitter(SimpleNamespace(batch_size=len(lengths), row_tokens=1000, stall_timeout=5, run_id="r"), queues)
    for n in lengths:
        emitter.add(sample(n))
    rounds = [[q.get(0)[1] for q in queues] for _ in range(2)]
    assert [[r["samples"] for r in row] for row in rounds] == [[1, 1], [10, 10]]
    assert "position" not in rounds[0][0] and rounds[1][0]["last"] and rounds[1][0]["position"]["next"] == 0


def test_a_ring_that_overflows_drops_the_oldest_and_says_so(tmp_path):
    """The real stage, with a trainer that stands still at version 0 (the test writes its notices)."""
    import subprocess
    import sys
    import time
    import config as cfg
    from conftest import ROOT
    from queues import notice, noticed
    launch.write(cfg.Config(run="r", out=str(tmp_path), task="toy", batch_size=8, attempts=4, steps=3, ring=8, row_tokens=64, trainers=1, on_full="drop_oldest",
                         advantage="none", stall_timeout=30, start_timeout=30, run_id="abc"))
    queues = tmp_path / "r" / "queues"
    rollouts = Queue(queues / "rollouts")
    notice(queues / "version.json", version=0, position=dict(next=0, ahead=[1]))  # problem 1 was trained before
    fed = 0

    def feed(groups):  # reward = the sample's number; number 3 is longer than a row
        nonlocal fed
        for _ in range(groups):
            n = [70 if fed + k == 3 else 5 for k in range(4)]
            rollouts.put(dict(tokens=np.zeros(sum(n), np.int32), mask=np.ones(sum(n), bool), logprobs=np.zeros(sum(n), np.float32), versions=np.zeros(sum(n), np.int32),
                              lengths=np.array(n), rewards=np.arange(fed, fed + 4, dtype=np.float32), finished=np.ones(4, bool), task="toy", outcomes=["wrong"] * 4, gen_tok_s=1.0, gen_idle=0.0, run_id="abc", lost=0, index=fed // 4 + (fed > 0)))
            fed += 4

    def until(condition):
        deadline = time.time() + 30
        while not condition():
            assert time.time() < deadline
            time.sleep(0.02)
    batches, trained, ledger = Queue(queues / "batches" / "rank_0"), {}, []

    def train(step):
        last = False
        while not last:
            seq, r = batches.get(30)
            trained.setdefault(r["step"], []).extend(r["rewards"].tolist())
            batches.ack(seq)
            last = r["step"] == step and r["last"]
        ledger.append((r["problems"], r["drops"]))
        return r["position"]
    feed(3)  # 12 samples: one is too long, the oldest three do not fit into the ring
    stage = subprocess.Popen([sys.executable, "preprocess.py", str(tmp_path / "r")], cwd=ROOT)
    try:
        train(0)
        feed(2)
        train(1)
        feed(2)  # step 2 may not be emitted before the trainer is at version 1: these eight wait in the ring
        until(lambda: len(rollouts) == 0)
        feed(2)  # and are overtaken by these
        until(lambda: noticed(queues / "dropped.json").get("samples", 0) == 12)
        notice(queues / "version.json", version=1, position={})
        assert train(2) == {"next": 10, "ahead": [], "left": {}}  # every problem that came, trained or dropped
        assert stage.wait(30) == 0
    finally:
        stage.kill()
    assert trained == {0: [4, 5, 6, 7, 8, 9, 10, 11], 1: list(range(12, 20)), 2: list(range(28, 36))}
    assert noticed(queues / "dropped.json") == {"samples": 12, "reasons": {"too_long": 1, "ring_full": 11}, "of_actor": {"0": 12}}
    assert ledger == [({"2": 4, "3": 4}, {"too_long": {"0": 1}, "ring_full": {"0": 3}}), ({"4": 4, "5": 4}, {}), ({"8": 4, "9": 4}, {"ring_full": {"6": 4, "7": 4}})]


def test_a_record_of_another_run_stops_the_stage_by_name(tmp_path):
    import subprocess
    import sys
    import config as cfg
    from conftest import ROOT
    from queues import notice
    run_dir = launch.write(cfg.Config(run="r", out=str(tmp_path), batch_size=8, attempts=4, steps=3, ring=8, row_tokens=64, trainers=1, run_id="abc"))
    Queue(run_dir / "queues" / "rollouts").put(dict(run_id="xyz", index=0, gen_tok_s=1.0, gen_idle=0.0, lengths=np.zeros(0, int), rewards=np.zeros(0, np.float32)))
    notice(run_dir / "queues" / "version.json", version=0, position=dict(next=0, ahead=[]))
    done = subprocess.run([sys.executable, "preprocess.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "rollouts is of run xyz, this is run abc" in done.stderr.splitlines()[-1]


def test_reference_logprobs_are_the_trainers_function_on_the_frozen_base_model(tmp_path, base_model):
    import torch
    from transformers import AutoModelForCausalLM
    import config as cfg
    from preprocess import reference_model
    from train import token_logprobs
    config = cfg.Config(model=str(base_model), dtype="float32", batch_size=2, row_tokens=64, temperature=0.8)
    queue = Queue(tmp_path / "q")
    emitter = Emitter(config, [queue], reference_model(config))
    emitter.add(sample(9)), emitter.add(sample(20))
    r = queue.get(0)[1]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base_model)
        expected = token_logprobs(model, torch.arange(20), torch.arange(20), 0.8)[0].numpy()
    row = r["ref_logprobs"][r["sequence_ids"] == r["sequence_ids"][np.flatnonzero(r["position_ids"] == 19)[0]]]
    assert row[1:] == pytest.approx(expected[1:], abs=2e-6)


def test_the_best_and_the_worst_answer_of_a_group_are_neighbours_in_one_row(tmp_path):
    import config as cfg
    from preprocess import samples_of, units
    config = cfg.Config(batch_size=12, attempts=4, row_tokens=40, dpo_coef=1.0)
    rng, queue = np.random.default_rng(0), Queue(tmp_path / "q")
    emitter = Emitter(config, [queue])
    rewards = [[0, 0, 1, 0.5], [1, 1, 1, 1], [0.2, 0.9, 0.1, 0.4]]
    for index, r in enumerate(rewards):
        lengths = rng.integers(5, 20, 4)
        n = lengths.sum()
        group = dict(tokens=np.arange(n, dtype=np.int32), mask=np.ones(n, bool), logprobs=np.zeros(n, np.float32), versions=np.zeros(n, np.int32), lengths=lengths, rewards=np.array(r, np.float32),
                     finished=np.ones(4, bool), outcomes=["wrong"] * 4, task="toy", index=index)
        found = list(samples_of(group, config))
        assert [s["role"] for s in found] == ([None] * 4 if index == 1 else ["best", "worst", None, None]) and sorted(s["reward"] for s in found) == sorted(np.float32(r))
        assert [len(u) for u in units(found)] == ([1] * 4 if index == 1 else [2, 1, 1])
        emitter.position.arrive(index, 4)
        for s in found:
            emitter.add(s)
    pairs = []
    while len(queue):
        seq, r = queue.get(0)
        pairs += [(float(r["rewards"][a]), float(r["rewards"][b])) for a, b in r["pairs"]]
        queue.ack(seq)
    assert np.allclose(sorted(pairs), [(0.9, 0.1), (1.0, 0.0)])


@pytest.mark.parametrize("no_signal", ["keep", "drop"])
def test_groups_without_signal(tmp_path, no_signal):
    """The real stage: of six groups, of two tasks in turn, every second has four equal rewards."""
    import subprocess
    import sys
    import config as cfg
    from conftest import ROOT
    from queues import notice, noticed
    run_dir = launch.write(cfg.Config(run="r", out=str(tmp_path), batch_size=12, attempts=4, steps=1, ring=24, row_tokens=64, trainers=1, run_id="abc", no_signal=no_signal))
    rollouts = Queue(run_dir / "queues" / "rollouts")
    for i in range(6):
        rewards = np.array([0.1] * 4 if i % 2 else [0.1, 1, 1, 0.1], np.float32)
        rollouts.put(dict(tokens=np.zeros(20, np.int32), mask=np.arange(20) % 5 > 0, logprobs=np.zeros(20, np.float32), versions=np.zeros(20, np.int32), lengths=np.array([5] * 4), rewards=rewards,
                          finished=np.ones(4, bool), task="ab"[i % 2], outcomes=["correct" if r == 1 else "no_answer" for r in rewards], gen_tok_s=1.0, gen_idle=0.0, run_id="abc", index=i, lost=0))
    notice(run_dir / "queues" / "version.json", version=0, position=dict(next=0, ahead=[]))
    subprocess.run([sys.executable, "preprocess.py", str(run_dir)], cwd=ROOT, check=True, timeout=60)
    batches, last = Queue(run_dir / "queues" / "batches" / "rank_0"), {"last": False}
    while not last["last"]:
        _, last = batches.get(5)
    a = dict(samples=12, reward=0.55, tokens=4, correct=0.5, no_answer=0.5)
    if no_signal == "drop":
        assert last["by_task"] == {"a": pytest.approx(a)} and last["position"] == {"next": 6, "ahead": [], "left": {}}
        assert noticed(run_dir / "queues" / "dropped.json") == {"samples": 12, "reasons": {"no_signal": 12}, "of_actor": {"0": 12}}
    else:
        assert last["by_task"] == {"a": pytest.approx(a | dict(samples=8)), "b": pytest.approx(dict(samples=4, reward=0.1, tokens=4, no_answer=1))}
        assert last["position"] == {"next": 3, "ahead": [], "left": {}} and noticed(run_dir / "queues" / "dropped.json") == {}
