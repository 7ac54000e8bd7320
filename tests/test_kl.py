"""bench/kl.py: what samples under changing weights, its KL, its intervals. Tiny models, nothing is timed."""

import json

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench import kl

V, P, L, END = 11, 3, 24, 1


@pytest.fixture(scope="module")
def models():
    """Versions that differ a lot."""
    found = []
    for seed in range(max(kl.LAGS) + 1):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.4,
        )
        found.append(Qwen2ForCausalLM(config).eval())
    return found


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(2, V, [kl.BLOCK, P], generator=generator)
    return prompts, torch.rand([kl.BLOCK, L], generator=generator)


@torch.inference_mode()
def fresh(model, tokens):
    """Logprobs of the distributions of sampled tokens, by a forward of the whole sequence."""
    return model(tokens[:, :-1]).logits[:, P - 1 :].log_softmax(-1)


def test_updates_come_every_so_many_tokens_the_first_after_twice_as_many():
    assert kl.swaps(2, 410) == {}
    assert kl.swaps(4, 400) == {200: 1, 300: 2}
    assert kl.swaps(32, 410)[26] == 1 and max(kl.swaps(32, 410).values()) == 30
    assert kl.IN_FLIGHT[0] > 2


def test_what_is_sampled_comes_from_the_weights_of_its_version(models, drawn):
    updates = {8: 1, 16: 2}
    found = kl.sample(models, *drawn, updates, True, END)
    assert found.versions.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert found.lengths.min() < L // 2 < found.lengths.max() == L
    for n, tokens, logprobs in zip(found.lengths, found.tokens, found.logprobs):
        sampled = tokens[P : P + n]
        assert (sampled[:-1] != END).all() and (n == L or sampled[-1] == END)
        assert not tokens[P + n + kl.SWEEP :].any() and not logprobs[n + kl.SWEEP :].any()
        own = torch.stack([fresh(model, tokens[None])[0] for model in models[:3]])
        own = own[found.versions, torch.arange(L)]
        assert torch.allclose(own[:n], logprobs[:n], atol=1e-5)


def test_a_stale_cache_differs_from_the_first_update_on(models, drawn):
    updates = {8: 1, 16: 2}
    stale = kl.sample(models, *drawn, updates, False, END)
    own = kl.sample(models, *drawn, updates, True, END)
    # the same random numbers: the same tokens until there is a difference
    assert torch.equal(stale.tokens[:, : P + 8], own.tokens[:, : P + 8])
    longest = stale.lengths == L
    difference = (stale.logprobs - fresh(models[1], stale.tokens)).abs().amax(-1)[longest]
    assert (difference[:, 8:16] > 1e-3).all()
    # one version alone: its cache is its own
    alone = kl.sample(models, *drawn, {}, False, END)
    assert torch.allclose(
        alone.logprobs[longest, :8], fresh(models[0], alone.tokens)[longest, :8], atol=1e-5
    )


def test_the_tokens_are_drawn_from_their_distribution(models):
    n = 4000
    prompts = torch.full([n, P], 5)
    uniforms = torch.rand([n, 1], generator=torch.Generator().manual_seed(0))
    found = kl.sample(models, prompts, uniforms, {}, False, END)
    share = torch.bincount(found.tokens[:, P], minlength=V) / n
    expected = fresh(models[0], found.tokens[:1])[0, 0].exp()
    assert torch.allclose(share, expected, atol=4 * 0.5 / n**0.5)


def test_kl_is_exact(models, drawn):
    found = kl.sample(models, *drawn, {}, False, END)
    own = kl.exact_kl(found, models[0])
    assert own.abs().max() < 1e-5
    other = kl.exact_kl(found, models[3])
    assert (other > -1e-6).all()
    for n, tokens, logprobs, values in zip(found.lengths, found.tokens, found.logprobs, other):
        p = torch.distributions.Categorical(logits=logprobs[:n])
        q = torch.distributions.Categorical(logits=fresh(models[3], tokens[None])[0, :n])
        expected = torch.distributions.kl_divergence(p, q)
        assert torch.allclose(values[:n], expected, atol=1e-4) and not values[n:].any()


def test_a_start_has_all_arms_and_intervals_hold_what_they_are_of(models, drawn, tmp_path, capsys):
    prompts = torch.cat([drawn[0]] * 4)
    sums = kl.study(models, prompts, L, END, 0)
    wanted = {f"conventional, {g}" for g in kl.LAGS}
    wanted |= {f"{arm}, {g}" for arm in kl.ARMS[1:] for g in kl.IN_FLIGHT}
    assert set(sums) == wanted
    kept = {"seed 0": dict(starts={"0": sums, "32": sums})}
    kept = json.loads(json.dumps(kept))
    cells = kl.Cells(kept)
    row = sums["conventional, 4"]
    assert len(row["kl"]) == 4
    value, low, high = kl.interval(cells.kl("conventional", 4))
    assert value == pytest.approx(np.sum(row["kl"]) / np.sum(row["tokens"]))
    assert low < value < high
    # before the first update all is the same
    for g in kl.IN_FLIGHT:
        stale, own = (sums[f"{arm}, {g}"] for arm in kl.ARMS[1:])
        before = [np.subtract(x["kl"], x["kl_after"]) for x in (stale, own)]
        # a sequence may end elsewhere once they differ, but not before
        assert np.allclose(*before)
    kl.say(kept)
    kl.draw(kept, tmp_path / "kl.png")
    assert "stale / recomputed" in capsys.readouterr().out
    assert (tmp_path / "kl.png").stat().st_size > 10000
