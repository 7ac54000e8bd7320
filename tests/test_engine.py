"""Who may call what on a real engine: the contract's calls with the run's secret, and nothing else."""

import asyncio
import itertools
import json
import os
import socket
import stat
import threading
from pathlib import Path

import psutil
import pytest
import requests

from conftest import PORT
from plumbing import secret, transport

GENERATE = "/inference/v1/generate"
ORDERS = ["/init_process_group", "/request_weight_update"]
# of vLLM 0.32, as its /openapi.json lists them, its documentation, its development routes; and tricks with paths
OTHERS = """
/ /load /version /kv_event_sources /tokenize /detokenize /v1/models /v1/systemone /ping /invocations /v1/completions
/v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/responses/x /v1/responses/x/cancel /v1/messages
/v1/messages/count_tokens /generative_scoring /scale_elastic_ep /is_scaling_elastic_ep /v1/chat/completions/render
/v1/messages/render /v1/completions/render /v1/responses/render /v1/chat/completions/derender
/v1/completions/derender /inference/v1/abort_requests /docs /redoc /openapi.json /docs/oauth2-redirect
/collective_rpc /pause /resume /is_paused /sleep /wake_up /is_sleeping /reset_prefix_cache /server_info /update_weights
/init_weight_transfer_engine /weight_info /weight_checker /get_world_size /start_profile /stop_profile /v1/realtime
/metrics/ /metrics/x /metricsx /health/ //health /health/../load /./health /%2e/health /x/../load /v1/../load
/inference/v1/generate/ //inference/v1/generate /inference//v1/generate /init_process_group/ //request_weight_update
""".split()
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT"]


def status(method, path, headers=None, body=b""):
    """Of a request whose path is sent as it is. The connection is closed afterwards."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", PORT), 20) as s:
        s.sendall(head.encode())
        s.sendall(body)
        answer = s.makefile("rb").readline()
    return int(answer.split()[1])


@pytest.fixture(scope="module")
def key(engine):
    """The header with the secret of the engine's run."""
    return secret.header(f"{engine.out}/{engine.run}")


def test_the_contract_is_all_there_is(engine, key):
    calls = [("GET", "/health"), ("GET", "/metrics")]
    calls += [("POST", path) for path in [GENERATE, *ORDERS]]
    paths = ["/health", "/metrics", GENERATE, *ORDERS, *OTHERS]
    answered = []
    for method, path in itertools.product(METHODS, paths):
        code = status(method, path, key)
        # 400: a call without a body, and what uvicorn does not know as a method
        if code != 404 and (code != 400 or path in [GENERATE, *ORDERS]):
            answered.append((method, path))
    assert sorted(answered) == sorted(calls)


def test_a_websocket_is_refused(engine, key):
    ask = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "eA=="}
    for path in ("/v1/realtime", GENERATE, "/health"):
        assert status("GET", path, key | ask | {"Connection": "Upgrade"}) in (400, 403, 404)


@pytest.mark.parametrize("path", [GENERATE, *ORDERS])
def test_strangers_are_refused(engine, path, key):
    right = key[secret.HEADER]
    config = json.loads(Path(engine.out, engine.run, "config.json").read_text())["config"]
    wrong = ["", "x", right[:-1], right + "0", right.upper() + "x", config["run_id"]]
    for value in wrong:
        assert status("POST", path, {secret.HEADER: value}, b"{}") == 403
    assert status("POST", path, {"x-run-id": right, "Authorization": right}, b"{}") == 403
    assert status("POST", f"{path}?{secret.HEADER}={right}", {}, b"{}") == 403


WHOLE = dict(
    backend="gloo",
    host="127.0.0.1",
    port=1,
    first_rank=1,
    world=2,
    timeout=1.0,
    names=["a"],
    shapes=[[1]],
    dtype="float32",
    bucket_bytes=8,
)
UPDATE = dict(version=1, recompute_kv=False)
BODIES = [b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b'"x"', b"{}", b"[" * 100000, b"1" * 9999]
WRONG = [None, [], {}, "x", -1.5, True]


@pytest.mark.parametrize("path,whole", [(ORDERS[0], WHOLE), (ORDERS[1], UPDATE)])
def test_an_order_that_is_none_is_refused_in_a_line(engine, key, path, whole):
    bodies = list(BODIES)
    for name, value in whole.items():
        without = dict(whole)
        del without[name]
        bodies.append(json.dumps(without))
        for other in WRONG:
            if type(other) is not type(value):
                bodies.append(json.dumps(whole | {name: other}))
    url = f"http://127.0.0.1:{PORT}{path}"
    for body in bodies:
        answer = requests.post(url, data=body, headers=key, timeout=20)
        assert answer.status_code == 400, (body[:100], answer.text)
        words = answer.json()["error"]
        assert words.startswith(path)
        assert "\n" not in words
    assert status("GET", "/health") == 200


def test_a_body_that_is_too_large_is_refused(engine, key):
    url = f"http://127.0.0.1:{PORT}/request_weight_update"
    answer = requests.post(url, data=b" " * (65 << 20), headers=key, timeout=60)
    assert answer.status_code == 400 and "more than 67108864 bytes" in answer.text


def test_a_body_that_does_not_come_keeps_nobody_waiting(engine, key):
    head = f"POST {ORDERS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    head += f"{secret.HEADER}: {key[secret.HEADER]}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", PORT)) as s:
        s.sendall(head.encode())
        # no wait: an engine without that update says so
        assert status("POST", ORDERS[1], key, json.dumps(UPDATE).encode()) == 500


ORDER = dict(token_ids=[3, 4, 5], sampling_params=dict(max_tokens=2))


def test_a_client_that_hangs_up_ends_its_sampling():
    generate = pytest.importorskip("plumbing.generate")
    ended = []

    class FakeEngine:
        async def generate(self, prompt, params, request_id):
            try:
                await asyncio.sleep(60)
                yield None
            finally:
                ended.append(prompt["prompt_token_ids"])

    async def hang_up():
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    body = json.dumps(ORDER).encode()
    assert asyncio.run(generate.sample(body, FakeEngine(), hang_up, 1)) is None
    assert ended == [[3, 4, 5]]


def test_the_secret_is_for_its_owner_alone_and_stays(tmp_path):
    before = os.umask(0)
    try:
        threads = [threading.Thread(target=secret.create, args=(tmp_path,)) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        os.umask(before)
    file = tmp_path / "secret"
    first = secret.read(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(first) == 32
    secret.create(tmp_path)
    assert secret.read(tmp_path) == first
    file.write_text("")
    with pytest.raises(RuntimeError, match="secret is empty"):
        secret.read(tmp_path)


def test_no_command_line_has_the_secret(engine, key):
    """Anybody on a machine may read those of all processes."""
    value = key[secret.HEADER]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        assert value not in " ".join(words)


def listening():
    """(address, port) of this process's sockets that listen."""
    sockets = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN}


def test_the_weight_group_listens_on_its_own_address_alone():
    before = listening()
    store = transport.open_store("127.0.0.1", 0, 5, server=True)
    # gloo's sockets, too
    group = transport.join_group("gloo", store, 0, 1, 5.0)
    hosts = {host for host, _ in listening() - before}
    assert hosts == {"127.0.0.1"}
    other = transport.open_store("127.0.0.1", store.port, 5)
    other.set("key", "value")
    assert store.get("key") == b"value"
    transport.leave_group(group)


def test_a_store_whose_port_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError):
            transport.open_store("127.0.0.1", taken.getsockname()[1], 5, server=True)
