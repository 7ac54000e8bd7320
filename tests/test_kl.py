"""bench/kl.py: sampling under changing weights, and its exact KL, with tiny random models."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench import kl

TOKENS = 12
END = 0


def random_model(seed):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return Qwen2ForCausalLM(config).eval()


def sampled_by(models, updates, recompute):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 16, (6, 3), generator=generator)
    uniforms = torch.rand([6, TOKENS], generator=generator)
    return kl.sample(models, prompts, uniforms, updates, recompute, END)


def test_updates_come_every_l_over_g_tokens():
    assert kl.swaps(4, 410) == {205: 1, 308: 2}


@pytest.mark.parametrize("recompute", [False, True])
def test_kl_is_0_without_a_change_of_weights(recompute):
    model = random_model(0)
    sampled = sampled_by([model, model], {6: 1}, recompute)
    assert kl.exact_kl(sampled, model).abs().max() < 1e-5
    assert kl.exact_kl(sampled, random_model(1)).sum() > 1


def test_a_recomputed_cache_samples_as_the_new_weights_do():
    models = [random_model(0), random_model(1)]
    # The token at which the update comes is not among those that the old weights sampled
    after = torch.arange(TOKENS) >= 6
    recomputed = sampled_by(models, {6: 1}, True)
    stale = sampled_by(models, {6: 1}, False)
    assert kl.exact_kl(recomputed, models[1])[:, after].abs().max() < 1e-5
    assert kl.exact_kl(stale, models[1])[:, after].max() > 1e-3
