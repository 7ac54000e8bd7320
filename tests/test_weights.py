"""Weight updates of a vLLM engine: right values, exact stamps, requests in progress go on, and
failures end in time.

The engines are real vLLM servers and the sender is the trainer's; the test plays the trainer.
tests/held_requests.py holds a request, so that an update reaches it in its middle.
"""

import contextlib
import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import held_requests
from conftest import PORT, register, resolved, wait_until, with_knobs
from plumbing import rundir, secret, weight_group
from plumbing.client import Span, token_versions
from plumbing.queues import read_json
from plumbing.ranks import Ranks, Stopped
from plumbing.supervise import stop
from tasks import toy
from tools import base_model as base_models
from tools.evaluate import start_engines
from train import token_logprobs
from weights import Sender

PROMPT = [45, 4, 52, 29, 2]


@contextlib.contextmanager
def served(command_line, environment=None, **start_options):
    """Run the engines of a command line and yield its Config.

    environment: {name: value} of the engines' variables.
    """
    config = resolved(*command_line.split())
    rundir.write(config)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        engines = start_engines(config, **start_options)
    try:
        yield config
    finally:
        stop(engines, 0)


def url_of(config):
    return f"http://{config.master_addr}:{config.port}"


def post(config, **order):
    url = f"{url_of(config)}/inference/v1/generate"
    headers = secret.secret_header(f"{config.out}/{config.run}")
    return requests.post(url, timeout=300, headers=headers, json=order)


def ask(config, prompt=PROMPT, n=8, salt=None, stop=()):
    """Have n tokens sampled, or fewer if one of `stop` comes; return the choice of the answer."""
    sampling = dict(max_tokens=n, temperature=1.0, ignore_eos=True, stop_token_ids=list(stop))
    reply = post(config, token_ids=prompt, sampling_params=sampling, cache_salt=salt)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    [choice] = answer["choices"]
    spans = [Span(**span) for span in choice["weight_versions"]]
    versions = token_versions(spans, len(choice["token_ids"]))
    return choice | dict(cached=answer["cached_tokens"], versions=versions)


def differences(model, answer, prompt=PROMPT):
    """|engine logprob - logprob of a forward that shares nothing| of each sampled token."""
    ids = torch.tensor(prompt + answer["token_ids"])
    with torch.no_grad():
        mine = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(prompt) :]
    return (mine - torch.tensor(answer["behavior_logprobs"])).abs()


def assert_serves(config, model, version):
    answer = ask(config)
    assert set(answer["versions"].tolist()) == {version}
    assert differences(model, answer).max() < 1e-4


def update(sender, version):
    sender.push(version)
    sender.wait()


OPEN = {}


def sender_to(config, model, **knobs):
    """Return a real Sender to the engine of this config, in place of the one before."""
    if config.port in OPEN:
        OPEN[config.port].close()
    config = with_knobs(config, sync_timeout=120.0, **knobs)
    run_dir = Path(config.out, config.run)
    register(run_dir, "engine0", url_of(config))
    (run_dir / "queues").mkdir(exist_ok=True)
    sender = Sender(config, model, Ranks(config), run_dir)
    sender.model = model
    OPEN[config.port] = sender
    return sender


@pytest.fixture(scope="module")
def model(engine):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(engine.model)


@pytest.fixture
def sender(engine, model):
    return sender_to(engine, model)


def perturb(model, scale=0.03):
    # Every parameter changes, a tied output head too.
    for p in model.parameters():
        p.data.add_(scale * torch.randn_like(p))


# Versions at which the second server holds a request in its middle until the next version
HELD = range(20, 31, 10)
# The second server's end-of-sequence token
STOP = 1


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Yield (config, model) of a second server, whose model differs from the toy base model.

    Its output head is not tied, vLLM pads its vocabulary from 100 to 128, and it has fewer KV heads
    than heads.
    """
    path = tmp_path_factory.mktemp("untied")
    torch.manual_seed(1)
    model_config = Qwen2Config(
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
        eos_token_id=STOP,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(model_config)
    model.save_pretrained(path / "model")
    base_models.make_tokenizer([toy]).save_pretrained(path / "model")
    knobs = f"toy --run engine --out {path} --model {path}/model --port {PORT + 1} --concurrency 8"
    environment = held_requests.plugin(path / "plugin", HELD)
    with served(knobs, environment, as_loaded=False) as config:
        yield config, model


# It must come first: an engine compares version 0 with what it has loaded until its first swap.
def test_version_0_must_be_what_the_engine_has_loaded(untied):
    """A single value differs from the model on disk."""
    config, model = untied
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight[3] += 0.01
    with pytest.raises(Stopped, match=r"model.norm.weight changes with the very weights that were"):
        update(sender_to(config, other), 0)
    update(sender_to(config, model), 0)
    assert_serves(config, model, 0)


# ---- values and stamps


def test_engine_equals_trainer_after_an_update_of_many_buckets(engine, model):
    # Each bucket has one tensor here. All other tests have one bucket.
    sender = sender_to(engine, model, bucket_mb=0)
    for version in (3, 4):
        perturb(model)
        update(sender, version)
        assert_serves(engine, model, version)


def scale(model, version):
    """Scale the weights, so that each version has those of its predecessor's predecessor."""
    for p in model.parameters():
        p.data.mul_(1.05 if version % 2 else 1 / 1.05)


def check_stamps(config, sender, version):
    """Update from this even version on, while 48 clients ask, and check the stamps of all tokens.

    Updates end when eight requests had one in their middle. These requests go on. If KV is
    recomputed, each token's logprob is that of the version in its stamp; else some tokens after an
    update differ from a fresh forward pass.
    """
    update(sender, version)
    first_version = version
    answers = []
    is_enough = threading.Event()

    def keep_asking():
        while not is_enough.is_set():
            answers.append(ask(config, n=120))

    def updated_in_the_middle():
        """Return how many answers had an update with ten tokens or more on both sides of it."""
        return sum(answer["versions"][9] < answer["versions"][-10] for answer in answers)

    with ThreadPoolExecutor(48) as pool:
        clients = [pool.submit(keep_asking) for _ in range(48)]
        try:
            while updated_in_the_middle() < 8:
                version += 1
                assert version < first_version + 1000, "updates go into no request's middle"
                scale(sender.model, version)
                update(sender, version)
                for client in clients:
                    # A client that has failed raises its error.
                    assert not client.done() or client.result()
        finally:
            is_enough.set()
    # The last requests end without an update.
    for client in clients:
        client.result()
    assert all(len(answer["token_ids"]) == 120 for answer in answers)
    assert_serves(config, sender.model, version)
    mixed = [a for a in answers if a["versions"][0] < a["versions"][-1]]
    stamps = np.stack([answer["versions"] for answer in mixed])
    assert (np.diff(stamps) >= 0).all()
    is_of_last_weights = torch.from_numpy(stamps % 2 == version % 2)
    last_differences = torch.stack([differences(sender.model, answer) for answer in mixed])
    scale(sender.model, version + 1)
    previous_differences = torch.stack([differences(sender.model, answer) for answer in mixed])
    stamped_differences = torch.where(is_of_last_weights, last_differences, previous_differences)
    before_update = torch.from_numpy(stamps == stamps[:, :1])
    assert stamped_differences[before_update].max() < 1e-3
    if not sender.config.recompute_kv:
        assert stamped_differences[~before_update].max() > 1e-2
        return
    assert stamped_differences.max() < 1e-3
    # With wrong stamps the differences would be these.
    assert torch.where(is_of_last_weights, previous_differences, last_differences).median() > 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_in_progress_continue_across_updates(engine, sender, recompute):
    sender.config.recompute_kv = recompute
    check_stamps(engine, sender, 2000 if recompute else 1000)


@pytest.mark.parametrize("version,recompute", [(HELD[0], False), (HELD[1], True)])
def test_an_update_reaches_a_request_in_its_middle(untied, version, recompute):
    """One version never samples the stop token, and the next one always does.

    A request that ends by itself has therefore been updated in its middle.
    """
    config, model = untied
    model = copy.deepcopy(model)
    sender = sender_to(config, model, recompute_kv=recompute)
    log = Path(config.out, config.run, "logs", "engine0.log")
    with torch.no_grad():
        # Every embedding has this value, from which the head computes the logit of the stop token.
        model.get_input_embeddings().weight[:, 0] = 10
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[STOP, 0] = -10
    update(sender, version)
    never = copy.deepcopy(model)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, config, n=100, stop=[STOP])
        # The request has sampled some tokens, and waits for the next version.
        wait_until(lambda: str(version) in re.findall(held_requests.LINE, log.read_text()))
        with torch.no_grad():
            model.lm_head.weight[STOP, 0] = 10
        update(sender, version + 1)
        answer = running.result()
    *earlier_tokens, last = answer["token_ids"]
    assert (answer["finish_reason"], last) == ("stop", STOP)
    assert len(earlier_tokens) == held_requests.TOKENS and STOP not in earlier_tokens
    assert answer["versions"].tolist() == [version] * len(earlier_tokens) + [version + 1]
    assert differences(never, answer)[:-1].max() < 1e-4
    assert differences(model, answer)[-1] < 1e-4
    # Neither model would sample what the other one has sampled.
    assert differences(never, answer)[-1] > 20
    assert differences(model, answer)[:-1].min() > 20


LONG_PROMPT = [3 + (7 * i + i // 5) % 40 for i in range(100)]


@pytest.mark.parametrize("recompute", [False, True])
def test_prefixes_are_shared_within_a_version_alone(engine, sender, recompute):
    sender.config.recompute_kv = recompute
    first = 160 + 10 * recompute
    update(sender, first)
    answers = [ask(engine, LONG_PROMPT, 8, str(first)) for _ in range(3)]
    assert [answer["cached"] for answer in answers] == [0, 96, 96]
    for answer in answers:
        assert differences(sender.model, answer, LONG_PROMPT).max() < 1e-4
    # Without a salt nothing is shared.
    assert [ask(engine, LONG_PROMPT, 1)["cached"] for _ in range(2)] == [0, 0]
    perturb(sender.model)
    update(sender, first + 1)
    fresh = ask(engine, LONG_PROMPT, 8, str(first + 1))
    assert fresh["cached"] == 0
    assert differences(sender.model, fresh, LONG_PROMPT).max() < 1e-4
    # A later turn of an attempt keeps its KV cache across the update, unless KV is recomputed.
    later = ask(engine, LONG_PROMPT, 8, str(first))
    is_stale = bool(differences(sender.model, later, LONG_PROMPT).max() > 1e-2)
    assert (later["cached"], is_stale) == ((0, False) if recompute else (96, True))
    # A trainer that continues from a checkpoint counts the same versions again.
    update(sender_to(engine, sender.model), first)
    assert ask(engine, LONG_PROMPT, 1, str(first))["cached"] == 0


# ---- what does not fit, or is not sent


WRONG_ORDERS = [dict(token_ids=["3"]), dict(token_ids=[10**9]), dict(sampling_params=None)]


@pytest.mark.parametrize("wrong", WRONG_ORDERS)
def test_requests_that_cannot_be_sampled_are_refused_in_a_line(engine, sender, wrong):
    update(sender, 150)
    answer = post(engine, **dict(token_ids=PROMPT, sampling_params=dict(max_tokens=2)) | wrong)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]


def test_an_update_of_some_parameters_leaves_the_others_as_they_are(untied):
    config, model = untied
    update(sender_to(config, model), 1)
    old = copy.deepcopy(model.state_dict())
    trained = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"]
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    partial_sender = sender_to(config, model)
    for version in (2, 3):
        perturb(model)
        update(partial_sender, version)
    model.requires_grad_(True)
    model.load_state_dict({name: x for name, x in old.items() if name not in trained}, strict=False)
    assert_serves(config, model, 3)
    # Now all parameters are sent again.
    perturb(model)
    update(sender_to(config, model), 4)
    assert_serves(config, model, 4)


def test_weights_that_are_not_the_models_are_refused_by_name(untied):
    config, model = untied
    update(sender_to(config, model), 5)
    named = [*model.named_parameters(), ("stranger", torch.nn.Parameter(torch.zeros(3)))]
    wrong_model = SimpleNamespace(named_parameters=lambda: named, named_modules=tuple)
    wrong_model.parameters = lambda: [p for _, p in named]
    broken = sender_to(config, wrong_model)
    message = "an engine does not compute with the weights that it is sent: ValueError.*stranger"
    with pytest.raises(Stopped, match=message):
        update(broken, 6)
    assert_serves(config, model, 5)
    update(sender_to(config, model), 6)
    assert_serves(config, model, 6)


# ---- engines come and go


def test_an_engine_that_comes_back_is_admitted(engine, sender, monkeypatch):
    """Its launcher starts it anew, at the same address."""
    run_dir = Path(engine.out, engine.run)
    update(sender, 400)
    previous_group = sender.group
    register(run_dir, "engine0", url_of(engine))

    def is_admitted():
        assert not sender.ranks.error
        return sender.group is not previous_group and not sender.delivery.locked()

    # The trainer has nothing to send at that time.
    wait_until(is_admitted)
    assert_serves(engine, sender.model, 400)
    # An update waits for the only engine, which is not listed while it is started again.
    (run_dir / "engines" / "engine0.json").unlink()
    looks = []
    listed = sender.engines.listed
    monkeypatch.setattr(sender.engines, "listed", lambda: looks.append(0) or listed())
    sender.push(401)
    wait_until(lambda: len(looks) > 8)
    assert not sender.ranks.error
    assert sender.delivery.locked()
    register(run_dir, "engine0", url_of(engine))
    sender.wait()
    assert_serves(engine, sender.model, 401)


def test_an_only_engine_that_refuses_a_swap_is_asked_again(engine, sender, monkeypatch):
    update(sender, 412)
    announced = []
    refusals = [f"refused, 500 number {n}" for n in range(3)]
    call = weight_group.EngineRegistry._call

    def refuse(self, member, path, body):
        announced.append(read_json(sender.version_file))
        if path == "/request_weight_update" and refusals:
            raise RuntimeError(refusals.pop())
        return call(self, member, path, body)

    monkeypatch.setattr(weight_group.EngineRegistry, "_call", refuse)
    perturb(sender.model)
    update(sender, 413)
    # Meanwhile the engine served the weights that it had.
    assert {(x["version"], *x["engines"]) for x in announced} == {(412, url_of(engine))}
    assert not refusals
    assert_serves(engine, sender.model, 413)


def test_unreachable_engines_are_an_error_within_the_deadline(engine, model, tmp_path):
    config = with_knobs(engine, out=str(tmp_path), start_timeout=2.0)
    register(tmp_path / config.run, "engine0", "http://127.0.0.1:9")
    (tmp_path / config.run / "queues").mkdir()
    sender = Sender(config, model, Ranks(config), tmp_path / config.run)
    with pytest.raises(Stopped, match="no engine was healthy within 6 s.*http://127.0.0.1:9"):
        update(sender, 101)


@pytest.mark.slow
def test_tensor_parallel_engine_equals_trainer_after_updates(tmp_path, base_model):
    """The engine has two workers, each with its shard of every fused matrix."""
    knobs = f"toy --run tp --out {tmp_path} --port {PORT + 2} --model {base_model}"
    with served(f"{knobs} --concurrency 16 --tensor_parallel 2", as_loaded=False) as config:
        sender = sender_to(config, AutoModelForCausalLM.from_pretrained(base_model))
        for version in (1, 2):
            perturb(sender.model)
            update(sender, version)
            assert_serves(config, sender.model, version)


def test_engine_that_fails_again_and_again_is_left_out_of_updates(tmp_path, monkeypatch, capsys):
    registry = weight_group.EngineRegistry(resolved("toy"), tmp_path)
    bad = ("http://127.0.0.1:9", "a")
    now = 1000.0
    monkeypatch.setattr(weight_group.time, "monotonic", lambda: now)
    registry.drop(bad, "no answer")
    assert registry.failing == {bad}
    # After the first failure it takes part in the next delivery, then it is left out for a minute.
    registry.begin()
    assert registry.failing == set()
    registry.drop(bad, "no answer")
    assert "in 2 deliveries in a row: it is left out for 60 s" in capsys.readouterr().out
    # If there is no other engine it is tried all the same. That counts only once for a delivery.
    registry.drop(bad, "no answer")
    assert "left out" not in capsys.readouterr().out
    registry.begin()
    assert registry.failing == {bad} and registry.due_again() == set()
    now += 61
    assert registry.due_again() == {bad}
    registry.begin()
    assert registry.failing == set()
    registry.drop(bad, "no answer")
    assert "is left out for 120 s" in capsys.readouterr().out
    registry.begin()
    assert registry.failing == {bad}
    # Another engine comes: perhaps the bad one failed because of the one whose place it takes.
    register(tmp_path, "engine1", "http://127.0.0.1:10")
    registry.begin()
    assert registry.failing == set()
    registry.drop(bad, "no answer")
    registry.begin()
    registry.succeeded(bad)
    registry.drop(bad, "no answer")
    registry.begin()
    assert registry.failing == set()
