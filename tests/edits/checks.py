"""What each edit of this folder does, seen in a copy of the repository that it is applied to: tests/test_edits.py
runs `pytest tests/edits/checks.py -k NAME` there. In the repository itself, without the edits, these fail.
"""

import asyncio
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_ranks import run_trainer, write_run
from test_samples import group_record, make_sample
from test_train import CPU, knobs, metrics_of, micro_record, one_step, packed_model

import actor
import preprocess
import train
from conftest import register, resolved
from fake_engine import fake_vllm
from plumbing import checkpoints, launch, secret
from plumbing.ledger import Ledger
from plumbing.mismatch import Guards
from plumbing.queues import Queue
from plumbing.ranks import Ranks
from plumbing.samples import Transcript, join, layout, split
from tools import replay
from tools.evaluate import start_engines, stop_engines
from weights import Sender


def sampled(n):
    """(tokens, behavior_logprobs, versions) of what an engine sampled."""
    return list(range(1, n + 1)), [-1.0] * n, [0] * n


# ---- cispo_by_position


def test_cispo_by_position_knows_the_tenth_of_every_token():
    transcript = Transcript([7, 7])
    transcript.append(*sampled(5))
    # what the environment says is no part of it
    transcript.append([8, 8, 8])
    transcript.append(*sampled(5))
    sample = transcript.fields()
    assert sample["tenth"][sample["mask"]].tolist() == list(range(10))
    short = Transcript([7])
    short.append(*sampled(3))
    assert short.fields()["tenth"].tolist() == [0, 0, 3, 6]


def test_cispo_by_position_clips_by_hand():
    # bounds of tenth 0: [0, 5]; of tenth 9: [0.45, 2.3]; the gradient is -clip(w) A
    tenth = torch.tensor([0, 9, 0, 9, 9])
    w = torch.tensor([20.0, 20.0, 0.1, 0.1, 1.5])
    advantages = torch.tensor([3.0, 3.0, -1.0, -1.0, 1.0])
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    behavior = logprobs.detach() - w.log()
    ids = torch.zeros(5, dtype=torch.int64)
    config = knobs(loss="cispo")
    loss, clipped = train.policy_loss("cispo", logprobs, behavior, advantages, ids, config, tenth)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-15.0, -6.9, 0.1, 0.45, -1.5])
    assert clipped.tolist() == [True, True, False, True, False]


def test_cispo_by_position_counts_ratios_above_2_by_tenth():
    model = packed_model()
    record = micro_record(model, [13, 23], version=6)
    prompt = [0, 0, 0]
    record["tenth"] = np.array([*prompt, *range(10), *prompt, *np.arange(20) // 2])
    # ratios of 3 in the first halves, of 1 in the others; in tenth 8 of the longer one a single 3
    early = record["mask"] & (record["tenth"] < 5)
    record["behavior_logprobs"] -= math.log(3) * early
    record["behavior_logprobs"][13 + 3 + 16] -= math.log(3)
    record = join(split(record))
    config = knobs(loss="cispo")
    optimizers = train.make_optimizers(model, config, CPU)
    metrics = one_step(model, optimizers, [record, record], 6, config)
    assert metrics["above_2"] == pytest.approx([1] * 5 + [0, 0, 0, 1 / 3, 0])
    # tenth 8 ends at 5 - 2.4 = 2.6, the first half of a completion nowhere below 3.8
    assert metrics["clip_frac"] == pytest.approx(1 / 30)


# ---- temperature_per_member


class FakeEngines:
    """In place of plumbing.client.Engines: samples from a model, at most eight tokens of an answer."""

    def __init__(self, model):
        self.model = model
        self.random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    async def generate(self, prompt, temperature, max_tokens, seed, salt, engine):
        tokens = []
        logprobs = []
        for _ in range(min(max_tokens, 8)):
            ids = torch.tensor([[*prompt, *tokens]])
            of_all = self.model(input_ids=ids, lengths=[ids.shape[1]], use_cache=False).logits
            logits = of_all[0, -1] / temperature
            of_token = torch.log_softmax(logits, -1)
            tokens.append(torch.multinomial(of_token.exp(), 1, generator=self.random).item())
            logprobs.append(of_token[tokens[-1]].item())
        of_tokens = dict(tokens=tokens, behavior_logprobs=logprobs, versions=[0] * len(tokens))
        return of_tokens | dict(finished=False, engine=engine)

    pace = {"gen_tok_s": 0.0, "gen_idle": 0.0}


async def one_group(config, run_dir, model):
    """The record of one group of the real actor."""
    secret.create(run_dir)
    stage = actor.Actor(config, run_dir)
    stage.engines = FakeEngines(model)
    await stage.sandbox.start()
    sampler = actor.Sampler({"toy": [0]}, {"toy": 1.0}, 0)
    try:
        await stage.group(0, "toy", 0, {"prompt": "ba=", "answer": "ab"}, sampler)
    finally:
        stage.sandbox.close()
    return Queue(run_dir / "queues" / "rollouts").get(0)[1]


def test_temperature_per_member_is_sampled_and_trained_at(tmp_path, base_model):
    config = resolved("toy", "--run", "t", "--out", tmp_path, "--attempts", 5, "--batch_size", 5)
    config.model = str(base_model)
    (tmp_path / "queues").mkdir()
    model, _ = train.build(config, CPU, 1)
    record = asyncio.run(asyncio.wait_for(one_group(config, tmp_path, model), 60))
    expected = [0.8, 0.9, 1.0, 1.1, 1.2]
    assert record["temperature"].tolist() == pytest.approx(expected)
    record["advantage"] = np.zeros(5, np.float32)
    assert metrics_of(model, record, 0)[1]["mismatch"] < 1e-5
    record["temperature"][:] = 1.0
    assert metrics_of(model, record, 0)[1]["mismatch"] > 1e-3


# ---- muon


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    model = packed_model()
    # a rank of 32 needs some tokens
    record = micro_record(model, [60, 60], version=0)
    record["advantage"][:] = [1.0, -1.0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = knobs(lr=0.01)
    optimizers = train.make_optimizers(model, config, CPU)
    assert [type(x).__name__ for x in optimizers] == ["AdamW", "Muon"]
    one_step(model, optimizers, [record], 0, config)
    kinds = set()
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).abs()
        if p.dim() > 1 and "layers" in name:
            # orthogonal up to what five iterations leave, times 0.2 sqrt(longer side)
            scale = 0.01 * 0.2 * math.sqrt(max(p.shape))
            singular = torch.linalg.svdvals(p.detach() - before[name]) / scale
            assert 0.6 < singular.median() < 1.3 and singular.max() < 1.3, name
            kinds.add("matrix")
        else:
            # AdamW's first step is the learning rate, whatever the gradient; unseen tokens have none
            assert moved.max() == pytest.approx(0.01, rel=1e-2), name
            kinds.add("other")
    assert kinds == {"matrix", "other"}


def test_muon_learns():
    model = packed_model()
    record = micro_record(model, [20, 20], version=0)
    record["advantage"][:] = [1.0, -1.0]
    config = knobs(lr=0.003)
    optimizers = train.make_optimizers(model, config, CPU)

    def preference():
        """Of the sample with advantage 1 over the other, nats per token."""
        positions, ids = layout(record["lengths"])
        with torch.no_grad():
            logprobs = model.token_logprobs(record["tokens"], positions, 1.0)[0].numpy()
        return [logprobs[record["mask"] & (ids == i)].mean() for i in (0, 1)]

    better, worse = preference()
    for version in range(10):
        one_step(model, optimizers, [record], version, config)
    after = preference()
    assert after[0] > better + 0.5
    assert after[1] < worse - 0.5


def test_muon_goes_on_from_a_checkpoint(tmp_path, base_model):
    config = resolved("toy", "--run", "t", "--out", tmp_path)
    config.model = str(base_model)
    ranks = Ranks(config)
    (tmp_path / "queues").mkdir()
    model, optimizers = train.build(config, CPU, 1)
    record = micro_record(model, [20, 20], version=0)

    def step(model, optimizers, version):
        one_step(model, optimizers, [record], version, config)

    for version in (0, 1):
        step(model, optimizers, version)
    state = checkpoints.NEW_RUN | {"version": 2}
    checkpoints.save(config, tmp_path, model, optimizers, state, ranks)
    step(model, optimizers, 2)
    continued, others = train.build(config, CPU, 1)
    saved = checkpoints.newest(tmp_path)
    assert checkpoints.restore(saved, continued, others)["version"] == 2
    step(continued, others, 2)
    for expected, got in zip(model.parameters(), continued.parameters()):
        assert torch.equal(expected, got)


# ---- subset_of_parameters


def test_subset_of_parameters_alone_is_trained_and_sent(tmp_path, base_model, monkeypatch):
    """With a FAKE engine: it has the new values of those, and of all others what it has loaded."""
    flags = dict(run="t", out=tmp_path, port=8985, model=base_model, trained=r"\.mlp\.up|norm")
    config = resolved("toy", *[x for knob, value in flags.items() for x in (f"--{knob}", value)])
    run_dir = launch.write(config)
    (run_dir / "queues").mkdir()
    ranks = Ranks(config)
    model, optimizers = train.build(config, CPU, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setenv("PYTHONPATH", str(fake_vllm(tmp_path / "fake")))
    engines = start_engines(config, as_loaded=False)
    try:
        register(run_dir, "engine0", "http://127.0.0.1:8985")
        sender = Sender(config, model, ranks, run_dir)
        sender.push(0, {})
        record = micro_record(model, [20, 20], version=0)
        one_step(model, optimizers, [record], 0, config)
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        trained = {name for name in before if "mlp.up" in name or "norm" in name}
        assert {n for n in before if not torch.equal(before[n], after[n])} == trained
        with torch.no_grad():
            # not even if the trainer's change
            model.get_input_embeddings().weight.mul_(2)
        sender.push(1, {})
        sender.wait()
        model.load_state_dict(after, strict=False)
        assert Guards(config, run_dir, ranks).measure(model, record, sender, 1)["mismatch"] < 1e-5
        sender.close()
        # its checkpoints are like any other's
        state = checkpoints.NEW_RUN | {"version": 1}
        checkpoints.save(config, run_dir, model, optimizers, state, ranks)
        newest = checkpoints.newest(run_dir)
        assert checkpoints.restore(newest, *train.build(config, CPU, 1))["version"] == 1
    finally:
        stop_engines(engines)


# ---- entropy_per_task


def test_entropy_per_task_by_hand():
    model = packed_model()
    record = micro_record(model, [10, 13, 8], version=6)
    record["task"] = np.array([1, 0, 1], np.int16)
    # tasks differ in entropy
    record["temperature"][:] = [0.3, 1.0, 0.3]
    positions, ids = layout(record["lengths"])
    with torch.no_grad():
        temperature = record["temperature"][ids]
        entropy = model.token_logprobs(record["tokens"], positions, temperature)[1].numpy()
    of_task = record["task"][ids]
    mean = [entropy[record["mask"] & (of_task == number)].mean() for number in (0, 1)]
    config = knobs(task="toy,countdown")
    optimizers = train.make_optimizers(model, config, CPU)
    metrics = one_step(model, optimizers, [record], 6, config)
    expected = {"toy": mean[0], "countdown": mean[1]}
    assert metrics["entropy_by_task"] == pytest.approx(expected, rel=1e-4)
    assert mean[0] > mean[1] + 0.01
    # 12 of the 22 sampled tokens are of countdown
    together = (10 * mean[0] + 12 * mean[1]) / 22
    assert metrics["entropy"] == pytest.approx(together, rel=1e-4)


def test_entropy_per_task_of_one_task_and_of_none_of_a_task():
    model = packed_model()
    record = micro_record(model, [10], version=6)
    record["task"] = np.array([0], np.int16)
    for task in ("toy", "toy,countdown"):
        config = knobs(task=task)
        optimizers = train.make_optimizers(model, config, CPU)
        metrics = one_step(model, optimizers, [record], 6, config)
        assert metrics["entropy_by_task"]["toy"] == pytest.approx(metrics["entropy"], rel=1e-5)
        assert metrics["entropy_by_task"].get("countdown", 0.0) == 0.0


# ---- curriculum


def test_curriculum_passes_over_what_is_too_easy_or_too_hard():
    # problem k of 11 is solved in k of 10 attempts, always
    sampler = actor.Sampler({"toy": list(range(11))}, {"toy": 1.0}, 0)
    drawn = []
    while sampler.drawn < 6 * 11:
        task, number = sampler.next()
        drawn.append(number)
        sampler.update(task, number, [0.5] * 10, [True] * number + [False] * (10 - number))
    counts = np.bincount(drawn, minlength=11)
    # 20 to 80%: in every one of six epochs; the others in every other one
    assert counts.tolist() == [3, 3, 6, 6, 6, 6, 6, 6, 6, 3, 3]
    share = sum(2 <= number <= 8 for number in drawn) / len(drawn)
    # of all problems 7 in 11 are
    assert share == pytest.approx(42 / 54)


def test_curriculum_goes_on_where_it_was():
    problems = {"toy": list(range(30)), "countdown": list(range(20))}
    shares = {"toy": 0.7, "countdown": 0.3}

    def draw(sampler, groups):
        drawn = []
        for _ in range(groups):
            task, number = sampler.next()
            drawn.append((task, number))
            sampler.update(task, number, [0.5] * 2, [number % 3 == 0, True])
        return drawn

    sampler = actor.Sampler(problems, shares, 3)
    draw(sampler, 60)
    saved = json.loads(json.dumps(sampler.state()))
    continued = actor.Sampler(problems, shares, 3, saved)
    assert draw(continued, 100) == draw(sampler, 100)


# ---- replay_by_success


def test_replay_by_success_draws_again_what_is_solved_now_and_then():
    sampler = actor.Sampler({"toy": list(range(40))}, {"toy": 1.0}, 0)

    def draw(sampler, groups):
        drawn = []
        for _ in range(groups):
            task, number = sampler.next()
            drawn.append(number)
            # problem 7 is solved in half of its attempts, 9 in one of ten, the others never
            rate = {7: 0.5, 9: 0.1}.get(number, 0.0)
            sampler.update(task, number, [0.5] * 10, np.arange(10) < 10 * rate)
        return drawn

    drawn = draw(sampler, 400)
    counts = np.bincount(drawn, minlength=40)
    # once a problem is known to be solved at times, every second one is drawn for that
    assert counts[7] > 2 * counts[9] > 2 * max(counts[i] for i in range(40) if i not in (7, 9))
    assert all(counts[i] >= 4 for i in range(40))
    saved = json.loads(json.dumps(sampler.state()))
    continued = actor.Sampler({"toy": list(range(40))}, {"toy": 1.0}, 0, saved)
    assert draw(continued, 100) == draw(sampler, 100)


# ---- rloo_by_length


def test_rloo_by_length_by_hand(tmp_path):
    # answers of 2, 4 and 6 tokens, the mean is 4; leave-one-out advantages 1, -1/2, -1/2
    rollouts = Queue(tmp_path / "rollouts")
    samples = [make_sample(2 + n, reward=float(n == 2)) for n in (2, 4, 6)]
    rollouts.put(group_record(0, samples))
    rollouts.put(group_record(1, [], failed=3))
    config = knobs(run_id="abc", advantage="loo_length", attempts=3, batch_size=6)
    waiting = preprocess.GroupBuffer(config, rollouts, Ledger(0, []))
    waiting.receive()
    [group] = waiting.groups
    found = [sample["advantage"] for sample in group["samples"]]
    assert found == pytest.approx([1 * 4 / 2, -1 / 2, -1 / 2 * 4 / 6])


# ---- log_ratio_histogram


def test_log_ratio_histogram_by_hand():
    model = packed_model()
    record = micro_record(model, [10, 13], version=6, offset=0.55)
    # the second sequence's last three
    record["behavior_logprobs"][-3:] += 1.1
    found = metrics_of(model, record, 6)[1]["log_ratios"]
    # bins of 0.1 from -1: 0.55 is in number 15, -0.55 in number 4; prompts are in none
    assert found == [3.0 if k == 4 else 14.0 if k == 15 else 0.0 for k in range(20)]


# ---- two_epochs


def test_two_epochs_are_two_optimizer_steps():
    config = knobs(loss="ppo", lr=0.01)
    record = micro_record(packed_model(), [20, 20], version=0)
    ranks = SimpleNamespace(device=CPU, world=1)
    after = []
    for epochs in (1, 2):
        model = packed_model()
        optimizers = train.make_optimizers(model, config, CPU)
        one_step(model, optimizers, [record], 0, config)
        if epochs == 2:
            train.epoch(model, optimizers, [record], 0, config, ranks)
        steps = {int(state["step"]) for state in optimizers[0].state.values()}
        assert steps == {epochs}
        after.append(model.lm_head.weight.detach().clone())
    assert not torch.equal(*after)


def test_two_epochs_come_out_alike_in_replay(tmp_path, base_model, capsys):
    alone = dict(master_addr="127.0.0.1", engines=1, trainer_threads=1)
    run_dir = write_run(tmp_path, "r", base_model, keep_steps=4, loss="ppo", **alone)
    run_trainer(run_dir)
    assert replay.main([str(run_dir), "--step", "6"]) == []
    assert "are the same, bit for bit" in capsys.readouterr().out
