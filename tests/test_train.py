"""The loss and the logprobs, against values worked by hand and against separate sequences."""
import math
import subprocess
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from config import Config
from conftest import ROOT
from train import ess, learning_rate, policy_loss, token_logprobs


def tiny_model(vocab=50):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, attn_implementation="sdpa"))


def loss_of(kind, w, advantages, logpi=None, sequence_ids=None, **knobs):
    """Loss and gradient with respect to log pi, both [T], of tokens with importance weights w."""
    logpi = torch.tensor(logpi or [-1.0] * len(w), requires_grad=True)
    ids = torch.zeros(len(w), dtype=torch.long) if sequence_ids is None else torch.tensor(sequence_ids)
    loss = policy_loss(kind, logpi, logpi.detach() - torch.tensor(w).log(), torch.tensor(advantages), ids, Config(**knobs))
    loss.sum().backward()
    return loss.tolist(), logpi.grad.tolist()


def test_reinforce_by_hand_at_below_and_above_the_clamp():
    # w = 0.5, 1, 5 (= c), 20 (clamped to 5); loss = -min(w, 5) A log pi; gradient with respect to log pi = -min(w, 5) A
    loss, grad = loss_of("reinforce", [0.5, 1.0, 5.0, 20.0], [2.0, -1.0, 1.0, 3.0], logpi=[-1.0, -2.0, -0.5, -0.25], clamp=5.0)
    assert loss == pytest.approx([0.5 * 2 * 1, -1 * 1 * 2, 5 * 1 * 0.5, 5 * 3 * 0.25])
    assert grad == pytest.approx([-1.0, 1.0, -5.0, -15.0])
    with pytest.raises(ValueError, match="unknown loss"):
        loss_of("nonsense", [1.0], [1.0])


def test_ppo_by_hand():
    # inside the range: -wA, gradient -wA. Outside: the clip stops the gradient only where it makes the objective smaller.
    loss, grad = loss_of("ppo", [1.1, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx([-1.1, -1.2, 1.5, -0.5, 0.8])
    assert grad == pytest.approx([-1.1, 0.0, 1.5, -0.5, 0.0])


def test_gspo_by_hand():
    # sequence 0: ratios 2 and 0.5, geometric mean 1, loss -1/2 a token, gradient -s A / |y| a token (through s, both terms)
    # sequence 1: ratios 4 and 4 with A > 0: clipped to 1.0004, no gradient. Token 2 was not sampled.
    loss, grad = loss_of("gspo", [2.0, 0.5, 100.0, 4.0, 4.0], [1.0, 1.0, 9.0, 2.0, 2.0], sequence_ids=[0, 0, -1, 1, 1])
    assert [loss[i] for i in (0, 1, 3, 4)] == pytest.approx([-0.5, -0.5, -1.0004, -1.0004])
    assert [grad[i] for i in (0, 1, 3, 4)] == pytest.approx([-0.5, -0.5, 0.0, 0.0])
    # A < 0 and a ratio above the range: not clipped; s = 4, each token: -4 * -1 / 2 = 2, gradient s |A| / |y| = 2
    loss, grad = loss_of("gspo", [4.0, 4.0], [-1.0, -1.0])
    assert loss == pytest.approx([2.0, 2.0]) and grad == pytest.approx([2.0, 2.0])


def test_icepop_by_hand():
    loss, grad = loss_of("icepop", [0.4, 0.5, 1.0, 5.0, 6.0], [1.0, 1.0, -2.0, 1.0, 1.0])
    assert loss == pytest.approx([0.0, 0.5, -2.0, 5.0, 0.0])
    assert grad == pytest.approx([0.0, -0.5, 2.0, -5.0, 0.0])


def test_kl_by_hand():
    logpi = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    kl = train.kl(logpi, torch.tensor([-1.0, -1.0, -3.0]))  # d = 0, 1, -2
    assert kl.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-2) + 1])
    kl.sum().backward()
    assert logpi.grad.tolist() == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-2)])


@pytest.mark.parametrize("kind,expected", [("reinforce", [0, 0, 0, 1]), ("ppo", [1, 0, 1, 1]), ("icepop", [1, 0, 0, 1])])
def test_which_weights_are_cut(kind, expected):
    assert train.clipped(kind, torch.tensor([0.3, 1.0, 2.0, 6.0]).log(), torch.zeros(4, dtype=torch.long), Config()).tolist() == [bool(x) for x in expected]


def test_dpo_by_hand():
    log_ratios = torch.tensor([1.0, -1.0, 0.5], requires_grad=True)
    loss = train.dpo_loss(log_ratios, torch.tensor([[0, 1], [2, 2]]), 0.5)
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])
    loss[0].backward()
    assert log_ratios.grad.tolist() == pytest.approx([-0.5 / (1 + math.e), 0.5 / (1 + math.e), 0])  # -beta (1 - sigmoid(margin))
    assert train.dpo_loss(log_ratios, torch.zeros(0, 2, dtype=torch.long), 0.5).tolist() == []


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
    monkeypatch.setattr(train, "HEAD_ELEMENTS", chunk * 50)
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


@pytest.fixture()
def model():
    m = tiny_model()
    m.token_logprobs = types.MethodType(token_logprobs, m)
    return m


def sums_of(model, r, version, **knobs):
    loss, sums, by_lag, lag_max = train.micro_batch(model, r, version, Config(**knobs), torch.device("cpu"))
    return loss, dict(zip(train.SUMS, sums.tolist())), train.lag_table(by_lag), lag_max


def test_micro_batch_sums_by_hand(model):
    loss, s, table, lag_max = sums_of(model, record(model, [10, 13], version=4, offset=math.log(2)), 6, clamp=1.5)  # every ratio is 2
    assert s["tokens"] == 17 and s["row_tokens"] == 23 and s["samples"] == 2 and s["reward"] == 1 and s["success"] == 1
    assert s["w"] == pytest.approx(34, rel=1e-4) and s["w2"] == pytest.approx(68, rel=1e-4) and s["clipped"] == 17
    assert s["kl"] == pytest.approx(17 * (2 - 1 - math.log(2)), rel=1e-4)
    assert s["lag"] == 34 and lag_max == 2 and s["mismatch_n"] == 0 and s["loss"] == pytest.approx(loss.item())
    assert set(table) == {"2"} and table["2"]["tokens"] == 17 and table["2"]["ess"] == pytest.approx(1, rel=1e-4)
    assert table["2"]["loss"] == pytest.approx(loss.item() / 17, rel=1e-4) and table["2"]["clip_frac"] == 1
    _, s, table, _ = sums_of(model, record(model, [10, 13], version=6), 6)
    assert s["mismatch_n"] == 17 and s["mismatch"] < 1e-4 and s["lag"] == 0 and s["clipped"] == 0 and set(table) == {"0"}


def test_every_lag_finds_its_bucket(model):
    r = record(model, [14], version=0)
    r["versions"][r["mask"]] = 20 - np.array([0, 1, 2, 3, 4, 5, 8, 9, 10, 20, 20])
    table = sums_of(model, r, 20)[2]
    assert {k: v["tokens"] for k, v in table.items()} == {"0": 1, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9+": 4}


def test_late_tokens_are_masked_and_counted(model):
    r = record(model, [10, 13], version=4)
    r["versions"][:10] = np.where(r["mask"][:10], 1, -1)  # the first sequence has lag 4 at version 5, the second lag 1
    kept, s, _, _ = sums_of(model, r, 5, max_lag=3, late="keep")
    assert s["tokens"] == 17 and s["late"] == 0 and s["lag"] == 7 * 4 + 10
    masked, s, _, lag_max = sums_of(model, r, 5, max_lag=3, late="mask")
    assert s["tokens"] == 10 and s["late"] == 7 and lag_max == 1
    r["mask"][:10] = False
    assert masked.item() == pytest.approx(sums_of(model, r, 5)[0].item()) != kept.item()


def test_a_window_of_lags_is_left_out_of_the_policy_loss_and_not_of_dpo(model):
    r = record(model, [10, 13], version=4)
    r["versions"][r["mask"]] = 6 - np.arange(r["mask"].sum()) % 4  # lags 0, 1, 2, 3 in turn
    _, s, table, _ = sums_of(model, r, 6, lags=(1, 2))
    assert set(table) == {"1", "2"} and s["tokens"] + s["late"] == 17 and s["late"] == sum(x % 4 in (0, 3) for x in range(17))
    assert set(sums_of(model, r, 6, lags=(1, 9), late="mask", max_lag=1)[2]) == {"1"}
    r |= dict(pairs=np.array([[0, 1]]))
    loss, s, _, _ = sums_of(model, r, 6, lags=(9, 9), dpo_coef=2.0)
    assert s["tokens"] == 0 and s["pairs"] == 1 and loss.item() == pytest.approx(2 * s["dpo"]) and s["dpo"] == pytest.approx(math.log(2), rel=1e-3)  # the behaviour policy's own logprobs


def test_normalizers_entropy_and_kl(model):
    r = record(model, [10, 13], version=6)  # 7 and 10 sampled tokens, advantages 1 and 0
    r["advantages"][:] = 1.0
    plain = sums_of(model, r, 6)[0].item()
    logprobs, entropy = (x.detach().numpy() for x in model.token_logprobs(torch.from_numpy(r["input_ids"]), torch.from_numpy(r["position_ids"]), 1.0))
    first, second = (r["mask"] & (r["sequence_ids"] == i) for i in (0, 1))
    assert plain == pytest.approx(-logprobs[r["mask"]].sum(), rel=1e-4)
    assert sums_of(model, r, 6, normalizer="sequence")[0].item() == pytest.approx(-logprobs[first].mean() - logprobs[second].mean(), rel=1e-4)
    reference = logprobs - 0.3 * r["mask"]
    kl, s, _, _ = sums_of(model, r | {"ref_logprobs": reference.astype(np.float32)}, 6, kl_coef=2.0)
    assert s["kl_ref"] == pytest.approx(17 * (math.exp(-0.3) - 1 + 0.3), rel=1e-3) and kl.item() == pytest.approx(plain + 2 * s["kl_ref"], rel=1e-4)
    assert sums_of(model, r, 6, entropy_coef=0.5)[0].item() == pytest.approx(plain - 0.5 * entropy[r["mask"]].sum(), rel=1e-4)


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo", "icepop"])
def test_an_empty_micro_batch_contributes_nothing(model, loss):
    from preprocess import row_record
    value, sums, by_lag, _ = train.micro_batch(model, row_record([]), 3, Config(loss=loss, entropy_coef=0.1), torch.device("cpu"))
    value.backward()
    assert sums.abs().sum() == 0 and by_lag.abs().sum() == 0
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.parameters())


def test_records_that_cannot_be_trained_on_are_named(model):
    c = Config(run_id="abc")
    fine = record(model, [10], 0) | dict(run_id="abc", step=4)
    train.check(fine, "record 7 of q", c, 4, 50)
    bad = fine | dict(rewards=np.array([float("nan")]))
    with pytest.raises(ValueError, match="record 7 of q: rewards has values that are not finite"):
        train.check(bad, "record 7 of q", c, 4, 50)
    with pytest.raises(ValueError, match="record 8 of q: token ids from .* the vocabulary has 20"):
        train.check(fine | {"input_ids": np.array([3, 25])}, "record 8 of q", c, 4, 20)
    with pytest.raises(RuntimeError, match="record 9 of q is for step 4 of run xyz, this is step 4 of run abc"):
        train.check(fine | dict(run_id="xyz"), "record 9 of q", c, 4, 50)


@pytest.mark.parametrize("kernel", ["sequence by sequence", "varlen"])
def test_attention_over_packed_rows_equals_a_mask(model, kernel, monkeypatch):
    """packed_attention against transformers' sdpa with a packed mask. `varlen` is the GPU's branch with a FAKE kernel: plain
    attention sequence by sequence takes the place of varlen_attn, which needs a GPU."""
    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa):
        assert window_size == (-1, 0) and cu_q.dtype == torch.int32 and max_q == max_k == cu_q.diff().max() and cu_q is cu_k
        out = [torch.nn.functional.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=enable_gqa)
               for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist())]
        return torch.cat([x[0].transpose(0, 1) for x in out])
    if kernel == "varlen":
        monkeypatch.setattr(train, "varlen_attn", varlen)
        monkeypatch.setattr(train, "flash_runs_on", lambda x: True)
    r = record(model, [10, 13, 1, 30], version=6)
    expected, _, _, _ = sums_of(model, r, 6, entropy_coef=0.1)
    expected.backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation("packed")
    got, _, _, _ = sums_of(model, r, 6, entropy_coef=0.1)
    got.backward()
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all((p.grad - g).norm() <= 1e-5 * g.norm() for p, g in zip(model.parameters(), gradient))


def test_head_in_float32(model):
    ids, positions = torch.arange(40), torch.arange(40)
    exact = token_logprobs(model, ids, positions, 1.0)[0]
    model.bfloat16()
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1]
    reference = torch.log_softmax(hidden.float() @ model.lm_head.weight.float().T, -1).gather(1, ids[1:, None])[:, 0]
    rounded = token_logprobs(model, ids, positions, 1.0)[0]
    model.head_float32 = True
    got = token_logprobs(model, ids, positions, 1.0)[0]
    assert got.dtype == rounded.dtype == torch.float32
    assert (got[1:] - reference).abs().max() < 1e-5 < (rounded[1:] - reference).abs().max() and (got - exact).abs().max() < 0.1


MEMORY = """
import resource, sys, types, torch
sys.path.insert(0, '.')
import train
tokens, vocabulary, hidden, elements = int(sys.argv[1]), 151936, 64, int(sys.argv[2])
torch.manual_seed(0)
train.HEAD_ELEMENTS = elements
embedding = torch.nn.Embedding(vocabulary, hidden)
body = lambda input_ids, **_: types.SimpleNamespace(last_hidden_state=embedding(input_ids))
model = types.SimpleNamespace(base_model=body, get_output_embeddings=lambda: embedding)
ids = torch.randint(0, vocabulary, (tokens,))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
logprobs, entropy = train.token_logprobs(model, ids, torch.arange(tokens), 1.0)
(logprobs + 0.1 * entropy).sum().backward()
print(peak() - before, embedding.weight.grad.norm().item(), embedding.weight.grad[ids[5]].norm().item())
"""


def test_the_output_head_never_holds_all_logits():
    """Peak extra memory at 8192 tokens and a 151,936-word vocabulary: under 1/8 of the unchunked path's, which is measured at
    1024 tokens and is proportional to them (at 8192 it would not fit here)."""
    def measure(tokens, elements):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(tokens), str(elements)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [float(x) for x in done.stdout.split()]
    naive, chunked, lean = measure(1024, 1 << 40), measure(1024, train.HEAD_ELEMENTS), measure(8192, train.HEAD_ELEMENTS)
    assert chunked[1:] == pytest.approx(naive[1:], rel=1e-5)
    assert lean[0] < 8 * naive[0] / 8, f"{lean[0] / 1e9:.2f} GB against {8 * naive[0] / 1e9:.2f} GB"
    print(f"output head, 8192 tokens: {lean[0] / 1e9:.2f} GB, unchunked {8 * naive[0] / 1e9:.2f} GB")
