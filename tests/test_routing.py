"""Mixtures of experts: what routers choose is counted, and can be prescribed.

Models are tiny and random. The engine of the run is FAKE: vLLM tells which experts it chose on GPUs
alone.
"""

import json

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

import config as cfg
import train
from bench import families
from conftest import PORT, resolved
from fake_engine import fake_vllm
from plumbing import engine
from plumbing.client import read_answer
from plumbing.model import decoder_of
from plumbing.routing import Routing
from plumbing.samples import Transcript, filler, join, split
from test_run import run
from tools import model_check

# the latent attention of DeepSeek, whose routers choose 2 of 4 groups of experts first
GROUPS = families.TINY | families.FAMILIES["deepseek_v3"]
GROUPS |= dict(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
GROUPS |= dict(first_k_dense_replace=0)
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoehybrid")


def random_model(family):
    torch.manual_seed(0)
    shape = families.shape_of(family)
    if family == "deepseek_v3":
        shape = AutoConfig.for_model(family, **GROUPS)
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_routers_take_the_prescribed_experts(family):
    """The own choice changes nothing, another one is taken, and both are counted."""
    model = random_model(family)
    ids = torch.randint(2, 100, (1, 20))
    expected = model(input_ids=ids, use_cache=False).logits
    routing = Routing(decoder_of(model), replays=True)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    own = torch.stack([choice.own for choice in routing.choices.values()], 1)
    experts = 8 if family == "deepseek_v3" else 4
    load = np.mean([x.flatten().bincount(minlength=experts).max() for x in own.unbind(1)])
    total, n = routing.sums()["expert_load"]
    assert float(total / n) == pytest.approx(load / (own.numel() / 2 / experts))
    routing.prescribed = own
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert routing.sums()["router_flips"] == (0, 40)
    # From token 12 on the second layer is to take others.
    routing.prescribed = own.clone()
    routing.prescribed[12:, 1] = (own[12:, 1] + 1) % experts
    other = model(input_ids=ids, use_cache=False).logits
    assert (other[:, :12] - expected[:, :12]).abs().max() < 1e-5
    assert (other[:, 12:] - expected[:, 12:]).abs().amax(-1).min() > 1e-4
    flips, known = routing.sums()["router_flips"]
    assert 0 < flips <= 8 and known == 40
    # -1: the router decides.
    routing.prescribed[12:, 1] = -1
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert routing.sums()["router_flips"] == (0, 32)


def test_a_router_without_topk_is_refused_by_name():
    model = random_model("phimoe")
    routing = Routing(decoder_of(model), replays=True)
    ids = torch.randint(2, 100, (1, 5))
    model(input_ids=ids, use_cache=False)
    assert routing.sums() == {}
    routing.prescribed = torch.zeros(5, 2, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="the router of layer 0 chooses its experts without"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("family, rows", [("qwen3_moe", "packed"), ("granitemoehybrid", "padded")])
def test_experts_belong_to_the_tokens_of_a_row(family, rows, tmp_path):
    """In a row, sequences have the logprobs and gradients that they have alone.

    Two begin alike, and share what is computed; layers are computed again in the backward pass.
    """
    families.make_model(family, tmp_path, torch.float32)
    knobs = dict(model=str(tmp_path), dtype="float32", rows=rows, replay_routing=True)
    policy = train.build(cfg.Config(**knobs, checkpointed_layers=2), torch.device("cpu"), 1)[0]
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2, 100, n) for n in (3, 9, 12)]
    sequences[2][:5] = sequences[1][:5]
    # two different ones of four experts in each of two layers
    experts = [rng.random((len(x), 2, 4)).argsort(-1)[..., :2] for x in sequences]
    experts[2][:5] = experts[1][:5]
    experts = [x.reshape(len(x), 4).astype(np.int16) for x in experts]
    weights = torch.randn(sum(map(len, sequences)))
    alone = []
    for tokens, chosen in zip(sequences, experts):
        logprobs, _ = policy.logprobs(tokens, np.arange(len(tokens)), 1.0, experts=chosen)
        first = sum(map(len, alone))
        (logprobs[1:] * weights[first + 1 : first + len(tokens)]).sum().backward()
        alone.append(logprobs)
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    positions = np.concatenate([np.arange(len(x)) for x in sequences])
    tokens = np.concatenate(sequences)
    logprobs, _ = policy.logprobs(tokens, positions, 1.0, experts=np.concatenate(experts))
    is_token = torch.from_numpy(positions > 0)
    (logprobs * weights)[is_token].sum().backward()
    assert (logprobs - torch.cat(alone))[is_token].abs().max() < 1e-5
    for p, gradient in zip(policy.parameters(), expected):
        assert (p.grad - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6
    plain, _ = policy.logprobs(tokens, positions, 1.0)
    assert (plain - logprobs)[is_token].abs().max() > 1e-3
    # Padding is no token: 21 in the row that shares nothing, 5 fewer in the packed one.
    _, n = policy.routing.sums()["expert_load"]
    assert n == 2 * (len(tokens) - 5 * (rows == "packed"))


def test_experts_of_a_conversation_are_those_of_the_turn_that_sampled():
    """The last token has not been computed, until the next turn has it in its prompt."""
    transcript = Transcript()
    transcript.append([5, 6])
    first = np.array([[1, 2], [3, 0], [2, 1]])
    transcript.append([7, 8], [-0.5] * 2, [0, 0], (0, first))
    assert transcript.fields()["experts"].tolist() == [*first.tolist(), [-1, -1]]
    assert transcript.known_experts == 3
    transcript.append([9])
    # The second turn is asked for what is not known; one that began earlier knew less.
    second = np.array([[4, 7], [5, 4], [6, 4]])
    expected = [*first.tolist(), [5, 4], [6, 4], [-1, -1]]
    transcript.append([3], [-0.5], [1], (2, second))
    assert transcript.fields()["experts"].tolist() == expected
    # Another turn has taken the segment that this one was asked for.
    transcript = Transcript([5, 6, 9])
    transcript.append([3], [-0.5], [1], (2, second[:1]))
    assert transcript.fields()["experts"].tolist() == [[-1, -1]] * 2 + [[4, 7], [-1, -1]]


def test_experts_travel_in_records_and_fillers_have_none():
    transcript = Transcript([5])
    transcript.append([7], [-0.5], [0], (0, np.array([[300, 2]])))
    samples = [transcript.fields(), transcript.fields()]
    for sample in split(join(samples)):
        assert sample["experts"].tolist() == [[300, 2], [-1, -1]]
        assert sample["experts"].dtype == np.int16
    assert filler()["experts"].shape == (1, 0)
    assert Transcript([5, 6]).fields()["experts"].shape == (2, 0)


def encoded(chosen):
    """vLLM's output for a prompt of two tokens as our engine's answer, in bytes."""
    logprobs = type("Logprobs", (), {"logprobs": [-0.5, -0.25]})
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[29, 1],
        cumulative_logprob=None,
        logprobs=logprobs,
        routed_experts=chosen,
        finish_reason="stop",
    )
    completion.weight_versions = [dict(version="3", start=0, end=2)]
    output = RequestOutput("0", None, [5, 6], None, [completion], True)
    return engine._encode(output, SamplingParams())


def test_experts_of_an_answer_are_read_and_checked():
    # [tokens, layers, k], as vLLM has them
    chosen = np.arange(12).reshape(3, 2, 2).astype(np.uint16) * 20
    answer = read_answer(encoded(chosen), 5, [1], 100, context=2)
    assert np.array_equal(answer["experts"], chosen.reshape(3, 4))
    assert read_answer(encoded(chosen), 5, [1], 100)["experts"] is None
    # 12 values are no 4 for each of 3 tokens if they are 6 for each of 2.
    for wrong in (None, chosen.reshape(2, 3, 2)):
        with pytest.raises(ValueError, match="those of 3 tokens were asked for"):
            read_answer(encoded(wrong), 5, [1], 100, context=2)
    body = msgspec.json.decode(encoded(None))
    assert body["choices"][0]["experts"] is None


def test_models_whose_routers_cannot_be_told_are_refused():
    model_check.check_replay("m", random_model("qwen3_moe").config)
    shapes = [
        families.shape_of("phimoe"),
        AutoConfig.for_model("deepseek_v2", **GROUPS | dict(topk_method="group_limited_greedy")),
    ]
    for shape in shapes:
        with pytest.raises(cfg.ConfigError, match="cannot take the experts that an engine chose"):
            model_check.check_replay("m", shape)


@pytest.mark.parametrize(
    "knobs, family, message",
    [
        (dict(replay_routing=True), "qwen3_moe", "on CPUs vLLM does not tell which experts"),
        (dict(replay_routing=True), "qwen2", "m .qwen2. has no experts"),
        (dict(lora_rank=4), "qwen3_moe", "has experts, which are no linear layers"),
        # These experts have no "expert" in their names.
        (dict(lora_rank=4), "granitemoehybrid", "has experts, which are no linear layers"),
    ],
)
def test_what_experts_make_impossible_is_refused(knobs, family, message, tmp_path):
    families.make_model(family, tmp_path, torch.float32)
    shape = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(cfg.ConfigError, match=message):
        model_check.check_supported(shape, cfg.Config(model="m", dtype="float32", **knobs))


def test_replay_needs_prefix_caching():
    with pytest.raises(cfg.ConfigError, match="--replay_routing needs --prefix_caching on"):
        resolved("toy", "--replay_routing", "True", "--prefix_caching", "off")


@pytest.mark.slow
def test_a_run_replays_what_its_engine_chose(tmp_path):
    """The engine is FAKE. It computes in float32, the trainer in bfloat16: some routers differ."""
    folder = tmp_path / "model"
    families.make_model("qwen3_moe", folder, torch.float32)
    knobs = f"--model {folder} --dtype bfloat16 --replay_routing True --prefix_caching on --steps 3"
    knobs += " --batch_size 32 --attempts 8 --eval_problems 8"
    path = str(fake_vllm(tmp_path / "fake"))
    done = run(tmp_path, "replay", PORT + 75, knobs, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "replay" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "step" in line]
    assert len(steps) == 3
    for step in steps:
        assert 0 < step["router_flips"] < 0.3 and 1 < step["expert_load"] < 4
        assert step["ess"] > 0.9
