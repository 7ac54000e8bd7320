"""Checks of the edits in this folder.

tests/test_edits.py applies each edit to a copy of the repository and runs
`pytest tests/edits/checks.py -k NAME` there. Without the edits these tests fail. The trainer is
real, and so are its processes; engines are FAKE.
"""

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web
from test_actor import choice, good, one_group
from test_preprocess import run_stage
from test_preprocess import write_run as write_stage
from test_ranks import resume, run_trainer, same, write_run
from test_samples import group_record, make_sample
from test_tasks import prompter
from test_train import CPU, knobs, metrics_of, micro_record, one_step, packed_model
from test_weights import sender_to, update

import actor
import preprocess
import train
from conftest import resolved
from fake_engine import fake_vllm
from plumbing import checkpoints, rundir
from plumbing.guards import Guards
from plumbing.ledger import Ledger
from plumbing.patience import Patience
from plumbing.queues import Queue, publish_json
from plumbing.ranks import Ranks
from plumbing.samples import Transcript, join, layout, split
from plumbing.supervise import stop
from tools import replay
from tools.evaluate import start_engines


def trained(model, *batches, version=6, **changed):
    """Make a step of a model with new optimizers; return (metrics, optimizers)."""
    config = knobs(**changed)
    optimizers = train.make_optimizers(model, config, CPU)
    return one_step(model, optimizers, batches, version, config), optimizers


def copies(model):
    """Return {name: copy} of a model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def drawn_by(sampler, groups, success):
    """Draw so many groups; return the numbers of their problems.

    success(number): the success of each attempt at a problem.
    """
    drawn = []
    for _ in range(groups):
        task, number = sampler.next()
        drawn.append(number)
        sampler.update(task, number, [0.5] * 10, success(number))
    return drawn


def counts_of(n, groups, success):
    """Return how often a sampler draws each of n problems in so many groups.

    Also assert that a sampler continues from its saved state as if it had not been stopped.
    """
    again = functools.partial(actor.Sampler, {"toy": list(range(n))}, {"toy": 1.0}, 0)
    sampler = again()
    drawn = drawn_by(sampler, groups, success)
    continued = again(json.loads(json.dumps(sampler.state())))
    assert drawn_by(continued, 100, success) == drawn_by(sampler, 100, success)
    return np.bincount(drawn, minlength=n).tolist()


# ---- cispo_by_position


def test_cispo_by_position_knows_the_tenth_of_every_token():
    # Five sampled tokens with their logprobs and versions
    five = [3] * 5, [-1.0] * 5, [0] * 5
    transcript = Transcript([7, 7])
    transcript.append(*five)
    # Tokens of the environment do not count
    transcript.append([8, 8, 8])
    transcript.append(*five)
    sample = transcript.fields()
    assert sample["tenth"][sample["mask"]].tolist() == list(range(10))
    short = Transcript([7])
    short.append([3] * 3, [-1.0] * 3, [0] * 3)
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
    metrics, _ = trained(model, record, record, loss="cispo")
    assert metrics["above_2"] == pytest.approx([1] * 5 + [0, 0, 0, 1 / 3, 0])
    # tenth 8 ends at 5 - 2.4 = 2.6, the first half of a completion nowhere below 3.8
    assert metrics["clip_frac"] == pytest.approx(1 / 30)


# ---- temperature_per_member


def test_temperature_per_member_is_sampled_and_trained_at(tmp_path, base_model):
    policy, _ = train.build(knobs(model=str(base_model), dtype="float32"), CPU, 1)
    model = policy.model

    def answer(n, body):
        """Return the answer of an engine that has sampled `ab` and the end token."""
        ids = np.array([*body["token_ids"], 29, 30, 1])
        temperature = body["sampling_params"]["temperature"]
        with torch.no_grad():
            logprobs, _ = policy.logprobs(ids, np.arange(len(ids)), temperature)
        return choice([29, 30, 1], [("5", 0, 3)], logprobs[-3:].tolist())

    _, record, _, _ = one_group(tmp_path, base_model, answer, attempts=5)
    assert record["temperature"].tolist() == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.2])
    record["advantage"] = np.zeros(len(record["tokens"]), np.float32)
    assert metrics_of(model, record, 5)[1]["mismatch"] < 1e-5
    record["temperature"][:] = 1.0
    assert metrics_of(model, record, 5)[1]["mismatch"] > 1e-3


# ---- tree_of_attempts


def test_tree_of_attempts_goes_on_from_the_middle_of_another_attempt(tmp_path):
    """Guesses 1, 2, 3, ... in the order in which they are sampled; the number is never among them.

    Each attempt has 13 turns, so a branch has six turns of another attempt, and seven of its own.
    """
    tokenizer = prompter(tmp_path / "model").tokenizer

    def answer(n, body):
        tokens = tokenizer.convert_tokens_to_ids([*str(n), "<eos>"])
        return choice(tokens, [("4", 0, len(tokens))])

    problem = {"prompt": "Guess.\n", "number": 1000}
    knobs = dict(task="guess", max_new_tokens=90, max_model_len=500, row_tokens=4096)
    _, record, calls, _ = one_group(
        tmp_path, tmp_path / "model", answer, problem=problem, attempts=5, **knobs
    )
    assert len(calls) == 3 * 13 + 2 * 7
    sampled = [tokenizer.decode(x["tokens"][x["mask"]].tolist()) for x in split(record)]
    turns = [text.split("<eos>")[:-1] for text in sampled]
    assert list(map(len, turns)) == [13] * 5
    for trunk, branch in zip(turns[:2], turns[3:], strict=True):
        assert branch[:6] == trunk[:6] and not set(branch[6:]) & set(trunk)
    assert len({guess for guesses in turns for guess in guesses}) == len(calls)
    assert record["sample_id"].tolist() == [35, 36, 37, 38, 39]


# ---- muon


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    model = packed_model()
    # a rank of 32 needs some tokens
    record = micro_record(model, [60, 60], version=0)
    record["advantage"][:] = np.repeat([1.0, -1.0], 60)
    before = copies(model)
    _, optimizers = trained(model, record, version=0, lr=0.01)
    assert [type(x).__name__ for x in optimizers] == ["AdamW", "Muon"]
    for name, after in copies(model).items():
        moved = after - before[name]
        if moved.dim() > 1 and "layers" in name:
            # orthogonal up to what five iterations leave, times 0.2 sqrt(longer side)
            scale = 0.01 * 0.2 * math.sqrt(max(moved.shape))
            singular = torch.linalg.svdvals(moved) / scale
            assert 0.6 < singular.median() < 1.3 and singular.max() < 1.3, name
        else:
            # AdamW's first step is the learning rate, whatever the gradient is
            assert moved.abs().max() == pytest.approx(0.01, rel=1e-2), name


def test_muon_continues_from_a_checkpoint(tmp_path, base_model):
    run_dir = write_run(tmp_path, "one", base_model)
    weights, _ = run_trainer(run_dir)
    halfway = run_dir / "checkpoints" / "step_000003"
    again, _ = resume(tmp_path, "again", base_model, halfway)
    assert same(again, weights)


# ---- subset_of_parameters


def test_subset_of_parameters_alone_is_trained_and_sent(tmp_path, base_model, monkeypatch):
    """A FAKE engine has the new values of the subset, and keeps the others as it loaded them."""
    words = f"toy --run t --out {tmp_path} --port 8985 --model {base_model}"
    config = resolved(*words.split(), "--trained", r"\.mlp\.up|norm")
    run_dir = rundir.write(config)
    ranks = Ranks(config)
    policy, optimizers = train.build(config, CPU, 1)
    model = policy.model
    before = copies(model)
    monkeypatch.setenv("PYTHONPATH", str(fake_vllm(tmp_path / "fake")))
    engines = start_engines(config, as_loaded=False)
    try:
        sender = sender_to(config, model)
        update(sender, 0)
        record = micro_record(model, [20, 20], version=0)
        one_step(model, optimizers, [record], 0, config)
        after = copies(model)
        wanted = {name for name in before if "mlp.up" in name or "norm" in name}
        assert {n for n in before if not torch.equal(before[n], after[n])} == wanted
        with torch.no_grad():
            # Other parameters are not sent, even if they change in the trainer
            model.get_input_embeddings().weight.mul_(2)
        update(sender, 1)
        model.load_state_dict(after, strict=False)
        assert Guards(config, run_dir, ranks).measure(policy, record, sender, 1)["mismatch"] < 1e-5
        sender.close()
        # Checkpoints are complete
        state = checkpoints.NEW_RUN | {"version": 1}
        saver = checkpoints.Saver(config, run_dir, model, optimizers, ranks, checkpoints.NEW_RUN)
        saver.save(state)
        saver.finish()
        newest = checkpoints.newest(run_dir)
        assert checkpoints.restore(newest, policy.model, optimizers)["version"] == 1
    finally:
        stop(engines, 0)


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
        entropy = train.token_logprobs(model, record["tokens"], positions, temperature)[1].numpy()
    task_numbers = record["task"][ids]
    mean = [entropy[record["mask"] & (task_numbers == number)].mean() for number in (0, 1)]
    metrics, _ = trained(model, record, task="toy,tail")
    expected = {"toy": mean[0], "tail": mean[1]}
    assert metrics["entropy_by_task"] == pytest.approx(expected, rel=1e-4)
    assert mean[0] > mean[1] + 0.01
    # 12 of the 22 sampled tokens are of tail
    together = (10 * mean[0] + 12 * mean[1]) / 22
    assert metrics["entropy"] == pytest.approx(together, rel=1e-4)


def test_entropy_per_task_of_one_task_and_of_an_absent_one():
    model = packed_model()
    record = micro_record(model, [10], version=6)
    record["task"] = np.array([0], np.int16)
    for task, others in [("toy", {}), ("toy,tail", {"tail": 0.0})]:
        metrics, _ = trained(model, record, task=task)
        own = pytest.approx(metrics["entropy"], rel=1e-5)
        assert metrics["entropy_by_task"] == {"toy": own} | others


# ---- curriculum


def test_curriculum_passes_over_problems_that_are_too_easy_or_too_hard():
    # problem k of 11 is solved in k of 10 attempts, always
    counts = counts_of(11, 7 * 6 + 4 * 3, lambda number: np.arange(10) < number)
    # 20 to 80%: in every one of six epochs; the others in every other one
    assert counts == [3, 3, 6, 6, 6, 6, 6, 6, 6, 3, 3]


# ---- replay_by_success


def test_replay_by_success_draws_again_problems_that_are_solved_at_times():
    # problem 7 is solved in half of its attempts, 9 in one of ten, the others never
    solved = {7: 5, 9: 1}
    counts = counts_of(40, 400, lambda number: np.arange(10) < solved.get(number, 0))
    # once a problem is known to be solved at times, every second one is drawn for that
    assert counts[7] > 2 * counts[9] > 2 * max(counts[i] for i in range(40) if i not in (7, 9))
    assert min(counts) >= 4


# ---- rloo_by_length


def test_rloo_by_length_by_hand(tmp_path):
    # answers of 2, 4 and 6 tokens, the mean is 4; leave-one-out advantages 1, -1/2, -1/2
    rollouts = Queue(tmp_path / "rollouts")
    samples = [make_sample(2 + n, reward=float(n == 2)) for n in (2, 4, 6)]
    rollouts.put(group_record(0, samples))
    rollouts.put(group_record(1, [], failed=3))
    config = knobs(run_id="abc", advantage="loo_length", attempts=3, batch_size=6)
    patience = Patience(config, tmp_path)
    waiting = preprocess.GroupBuffer(config, rollouts, Ledger(0, []), patience)
    waiting.receive()
    [group] = waiting.groups
    found = [sample["advantage"][-1] for sample in group["samples"]]
    assert found == pytest.approx([1 * 4 / 2, -1 / 2, -1 / 2 * 4 / 6])


# ---- dpo_pairs


def test_dpo_pairs_by_hand():
    """Samples 0 and 1 are attempts at one problem, and so are 2 and 3, with equal rewards."""
    model = packed_model()
    record = micro_record(model, [10, 13, 8, 9], version=6, offset=0.1)
    record["sample_id"] = np.arange(4)
    record["reward"][:] = [1.0, 0.0, 0.5, 0.5]
    of_first = record["mask"] & (np.arange(40) < 10)
    # sum of log w: 7 * 0.3 of the better one, 10 * 0.1 of the worse one
    record["behavior_logprobs"] -= 0.2 * of_first
    plain, _ = metrics_of(model, record, 6, attempts=2)
    loss, _ = metrics_of(model, record, 6, attempts=2, dpo_coef=3.0, dpo_beta=0.5)
    expected = 3.0 * math.log(1 + math.exp(-0.5 * (2.1 - 1.0))) / 2
    assert (loss - plain).item() == pytest.approx(expected, rel=1e-3)
    # descending makes the better one likelier than the worse one
    (loss - plain).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * (p.grad if p.grad is not None else 0)
    positions, ids = layout(record["lengths"])
    logprobs = train.Policy(model, knobs()).logprobs(record["tokens"], positions, 1.0)[0]
    log_w = (logprobs.detach().numpy() - record["behavior_logprobs"]) * record["mask"]
    better, worse = np.bincount(ids, log_w)[:2]
    assert better - worse > 2.1 - 1.0


# ---- shuffled_window


def test_shuffled_window_trains_every_group_once_and_not_in_order(tmp_path):
    """A real stage with `--late hold --max_lag 11`: all twelve groups wait when it begins."""
    held = dict(late="hold", max_lag=11, shuffled=True, steps=12, batch_size=2, attempts=2)
    run_dir = write_stage(tmp_path, **held)
    rollouts = Queue(run_dir / "queues" / "rollouts")
    for draw in range(12):
        rollouts.put(group_record(draw, [make_sample(4, reward=1.0), make_sample(5)]))
    publish_json(run_dir / "queues" / "version.json", version=12)
    assert run_stage(run_dir).returncode == 0
    steps = Queue(run_dir / "queues" / "batches" / "rank_0")
    draws = [int(draw) for _ in range(12) for draw in steps.get()[1]["problems"]]
    assert sorted(draws) == list(range(12)) != draws


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
        _, optimizers = trained(model, record, version=0, loss="ppo", lr=0.01)
        if epochs == 2:
            train.epoch(train.Policy(model, config), optimizers, [record], 0, config, ranks)
        assert {int(state["step"]) for state in optimizers[0].state.values()} == {epochs}
        after.append(copies(model)["model.embed_tokens.weight"])
    assert not torch.equal(*after)


def test_two_epochs_come_out_alike_in_replay(tmp_path, base_model, capsys):
    alone = dict(master_addr="127.0.0.1", engines=1, trainer_threads=1)
    run_dir = write_run(tmp_path, "r", base_model, keep_steps=4, loss="ppo", **alone)
    run_trainer(run_dir)
    assert replay.main([str(run_dir), "--step", "6"]) == []
    assert "are the same, bit for bit" in capsys.readouterr().out


# ---- self_teacher


def test_self_teacher_scores_wrong_attempts_with_a_right_one_in_the_prompt(tmp_path, base_model):
    def answer(n, body):
        if "prompt_logprobs" in body["sampling_params"]:
            prompt = [-9.0] * (len(body["token_ids"]) - 4)
            return web.json_response({"prompt_logprobs": [*prompt, -0.25, -0.5, -1.5]})
        return good(n, body) if n == 2 else choice([30, 29, 1], [("5", 0, 3)])

    made, record, calls, _ = one_group(tmp_path, base_model, answer, self_teacher=0.5)
    hint = made.prompter.start("ba=\n\nThis answer is correct:\nab")
    assert [call["token_ids"] for call in calls[4:]] == 3 * [hint + [30, 29, 1]]
    for sample in split(record):
        expected = [0, 0, 0] if sample["reward"] else [0.25, 0, -1]
        assert sample["self_teacher"].tolist() == [0, 0, 0, *expected]


def test_self_teacher_adds_to_each_advantage():
    model = packed_model()
    record = micro_record(model, [12], version=6)
    record["self_teacher"] = np.zeros(12, np.float32)
    before, _ = metrics_of(model, record, 6, self_teacher=0.5)
    sampled = np.flatnonzero(record["mask"])
    record["self_teacher"][sampled] = np.linspace(-1, 1, len(sampled))
    after, _ = metrics_of(model, record, 6, self_teacher=0.5)
    logprobs = record["behavior_logprobs"][sampled]
    expected = -(0.5 * record["self_teacher"][sampled] * logprobs).sum()
    assert (after - before).item() == pytest.approx(expected, abs=1e-4)


# ---- tokens_trained


@pytest.mark.parametrize(
    "rule,first,second",
    [
        # The sampled tokens that are in the loss, of sequences of 10 and 13 tokens
        ("recent 1", range(7, 10), range(9, 13)),
        ("old 1", range(3, 7), range(3, 9)),
        ("end 4", range(6, 10), range(9, 13)),
        ("beginning 4", range(3, 6), range(3, 9)),
    ],
)
def test_tokens_trained_are_those_of_the_rule_and_no_others(rule, first, second):
    model = packed_model()
    record = micro_record(model, [10, 13], version=6, offset=0.1)
    # The lag at version 7 is 2 at first, and 1 later
    record["versions"][[*range(3, 7), *range(13, 19)]] = 5
    expected = dict(record, mask=np.zeros_like(record["mask"]))
    expected["mask"][[*first, *(10 + i for i in second)]] = True
    loss, metrics = metrics_of(model, record, 7, tokens_trained=rule)
    expected_loss, expected_metrics = metrics_of(model, expected, 7)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert metrics["sampled_tokens"] == len(first) + len(second)
    assert metrics["late"] == 17 - metrics["sampled_tokens"]
    assert metrics["ess"] == pytest.approx(expected_metrics["ess"], rel=1e-5)
