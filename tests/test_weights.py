"""Weight updates into a real vLLM server: right values, exact stamps, requests in progress go on, failures end in time."""
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import config as cfg
import launch
import weights
from actor import token_versions
from conftest import PORT
from evaluate import start_engines, stop_engines
from tasks import _tiny, toy
from train import token_logprobs
from weights import Sender, buckets

PROMPT = [45, 4, 52, 29, 2]


def generate(config, n=8, **sampling):
    answer = requests.post(f"{config.urls[0]}/inference/v1/generate", timeout=60, json=dict(
        token_ids=PROMPT, sampling_params=dict(max_tokens=n, temperature=1.0, logprobs=0, ignore_eos=True) | sampling))
    choice = answer.json()["choices"][0]
    return choice["token_ids"], torch.tensor([x["logprob"] for x in choice["logprobs"]["content"]]), token_versions(choice["weight_versions"], n)


def difference(config, model):
    """Largest |engine logprob - trainer logprob| over a fresh completion, and its versions."""
    tokens, engine, versions = generate(config)
    ids = torch.tensor(PROMPT + tokens)
    with torch.no_grad():
        mine = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(PROMPT):]
    return (mine - engine).abs().max().item(), set(versions.tolist())


def update(sender, version):
    sender.prepare(version)
    sender.send(version, lambda engines: None)
    sender.wait()


@pytest.fixture(scope="module")
def sender(engine):
    torch.manual_seed(0)
    return Sender(engine, AutoModelForCausalLM.from_pretrained(engine.model), 0, torch.device("cpu"))


def perturb(model, scale=0.03):
    with torch.no_grad():
        for p in model.parameters():  # every parameter, a tied output head too
            p.add_(scale * torch.randn_like(p))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Sender to a second server: an output head of its own, a vocabulary that vLLM pads (100 to 128), fewer KV heads than heads."""
    path = tmp_path_factory.mktemp("untied")
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=100, hidden_size=128, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                         max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    model.save_pretrained(path / "model")
    _tiny.make_tokenizer([toy]).save_pretrained(path / "model")
    config = cfg.resolve(cfg.parse(["toy", "--run", "engine", "--out", str(path), "--model", str(path / "model"), "--port", str(PORT + 1), "--concurrency", "8"], 0), 0)
    launch.write(config)
    engines = start_engines(config)
    yield Sender(config, model, 0, torch.device("cpu"))
    stop_engines(engines)


def test_buckets_cover_all_parameters_in_order():
    shapes = [[10], [3, 5], [100], [1], [7]]
    assert buckets(shapes, 4, 100) == [(0, 2, 25), (2, 3, 100), (3, 5, 8)]
    assert buckets(shapes, 4, 10**9) == [(0, 5, 133)]


@pytest.mark.parametrize("bucket_mb", [256, 0])
def test_engine_equals_trainer_after_an_update(engine, sender, bucket_mb):
    sender.config.bucket_mb = bucket_mb  # 0: one tensor per bucket
    for version in (3, 4):
        perturb(sender.model)
        update(sender, version)
        worst, versions = difference(engine, sender.model)
        assert worst < 1e-4 and versions == {version}


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_in_progress_continue_across_updates(engine, sender, recompute):
    sender.config.recompute_kv, first = recompute, 2000 if recompute else 1000
    version = first - 1
    with ThreadPoolExecutor(48) as pool:
        running = [pool.submit(generate, engine, 120) for _ in range(4 * 48)]
        while sum(r.done() for r in running) < 3 * 48:  # one update after the other; the last ones end without
            version += 1
            with torch.no_grad():
                sender.model.model.norm.weight.mul_(1.05 if version % 2 else 1 / 1.05)
            update(sender, version)
        results = [r.result(60) for r in running]
    assert all(len(tokens) == 120 for tokens, _, _ in results)
    assert all((v[1:] >= v[:-1]).all() for _, _, v in results)  # stamps only rise
    assert sum(len(set(v.tolist())) >= 2 for _, _, v in results) >= 8
    assert difference(engine, sender.model)[0] < 1e-4
    if recompute:
        # all KV is of the newest weights after the last update, so the tail of every sequence is a fresh forward's
        for tokens, logprobs, v in results[-8:]:
            ids, tail = torch.tensor(PROMPT + tokens), torch.from_numpy(v == version)
            with torch.no_grad():
                mine = token_logprobs(sender.model, ids, torch.arange(len(ids)), 1.0)[0][len(PROMPT):]
            assert (mine - logprobs)[tail].abs().max() < 1e-3 if tail.any() else True


def test_zeros_and_back(engine, sender):
    kept = [p.detach().clone() for p in sender.model.parameters()]
    with torch.no_grad():
        for p in sender.model.parameters():
            p.zero_()
    update(sender, 200)
    tokens, logprobs, _ = generate(engine, 20)
    assert logprobs.tolist() == pytest.approx([-math.log(sender.model.config.vocab_size)] * 20, abs=1e-5)  # every token equally likely
    with torch.no_grad():
        for p, k in zip(sender.model.parameters(), kept):
            p.copy_(k)
    update(sender, 201)
    assert difference(engine, sender.model)[0] < 1e-4


def test_what_arrives_damaged_is_not_loaded(engine, sender, monkeypatch):
    sender.config.verify_weights = 1
    update(sender, 300)
    monkeypatch.setattr(weights, "checksum", lambda flat: torch.tensor(12345))  # as if a bit had changed on the way
    with pytest.raises(RuntimeError, match="checksums differ"):
        update(sender, 301)
    assert difference(engine, sender.model)[1] == {300}
    monkeypatch.undo()
    update(sender, 302)
    assert difference(engine, sender.model)[1] == {302}


def test_checksum_sees_values_and_places():
    a = torch.randn(3 << 20)
    b = a.clone()
    b[[5, 9]] = b[[9, 5]]
    c = a.clone()
    c[-1] += 1e-6
    assert len({int(weights.checksum(x)) for x in (a, b, c)}) == 3 and weights.checksum(a) == weights.checksum(a.clone())


def test_an_incomplete_update_leaves_the_old_weights_whole(untied):
    for version in (1, 2, 3):  # the first one learns where everything goes, the others use it
        perturb(untied.model)
        update(untied, version)
        worst, versions = difference(untied.config, untied.model)
        assert worst < 1e-4 and versions == {version}
    old = {k: v.clone() for k, v in untied.model.state_dict().items()}
    perturb(untied.model)
    named = untied.model.named_parameters
    most = [(n, p) for n, p in named() if n != "model.layers.1.self_attn.k_proj.bias"]  # a third of a fused tensor is missing
    untied.model.named_parameters = lambda: most
    with pytest.raises(RuntimeError, match="do not make up the model's model.layers.1.self_attn.qkv_proj.bias"):
        update(untied, 4)
    untied.model.named_parameters = named
    untied.model.load_state_dict(old)
    worst, versions = difference(untied.config, untied.model)
    assert worst < 1e-4 and versions == {3}
    update(untied, 5)
    assert difference(untied.config, untied.model) == (pytest.approx(0, abs=1e-4), {5})


def test_a_refused_update_is_an_error_that_names_the_engine(engine, sender):
    sender.model.register_parameter("stranger", torch.nn.Parameter(torch.zeros(3)))  # vLLM's model has no such parameter
    try:
        with pytest.raises(RuntimeError, match=rf"no engine took version 99; engine http://127.0.0.1:{engine.port}: /swap refused: 500 .*stranger"):
            update(sender, 99)
        assert generate(engine)[2].tolist() != [99] * 8  # nothing of it is served
    finally:
        del sender.model.stranger
    update(sender, 100)  # and the next update is taken as ever
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {100}


def test_tensor_parallel_engine(tmp_path, base_model):
    """Two workers, each with its shard of every fused matrix: one group of three."""
    config = cfg.resolve(cfg.parse(["toy", "--run", "tp", "--out", str(tmp_path), "--port", "8702", "--concurrency", "16", "--model", str(base_model), "--tensor_parallel", "2"], 0), 0)
    launch.write(config)
    engines = start_engines(config)
    try:
        sender = Sender(config, AutoModelForCausalLM.from_pretrained(base_model), 0, torch.device("cpu"))
        for version in (1, 2):
            perturb(sender.model)
            update(sender, version)
            worst, versions = difference(config, sender.model)
            assert worst < 1e-4 and versions == {version}
    finally:
        stop_engines(engines)


def test_strangers_are_refused(engine):
    for path in ("/pause", "/swap", "/arm", "/update_weights"):
        answer = requests.post(f"http://127.0.0.1:{engine.port}{path}", json={}, headers={"x-run-id": "another"}, timeout=10)
        assert answer.status_code == 403 and "not 'another'" in answer.json()["error"]


def test_receiving_without_a_second_copy(engine, sender):
    sender.config.background_receive = False
    update(sender, 399)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(generate, engine, 120) for _ in range(8)]
        for version in (400, 401):
            perturb(sender.model, 0.01)
            update(sender, version)
        worst, versions = difference(engine, sender.model)
        assert worst < 1e-4 and versions == {401}
        assert all(len(r.result(60)[0]) == 120 for r in running)
    sender.config.background_receive = True


def test_unreachable_engines_are_an_error_within_the_deadline(engine, sender):
    sender.config.start_timeout, sender.urls = 2.0, ["http://127.0.0.1:9"]
    sender.http[sender.urls[0]], sender.silent[sender.urls[0]] = requests.Session(), 0
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="none of http://127.0.0.1:9 was healthy within 2 s"):
        update(sender, 101)
    assert time.monotonic() - start < 20
