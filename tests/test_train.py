"""The loss, logprobs, metrics and guards of the trainer, against values worked by hand and against
separate sequences.

The model is tiny and random. The engine that measures the mismatch is FAKE (Answers).
"""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from config import LOSSES, Config, check
from conftest import ROOT
from plumbing import checkpoints, secret
from plumbing.guards import Guards
from plumbing.metrics import (
    LAGS,
    LENGTHS,
    Sums,
    buckets_of,
    lag_buckets,
    length_p90,
    lengths_table,
)
from plumbing.model import Packing
from plumbing.queues import publish_json
from plumbing.samples import filler, join, layout
from train import ess, learning_rate, policy_loss, token_logprobs

CPU = torch.device("cpu")


def tiny_model(vocab=50):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=vocab,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def packed_model():
    """The tiny model with attention for packed rows, as the trainer has it."""
    model = tiny_model()
    model.set_attn_implementation("packed")
    return model


def micro_batch(model, record, version, config):
    """Call train.micro_batch with the policy of this model."""
    return train.micro_batch(train.Policy(model, config), record, version, config, CPU)


@pytest.fixture()
def model():
    return packed_model()


def knobs(**changed):
    """A Config with its loss's own bounds filled in."""
    return check(Config(**dict(run="tiny", max_new_tokens=8, max_model_len=16) | changed))


# ---- the loss, token by token


def loss_of(kind, w, advantages, logpi=None, ids=None, **changed):
    """Return (loss, gradient by log pi, clipped), each [T], of tokens with importance weights w."""
    logpi = torch.tensor(logpi or [-1.0] * len(w), requires_grad=True)
    behavior = logpi.detach() - torch.tensor(w).log()
    ids = torch.tensor(ids or [0] * len(w))
    config = knobs(loss=kind, **changed)
    loss, clipped = policy_loss(kind, logpi, behavior, torch.tensor(advantages), ids, config)
    loss.sum().backward()
    return loss.tolist(), logpi.grad.tolist(), clipped.tolist()


def test_reinforce_by_hand_at_below_and_above_the_bound():
    # The weights w are 0.5, 1, 5 (the bound) and 20 (cut to 5). The loss is -min(w, 5) A log pi and
    # its gradient -min(w, 5) A.
    advantages, logpi = [2.0, -1.0, 1.0, 3.0], [-1.0, -2.0, -0.5, -0.25]
    loss, grad, clipped = loss_of("reinforce", [0.5, 1.0, 5.0, 20.0], advantages, logpi)
    assert loss == pytest.approx([0.5 * 2 * 1, -1 * 1 * 2, 5 * 1 * 0.5, 5 * 3 * 0.25])
    assert grad == pytest.approx([-1.0, 1.0, -5.0, -15.0])
    assert clipped == [False, False, False, True]
    assert loss_of("reinforce", [20.0], [3.0], clip_high=7.0)[1] == pytest.approx([-21.0])


def test_ppo_by_hand():
    # Inside the range loss and gradient are -wA. Outside, the gradient is 0 only where the clipped
    # objective is the smaller one.
    loss, grad, clipped = loss_of("ppo", [1.1, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx([-1.1, -1.2, 1.5, -0.5, 0.8])
    assert grad == pytest.approx([-1.1, 0.0, 1.5, -0.5, 0.0])
    assert clipped == [False, True, True, True, True]


def test_cispo_by_hand():
    # The weight is cut to [low, high]. Every token keeps its gradient, -clip(w) A.
    w, advantages = [0.1, 0.5, 5.0, 20.0, 20.0], [1.0, -2.0, 1.0, 3.0, -1.0]
    logpi = [-1.0, -2.0, -0.5, -0.25, -1.0]
    loss, grad, clipped = loss_of("cispo", w, advantages, logpi, clip_low=0.2)
    assert loss == pytest.approx([0.2, -0.5 * 2 * 2, 5 * 0.5, 5 * 3 * 0.25, -5.0])
    assert grad == pytest.approx([-0.2, 1.0, -5.0, -15.0, 5.0])
    assert clipped == [True, False, False, True, True]
    # By default cispo has no lower bound.
    assert loss_of("cispo", [0.1], [1.0])[1:] == (pytest.approx([-0.1]), [False])


def test_gspo_by_hand():
    # Sequence 0 has ratios 2 and 0.5, with the geometric mean s = 1: a token has the loss -1. Its
    # gradient is -s A, as both tokens of the sequence share s. Sequence 1 has ratios 4 and 4 with
    # A > 0: they are cut to 1.0004 and have no gradient. Token 2 was not sampled.
    sampled = [0, 1, 3, 4]
    w, advantages = [2.0, 0.5, 100.0, 4.0, 4.0], [1.0, 1.0, 9.0, 2.0, 2.0]
    loss, grad, clipped = loss_of("gspo", w, advantages, ids=[0, 0, -1, 1, 1])
    assert [loss[i] for i in sampled] == pytest.approx([-1.0, -1.0, -2.0008, -2.0008])
    assert [grad[i] for i in sampled] == pytest.approx([-1.0, -1.0, 0.0, 0.0])
    assert [clipped[i] for i in sampled] == [False, False, True, True]
    # Ratios above the range are not cut if A < 0. Here s = 4: a token has the loss -4 * -1 = 4 and
    # the gradient s |A| = 4.
    loss, grad, _ = loss_of("gspo", [4.0, 4.0], [-1.0, -1.0])
    assert loss == pytest.approx([4.0, 4.0])
    assert grad == pytest.approx([4.0, 4.0])


def test_ratios_of_whole_sequences_by_hand():
    # TIS and MIS of sequences: ratios 2 and 18 have the geometric mean 6.
    rows = dict(w=[2.0, 18.0, 1.0], advantages=[1.0, 1.0, 1.0], ids=[0, 0, 1], ratio="sequence")
    assert loss_of("reinforce", **rows)[1:] == (
        pytest.approx([-5.0, -5.0, -1.0]),
        [True, True, False],
    )
    assert loss_of("icepop", **rows)[1] == pytest.approx([0.0, 0.0, -1.0])
    # With --ratio sequence, ppo is gspo.
    rows["w"] = [1.1, 1.1, 0.5]
    bounds = dict(clip_low=0.9, clip_high=1.2)
    assert loss_of("ppo", **rows, **bounds) == loss_of("gspo", **rows, **bounds)
    assert loss_of("ppo", **rows, **bounds)[1] == pytest.approx([-1.1, -1.1, -0.5])


def test_icepop_by_hand():
    loss, grad, clipped = loss_of("icepop", [0.4, 0.5, 1.0, 5.0, 6.0], [1.0, 1.0, -2.0, 1.0, 1.0])
    assert loss == pytest.approx([0.0, 0.5, -2.0, 5.0, 0.0])
    assert grad == pytest.approx([0.0, -0.5, 2.0, -5.0, 0.0])
    assert clipped == [True, False, False, False, True]


def test_dppo_by_hand():
    # mu is pi / w. A token is left out if |pi - mu| > 0.2 and its gradient leads further away.
    # With pi = 0.6: w = 2 (mu 0.3) is far; w = 1.2 (mu 0.5) is near; w = 0.7 (mu 0.857) is far.
    # With pi = 0.001 even w = 10 is near.
    w, advantages = [2.0, 2.0, 1.2, 0.7, 0.7, 10.0], [1.0, -1.0, 1.0, -3.0, 1.0, 2.0]
    logpi = [math.log(0.6)] * 5 + [math.log(0.001)]
    loss, grad, clipped = loss_of("dppo", w, advantages, logpi)
    assert clipped == [True, False, False, True, False, False]
    assert grad == pytest.approx([0.0, 2.0, -1.2, 0.0, -0.7, -20.0])
    assert loss == pytest.approx([g * logp for g, logp in zip(grad, logpi)])
    # with a wider bound nothing is left out
    assert not any(loss_of("dppo", w, advantages, logpi, clip_high=0.4)[2])


def test_ratios_that_are_products_of_a_sequence_by_hand():
    # ratios 2 and 0.25 have the product 0.5, ratios 3 and 4 the product 12, which is cut to 5
    rows = dict(w=[2.0, 0.25, 3.0, 9.0, 4.0], advantages=[1.0] * 5, ids=[0, 0, 1, -1, 1])
    loss, grad, clipped = loss_of("reinforce", **rows, ratio="product")
    sampled = [0, 1, 2, 4]
    assert [grad[i] for i in sampled] == pytest.approx([-0.5, -0.5, -5.0, -5.0])
    assert [clipped[i] for i in sampled] == [False, False, True, True]
    grad = loss_of("icepop", **rows, ratio="product")[1]
    assert [grad[i] for i in sampled] == pytest.approx([-0.5, -0.5, 0.0, 0.0])
    # all tokens have the weight of their sequence, so that the terms of one sample add up to W A
    # grad log pi(sequence)
    assert knobs(ratio="product").normalizer == "samples"


def test_kl_by_hand():
    logpi = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    # The differences of the logprobs are 0, 1 and -2.
    kl = train.kl(logpi, torch.tensor([-1.0, -1.0, -3.0]))
    assert kl.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-2) + 1])
    kl.sum().backward()
    assert logpi.grad.tolist() == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-2)])


def test_ess_by_hand():
    # The weights are ten times 1; 1 and 3; 1, 0, 0, 0; none.
    assert [ess(10, 10, 10), ess(4, 10, 2), ess(1, 1, 4), ess(0, 0, 0)] == [1, 16 / 20, 1 / 4, 1]


def test_learning_rate_by_hand():
    c = SimpleNamespace(lr=1.0, warmup_steps=4, lr_schedule="constant", steps=10)
    rates = [learning_rate(c, step) for step in (0, 1, 3, 9)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0])
    c.lr_schedule = "linear"
    assert learning_rate(c, 9) == pytest.approx(1 - 0.9 * 0.9)


# ---- logprobs of packed rows


def vector(model):
    """All of the model's parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model):
    """All of the model's gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_packed_row_equals_the_separate_sequences(chunk, monkeypatch):
    """Each sequence has its own temperature."""
    monkeypatch.setattr(train, "head_chunk", lambda *_: chunk)
    model = tiny_model()
    lengths = [5, 17, 2, 30]
    positions = torch.from_numpy(layout(lengths)[0])
    ids = torch.randint(0, 50, positions.shape)
    temperature = torch.tensor([0.5, 0.7, 1.0, 2.0]).repeat_interleave(torch.tensor(lengths))
    # A sequence's first token has no context.
    weights = torch.randn(2, len(ids)) * (positions > 0)

    def run(rows):
        model.zero_grad()
        outputs = []
        for row in rows:
            inputs = (ids[row], positions[row], temperature[row])
            output = torch.stack(token_logprobs(model, *inputs, entropy_grad=True))
            (output * weights[:, row]).sum().backward()
            outputs.append(output.detach())
        return torch.cat(outputs, 1)[:, positions > 0], gradient(model)

    packed, packed_gradient = run([slice(0, 54)])
    sequences = [slice(0, 5), slice(5, 22), slice(22, 24), slice(24, 54)]
    separate, separate_gradient = run(sequences)
    assert torch.allclose(packed, separate, atol=2e-6)
    assert (packed_gradient - separate_gradient).norm() / separate_gradient.norm() < 1e-5
    # By definition, logprobs are the log softmax of logits / temperature at the next token.
    logits = model(ids[None, 5:22]).logits[0] / 0.7
    next_logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[6:22, None])[:, 0]
    assert torch.allclose(packed[0, 4:20], next_logprobs, atol=2e-6)
    # The head computes the wanted tokens alone.
    wanted = positions >= 3
    partial = token_logprobs(model, ids, positions, temperature, wanted.numpy())
    # The entropy costs the backward pass nothing unless it is in the loss.
    assert [x.requires_grad for x in partial] == [True, False]
    partial = torch.stack(partial)
    assert torch.allclose(partial[:, wanted], packed[:, wanted[positions > 0]], atol=2e-6)
    assert not partial[:, ~wanted].any()


def test_head_float32_equals_a_head_in_float32(model):
    ids = torch.arange(40)
    exact = token_logprobs(model, ids, ids, 1.0)[0]
    exact.sum().backward()
    exact_gradient = gradient(model)
    model.zero_grad()
    model.bfloat16()
    lengths = torch.tensor([40])
    packing = Packing(None, None, None, lengths, lengths)
    hidden = model.model(input_ids=ids[None], packing=packing).last_hidden_state[0, :-1]
    logits = hidden.float() @ model.lm_head.weight.float().T
    reference = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    rounded = token_logprobs(model, ids, ids, 1.0)[0]
    computed = train.Policy(model, knobs(head_float32=True)).logprobs(ids, ids, 1.0)[0]
    assert computed.dtype == rounded.dtype == torch.float32
    assert (computed[1:] - reference).abs().max() < 1e-5 < (rounded[1:] - reference).abs().max()
    assert (computed - exact).abs().max() < 0.1
    computed.sum().backward()
    assert (gradient(model) - exact_gradient).norm() < 0.02 * exact_gradient.norm()


MEMORY = """
import re, sys
import torch
sys.path[:0] = [".", "tests"]
import train
from test_train import tiny_model


def peak():
    # The peak of getrusage would begin with that of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024


def measure(tokens, chunk):
    train.head_chunk = lambda *_: chunk
    model.zero_grad()
    ids = torch.arange(tokens) % 251
    logprobs, entropy = train.token_logprobs(model, ids, ids * 0, 1.0, None, True)
    (logprobs + 0.1 * entropy).sum().backward()
    grad = model.lm_head.weight.grad
    print(peak() - start, grad.norm().item(), grad[5].norm().item())


model = tiny_model(32768)
chunk = train.head_chunk(32768, 32) // 32
start = peak()
measure(256, chunk)
measure(2048, chunk)
measure(256, 1 << 40)
"""


def test_the_output_head_never_holds_all_logits():
    """The chunked head needs under an eighth of the unchunked head's extra memory.

    The gradients are the same. The unchunked head's memory is measured at an eighth of the tokens,
    to which it is proportional. For speed, chunks have a 32nd of the usual size and the vocabulary
    is small.
    """
    # Freed memory goes back to the system at once, as it does with blocks of the usual size.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    chunked, lean, naive = (
        [float(value) for value in line.split()] for line in done.stdout.splitlines()
    )
    # The peak of a process never falls: this one has risen.
    assert lean[0] < naive[0], f"{lean[0] / 1e6:.0f} MB, unchunked {8 * naive[0] / 1e6:.0f} MB"
    assert chunked[1:] == pytest.approx(naive[1:], rel=1e-5)


# ---- a micro-batch


def micro_record(model, lengths, version, offset=0.0):
    """Return a micro-batch of random sequences, each with a prompt of three tokens.

    The engine's logprobs are the model's own minus `offset`. Rewards are 0, 1, ...; advantages are
    1, 0, -1, ...
    """
    rng = np.random.default_rng(1)
    samples = []
    for i, n in enumerate(lengths):
        tokens = rng.integers(0, 50, n)
        with torch.no_grad():
            logprobs = token_logprobs(model, tokens, np.arange(n), 1.0)[0].numpy() - offset
        mask = np.arange(n) >= 3
        sample = {
            "tokens": tokens,
            "mask": mask,
            "behavior_logprobs": logprobs * mask,
            "versions": np.where(mask, version, -1),
            "segment": np.zeros(n),
            "experts": np.zeros((n, 0)),
            "temperature": 1.0,
            "reward": i,
            "outcome": 0 if i else 1,
            "num_versions": 1,
            "part": np.where(mask, 0, -1),
            "reward_to_go": np.where(mask, i, 0.0),
            "advantage": np.where(mask, 1.0 - i, 0.0),
            "finished": True,
        }
        samples.append(sample)
    return join(samples)


def reduced(metrics):
    """Return {name: value} of the metrics of one micro-batch."""
    sums = Sums()
    sums.add(metrics)
    return sums.reduce()


def metrics_of(model, record, version, **changed):
    """Return (loss, {name: value}) of one micro-batch."""
    loss, metrics, _ = micro_batch(model, record, version, knobs(**changed))
    return loss, reduced(metrics)


def test_metrics_by_hand(model):
    # Every ratio is 2.
    record = micro_record(model, [10, 13], version=4, offset=math.log(2))
    loss, m = metrics_of(model, record, 6, clip_high=1.5)
    counts = dict(samples=2, tokens=23, sampled_tokens=17, late=0, lag_max=2)
    assert {name: m[name] for name in counts} == counts
    kl = 2 - 1 - math.log(2)
    means = dict(
        reward=0.5,
        success=0.5,
        signal=0.5,
        cut_off=0,
        lag_mean=2,
        clip_frac=1,
        ess=1,
        kl_behavior=kl,
        kl_ref=0,
        loss=loss.item() / 2,
        versions_2=0,
        versions_3=0,
    )
    assert {name: m[name] for name in means} == pytest.approx(means, rel=1e-4)
    assert m["mismatch"] is None


def test_attempts_that_overlong_mask_leaves_out_count_as_sampled(model):
    """Of the second attempt no token is trained; it has a turn and a length all the same."""
    record = micro_record(model, [10, 13], version=6)
    record["mask"][10:] = False
    m = metrics_of(model, record, 6)[1]
    assert (m["turns"], m["length_mean"], m["sampled_tokens"]) == (1, (7 + 10) / 2, 7)


def test_kl_to_the_behaviour_policy_by_hand(model):
    """Every sampled token adds coefficient * (log w)^2 with log w = 0.5, and the gradient of it."""
    record = micro_record(model, [10, 13], version=6, offset=0.5)
    plain = metrics_of(model, record, 6)[0]
    plain.backward()
    plain_gradient = gradient(model)
    model.zero_grad()
    loss = metrics_of(model, record, 6, kl_behavior_coef=0.3)[0]
    assert (loss - plain).item() == pytest.approx(17 * 0.3 * 0.25, rel=1e-3)
    loss.backward()
    added = gradient(model) - plain_gradient
    model.zero_grad()
    # 2 log w grad log pi
    _, _, logprobs = micro_batch(model, record, 6, knobs())
    positions, _ = layout(record["lengths"])
    logprobs = train.Policy(model, knobs()).logprobs(record["tokens"], positions, 1.0)[0]
    (0.3 * 2 * 0.5 * logprobs[torch.from_numpy(record["mask"])].sum()).backward()
    assert torch.allclose(added, gradient(model), atol=1e-4)


def test_metrics_by_lag_by_hand(model):
    # The first sample has seven tokens of lag 0 and log w = 0.5, the second one five of lag 2 and
    # five of lag 3 with log w = 1 and 2.
    record = micro_record(model, [10, 13], version=6)
    first, second = (record["mask"] & (np.arange(23) < 10)), (record["mask"] & (np.arange(23) > 9))
    late = second & (np.arange(23) >= 18)
    record["behavior_logprobs"] -= 0.5 * first + 1.0 * second + 1.0 * late
    record["versions"] -= 2 * second + late
    loss, m = metrics_of(model, record, 6, clip_high=3.0)
    assert list(m["by_lag"]) == ["0", "2-3"]
    zero, old = m["by_lag"].values()
    w = math.exp(0.5)
    expected = dict(tokens=7, kl=w - 1.5, log_ratio=0.5, ess=1.0, clip_frac=0.0)
    assert {name: zero[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    w1, w2 = math.e, math.e**2
    kl = ((w1 - 2) + (w2 - 3)) / 2
    ess_of_both = (5 * w1 + 5 * w2) ** 2 / (10 * (5 * w1**2 + 5 * w2**2))
    expected = dict(tokens=10, kl=kl, log_ratio=1.5, ess=ess_of_both, clip_frac=0.5)
    assert {name: old[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    total = 7 * zero["loss"] + 10 * old["loss"]
    assert total == pytest.approx(loss.item(), rel=1e-3)
    # weights of whole samples: exp(3.5) and exp(15)
    a, b = math.exp(3.5 - 15), 1.0
    assert m["ess_sample"] == pytest.approx((a + b) ** 2 / (2 * (a**2 + b**2)), rel=1e-2)
    # tokens that are masked do not count
    masked = metrics_of(model, record, 6, clip_high=3.0, max_lag=1, late="mask")[1]
    assert list(masked["by_lag"]) == ["0"]


def test_buckets_of_lags_and_lengths():
    assert buckets_of(LAGS) == "0 1 2-3 4-7 8-15 16-31 32-63 64-127 128+".split()
    lags = [0, 1, 2, 3, 4, 127, 128, 5000]
    assert lag_buckets(np.array(lags)).tolist() == [0, 1, 2, 2, 3, 7, 8, 8]
    assert buckets_of(LENGTHS)[:11] == "0 1 2 3 4 5 6 7 8-9 10 11-12".split()
    # of 10 samples nine have at most 5 tokens
    counts = np.zeros(len(LENGTHS))
    counts[[3, 5, 40]] = 4, 5, 1
    assert length_p90(counts) == 5
    counts[40] = 2
    assert length_p90(counts) == LENGTHS[41] - 1
    assert lengths_table(counts) == {"3": 4, "5": 5, buckets_of(LENGTHS)[40]: 2}


def test_lengths_are_those_of_answers_masked_ones_too(model):
    record = micro_record(model, [10, 13, 5], version=6)
    record["mask"][:10] = False
    m = metrics_of(model, record, 6)[1]
    assert m["length_mean"] == pytest.approx((7 + 10 + 2) / 3)
    assert (m["length_p90"], m["lengths"]) == (10, {"2": 1, "7": 1, "10": 1})


def test_mismatch_counts_tokens_of_the_current_version_alone(model):
    record = micro_record(model, [10, 13], version=6)
    loss, metrics, logprobs = micro_batch(model, record, 6, knobs())
    distance = (logprobs.numpy() - record["behavior_logprobs"])[record["mask"]]
    assert abs(distance).max() < 1e-5 and not logprobs.requires_grad
    m = reduced(metrics)
    assert m["mismatch"] < 1e-5
    assert (m["lag_mean"], m["clip_frac"]) == (0, 0)
    # A sequence of two versions may have been sampled with an older KV cache: it does not count.
    record["behavior_logprobs"][:10] -= record["mask"][:10]
    assert metrics_of(model, record, 6)[1]["mismatch"] == pytest.approx(7 / 17, rel=1e-4)
    record["num_versions"][0] = 2
    m = metrics_of(model, record, 6)[1]
    assert m["mismatch"] < 1e-5 and (m["versions_2"], m["versions_3"]) == (0.5, 0)


def test_late_tokens_are_masked_and_counted(model):
    record = micro_record(model, [10, 13], version=4)
    # At version 5 the first sequence has lag 4 and the second one lag 1.
    record["versions"][:10] = np.where(record["mask"][:10], 1, -1)
    kept, m = metrics_of(model, record, 5, max_lag=3, late="keep")
    assert (m["sampled_tokens"], m["late"]) == (17, 0)
    assert m["lag_mean"] == pytest.approx((7 * 4 + 10) / 17)
    # the oldest tokens of the two samples, one of which a newer version has ended
    record["versions"][22] = 5
    assert metrics_of(model, record, 5)[1]["lag_oldest"] == (4 + 1) / 2
    record["versions"][22] = 4
    masked, m = metrics_of(model, record, 5, max_lag=3, late="mask")
    assert (m["sampled_tokens"], m["late"], m["lag_max"], m["samples"]) == (10, 7, 1, 2)
    record["mask"][:10] = False
    assert masked.item() == pytest.approx(metrics_of(model, record, 5)[0].item())
    assert masked.item() != pytest.approx(kept.item())


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_were_not_sampled_contribute_nothing(model, loss):
    """Neither fillers nor prompt tokens contribute, even where their ratio would be infinite."""
    config = knobs(loss=loss, entropy_coef=0.1, kl_coef=0.1, normalizer="sequence")
    policy = train.Policy(model, config)
    policy.reference_logprobs = lambda ids, *_: torch.linspace(-9, 0, len(ids))
    value, metrics, _ = train.micro_batch(policy, join([filler()]), 3, config, CPU)
    value.backward()
    assert not any(part.any() for _, *parts in metrics.values() for part in parts)
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    record = micro_record(model, [10, 13], version=6, offset=0.1)
    results = []
    for logprob in (0.0, -200.0):
        record["behavior_logprobs"][~record["mask"]] = logprob
        model.zero_grad()
        value, metrics, _ = train.micro_batch(policy, record, 7, config, CPU)
        value.backward()
        results.append((gradient(model), reduced(metrics)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("teacher", ["another", ""])
def test_a_teacher_adds_to_each_tokens_advantage(model, teacher):
    record = micro_record(model, [12], version=6, offset=0.1)
    sampled = np.flatnonzero(record["mask"])
    log_ratio = np.linspace(-2, 1, 12).astype(np.float32)
    config = knobs(teacher=teacher, teacher_coef=0.5)
    policy = train.Policy(model, config)
    teacher_logprobs = torch.from_numpy(record["behavior_logprobs"] + log_ratio)
    policy.teacher_logprobs = lambda *_: teacher_logprobs
    loss, metrics, logprobs = train.micro_batch(policy, record, 6, config, CPU)
    advantage = record["advantage"][sampled] + 0.5 * log_ratio[sampled] * (teacher != "")
    w = np.exp(logprobs.numpy() - record["behavior_logprobs"])[sampled]
    assert loss.item() == pytest.approx(
        -(w * advantage * logprobs.numpy()[sampled]).sum(), rel=1e-4
    )
    expected_kl = -log_ratio[sampled].mean() if teacher else 0.0
    assert reduced(metrics)["kl_teacher"] == pytest.approx(expected_kl, abs=1e-5)


def test_normalizer_tokens_divides_the_loss_by_the_sampled_tokens(model):
    record = micro_record(model, [10, 13, 8], version=6)
    parameters, _ = parameters_after([record], normalizer="tokens")
    micro_batch(model, record, 6, knobs())[0].backward()
    assert torch.allclose(parameters - vector(model), -0.1 * gradient(model) / 22, atol=1e-7)


# ---- a step


def one_step(model, optimizers, batches, version, config):
    """Do a step as train.train does it, and return its metrics."""
    sums = Sums()
    for batch in batches:
        loss, metrics, _ = micro_batch(model, batch, version, config)
        loss.backward()
        sums.add(metrics)
    return train.optimizer_step(model, optimizers, sums, version, config)


def parameters_after(batches, **changed):
    """Return (parameters, metrics) of the tiny model after one step of plain gradient descent."""
    model = packed_model()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}], lr=1.0)
    config = knobs(lr=0.1, max_grad_norm=1e9, **changed)
    metrics = one_step(model, [optimizer], batches, 6, config)
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    return vector(model), metrics


@pytest.mark.parametrize("log_weights,expected", [((100, 1), 0.5), ((-60, -70), 0.5)])
def test_effective_samples_of_extreme_weights(model, log_weights, expected):
    record = micro_record(model, [10, 13], version=6)
    # seven and ten sampled tokens
    shift = np.repeat([log_weights[0] / 7, log_weights[1] / 10], [10, 13])
    record["behavior_logprobs"] -= (shift * record["mask"]).astype(np.float32)
    m = metrics_of(model, record, 6)[1]
    assert m["ess_sample"] == pytest.approx(expected, rel=1e-3)
    # a sample without a token in the loss does not count
    record["mask"][:10] = False
    assert metrics_of(model, record, 6)[1]["ess_sample"] == pytest.approx(1.0)


def test_learning_rate_by_ess_is_multiplied_by_its_root(model):
    """The weights of the two samples are exp(0.7) and exp(1.0)."""
    record = micro_record(model, [10, 13], version=6, offset=0.1)
    plain, _ = parameters_after([record])
    scaled, metrics = parameters_after([record], lr_by_ess=True)
    w = np.exp([0.7, 1.0])
    share = (w.sum() ** 2 / (2 * (w**2).sum())) ** 0.5
    assert metrics["ess_sample"] ** 0.5 == pytest.approx(share, rel=1e-3)
    assert metrics["lr"] == pytest.approx(0.1 * share, rel=1e-3)
    steps = (scaled - vector(model)).norm() / (plain - vector(model)).norm()
    assert steps.item() == pytest.approx(share, rel=1e-3)


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_are(model):
    record = micro_record(model, [10], version=6)
    record["advantage"][:] = 3e38
    record["behavior_logprobs"] -= 1
    parameters, metrics = parameters_after([record])
    assert not math.isfinite(metrics["grad_norm"])
    assert torch.equal(parameters, vector(model))


def test_the_state_counts_steps_that_were_skipped_too():
    record = {"drops": {"failed": {"3": 2}, "too_long": {"3": 1, "4": 1}}, "position": {"next": 9}}
    state = {"version": 5, "samples": 40, "dropped": 1, "skipped": 0}
    state = checkpoints.next_state(state, {"grad_norm": math.nan, "samples": 7}, record, 3.5)
    assert (state["version"], state["samples"], state["dropped"], state["skipped"]) == (6, 47, 5, 1)
    assert state["wall_s"] == 3.5
    state = checkpoints.next_state(state, {"grad_norm": 1.0, "samples": 8}, record, 4.0)
    assert (state["version"], state["skipped"], state["position"]) == (7, 1, {"next": 9})


def raise_error(error):
    raise error


def make_guards(run_dir="", rank=0, **changed):
    ranks = SimpleNamespace(rank=rank, fail=raise_error)
    return Guards(knobs(dtype="float32", **changed), run_dir, ranks)


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run():
    guards = make_guards()
    bad = {"grad_norm": math.nan}
    for metrics in (bad, bad, {"grad_norm": 1.0}, bad, bad):
        guards.check(1, metrics)
    with pytest.raises(RuntimeError, match="3 steps in a row had gradients that are not finite"):
        guards.check(2, bad)


# ---- the mismatch of engines and trainer, measured while both go on


class Answers:
    """A FAKE engine for requests.post: it answers with the model's own logprobs plus `offset`."""

    def __init__(self, model, version, offset=0.0):
        self.model = model
        self.version = version
        self.offset = offset
        self.requests = []

    def post(self, url, json, **options):
        self.requests.append((url, json))
        ids = torch.tensor(json["token_ids"])
        logp = torch.log_softmax(self.model(ids[None]).logits[0], -1)[:-1]
        logprobs = logp.gather(1, ids[1:, None])[:, 0] + self.offset
        choice = {"weight_versions": [{"version": str(self.version)}]}
        answer = {"choices": [choice], "prompt_logprobs": logprobs.tolist()}
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: answer)


def measure(policy, tmp_path, monkeypatch, engine, guards):
    (tmp_path / "queues").mkdir(exist_ok=True)
    secret.make_secret(tmp_path)
    publish_json(tmp_path / "queues" / "version.json", engines=["http://a", "http://b"])
    monkeypatch.setattr("plumbing.guards.requests.post", engine.post)
    record = micro_record(policy.model, [10, 13, 4, 30, 9, 5, 6, 7, 8], version=3)
    # Temperatures and the age of samples do not matter.
    record["temperature"][:] = 0.5
    # These two sequences begin as the one before them does.
    record["tokens"][10:16] = record["tokens"][:6]
    record["tokens"][23:26] = record["tokens"][10:13]
    sender = SimpleNamespace(wait=lambda: None)
    return guards.measure(policy, record, sender, 40)


def test_the_mismatch_is_measured_by_engines_in_turn(model, tmp_path, monkeypatch):
    guards = make_guards(tmp_path)
    engine = Answers(tiny_model(), 40, offset=5e-4)
    policy = train.Policy(model, knobs())
    measured = measure(policy, tmp_path, monkeypatch, engine, guards)
    # Eight sequences are measured, each without its first token.
    assert measured == {"mismatch": pytest.approx(5e-4, rel=0.05), "tokens": 76}
    assert [url[7] for url, _ in engine.requests] == ["b", "a"] * 4
    assert engine.requests[0][1]["sampling_params"] == dict(max_tokens=1, prompt_logprobs=0)
    other_rank = make_guards(tmp_path, rank=1)
    assert measure(policy, tmp_path, monkeypatch, engine, other_rank) == {}


def test_another_policy_in_the_engines_ends_the_run(model, tmp_path, monkeypatch):
    engine = Answers(tiny_model(), 40, offset=2e-3)
    complaint = "of qwen2 is 2.0e-03 nats at version 40, the limit is 0.001"
    with pytest.raises(RuntimeError, match=complaint):
        measure(train.Policy(model, knobs()), tmp_path, monkeypatch, engine, make_guards(tmp_path))


def test_mismatch_that_cannot_be_measured_three_times_ends_the_run(
    model, tmp_path, monkeypatch, capsys
):
    guards = make_guards(tmp_path)
    stale_engine = Answers(tiny_model(), 39)
    message = "mismatch of version 40 was not measured: the engine has version 39"
    # One measurement that succeeds starts the count again.
    for engine in [stale_engine] * 2 + [Answers(tiny_model(), 40)] + [stale_engine] * 2:
        measured = measure(train.Policy(model, knobs()), tmp_path, monkeypatch, engine, guards)
        assert (measured == {}) == (engine is stale_engine)
    assert capsys.readouterr().out.count(message) == 4
    complaint = "3 times in a row the mismatch could not be measured, last at version 40"
    with pytest.raises(RuntimeError, match=complaint):
        measure(train.Policy(model, knobs()), tmp_path, monkeypatch, stale_engine, guards)


def test_mismatch_is_due_every_20_updates():
    pipeline = make_guards()
    assert [v for v in range(1, 70) if pipeline.is_due(v)] == [1, 21, 41, 61]
    # Here an update comes every 8 steps.
    conventional = make_guards(conventional_g=8)
    assert [v for v in range(1, 330) if conventional.is_due(v)] == [8, 168, 328]
