"""The loss and the logprobs, against values worked by hand and against separate sequences."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from train import ess, learning_rate, policy_loss, token_logprobs


def tiny_model(vocab=50):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, attn_implementation="sdpa"))


def test_reinforce_by_hand_at_below_and_above_the_clamp():
    # w = 0.5, 1, 5 (= c), 20 (clamped to 5); loss = -min(w, 5) A log pi; gradient with respect to log pi = -min(w, 5) A
    logpi = torch.tensor([-1.0, -2.0, -0.5, -0.25], requires_grad=True)
    w, adv = torch.tensor([0.5, 1.0, 5.0, 20.0]), torch.tensor([2.0, -1.0, 1.0, 3.0])
    loss = policy_loss("reinforce", logpi, logpi.detach() - w.log(), adv, torch.zeros(4), SimpleNamespace(clamp=5.0))
    assert loss.tolist() == pytest.approx([0.5 * 2 * 1, -1 * 1 * 2, 5 * 1 * 0.5, 5 * 3 * 0.25])
    loss.sum().backward()
    assert logpi.grad.tolist() == pytest.approx([-1.0, 1.0, -5.0, -15.0])
    with pytest.raises(ValueError, match="unknown loss"):
        policy_loss("nonsense", logpi, logpi, adv, None, None)


def test_ess_by_hand():
    assert ess(torch.ones(10)) == pytest.approx(1.0)
    assert ess(torch.tensor([1.0, 3.0])) == pytest.approx(16 / 20)
    assert ess(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_learning_rate():
    c = SimpleNamespace(lr=1.0, warmup_steps=4, lr_schedule="constant", steps=10)
    assert [learning_rate(c, s) for s in (0, 1, 3, 9)] == pytest.approx([0.25, 0.5, 1.0, 1.0])
    c.lr_schedule = "linear"
    assert learning_rate(c, 9) == pytest.approx(1 - 0.9 * 0.9)


@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_packed_row_equals_the_separate_sequences(chunk, monkeypatch):
    monkeypatch.setattr(train, "HEAD_CHUNK", chunk)
    model, rng = tiny_model(), np.random.default_rng(0)
    sequences = [torch.from_numpy(rng.integers(0, 50, n)) for n in (5, 17, 2, 30)]
    weights = [torch.randn(len(s)) for s in sequences]
    for w in weights:
        w[0] = 0  # a sequence's first token has no context

    def gradient(rows):
        model.zero_grad()
        out = []
        for row in rows:
            ids, w = torch.cat([sequences[i] for i in row]), torch.cat([weights[i] for i in row])
            logprobs, entropy = token_logprobs(model, ids, torch.cat([torch.arange(len(sequences[i])) for i in row]), 0.7)
            ((logprobs + 0.1 * entropy) * w).sum().backward()
            out += [x for i, x in zip(row, logprobs.split([len(sequences[i]) for i in row]))]
        return out, torch.cat([p.grad.flatten() for p in model.parameters()])

    packed, g = gradient([[0, 1, 2, 3]])
    separate, h = gradient([[0], [1], [2], [3]])
    for a, b in zip(packed, separate):
        assert torch.allclose(a[1:], b[1:], atol=2e-6)
    assert (g - h).norm() / h.norm() < 1e-5
    # and the definition itself: log softmax of the logits / temperature, taken at the next token; its entropy
    logits = model(sequences[1][None]).logits[0] / 0.7
    reference = torch.log_softmax(logits, -1)[:-1].gather(1, sequences[1][1:, None])[:, 0]
    assert torch.allclose(packed[1][1:], reference, atol=2e-6)


def record(model, lengths, version, temperature=1.0, offset=0.0):
    """A micro-batch of random sequences whose engine logprobs are the model's own, plus `offset`."""
    from preprocess import row_record
    rng, samples = np.random.default_rng(1), []
    for i, n in enumerate(lengths):
        ids = rng.integers(0, 50, n)
        with torch.no_grad():
            logprobs = token_logprobs(model, torch.from_numpy(ids), torch.arange(n), temperature)[0].numpy() - offset
        mask = np.arange(n) >= 3
        samples.append(dict(tokens=ids, mask=mask, logprobs=logprobs * mask, versions=np.where(mask, version, -1), advantage=1.0 - i, reward=float(i), success=i > 0))
    return row_record(samples)


def test_micro_batch_sums_by_hand():
    import types
    model = tiny_model()
    model.token_logprobs = types.MethodType(token_logprobs, model)
    config = SimpleNamespace(temperature=1.0, loss="reinforce", clamp=1.5)
    r = record(model, [10, 13], version=4, offset=math.log(2))  # every ratio is 2
    loss, sums, lag_max = train.micro_batch(model, r, 6, config, torch.device("cpu"))
    s = dict(zip(train.SUMS, sums.tolist()))
    assert s["tokens"] == 17 and s["row_tokens"] == 23 and s["samples"] == 2 and s["reward"] == 1 and s["success"] == 1
    assert s["w"] == pytest.approx(34, rel=1e-4) and s["w2"] == pytest.approx(68, rel=1e-4) and s["clipped"] == 17
    assert s["kl"] == pytest.approx(17 * (2 - 1 - math.log(2)), rel=1e-4)
    assert s["lag"] == 34 and lag_max == 2 and s["mismatch_n"] == 0 and s["loss"] == pytest.approx(loss.item())
    s = dict(zip(train.SUMS, train.micro_batch(model, record(model, [10, 13], version=6), 6, config, torch.device("cpu"))[1].tolist()))
    assert s["mismatch_n"] == 17 and s["mismatch"] < 1e-4 and s["lag"] == 0 and s["clipped"] == 0


def test_an_empty_micro_batch_contributes_nothing():
    import types
    from preprocess import row_record
    model = tiny_model()
    model.token_logprobs = types.MethodType(token_logprobs, model)
    loss, sums, _ = train.micro_batch(model, row_record([]), 3, SimpleNamespace(temperature=1.0, loss="reinforce", clamp=5.0), torch.device("cpu"))
    loss.backward()
    assert sums.abs().sum() == 0
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.parameters())
