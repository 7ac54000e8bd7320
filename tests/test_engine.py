"""Access to an engine: it answers the contract's calls for those who have the run's secret, and
nothing else; token stamps under asynchronous scheduling and compilation.

The engines are real vLLM servers, asked over real sockets. Where a client hangs up, the engine
inside the call is FAKE.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_weights import check_stamps, sender_to, served, update
from transformers import AutoModelForCausalLM

from conftest import PORT, ROOT, wait_until
from plumbing import placement, secret

GENERATE = "/inference/v1/generate"
CHAT = [f"/v1/chat/completions/{call}" for call in ("render", "derender")]
ORDERS = ["/init_process_group", "/request_weight_update"]
# Routes of vLLM 0.32, from its /openapi.json, its documentation and its development mode; and
# tricks with paths
OTHERS = """
/ /load /version /kv_event_sources /tokenize /detokenize /v1/models /v1/systemone /ping
/invocations /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses
/v1/responses/x /v1/responses/x/cancel /v1/messages /v1/messages/count_tokens
/generative_scoring /scale_elastic_ep /is_scaling_elastic_ep /v1/chat/completions/render
/v1/messages/render /v1/completions/render /v1/responses/render /v1/chat/completions/derender
/v1/completions/derender /inference/v1/abort_requests /docs /redoc /openapi.json
/docs/oauth2-redirect
/collective_rpc /pause /resume /is_paused /sleep /wake_up /is_sleeping /reset_prefix_cache
/server_info /update_weights /init_weight_transfer_engine /weight_info /weight_checker
/get_world_size /start_profile /stop_profile /v1/realtime
/metrics/ /metrics/x /metricsx /health/ //health /health/../load /./health /%2e/health
/x/../load /v1/../load /inference/v1/generate/ //inference/v1/generate
/inference//v1/generate /init_process_group/ //request_weight_update
""".split()
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT"]


# uvicorn's own answer to an invalid request, as CONNECT without a host; the contract never sees
# such a request
NO_REQUEST = "Invalid HTTP request received."


def answer(method, path, headers=None, body=b""):
    """Send a request with its path as it is, on a connection of its own; return (status, body)."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    headers = {"Content-Length": len(body)} | (headers or {})
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", PORT), 120) as s:
        s.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        head, _, text = s.makefile("rb").read().decode().partition("\r\n\r\n")
    return int(head.split()[1]), text


@pytest.fixture(scope="module")
def key(engine):
    """The header with the secret of the engine's run."""
    return secret.secret_header(f"{engine.out}/{engine.run}")


def test_engine_answers_the_contracts_calls_and_no_others(engine, key):
    calls = [("GET", "/health"), ("GET", "/metrics")]
    calls += [("POST", path) for path in [GENERATE, *ORDERS, *CHAT]]
    paths = ["/health", "/metrics", GENERATE, *ORDERS, *OTHERS]
    answered = []
    for method, path in itertools.product(METHODS, paths):
        code, text = answer(method, path, key)
        if code != 404 and text != NO_REQUEST:
            answered.append((method, path))
    assert sorted(answered) == sorted(calls)
    websocket = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "eA=="}
    headers = key | websocket | {"Connection": "Upgrade"}
    codes = {answer("GET", path, headers)[0] for path in (GENERATE, "/v1/realtime", "/health")}
    assert codes <= {400, 403, 404}


@pytest.mark.parametrize("path", [GENERATE, *ORDERS, *CHAT])
def test_calls_without_the_secret_are_refused(engine, path, key):
    right = key[secret.SECRET_HEADER]
    for value in ("", "x", right[:-1], right + "0", right.upper() + "x", engine.run_id):
        assert answer("POST", path, {secret.SECRET_HEADER: value}, b"{}")[0] == 403
    assert answer("POST", path, {"x-run-id": right, "Authorization": right}, b"{}")[0] == 403
    assert answer("POST", f"{path}?{secret.SECRET_HEADER}={right}", {}, b"{}")[0] == 403


def test_an_order_that_cannot_be_followed_is_refused_in_a_line(engine, key):
    """An update that has not been sent, and bodies that are no orders."""
    update = b'{"version": 1, "recompute_kv": false}'
    for path, order in [(ORDERS[1], update), (ORDERS[1], b"{}"), (ORDERS[0], b"7")]:
        code, text = answer("POST", path, key, order)
        assert code == 500
        error = json.loads(text)["error"]
        assert error.startswith(path) and "\n" not in error
    assert answer("GET", "/health")[0] == 200


def core_of(config):
    """The process of vLLM's core in the engine of this run."""
    run_dir = str(Path(config.out, config.run).absolute())
    for process in psutil.Process().children(recursive=True):
        # Some may have ended, or are left by other tests.
        with contextlib.suppress(psutil.Error):
            # Its name lies where its environment was; its parent is the server.
            is_core = process.cmdline()[:1] == ["VLLM::EngineCore"]
            if is_core and process.parent().environ()["PIPELINE_RUN_DIR"] == run_dir:
                return process


def test_an_engine_whose_core_hangs_is_not_healthy(engine, base_model):
    """Its HTTP server still answers; the launcher kills an engine that is not healthy for long."""
    update(sender_to(engine, AutoModelForCausalLM.from_pretrained(base_model)), 1)
    core = core_of(engine)
    assert answer("GET", "/health")[0] == 200
    core.suspend()
    try:
        wait_until(lambda: answer("GET", "/health")[0] == 503)
        assert "vLLM's core has answered nothing for 30 s" in answer("GET", "/health")[1]
    finally:
        core.resume()
    wait_until(lambda: answer("GET", "/health")[0] == 200)


def test_a_client_that_hangs_up_ends_its_sampling():
    engine = pytest.importorskip("plumbing.engine")
    ended = []

    class FakeEngine:
        model_config = SimpleNamespace(get_vocab_size=lambda: 10)

        async def generate(self, prompt, params, request_id):
            has_begun.set()
            try:
                await asyncio.Event().wait()
                yield None
            finally:
                ended.append(prompt["prompt_token_ids"])

    async def hang_up():
        await has_begun.wait()

    has_begun = asyncio.Event()
    body = b'{"token_ids": [3, 4, 5], "sampling_params": {}}'
    assert asyncio.run(engine.sample(body, FakeEngine(), hang_up, 1)) is None
    assert ended == [[3, 4, 5]]


def test_secret_is_readable_by_its_owner_alone_and_is_kept(tmp_path):
    secret.make_secret(tmp_path)
    first = (tmp_path / "secret").read_text()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600 and len(first) == 32
    secret.make_secret(tmp_path)
    assert secret.secret_header(tmp_path) == {secret.SECRET_HEADER: first}


def test_no_command_line_has_the_secret(engine, key):
    """All users of a machine may read the command lines of all processes."""
    value = key[secret.SECRET_HEADER]
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        assert value not in " ".join(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asynchronous", "compiled"])
def test_tokens_are_stamped_under_asynchronous_scheduling_and_compilation(
    mode, base_model, tmp_path, monkeypatch
):
    knobs = f"toy --run {mode} --out {tmp_path} --model {base_model} --port {PORT + 3}"
    knobs += f" --concurrency 64 --enforce_eager {mode != 'compiled'}"
    commands = placement.engine_commands

    def asynchronous(*arguments):
        [(name, env, command)] = commands(*arguments)
        first = command.index("-m")
        command[first : first + 2] = [str(ROOT / "tests" / "async_vllm.py")]
        return [(name, env, command)]

    if mode == "asynchronous":
        monkeypatch.setattr(placement, "engine_commands", asynchronous)
    with served(knobs, as_loaded=False) as config:
        sender = sender_to(config, AutoModelForCausalLM.from_pretrained(base_model))
        sender.config.recompute_kv = True
        check_stamps(config, sender, 0)
