"""The flags of vLLM that --engine_flags accepts and refuses, and speculative decoding.

The engine that guesses tokens is a real one. vLLM's build for CPUs guesses wrongly, which
tests/mended_speculation.py mends.
"""

import json
import re
import shlex
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mended_speculation
import numpy as np
import pytest
import torch
from test_weights import check_stamps, post, sender_to, served
from transformers import AutoModelForCausalLM, AutoTokenizer

import config as cfg
from bench.engines import guessed_and_accepted, statistics
from conftest import PORT, resolved, with_knobs
from held_requests import registered
from plumbing import engine_flags, placement

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
NGRAM |= {"prompt_lookup_min": 1}
SPECULATION = f"--speculative-config '{json.dumps(NGRAM)}'"


def read(text, gpus=8):
    return engine_flags.read(with_knobs(resolved("toy"), engine_flags=text), gpus)


def test_flags_come_last_on_the_command_line_of_every_engine():
    config = resolved("toy", "--engines", "2", gpus=8)
    plain = [command for _, _, command in placement.engine_commands(config, 8)]
    text = f"--attention-backend CPU_ATTN --no-async_scheduling {SPECULATION}"
    config = with_knobs(config, engine_flags=text)
    flagged = [command for _, _, command in placement.engine_commands(config, 8)]
    assert flagged == [command + shlex.split(text) for command in plain]


def test_a_step_has_room_for_the_guessed_tokens_beside_the_longest_prompt():
    """An engine has a slot more than --concurrency, for the question of the mismatch."""
    config = with_knobs(resolved("toy", gpus=1), max_model_len=9000, concurrency=100)
    for text, tokens in [("", 9101), (SPECULATION, 9505)]:
        config = with_knobs(config, engine_flags=text)
        [(_, _, command)] = placement.engine_commands(config, 1)
        assert command[command.index("--max-num-batched-tokens") + 1] == str(tokens)


@pytest.mark.parametrize(
    "text, refusal",
    [
        ("attention-backend X", "'attention-backend' is the value of no flag"),
        ("--async-scheduling false", "'false' is the value of no flag: async-scheduling takes"),
        ("--no-numa-bind 3", "'3' is the value of no flag: numa-bind takes none"),
        ("'", "No closing quotation"),
        ("--max-num-seqs 3", "--max-num-seqs is set by the run itself: use its knob --concurrency"),
        ("--no-enforce-eager", "use its knob --enforce_eager"),
        ("--numa-bind --quantization=fp8", "--quantization is refused: tokens would come from"),
        ("--kv_cache_dtype fp8", "--kv_cache_dtype is refused: tokens would come from another"),
        ("--enable-lora", "--enable-lora is refused: it moves weights or replaces them"),
        ("--enable-expert-parallel", "weight updates would miss them"),
        ("--kv-offloading-size 3", "a KV cache outside of the engine may be that of older"),
        ("--data-parallel-size 2", "weight updates reach the tensor-parallel workers"),
        ("--trust-remote-code", "the engines would read another model or tokenizer"),
        ("--no-enable-chunked-prefill", "a prompt must be computed in one step"),
        ("--kv-cache-metrics", "the run switches vLLM's statistics off"),
        ("--quant fp8", "--quant is not among the flags that are known to leave"),
        ("--no-attention-backend", "--no-attention-backend is not among the flags"),
        ("-q fp8", "-q is not among the flags"),
        ("--speculative-config.method ngram", "-config.method is not among the flags"),
        ("--speculative-config", "--speculative-config : must be JSON, in quotes"),
        ("--speculative-config ngram", "--speculative-config ngram: must be JSON, in quotes"),
        ("--speculative-config '[1]'", "must be JSON, in quotes"),
        ("""--speculative-config='{"method": "eagle"}'""", "the method must be ngram"),
        (
            """--compilation-config '{"inductor_passes": {}}'""",
            "has inductor_passes, which could change the sampled",
        ),
        ("--compilation-config 3", "must be JSON, in quotes"),
    ],
)
def test_a_flag_that_could_change_what_is_sampled_is_refused_by_name(text, refusal):
    with pytest.raises(cfg.ConfigError, match=f"^--engine_flags.*{re.escape(refusal)}"):
        read(text)


@pytest.mark.parametrize(
    "settings, refusal",
    [
        (NGRAM | {"rejection_sample_method": "synthetic"}, "has rejection_sample_method, which"),
        (NGRAM | {"model": "x", "quantization": "fp8"}, "has model, quantization, which could"),
        (NGRAM | {"method": "draft_model"}, "the method must be ngram"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens 0: must be a whole"),
        ({"method": "ngram"}, "num_speculative_tokens None: must be a whole number"),
    ],
)
def test_speculative_decoding_must_keep_the_distribution(settings, refusal):
    text = f"--speculative-config '{json.dumps(settings)}'"
    with pytest.raises(cfg.ConfigError, match=f"^--engine_flags: .*{refusal}"):
        read(text)


def test_settings_of_compilation_are_accepted():
    text = """--compilation-config='{"cudagraph_mode": "FULL", "compile_sizes": [1]}'"""
    assert read(f"{text} --distributed-timeout-seconds -1").draft_tokens == 0


def test_guessed_tokens_are_refused_beside_replayed_routing():
    config = with_knobs(resolved("toy"), engine_flags=SPECULATION, replay_routing=True)
    with pytest.raises(cfg.ConfigError, match="--replay_routing True and --speculative-config"):
        engine_flags.read(config, 8)


def test_guessed_tokens_need_gpus():
    assert read(SPECULATION).draft_tokens == 4
    with pytest.raises(cfg.ConfigError, match="--speculative-config needs GPUs: vLLM 0.32's build"):
        read(SPECULATION, gpus=0)


def test_refusal_comes_before_anything_is_written(tmp_path):
    arguments = ["toy", "--out", str(tmp_path), "--engine_flags=--quantization fp8"]
    with pytest.raises(cfg.ConfigError, match="--quantization is refused"):
        resolved(*arguments)
    assert not list(tmp_path.iterdir())


def test_every_flag_of_the_lists_is_one_of_vllm_and_none_is_set_by_the_run():
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert arg_utils
    parser = make_arg_parser(FlexibleArgumentParser())
    known = {option.lstrip("-") for option in parser._option_string_actions}
    refused = set(" ".join(engine_flags.REASONS.values()).split())
    knobs = engine_flags.KNOBS
    switches, options = engine_flags.SWITCHES, engine_flags.OPTIONS
    assert (switches | options | refused | knobs.keys()) - known == set()
    groups = [switches, options, refused, knobs.keys()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    takes_value = {
        name for name in switches | options if parser._option_string_actions[f"--{name}"].nargs != 0
    }
    assert takes_value == options
    assert set(knobs.values()) <= set(cfg.Config.__dataclass_fields__)
    for gpus in (0, 8):
        config = placement.resolve(cfg.parse(["toy", "--replay_routing", "False"]), gpus)
        config = with_knobs(config, replay_routing=True, reasoning_parser="x", prefix_caching="on")
        for _, _, command in placement.engine_commands(config, gpus):
            words = [word.removeprefix("--") for word in command if word.startswith("--")]
            taken = {word.removeprefix("no-") for word in words}
            assert not taken & (switches | options)


# ---- a real engine that guesses tokens, with vLLM mended for CPUs

# The answer repeats these letters, as they are sorted already: most guesses are right.
TEXT = "abc="
TEMPERATURE = 0.7


def log_probabilities(model, prompt, n):
    """The log-probabilities of all continuations of n tokens, [vocabulary] * n, by transformers."""
    vocabulary = model.config.vocab_size
    texts = torch.tensor([prompt])
    joint = torch.zeros(1, dtype=torch.float64)
    for _ in range(n):
        with torch.no_grad():
            logits = torch.cat([model(part).logits[:, -1] for part in texts.split(1000)])
        of_next = torch.log_softmax(logits.double() / TEMPERATURE, -1)
        joint = (joint[:, None] + of_next).flatten()
        following = torch.arange(vocabulary).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocabulary, 0), following], 1)
    return joint.reshape([vocabulary] * n).numpy()


@pytest.fixture(scope="module")
def guessing(base_model, tmp_path_factory):
    """Yield the Config of an engine that guesses tokens by n-grams."""
    out = tmp_path_factory.mktemp("guessing")
    flags = SPECULATION.replace(" '", "='").replace(" ", "")
    knobs = f"toy --run engine --out {out} --model {base_model} --port {PORT + 3}"
    knobs += f" --concurrency 64 --engine_flags={flags}"
    environment = registered(out / "plugin", mended_speculation.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_flags, "_refuse_on_cpus", lambda: None)
        with statistics(), served(knobs, environment, as_loaded=True) as config:
            yield config


@pytest.mark.slow
def test_guessed_tokens_leave_the_distribution_and_the_logprobs_exact(guessing):
    model = AutoModelForCausalLM.from_pretrained(guessing.model).float()
    prompt = AutoTokenizer.from_pretrained(guessing.model)(TEXT)["input_ids"]
    exact = log_probabilities(model, prompt, 3)
    _, before = guessed_and_accepted(guessing)
    sampling = dict(max_tokens=3, temperature=TEMPERATURE, ignore_eos=True)
    order = dict(token_ids=prompt, sampling_params=sampling)
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda _: post(guessing, **order), range(4000)))
    choices = [reply.json()["choices"][0] for reply in replies]
    _, accepted = guessed_and_accepted(guessing)
    assert accepted - before > 200
    counts = Counter()
    for choice in choices:
        tokens = tuple(choice["token_ids"])
        counts[tokens] += 1
        assert abs(sum(choice["behavior_logprobs"]) - exact[tokens]) < 1e-3
    # Pearson's test: continuations that are expected fewer than five times are one class together.
    expected = len(choices) * np.exp(exact)
    common = [tuple(index) for index in np.argwhere(expected >= 5)]
    observed = [counts[tokens] for tokens in common]
    wanted = [expected[tokens] for tokens in common]
    observed.append(len(choices) - sum(observed))
    wanted.append(len(choices) - sum(wanted))
    assert len(common) > 10
    chi_square = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = torch.tensor(len(observed) - 1.0)
    assert torch.special.gammaincc(freedom / 2, torch.tensor(chi_square / 2)) > 1e-6


@pytest.mark.slow
def test_guessed_tokens_have_the_stamp_of_the_weights_that_accepted_them(guessing):
    sender = sender_to(guessing, AutoModelForCausalLM.from_pretrained(guessing.model))
    sender.config.recompute_kv = True
    check_stamps(guessing, sender, 0)
