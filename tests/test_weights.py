"""Weight updates into a real vLLM server: right values, exact stamps, requests in progress go on, failures end in time."""

import asyncio
import copy
import math
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import weights
from conftest import PORT, register, resolved, with_knobs
from plumbing import attribution, client, group, launch, secret, transport
from plumbing.answers import Span, token_versions
from plumbing.queues import read_json
from plumbing.ranks import Ranks
from plumbing.samples import Transcript, join
from plumbing.transport import buckets
from tasks import toy
from tools import base_model as base_models
from tools.evaluate import start_engines, stop_engines
from train import token_logprobs
from weights import Sender

PROMPT = [45, 4, 52, 29, 2]


def url_of(config):
    return f"http://{config.master_addr}:{config.port}"


def ask(config, prompt, n, salt=None, **sampling):
    """What the engine answers, as it is."""
    order = dict(
        token_ids=prompt,
        sampling_params=dict(max_tokens=n, temperature=1.0, ignore_eos=True) | sampling,
        cache_salt=salt,
    )
    url = f"{url_of(config)}/inference/v1/generate"
    headers = secret.header(f"{config.out}/{config.run}")
    answer = requests.post(url, timeout=60, headers=headers, json=order).json()
    assert "choices" in answer, answer
    return answer


def generate(config, n=8, **sampling):
    choice = ask(config, PROMPT, n, **sampling)["choices"][0]
    return (
        choice["token_ids"],
        torch.tensor(choice["behavior_logprobs"]),
        token_versions([Span(**s) for s in choice["weight_versions"]], n),
    )


def difference(config, model):
    """Largest |engine logprob - trainer logprob| over a fresh completion, and its versions."""
    tokens, engine, versions = generate(config)
    ids = torch.tensor(PROMPT + tokens)
    with torch.no_grad():
        mine = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(PROMPT) :]
    return (mine - engine).abs().max().item(), set(versions.tolist())


def update(sender, version):
    sender.push(version, {})
    sender.wait()


OPEN = {}


def sender_to(config, model):
    """A real Sender to the engine of this config, which takes the place of the one before."""
    before = OPEN.get(config.port)
    if before is not None:
        before.close()
    config = with_knobs(config, sync_timeout=20.0)
    run_dir = f"{config.out}/{config.run}"
    register(run_dir, "engine0", url_of(config))
    (Path(run_dir) / "queues").mkdir(exist_ok=True)
    sender = Sender(config, model, Ranks(config), run_dir)
    sender.model = model
    OPEN[config.port] = sender
    return sender


@pytest.fixture(scope="module")
def model(engine):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(engine.model)
    model.token_logprobs = types.MethodType(token_logprobs, model)
    return model


@pytest.fixture
def sender(engine, model):
    return sender_to(engine, model)


def perturb(model, scale=0.03):
    with torch.no_grad():
        for p in model.parameters():  # every parameter, a tied output head too
            p.add_(scale * torch.randn_like(p))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Sender to a second server: an output head of its own, a vocabulary that vLLM pads (100 to 128), fewer KV heads than heads."""
    path = tmp_path_factory.mktemp("untied")
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=100,
            hidden_size=128,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(path / "model")
    base_models.make_tokenizer([toy]).save_pretrained(path / "model")
    config = resolved(
        *("toy", "--run", "engine", "--out", path, "--model", path / "model"),
        *("--port", PORT + 1, "--concurrency", 8),
    )
    launch.write(config)
    engines = start_engines(config, as_loaded=False)
    yield sender_to(config, model)
    stop_engines(engines)


def test_buckets_cover_all_parameters_in_order():
    shapes = [[10], [3, 5], [100], [1], [7]]
    assert buckets(shapes, 4, 100) == [(0, 2, 25), (2, 3, 100), (3, 5, 8)]
    assert buckets(shapes, 4, 10**9) == [(0, 5, 133)]


@pytest.mark.parametrize("bucket_mb", [256, 0])
def test_engine_equals_trainer_after_an_update(engine, sender, bucket_mb):
    # 0: one tensor per bucket
    other = sender_to(with_knobs(engine, bucket_mb=bucket_mb), sender.model)
    for version in (3, 4):
        perturb(sender.model)
        update(other, version)
        worst, versions = difference(engine, sender.model)
        assert worst < 1e-4 and versions == {version}


def test_updates_that_bring_nothing_new_are_counted(engine, sender):
    for version in (5, 6, 7):
        update(sender, version)
    assert sender.unchanged == 2
    with torch.no_grad():
        sender.model.model.norm.weight[0] += 1e-3
    update(sender, 8)
    assert sender.unchanged == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_in_progress_continue_across_updates(engine, sender, recompute):
    sender.config.recompute_kv, first = recompute, 2000 if recompute else 1000
    version = first - 1
    with ThreadPoolExecutor(48) as pool:
        running = [pool.submit(generate, engine, 120) for _ in range(4 * 48)]
        while (
            sum(r.done() for r in running) < 3 * 48
        ):  # one update after the other; the last ones end without
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
                mine = token_logprobs(sender.model, ids, torch.arange(len(ids)), 1.0)[0][
                    len(PROMPT) :
                ]
            assert (mine - logprobs)[tail].abs().max() < 1e-3 if tail.any() else True


@pytest.mark.parametrize(
    "others",
    [
        dict(token_ids=[]),
        dict(token_ids=["3"]),
        dict(token_ids=[-3]),
        dict(token_ids=[10**9]),
        dict(token_ids=[3] * 1000),
        dict(sampling_params=None),
        dict(sampling_params=dict(max_tokens=0)),
        dict(sampling_params=dict(temperature=-1)),
        dict(cache_salt=7),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_a_line(engine, sender, others):
    update(sender, 150)
    order = dict(token_ids=PROMPT, sampling_params=dict(max_tokens=2))
    url = f"{url_of(engine)}/inference/v1/generate"
    key = secret.header(f"{engine.out}/{engine.run}")
    answer = requests.post(url, json=order | others, headers=key, timeout=20)
    assert answer.status_code == 400, answer.text
    assert "\n" not in answer.json()["error"]
    assert len(generate(engine, 2)[0]) == 2


LONG_PROMPT = [3 + (7 * i + i // 5) % 40 for i in range(100)]


def from_scratch(model, prompt, answer):
    """Largest |engine logprob - logprob of a forward that shares nothing|."""
    choice = answer["choices"][0]
    ids = torch.tensor(prompt + choice["token_ids"])
    with torch.no_grad():
        mine = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(prompt) :]
    return (mine - torch.tensor(choice["behavior_logprobs"])).abs().max().item()


@pytest.mark.parametrize("recompute", [False, True])
def test_beginnings_are_shared_within_a_version_alone(engine, sender, recompute):
    sender.config.recompute_kv = recompute
    first = 160 + 10 * recompute
    update(sender, first)
    answers = [ask(engine, LONG_PROMPT, 8, str(first)) for _ in range(3)]
    assert [a["cached_tokens"] for a in answers] == [0, 96, 96]
    assert max(from_scratch(sender.model, LONG_PROMPT, a) for a in answers) < 1e-4
    # without a salt nothing is shared
    assert [ask(engine, LONG_PROMPT, 1)["cached_tokens"] for _ in range(2)] == [0, 0]
    perturb(sender.model)
    update(sender, first + 1)
    fresh = ask(engine, LONG_PROMPT, 8, str(first + 1))
    assert fresh["cached_tokens"] == 0
    assert from_scratch(sender.model, LONG_PROMPT, fresh) < 1e-4
    # a turn of an attempt that began before the update: the KV cache it had, unless that is recomputed
    later = ask(engine, LONG_PROMPT, 8, str(first))
    stale = from_scratch(sender.model, LONG_PROMPT, later)
    assert (later["cached_tokens"], stale > 1e-2) == ((0, False) if recompute else (96, True))
    # a trainer that continues from a checkpoint counts the same versions again
    again = sender_to(engine, sender.model)
    update(again, first)
    assert ask(engine, LONG_PROMPT, 1, str(first))["cached_tokens"] == 0


def test_no_token_is_sampled_from_kv_of_another_version_than_its_salts(engine, sender):
    versions = range(180, 185)
    models = {}
    announced = []
    answers = []
    done = threading.Event()

    def go_on_asking(k):
        while not done.is_set():
            salt = announced[-1]
            # equal beginnings, four of them
            prompt = [3 + k % 4, *LONG_PROMPT[:99]]
            answers.append((salt, prompt, ask(engine, prompt, 12, str(salt))))

    with ThreadPoolExecutor(16) as pool:
        for version in versions:
            perturb(sender.model)
            models[version] = copy.deepcopy(sender.model)
            update(sender, version)
            announced.append(version)
            if version == versions[0]:
                running = [pool.submit(go_on_asking, k) for k in range(16)]
            time.sleep(0.7)
        done.set()
        for r in running:
            r.result(60)
    pure = []
    for salt, prompt, answer in answers:
        spans = answer["choices"][0]["weight_versions"]
        if {span["version"] for span in spans} == {str(salt)}:
            pure.append((salt, prompt, answer))
    # most of them, of each version, most from shared beginnings
    assert len(pure) > len(answers) / 2 and {salt for salt, _, _ in pure} == set(versions)
    assert np.mean([answer["cached_tokens"] for _, _, answer in pure]) > 64
    for salt, prompt, answer in pure:
        assert from_scratch(models[salt], prompt, answer) < 1e-4


# ---- what the distance between behaviour and trained policy is made of (plumbing/attribution.py)


def sampled(config, n=100, **fields):
    """One sample from the engine, as the actor makes it."""
    choice = ask(config, PROMPT, n)["choices"][0]
    transcript = Transcript(PROMPT)
    spans = [Span(**s) for s in choice["weight_versions"]]
    transcript.add_turn(
        dict(
            tokens=choice["token_ids"],
            logprobs=choice["behavior_logprobs"],
            versions=token_versions(spans, n),
        )
    )
    return transcript.fields() | dict(outcome=0, temperature=1.0) | fields


def parts_of_trainer(config, sender, model, samples, version):
    """As train.py calls it; each sample is a micro-batch."""
    config = with_knobs(config, attribute_every=1)
    said = []
    log = SimpleNamespace(attribution=lambda version, parts: said.append((version, parts)))
    run_dir = Path(config.out, config.run)
    looks_on = attribution.Attribution(config, run_dir, model, sender.ranks, sender, log)
    batches = [join([sample]) for sample in samples]
    assert list(looks_on.watch(batches, version)) == batches
    [(of, parts)] = said
    assert of == version
    return parts


def parts_of_actor(config, samples):
    """As actor.py calls it."""
    queues = Path(config.out, config.run, "queues")

    async def look():
        engines = client.Engines(config, [], 0, None, secret.header(queues.parent))
        engines.serve([url_of(config)])
        await attribution.after_sampling(engines, samples, config, queues)
        await engines.close()

    asyncio.run(look())
    return read_json(queues / "attribution.json")["parts"]


def test_age_alone_is_found_as_age(engine, sender):
    update(sender, 190)
    samples = [sampled(engine) for _ in range(6)]
    before = parts_of_trainer(engine, sender, sender.model, samples, 190)
    assert before["age"]["tokens"] == 600
    assert max(before[kind]["nats"] for kind in ("age", "numerics", "all")) < 1e-4
    perturb(sender.model)
    update(sender, 191)
    parts = parts_of_trainer(engine, sender, sender.model, samples, 191)
    assert parts["numerics"]["nats"] < 1e-4 < 1e-2 < parts["age"]["nats"]
    assert parts["all"]["kl"] == pytest.approx(parts["age"]["kl"], rel=0.01)
    # it is the engines that have to have this version
    assert parts_of_trainer(engine, sender, sender.model, samples, 192)["all"] is None


def test_another_computation_alone_is_found_as_numerics(engine, sender):
    update(sender, 193)
    samples = [sampled(engine) for _ in range(6)]
    other = copy.deepcopy(sender.model)
    other.token_logprobs = types.MethodType(token_logprobs, other)
    perturb(other, 0.003)
    parts = parts_of_trainer(engine, sender, other, samples, 193)
    assert parts["age"]["nats"] < 1e-4 < 1e-3 < parts["numerics"]["nats"]
    assert parts["all"]["nats"] == pytest.approx(parts["numerics"]["nats"], rel=0.05)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stale_cache_alone_is_found_as_stale(engine, sender, recompute):
    sender.config.recompute_kv = recompute
    version = 195 + 3 * recompute
    update(sender, version)
    perturb(sender.model)
    with ThreadPoolExecutor(32) as pool:
        running = [pool.submit(sampled, engine, 120) for _ in range(96)]
        while sum(r.done() for r in running) < 16:
            time.sleep(0.01)
        update(sender, version + 1)
        samples = [r.result(60) for r in running]
    mixed = [sample for sample in samples if sample["num_versions"] == 2]
    assert mixed, "no sequence was in progress during the update"
    stale = parts_of_actor(engine, mixed)["stale"]
    assert (stale["nats"] > 1e-3) == (not recompute) and stale["tokens"] > 0
    assert recompute is (stale["nats"] < 1e-4)
    pure = [sampled(engine) for _ in range(4)]
    parts = parts_of_actor(engine, pure)
    assert parts["stale"] is None and parts["decode"]["nats"] < 1e-4


def test_zeros_and_back(engine, sender):
    kept = [p.detach().clone() for p in sender.model.parameters()]
    with torch.no_grad():
        for p in sender.model.parameters():
            p.zero_()
    update(sender, 200)
    tokens, logprobs, _ = generate(engine, 20)
    assert logprobs.tolist() == pytest.approx(
        [-math.log(sender.model.config.vocab_size)] * 20, abs=1e-5
    )  # every token equally likely
    with torch.no_grad():
        for p, k in zip(sender.model.parameters(), kept):
            p.copy_(k)
    update(sender, 201)
    assert difference(engine, sender.model)[0] < 1e-4


def test_what_arrives_damaged_is_not_loaded_and_sent_again(engine, sender, monkeypatch, capsys):
    monkeypatch.setattr(weights, "VERIFY_EVERY", 1)
    update(sender, 300)
    perturb(sender.model)
    calls = []

    def damaged(flat):
        """As if a bit had changed on the way, the first time."""
        calls.append(flat)
        return torch.tensor(12345) if len(calls) == 1 else transport.checksum(flat)

    monkeypatch.setattr(group, "checksum", damaged)
    sender.config.sync_timeout = 3.0
    update(sender, 301)
    sender.config.sync_timeout = 20.0
    said = capsys.readouterr().out
    assert "did not receive the update" in said and "version 301 did not reach all engines" in said
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {301}


def test_checksum_sees_values_and_places():
    a = torch.randn(3 << 20)
    b = a.clone()
    b[[5, 9]] = b[[9, 5]]
    c = a.clone()
    c[-1] += 1e-6
    assert len({int(transport.checksum(x)) for x in (a, b, c)}) == 3 and transport.checksum(
        a
    ) == transport.checksum(a.clone())


def test_an_incomplete_update_leaves_the_old_weights_whole(untied):
    # the first one learns where everything goes, the others use it
    for version in (1, 2, 3):
        perturb(untied.model)
        update(untied, version)
        worst, versions = difference(untied.config, untied.model)
        assert worst < 1e-4 and versions == {version}
    old = {k: v.clone() for k, v in untied.model.state_dict().items()}
    perturb(untied.model)
    # a third of a fused tensor is missing
    missing = "model.layers.1.self_attn.k_proj.bias"
    most = [(n, p) for n, p in untied.model.named_parameters() if n != missing]
    named = untied.model.named_parameters
    untied.model.named_parameters = lambda: most
    broken = sender_to(untied.config, untied.model)
    with pytest.raises(
        RuntimeError, match="do not make up .*model.layers.1.self_attn.qkv_proj.bias"
    ):
        update(broken, 4)
    untied.model.named_parameters = named
    untied.model.load_state_dict(old)
    worst, versions = difference(untied.config, untied.model)
    assert worst < 1e-4 and versions == {3}
    again = sender_to(untied.config, untied.model)
    update(again, 5)
    assert difference(untied.config, untied.model) == (pytest.approx(0, abs=1e-4), {5})


def test_a_refused_update_is_an_error_that_names_the_engine(engine, sender):
    # vLLM's model has no such parameter
    sender.model.register_parameter("stranger", torch.nn.Parameter(torch.zeros(3)))
    broken = sender_to(engine, sender.model)
    try:
        with pytest.raises(
            RuntimeError,
            match=rf"99 reached no engine .*:{engine.port}: /init_process_group: .*500 .*stranger",
        ):
            update(broken, 99)
        # nothing of it is served
        assert generate(engine)[2].tolist() != [99] * 8
    finally:
        del sender.model.stranger
    # and the next update is taken as ever
    update(sender_to(engine, sender.model), 100)
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {100}


def test_an_engine_that_comes_back_is_admitted_while_nothing_is_to_be_sent(engine, sender):
    """As its launcher does it: the same address, started anew."""
    update(sender, 400)
    deliveries = sender.deliveries
    register(f"{engine.out}/{engine.run}", "engine0", url_of(engine))
    deadline = time.monotonic() + 20
    while sender.deliveries == deliveries:
        sender.check()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {400}


def test_an_update_waits_for_the_only_engine_to_come_back(engine, sender):
    """It is not listed while its launcher starts it again."""
    update(sender, 410)
    run_dir = Path(engine.out, engine.run)
    (run_dir / "engines" / "engine0.json").unlink()
    sender.push(411, {})
    time.sleep(1.5)
    sender.check()
    assert not sender.delivered.is_set()
    register(run_dir, "engine0", url_of(engine))
    sender.wait()
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {411}


@pytest.mark.parametrize("refusals", [1, 3])
def test_an_only_engine_that_refuses_a_swap_is_asked_again(engine, sender, monkeypatch, refusals):
    update(sender, 412)
    said = []
    left = [f"refused, 500 number {n}" for n in range(refusals)]
    call = group.Engines._call

    def refuse(self, member, path, body):
        said.append(read_json(sender.version_file))
        if path == "/request_weight_update" and left:
            raise RuntimeError(left.pop())
        return call(self, member, path, body)

    monkeypatch.setattr(group.Engines, "_call", refuse)
    perturb(sender.model)
    update(sender, 413)
    # meanwhile it served what it had
    assert {(x["version"], *x["engines"]) for x in said} == {(412, url_of(engine))}
    assert not left
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {413}


class Mute(BaseHTTPRequestHandler):
    """Says yes to every order, and follows none."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_that_never_joins_does_not_keep_the_others_waiting(engine, sender, dies, capsys):
    update(sender, 420)
    run_dir = Path(engine.out, engine.run)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mute)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # long if it is to be found dead before that
    sender.config.sync_timeout = 60.0 if dies else 3.0
    register(run_dir, "mute", f"http://127.0.0.1:{server.server_port}")
    try:
        sender.push(421, {})
        if dies:
            time.sleep(2)
            server.shutdown()
            (run_dir / "engines" / "mute.json").unlink()
        sender.wait()
    finally:
        server.server_close()
        (run_dir / "engines" / "mute.json").unlink(missing_ok=True)
        sender.config.sync_timeout = 20.0
    said = capsys.readouterr().out
    assert ("an engine is gone" if dies else "did not join") in said
    worst, versions = difference(engine, sender.model)
    assert worst < 1e-4 and versions == {421}


@pytest.mark.slow
def test_tensor_parallel_engine(tmp_path, base_model):
    """Two workers, each with its shard of every fused matrix: one group of three."""
    config = resolved(
        *("toy", "--run", "tp", "--out", tmp_path, "--port", PORT + 2, "--concurrency", 16),
        *("--model", base_model, "--tensor_parallel", 2),
    )
    launch.write(config)
    engines = start_engines(config, as_loaded=False)
    try:
        sender = sender_to(config, AutoModelForCausalLM.from_pretrained(base_model))
        for version in (1, 2):
            perturb(sender.model)
            update(sender, version)
            worst, versions = difference(config, sender.model)
            assert worst < 1e-4 and versions == {version}
    finally:
        stop_engines(engines)


def test_unreachable_engines_are_an_error_within_the_deadline(engine, tmp_path):
    config = with_knobs(engine, out=str(tmp_path), start_timeout=2.0)
    model = AutoModelForCausalLM.from_pretrained(engine.model)
    register(tmp_path / config.run, "engine0", "http://127.0.0.1:9")
    (tmp_path / config.run / "queues").mkdir()
    sender = Sender(config, model, Ranks(config), tmp_path / config.run)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="none of .*http://127.0.0.1:9.* was healthy within 2 s"):
        update(sender, 101)
    assert time.monotonic() - start < 20
