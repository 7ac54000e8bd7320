"""How an engine's worker receives weight updates: shards, fused matrices, one bucket's memory.

Sockets, stores and gloo groups are real. The worker and its model are small stand-ins with
loaders like vLLM's; NCCL is FAKE.
"""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
from test_transport import FOREVER, LONG, FakeNCCL, nccl  # noqa: F401

from conftest import wait_until
from plumbing import transport
from plumbing.engine import Receiver
from plumbing.plan import Plan

WIDTH = 6
NAMES = ["q", "k", "down", "norm"]
SHAPES = [[WIDTH, WIDTH], [WIDTH, WIDTH], [WIDTH, 2 * WIDTH], [WIDTH]]


class Shard(torch.nn.Module):
    """Worker `rank` of two: rows of q and k fused, columns of down, all of norm."""

    def __init__(self, rank=0):
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.down = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH))

    def load_weights(self, weights):
        half = WIDTH // 2
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
            elif name == "down":
                self.down.data.copy_(weight.narrow(1, self.rank * WIDTH, WIDTH))
            else:
                target = self.qk.data.narrow(0, half * (name == "k"), half)
                target.copy_(weight.narrow(0, self.rank * half, half))

    def values(self):
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def expected(self, sent):
        """Return what `values` returns once these tensors have been loaded."""
        q, k = (sent[name].chunk(2)[self.rank] for name in "qk")
        down = sent["down"].chunk(2, 1)[self.rank]
        return {"qk": torch.cat([q, k]), "down": down, "norm": sent["norm"]}


def equal(values, expected):
    return all(torch.equal(values[name], expected[name]) for name in values | expected)


def layout_of(bucket_bytes=200):
    return dict(names=NAMES, shapes=SHAPES, dtype="float32", whole=True, bucket_bytes=bucket_bytes)


class Update:
    """Random tensors of a layout: `sent` by name, and as the buckets in which they travel."""

    def __init__(self, layout, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ranges = transport.bucket_ranges(layout)
        self.buckets = [torch.randn(n, generator=generator) for _, _, n in self.ranges]
        self.sent = dict(transport.named_views(layout, self.ranges, self.buckets))


def receive(plan, update):
    """Receive bucket after bucket in the same memory, as Receiver does."""
    memory = torch.empty(max(map(len, update.buckets)))
    for k, bucket in enumerate(update.buckets):
        memory[: len(bucket)] = bucket
        plan.stage(k, memory[: len(bucket)])


def test_buckets_cover_all_parameters_in_order():
    layout = dict(shapes=[[10], [3, 5], [100], [1], [7]], dtype="float32", bucket_bytes=100)
    assert transport.bucket_ranges(layout) == [(0, 2, 25), (2, 3, 100), (3, 5, 8)]
    assert transport.bucket_ranges(layout | dict(bucket_bytes=10**9)) == [(0, 5, 133)]
    assert len(transport.bucket_ranges(layout | dict(bucket_bytes=0))) == 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_a_worker_gets_its_shards_bucket_by_bucket(rank, bucket_bytes):
    model = Shard(rank)
    layout = layout_of(bucket_bytes=bucket_bytes)
    plan = Plan(model, layout)
    for seed in (0, 1):
        served_values = model.values()
        update = Update(layout, seed)
        receive(plan, update)
        # Nothing of the update is served before the swap.
        assert equal(model.values(), served_values)
        plan.swap()
        assert equal(model.values(), model.expected(update.sent))


class Elsewhere(Shard):
    """A layer whose weight loader fills a buffer, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("statistics", torch.zeros(WIDTH))

    def load_weights(self, weights):
        weights = list(weights)
        super().load_weights(weights)
        self.statistics.copy_(dict(weights)["norm"])


class Scaled(Shard):
    def load_weights(self, weights):
        super().load_weights((name, weight * 2) for name, weight in weights)


class Quantised(Shard):
    """A layer whose weights are processed after loading."""

    def __init__(self):
        super().__init__()
        self.quant_method = object()


def test_a_model_that_does_more_than_copy_is_refused_by_name():
    for kind, layer in [
        (Elsewhere, "a weight loader that fills buffers"),
        (Scaled, "a weight loader that calls aten.mul.Tensor"),
        (Quantised, "Quantised"),
    ]:
        complaint = f"{layer} does more than copy: such a model cannot be"
        with pytest.raises(ValueError, match=complaint):
            Plan(kind(), layout_of())


# ---- a worker's receiver


class Worker:
    """The attributes of vLLM's worker that Receiver uses."""

    def __init__(self, model):
        self.device = torch.device("cpu")
        self.model_runner = self
        self.parallel_config = self
        self.rank = 0
        self.get_model = lambda: model


def group_of(layout, **changed):
    group = dict(
        backend="gloo",
        host="127.0.0.1",
        port=1,
        first_rank=1,
        world=2,
        timeout=1,
        layout=layout,
    )
    return group | changed


def test_a_worker_needs_memory_for_one_bucket_and_its_own_shards(monkeypatch):
    # There is no trainer to connect to.
    monkeypatch.setattr(Receiver, "run", lambda self: None)
    receiver = Receiver(Worker(Shard()), group_of(layout_of(bucket_bytes=300)), None)
    shard_size = sum(x.numel() for x in receiver.plan.successor.values())
    assert shard_size == 2 * WIDTH * WIDTH + WIDTH
    assert receiver.memory.shape == (2 * WIDTH * WIDTH,)
    # A group with other buckets needs other memory.
    second = Receiver(receiver.worker, group_of(layout_of(bucket_bytes=10**6)), receiver)
    assert second.plan is not receiver.plan and receiver.is_retired


# The deadline of a gloo group in seconds. Only the deadline ends a wait in such a group, even if
# the group was given up.
GLOO = 60.0


def trainer_of(model, layout, predecessor=None):
    """Return (store, process group, the worker's Receiver) of a trainer with one worker."""
    store = transport.open_store("127.0.0.1", 0, LONG, server=True)
    group = group_of(layout, port=store.port, timeout=GLOO)
    receiver = Receiver(Worker(model), group, predecessor)
    store.wait(["here/1"])
    store.set("all_here", "")
    return store, transport.join_group("gloo", store, 0, 2, GLOO), receiver


def test_new_weight_group_does_not_wait_for_one_that_hangs():
    """Either may come first: the new update, or what is on its way in the old group."""
    layout = layout_of(bucket_bytes=1)
    model = Shard()
    store, group, first = trainer_of(model, layout)
    old = Update(layout, 0)
    store.set("update/0", "1")
    # The old group gets the first bucket and no other.
    group.broadcast(old.buckets[0], 0).wait()
    start = time.monotonic()
    new_store, new_group, second = trainer_of(model, layout, first)
    assert time.monotonic() < start + LONG
    update = Update(layout, 1)
    new_store.set("update/0", "2")
    new_group.broadcast(update.buckets[0], 0).wait()
    # Now the old group goes on after all. Its receiver may have left already.
    with contextlib.suppress(RuntimeError):
        group.broadcast(old.buckets[1], 0).wait(timedelta(seconds=3))
    for bucket in update.buckets[1:]:
        new_group.broadcast(bucket, 0).wait()
    new_store.wait(["ready/0/1"])
    assert second.received == "2" and first.received is None
    second.swap()
    assert equal(model.values(), model.expected(update.sent))


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("raises", [True, False])
def test_a_broadcast_that_returns_late_writes_nothing(monkeypatch, raises):
    """A wait in a group that was given up ends late: with an error, or as if all had come."""
    monkeypatch.setattr(FakeNCCL, "raises", raises)
    layout = layout_of(bucket_bytes=1)
    worker = Worker(Shard())
    store = transport.open_store("127.0.0.1", 0, LONG, server=True)
    group = group_of(layout, backend="nccl", port=store.port, timeout=FOREVER)
    first = Receiver(worker, group, None)
    store.set("all_here", "")
    wait_until(lambda: first.process_group)
    monkeypatch.setattr(FakeNCCL, "hangs", ["wait"])
    store.set("update/0", "1")
    wait_until(first.process_group.is_waiting.is_set)
    successor = {p: x.clone() for p, x in first.plan.successor.items()}
    second = Receiver(worker, group, first)
    # Two threads abort the group: the one that gives it up, and the receiver's own as it ends.
    wait_until(lambda: first.process_group.aborts == 2)
    assert first.received is None and not store.check(["ready/0/1"])
    assert second.plan is first.plan
    assert all(torch.equal(x, successor[p]) for p, x in first.plan.successor.items())
