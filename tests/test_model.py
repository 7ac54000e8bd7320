"""Families of models: the packed forward pass equals the model's own, and families for which it
would not are refused by name.

The models are tiny, with random weights. The engine of the mismatch is FAKE, and so is the GPU's
attention kernel; the slow tests update a real vLLM engine.
"""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_train import Answers, make_guards, measure
from test_weights import assert_serves, perturb, sender_to, served, update
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoConfig, AutoModelForCausalLM

import config as cfg
import train
from bench import families
from conftest import PORT
from plumbing import checkpoints
from plumbing.samples import layout
from tools import model_check

CPU = torch.device("cpu")
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
WIDTH = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, initializer_range=0.1)
TOKENS = dict(vocab_size=100, bos_token_id=None, eos_token_id=1, pad_token_id=0)
TINY = dict(max_position_embeddings=256, **HEADS, **WIDTH, **TOKENS)
# The window is shorter than the test's sequences. Every second layer sees all tokens.
WINDOW = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
GPT2 = dict(n_embd=64, n_head=4, n_layer=2, n_positions=256)
GRANITE = dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5)
# The supported families, each with its own settings. Engines let Cohere 2 see one token more in its
# window than transformers does: beyond the window they differ from the trainer.
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": dict(sliding_window=8),
    "gemma3_text": dict(query_pre_attn_scalar=16, **WINDOW),
    "granite": dict(attention_multiplier=0.2, **GRANITE),
    "phi": {},
    "phi3": {},
    "olmo": dict(clip_qkv=1.0),
    "olmo2": {},
    "cohere2": dict(logit_scale=0.25, **WINDOW),
    # Scores and logits are capped.
    "gemma2": dict(query_pre_attn_scalar=16, **CAPS, **WINDOW),
    # Heads have sinks. Engines refuse its experts by name at the first update.
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW),
    # GPT-2 has dropout of 0.1 everywhere, unless the trainer removes it.
    "gpt2": GPT2,
}


def tiny(family, folder, **changed):
    """Make a random model of a family; no bias and no norm has its initial value."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(TINY | FAMILIES.get(family, {}) | changed))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def build(folder, **knobs):
    """The Policy as the trainer has it."""
    return train.build(cfg.Config(model=str(folder), dtype="float32", **knobs), CPU, 1)[0]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_equal_the_models_own(family, tmp_path, monkeypatch):
    """Logprobs and gradients are equal, with a head that works in chunks."""
    # The head computes the logits of 16 tokens at once.
    monkeypatch.setattr(train, "head_chunk", lambda *_: 16)
    folder = tiny(family, tmp_path)
    # This is the way that is chosen before a run.
    assert model_check.choose_rows(folder)[0] == "packed"
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 100, n) for n in (5, 17, 2, 30, 30, 33)]
    # The last three are attempts at one problem, of which the first two are equal.
    sequences[4][:] = sequences[3]
    sequences[5][:12] = sequences[4][:12]
    positions, _ = layout([len(tokens) for tokens in sequences])
    weights = torch.randn(sum(map(len, sequences)) - len(sequences))
    # The reference is transformers alone, a sequence at a time.
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    reference_logprobs = []
    for tokens in map(torch.from_numpy, sequences):
        logp = torch.log_softmax(reference(tokens[None]).logits[0, :-1].float() / 0.7, -1)
        reference_logprobs.append(logp.gather(1, tokens[1:, None])[:, 0])
    expected = torch.cat(reference_logprobs)
    (expected * weights).sum().backward()

    # Recomputed layers have no dropout either.
    model = build(folder, checkpointed_layers=1 if family in ("gpt2", "qwen2") else 0)
    logprobs, _ = model.logprobs(np.concatenate(sequences), positions, 0.7)
    packed = logprobs[positions > 0]
    (packed * weights).sum().backward()
    assert (packed - expected).abs().max() < 1e-5
    assert (gradient(model) - gradient(reference)).norm() < 1e-5 * gradient(reference).norm()


@pytest.mark.slow
def test_compiled_logprobs_equal_plain_ones(tmp_path, monkeypatch):
    """One layer is recomputed and the head is in chunks; new row lengths compile nothing anew."""
    monkeypatch.setattr(train, "head_chunk", lambda *_: 16)
    folder = tiny("qwen2", tmp_path)
    models = [build(folder, compile=compiled, checkpointed_layers=1) for compiled in (False, True)]
    graphs = []
    rng = np.random.default_rng(0)
    for lengths in ((5, 17, 30), (40,), (9, 8, 7, 33), (21, 22)):
        positions, _ = layout(lengths)
        tokens = rng.integers(0, 100, len(positions))
        weights = torch.randn(2, len(positions)) * torch.from_numpy(positions > 0)
        results = []
        for model in models:
            model.zero_grad()
            outputs = torch.stack(model.logprobs(tokens, positions, 0.7, entropy_grad=True))
            (outputs * weights).sum().backward()
            results.append((outputs.detach(), gradient(model)))
        (plain, plain_gradient), (compiled, compiled_gradient) = results
        assert (compiled - plain)[:, positions > 0].abs().max() < 2e-6
        assert (compiled_gradient - plain_gradient).norm() < 1e-6 * plain_gradient.norm()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] < graphs[1] == graphs[-1]


# Sequences with state, which packed rows would let leak from one into the next, and what the
# packed attention does not do.
HYBRIDS = {
    "granitemoehybrid": dict(
        num_local_experts=4,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=96,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=4, head_dim=32, state_size=16, n_groups=1, use_cache=False),
    "qwen3_5_text": dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    # chunks of the attention
    "llama4_text": dict(
        num_local_experts=4,
        intermediate_size_mlp=96,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    ),
    # attention that takes no arguments of others
    "stablelm": {},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_rows_of_any_model_are_computed_in_a_way_that_is_exact(family, tmp_path):
    """model_check chooses it on a small copy; here it computes the model itself."""
    folder = tiny(family, tmp_path, **HYBRIDS[family])
    rows, _ = model_check.choose_rows(folder)
    assert rows == ("native" if family == "stablelm" else "padded")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2, 100, n) for n in (5, 17, 2, 33, 33)]
    sequences[4][:12] = sequences[3][:12]
    positions, _ = layout([len(tokens) for tokens in sequences])
    weights = torch.randn(sum(map(len, sequences)) - len(sequences))
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = model_check.own_logprobs(reference, sequences)
    (expected * weights).sum().backward()
    policy = build(folder, rows=rows, checkpointed_layers=1)
    logprobs, _ = policy.logprobs(np.concatenate(sequences), positions, 1.0)
    found = logprobs[positions > 0]
    (found * weights).sum().backward()
    assert (found - expected).abs().max() < 2e-5
    assert (gradient(policy) - gradient(reference)).norm() < 1e-4 * gradient(reference).norm()


def test_experts_are_written_one_by_one_and_read_again(tmp_path):
    """In the model all experts of a layer are one tensor, and on disk each has its own."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    folder = tiny("qwen3_moe", tmp_path / "model", **experts)
    model = build(folder).model
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    shutil.copytree(folder, tmp_path / "written", ignore=shutil.ignore_patterns("*.safetensors"))
    checkpoints.write_weights(tmp_path / "written", model, model.state_dict())
    names = load_file(tmp_path / "written" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert equal_states(again.state_dict(), model.state_dict())


def equal_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_without_an_exact_way_is_refused_with_what_was_measured(tmp_path, monkeypatch):
    folder = tiny("lfm2", tmp_path, **HYBRIDS["lfm2"])
    # FAKE: padding is not known yet
    monkeypatch.setattr(model_check, "WAYS", ("packed", "native"))
    with pytest.raises(cfg.ConfigError) as e:
        model_check.choose_rows(folder)
    assert "the trainer cannot compute lfm2 as transformers does (packed: logprobs" in str(e.value)
    assert "; native: logprobs differ by " in str(e.value)


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "smollm3", "seed_oss", "arcee", "dots1"])
def test_what_vllm_runs_with_its_own_code_or_that_of_transformers_is_supported(family):
    """The last four have no code in vLLM itself, dots1 not even an entry in its registry."""
    shape = AutoConfig.for_model(family, **TINY)
    shape.architectures = [AutoModelForCausalLM._model_mapping[type(shape)].__name__]
    model_check.check_supported(shape, cfg.Config(model="m", dtype="float32"))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_a_small_copy_has_every_kind_of_layer(family):
    """Of a configuration as large as the family's own."""
    shape = AutoConfig.for_model(family)
    copy = model_check.small_copy(shape)
    assert sum(p.numel() for p in copy.parameters()) < 50e6
    whole = model_check.make_model(shape, "meta")
    kinds = model_check.kinds_of_layers
    assert set(kinds(copy)) == set(kinds(whole)) and len(kinds(copy)) < len(kinds(whole))


# ---- what is refused


def measure_against_transformers(model, folder, tmp_path, monkeypatch):
    """Measure the mismatch with a FAKE engine that uses transformers, a sequence at a time."""
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    engine = Answers(reference, 40)
    return measure(model, tmp_path, monkeypatch, engine, make_guards(tmp_path))


@pytest.mark.parametrize("family", ["granite", "cohere2"])
def test_missing_logit_scaling_ends_the_run_by_its_mismatch(family, tmp_path, monkeypatch):
    folder = tiny(family, tmp_path / "model")
    model = build(folder)
    assert measure_against_transformers(model, folder, tmp_path, monkeypatch)["mismatch"] < 1e-5
    monkeypatch.setattr(train, "finish_logits", lambda logits, config: logits)
    complaint = f"of {family} is .* nats at version 40, the limit is 0.001"
    with pytest.raises(RuntimeError, match=complaint):
        measure_against_transformers(model, folder, tmp_path, monkeypatch)


REFUSED = {
    # Sequences that are packed into a row see each other.
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mamba": {},
    # It multiplies by the factor that Granite divides by.
    "hyperclovax": dict(logits_scaling=4.0),
    # Positions are a bias of its scores.
    "bloom": {},
}


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_families_are_refused_by_name(family, tmp_path, monkeypatch):
    folder = tiny(family, tmp_path / "model", **REFUSED[family])
    with pytest.raises(RuntimeError, match=f"of {family} is .* nats at .*, the limit is 0.001"):
        measure_against_transformers(build(folder), folder, tmp_path, monkeypatch)


def fake_flash(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa, return_aux=None):
    """A FAKE varlen_attn, as the real one needs a GPU; its window is that of FlashAttention."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    left, right = window_size
    outputs = []
    all_lse = []
    query_ranges = pairwise(cu_q.tolist())
    key_ranges = pairwise(cu_k.tolist())
    for (q_start, q_end), (k_start, k_end) in zip(query_ranges, key_ranges, strict=True):
        n = k_end - k_start
        # The last query belongs to the last key.
        distance = torch.arange(n)[-(q_end - q_start) :, None] - torch.arange(n)
        is_seen = (distance >= -right) & ((distance <= left) | (left < 0))
        sequence = (q[q_start:q_end], k[k_start:k_end], v[k_start:k_end])
        heads = [x.transpose(0, 1)[None] for x in sequence]
        output = sdpa(*heads, attn_mask=is_seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output[0].transpose(0, 1))
        keys = heads[1].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (heads[0] @ keys.transpose(2, 3) * scale).masked_fill(~is_seen, -torch.inf)
        all_lse.append(scores.logsumexp(-1)[0])
    if return_aux is None:
        return torch.cat(outputs)
    assert return_aux.lse
    return torch.cat(outputs), torch.cat(all_lse, -1)


def fake_flash_backward(gradient, q, k, v, out, lse, cu_q, cu_k, *options):
    """FAKE: FlashAttention's backward pass, from the `out` and the `lse` that it is given."""
    *_, random_state, scale, (left, right) = options
    assert random_state.dtype == torch.uint64
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    heads_per_key = q.shape[1] // k.shape[1]
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        n = k_end - k_start
        distance = torch.arange(n)[-(q_end - q_start) :, None] - torch.arange(n)
        is_seen = (distance >= -right) & ((distance <= left) | (left < 0))
        for head in range(q.shape[1]):
            queries, keys = slice(q_start, q_end), slice(k_start, k_end)
            key_head = head // heads_per_key
            own_q, own_k, own_v = q[queries, head], k[keys, key_head], v[keys, key_head]
            d_out = gradient[queries, head]
            scores = (own_q @ own_k.T * scale).masked_fill(~is_seen, -torch.inf)
            p = (scores - lse[head, queries, None]).exp()
            row_sum = (d_out * out[queries, head]).sum(-1, keepdim=True)
            d_scores = p * (d_out @ own_v.T - row_sum)
            gradients[0][queries, head] += d_scores @ own_k * scale
            gradients[1][keys, key_head] += d_scores.T @ own_q * scale
            gradients[2][keys, key_head] += p.T @ d_out
    return gradients


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_attention_branch_for_gpus_equals_the_models_own(family, tmp_path, monkeypatch):
    folder = tiny(family, tmp_path / "model")
    monkeypatch.setattr("plumbing.model.varlen_attn", fake_flash)
    monkeypatch.setattr("plumbing.model.flash_backward", fake_flash_backward)
    monkeypatch.setattr("plumbing.model.flash_runs_on", lambda query, value: True)
    policy = build(folder)
    measured = measure_against_transformers(policy, folder, tmp_path, monkeypatch)
    assert measured["mismatch"] < 1e-5
    # Its gradients are those of transformers, too.
    way, results, _ = model_check.measure(policy.model, ["packed"])
    assert way == "packed", results


def test_rows_are_measured_in_16_bits_where_other_kernels_compute_them(tmp_path, monkeypatch):
    """Both kernels are FAKE: a right one, and one whose gradient does not reach the keys."""
    monkeypatch.setattr("plumbing.model.flash_runs_on", lambda q, v: q.dtype == torch.bfloat16)
    folder = tiny("qwen2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr("plumbing.model.varlen_attn", fake_flash)
    assert model_check.measure(model, ["packed"], in_16_bits=True)[0] == "packed"

    def wrong(q, k, *arguments, **options):
        return fake_flash(q, k.detach(), *arguments, **options)

    monkeypatch.setattr("plumbing.model.varlen_attn", wrong)
    model = AutoModelForCausalLM.from_pretrained(folder)
    way, results, _ = model_check.measure(model, ["packed", "padded"], in_16_bits=True)
    assert way == "padded" and "in bfloat16 logprobs differ" in results["packed"]


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
def test_hidden_states_in_float32_meet_a_head_in_16_bits(family, tmp_path):
    families.make_model(family, tmp_path / "model", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    sequences = model_check.sequences_to_compare(model.config.vocab_size)
    own = model_check.own_logprobs(model, sequences)
    padded = model_check.row_logprobs(model, sequences, "padded")
    assert (padded - own).abs().mean() < 0.02


# ---- engine = trainer


# Kinds of models, beside the Qwen2 of test_weights.py: capped scores and windows; multipliers, and
# layers that are compiled, as on GPUs; transformers' code within vLLM; experts; experts with biases
# and heads with sinks; experts, and layers with state, whose rows are padded.
KINDS = dict(gemma2="packed", granite="packed", olmo2="packed", qwen3_moe="packed")
KINDS |= dict(gpt_oss="packed", granitemoehybrid="padded")


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_engine_equals_trainer_after_updates(family, tmp_path):
    folder = tmp_path / "model"
    families.make_model(family, folder, torch.float32)
    assert model_check.choose_rows(folder)[0] == KINDS[family]
    knobs = f"toy --run engine --out {tmp_path} --model {folder} --port {PORT + 3} --concurrency 8"
    knobs += f" --enforce_eager {family != 'granite'}"
    model = build(folder, rows=KINDS[family]).model
    with served(knobs, as_loaded=False) as config:
        sender = sender_to(config, model)
        # The weights that the engine has loaded from disk prove that updates reach all of them.
        update(sender, 0)
        for version in (1, 2):
            perturb(model)
            update(sender, version)
            assert_serves(config, model, version)
        sender.close()
