"""Weight groups over NCCL and gloo: how they are joined, and that every wait ends.

NCCL is FAKE, as there is no GPU here; stores, sockets and gloo are real.
"""

import os
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

import config as cfg
from conftest import wait_until
from plumbing import transport
from plumbing.weight_group import WeightGroup

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
# In seconds: a call that hangs does so for longer than a busy machine takes for all the rest
FOREVER = 1000.0
LONG = 200.0


class FakeNCCL:
    """A FAKE ProcessGroupNCCL, which keeps what the real one reads from the environment.

    Its calls that are named in `hangs` wait until it is aborted; a wait then raises, or returns as
    if all had come.
    """

    made = []
    hangs = ()
    raises = True

    class Options:
        config = SimpleNamespace()

    def __init__(self, store, rank, world, options):
        self.options = options
        self.blocking_wait = os.environ.get(NO_WATCHDOG)
        self.aborts = 0
        self.is_waiting = threading.Event()
        self.is_free = threading.Event()
        FakeNCCL.made.append(self)

    def hang(self, name):
        if name in self.hangs:
            self.is_waiting.set()
            self.is_free.wait(FOREVER)
            if self.raises:
                raise RuntimeError(f"{name} was aborted")

    def broadcast(self, tensor, root):
        self.tensor = tensor
        self.hang("broadcast")
        return self

    def wait(self, limit):
        self.hang("wait")
        self.tensor.fill_(7)

    def abort(self):
        self.aborts += 1
        if "abort" in self.hangs:
            threading.Event().wait(FOREVER)
        self.is_free.set()


@pytest.fixture
def nccl(monkeypatch):
    FakeNCCL.made = []
    monkeypatch.setattr(transport.dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(transport.dist, "is_nccl_available", lambda: True)
    return monkeypatch


def join(timeout=LONG):
    store = transport.open_store("127.0.0.1", 0, LONG, server=True)
    return transport.join_group("nccl", store, 0, 1, timeout, torch.device("cpu"))


def test_a_group_has_no_watchdog_and_others_keep_theirs(nccl):
    group = join()
    assert group.blocking_wait == "1"
    assert NO_WATCHDOG not in os.environ
    # an engine's own all-reduces go on beside it
    assert group.options.is_high_priority_stream and group.options.config.max_ctas == 8
    transport.abort_group(group)
    assert group.aborts == 1


@pytest.mark.parametrize("hangs", ["broadcast", "wait", "wait abort"])
def test_joining_a_group_has_a_deadline(nccl, hangs):
    nccl.setattr(FakeNCCL, "hangs", hangs.split())
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        join(timeout=0.5)
    assert time.monotonic() < start + LONG
    # nobody is left waiting in it
    wait_until(lambda: FakeNCCL.made[0].aborts)


# (URL, when it started)
ENGINE = ("http://a", 1.0)


def trainers_group(engines):
    """Make the trainer's end of a group with one engine. engines: those that are listed now."""

    def call_all(path, bodies):
        [body] = bodies.values()
        transport.open_store(body["host"], body["port"], LONG).set("here/1", "")
        return bodies

    those = SimpleNamespace(listed=lambda: engines, call_all=call_all)
    config = cfg.Config(sync_timeout=FOREVER, weight_backend="nccl", master_addr="127.0.0.1")
    return WeightGroup(config, those, [ENGINE], {}, torch.device("cpu"), as_loaded=False)


@pytest.mark.parametrize("hangs", ["broadcast", "wait", "broadcast abort", "wait abort"])
@pytest.mark.parametrize(
    "timeout, words", [(0.5, "longer than --sync_timeout 0 s"), (FOREVER, "engines are gone")]
)
def test_every_wait_of_the_trainer_ends(nccl, hangs, timeout, words):
    """At its deadline, or when an engine is gone."""
    engines = [ENGINE]
    group = trainers_group(engines)
    group.broadcast([torch.ones(3)])
    nccl.setattr(FakeNCCL, "hangs", hangs.split())
    group.timeout = timeout
    if timeout == FOREVER:
        engines.clear()
    start = time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError), match=words):
        group.broadcast([torch.ones(3), torch.ones(3)])
    group.close()
    assert time.monotonic() < start + LONG
    wait_until(lambda: FakeNCCL.made[0].aborts)


def test_an_engine_that_dies_while_it_joins_is_not_waited_for(nccl):
    nccl.setattr(FakeNCCL, "hangs", ["broadcast"])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="these engines are gone: http://a$"):
        trainers_group([])
    assert time.monotonic() < start + LONG


def listening():
    """(address, port) of this process's sockets that listen."""
    sockets = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN}


def test_the_weight_group_listens_on_its_own_address_alone():
    before = listening()
    store = transport.open_store("127.0.0.1", 0, LONG, server=True)
    # gloo's sockets, too
    group = transport.join_group("gloo", store, 0, 1, LONG)
    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    other = transport.open_store("127.0.0.1", store.port, LONG)
    other.set("key", "value")
    assert store.get("key") == b"value"
    # its port is taken
    with pytest.raises(OSError):
        transport.open_store("127.0.0.1", store.port, LONG, server=True)
    # gloo's ends by itself
    transport.abort_group(group)
    transport.abort_group(None)
