"""How a weight group is joined where there is NCCL: the calls, on a FAKE, as there is no GPU here."""

import os
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from plumbing import transport

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


class FakeNCCL:
    """Notes what torch's would read from the environment; its first broadcast takes `seconds`."""

    made = []
    seconds = 0.0

    class Options:
        config = SimpleNamespace()

    def __init__(self, store, rank, world, options):
        self.options = options
        self.blocking_wait = os.environ.get(NO_WATCHDOG)
        self.aborted = False
        FakeNCCL.made.append(self)

    def broadcast(self, tensor, root):
        return self

    def wait(self, limit):
        threading.Event().wait(self.seconds)

    def abort(self):
        self.aborted = True


@pytest.fixture
def nccl(monkeypatch):
    FakeNCCL.made = []
    monkeypatch.setattr(transport.dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(transport.dist, "is_nccl_available", lambda: True)
    return monkeypatch


def join(timeout=5.0):
    store = transport.open_store("127.0.0.1", 0, 5, server=True)
    return transport.join_group("nccl", store, 0, 1, timeout, torch.device("cpu"))


def test_a_group_has_no_watchdog_and_others_keep_theirs(nccl):
    group = join()
    assert group.blocking_wait == "1"
    assert NO_WATCHDOG not in os.environ
    # an engine's own all-reduces go on beside it
    assert group.options.is_high_priority_stream and group.options.config.max_ctas == 8
    transport.abort_group(group)
    assert group.aborted


def test_connecting_has_a_deadline(nccl):
    nccl.setattr(FakeNCCL, "seconds", 60.0)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        join(timeout=0.5)
    assert time.monotonic() < start + 30
    # nobody is left waiting in it
    while not FakeNCCL.made[0].aborted:
        assert time.monotonic() < start + 30
        time.sleep(0.01)


def listening():
    """(address, port) of this process's sockets that listen."""
    sockets = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN}


def test_the_weight_group_listens_on_its_own_address_alone():
    before = listening()
    store = transport.open_store("127.0.0.1", 0, 5, server=True)
    # gloo's sockets, too
    group = transport.join_group("gloo", store, 0, 1, 5.0)
    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    other = transport.open_store("127.0.0.1", store.port, 5)
    other.set("key", "value")
    assert store.get("key") == b"value"
    # its port is taken
    with pytest.raises(OSError):
        transport.open_store("127.0.0.1", store.port, 5, server=True)
    # gloo's ends by itself
    transport.abort_group(group)
    transport.abort_group(None)
