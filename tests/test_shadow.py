"""How an engine's worker receives weight updates: a second model that loads them, and a swap.

Sockets, stores and gloo groups are real. The worker and its model are small stand-ins with
loaders like vLLM's; NCCL is FAKE. tests/test_model.py updates models in the real vLLM.
"""

import contextlib
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from test_transport import FOREVER, LONG, FakeNCCL, nccl  # noqa: F401

from conftest import wait_until
from plumbing import transport
from plumbing.engine import Receiver, move
from plumbing.shadow import Shadow

WIDTH = 6
TENSORS = [
    ["q", [WIDTH, WIDTH], "float32"],
    ["k", [WIDTH, WIDTH], "float32"],
    ["down", [WIDTH, 2 * WIDTH], "bfloat16"],
    ["norm", [WIDTH], "float32"],
]


class Shard(torch.nn.Module):
    """Worker `rank` of two: rows of q and k fused, columns of down, all of norm."""

    def __init__(self, rank=0):
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.down = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(WIDTH))

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

    @staticmethod
    def process(model):
        """What is done after all weights are loaded: nothing."""

    def values(self):
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def expected(self, sent):
        """Return what `values` returns once these tensors have been loaded."""
        q, k = (sent[name].chunk(2)[self.rank] for name in "qk")
        down = sent["down"].chunk(2, 1)[self.rank].float()
        return {"qk": torch.cat([q, k]), "down": down, "norm": sent["norm"]}


class Decay(Shard):
    """A layer that computes with something else than what it loads, as vLLM's packed matrices."""

    @staticmethod
    def process(model):
        model.decay = -torch.exp(model.norm.data)
        # Its memory is given back after loading, as vLLM's build for CPUs does.
        model.qk, model.packed = torch.nn.Parameter(torch.empty(0)), model.qk.data.T.clone()

    def values(self):
        return super().values() | {"decay": self.decay.clone(), "packed": self.packed.clone()}

    def expected(self, sent):
        loaded = super().expected(sent)
        packed = loaded["qk"].T
        return loaded | dict(qk=torch.empty(0), decay=-loaded["norm"].exp(), packed=packed)


class Repacked(Shard):
    """A layer whose parameter gets other memory with another order after loading, as vLLM's build
    for CPUs has it for convolutions.
    """

    @staticmethod
    def process(model):
        model.down.data = model.down.data.T.clone()

    def expected(self, sent):
        loaded = super().expected(sent)
        return loaded | dict(down=loaded["down"].T)


def equal(values, expected):
    return all(torch.equal(values[name], expected[name]) for name in values | expected)


def layout_of(buckets=1):
    """The layout of TENSORS in so many buckets."""
    per_bucket = -(-len(TENSORS) // buckets)
    parts = [TENSORS[i : i + per_bucket] for i in range(0, len(TENSORS), per_bucket)]
    return {"buckets": parts, "whole": True}


def loaded(kind, *arguments, seed=0):
    """A model with random weights, as an engine has loaded it from disk."""
    torch.manual_seed(seed)
    model = kind(*arguments)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
        kind.process(model)
    return model


def shadow_of(model, layout):
    return Shadow(model, type(model)(model.rank), model.process, layout)


class Update:
    """Random tensors of a layout: `sent` by name, and as the buckets in which they travel."""

    def __init__(self, layout, seed):
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.sent = {}
        self.buckets = []
        for tensors in layout["buckets"]:
            bucket = torch.zeros(transport.bucket_bytes(tensors), dtype=torch.uint8)
            for name, view in transport.named_views(tensors, bucket):
                view.copy_(torch.randn(view.shape, generator=generator))
                self.sent[name] = view
            self.buckets.append(bucket)


def receive(shadow, update, change=None):
    """Receive bucket after bucket in the same memory, as Receiver does."""
    memory = torch.empty(max(map(len, update.buckets)), dtype=torch.uint8)
    for k, bucket in enumerate(update.buckets):
        part = memory[: len(bucket)]
        part.copy_(bucket)
        if change:
            change(transport.named_views(update.layout["buckets"][k], part))
        shadow.stage(k, part)


def test_buckets_cover_all_parameters_in_order():
    sizes = [40, 60, 400, 4, 28]
    assert transport.bucket_ranges(sizes, 100) == [(0, 2), (2, 3), (3, 5)]
    assert transport.bucket_ranges(sizes, 10**9) == [(0, 5)]
    assert len(transport.bucket_ranges(sizes, 0)) == 5


def test_tensors_of_a_bucket_are_aligned_views_of_their_own_dtype():
    tensors = [["a", [3], "bfloat16"], ["b", [2, 2], "float32"], ["c", [], "float32"]]
    bucket = torch.zeros(transport.bucket_bytes(tensors), dtype=torch.uint8)
    assert len(bucket) == 3 * transport.ALIGNMENT
    views = dict(transport.named_views(tensors, bucket))
    assert [(x.dtype, list(x.shape)) for x in views.values()] == [
        (torch.bfloat16, [3]),
        (torch.float32, [2, 2]),
        (torch.float32, []),
    ]
    views["b"].fill_(1.0)
    assert bucket.nonzero().min() >= 16 and bucket.nonzero().max() < 32


@pytest.mark.parametrize("kind", [Shard, Decay, Repacked])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_a_worker_gets_its_shards_bucket_by_bucket(kind, rank, buckets):
    model = loaded(kind, rank)
    memory = {name: x.data_ptr() for name, x in vars(model).items() if torch.is_tensor(x)}
    layout = layout_of(buckets)
    shadow = shadow_of(model, layout)
    for seed in (0, 1):
        served_values = model.values()
        update = Update(layout, seed)
        receive(shadow, update)
        # Nothing of the update is served before the swap.
        assert equal(model.values(), served_values)
        shadow.swap()
        assert equal(model.values(), model.expected(update.sent))
    # CUDA graphs keep the addresses of what a model computes with.
    assert memory == {name: x.data_ptr() for name, x in vars(model).items() if torch.is_tensor(x)}


def test_a_swap_that_leaves_vectors_out_is_found(monkeypatch):
    model = loaded(Shard, 0)
    layout = layout_of(2)
    shadow = shadow_of(model, layout)
    update = Update(layout, 0)
    receive(shadow, update)
    shadow.swap()
    # As at the start of a new run, the first update has the values that are there already.
    shadow = shadow_of(model, layout)
    receive(shadow, update)
    copy = torch._foreach_copy_

    def of_matrices(old, new):
        copy(*([x for x in tensors if x.dim() > 1] for tensors in (old, new)))

    monkeypatch.setattr(torch, "_foreach_copy_", of_matrices)
    shadow.swap()
    receive(shadow, Update(layout, 1))
    with pytest.raises(RuntimeError, match=r"norm is not what was sent \(1 tensors are wrong\)"):
        shadow.swap()


def as_sent(model, layout):
    """An Update with the weights that this worker, the only one, has loaded."""
    update = Update(layout, 0)
    half = WIDTH // 2
    values = dict(
        q=model.source["qk"][:half].repeat(2, 1), k=model.source["qk"][half:].repeat(2, 1)
    )
    values |= dict(down=model.source["down"].repeat(1, 2), norm=model.source["norm"])
    for name, value in values.items():
        update.sent[name].copy_(value)
    return update


def loaded_with_source(kind):
    """A model as `loaded` makes it, with the values that were loaded as `source`."""
    source = loaded(Shard).values()
    source["down"] = source["down"].bfloat16().float()
    model = kind()
    model.load_state_dict(source, strict=False)
    kind.process(model)
    model.source = source
    return model


class Stale(Decay):
    """A layer that makes what it computes with once, and not again after an update."""

    made = None

    @staticmethod
    def process(model):
        Stale.made = -torch.exp(model.norm.data) if Stale.made is None else Stale.made
        model.decay = Stale.made.clone()


class Rounded(Shard):
    """A layer that loads another value than it loaded from disk."""

    has_loaded = False

    @staticmethod
    def process(model):
        if Rounded.has_loaded:
            model.norm.data.copy_(model.norm.data.bfloat16())
        Rounded.has_loaded = True


class Deaf(Shard):
    """A layer whose loader passes over a name that it does not know."""

    def load_weights(self, weights):
        super().load_weights((name, x) for name, x in weights if name != "norm")


def test_weights_as_loaded_change_nothing_and_moved_ones_change_everything():
    layout = layout_of(2)
    for kind in (Shard, Decay, Repacked):
        model = loaded_with_source(kind)
        shadow = shadow_of(model, layout)
        update = as_sent(model, layout)
        receive(shadow, update, change=move)
        assert set(shadow.equal().values()) == {False}
        assert {".down", ".norm"} <= shadow.equal().keys()
        receive(shadow, update)
        assert set(shadow.equal().values()) == {True}


def test_what_an_update_does_not_reach_is_named():
    layout = layout_of(2)
    model = loaded_with_source(Stale)
    shadow = shadow_of(model, layout)
    update = as_sent(model, layout)
    receive(shadow, update, change=move)
    assert [name for name, same in shadow.equal().items() if same] == [".decay"]

    model = loaded_with_source(Rounded)
    shadow = shadow_of(model, layout)
    receive(shadow, as_sent(model, layout))
    assert [name for name, same in shadow.equal().items() if not same] == [".norm"]

    model = loaded_with_source(Deaf)
    with pytest.raises(ValueError, match="vLLM does not load norm, which is trained"):
        receive(shadow_of(model, layout), as_sent(model, layout))


def test_what_is_not_sent_stays_as_it_is():
    """Of a fused matrix one part is sent; the others are those that the second model has loaded."""
    model = loaded_with_source(Decay)
    before = model.values()
    second = Decay()
    second.load_state_dict(model.source, strict=False)
    layout = {"buckets": [[["k", [WIDTH, WIDTH], "float32"]]], "whole": False}
    shadow = Shadow(model, second, Decay.process, layout)
    bucket = torch.ones(WIDTH * WIDTH).view(torch.uint8)
    receive(shadow, SimpleNamespace(buckets=[bucket], layout=layout))
    shadow.swap()
    half = WIDTH // 2
    assert torch.equal(model.packed.T[:half], before["packed"].T[:half])
    assert torch.equal(model.packed.T[half:], torch.ones(half, WIDTH))
    assert torch.equal(model.down, before["down"]) and torch.equal(model.norm, before["norm"])


# ---- a worker's receiver


class Worker:
    """The attributes of vLLM's worker that Receiver uses."""

    has_loaded_weights = True

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
        as_loaded=False,
        layout=layout,
    )
    return group | changed


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The second model of a worker is a stand-in, too."""
    monkeypatch.setattr(
        "plumbing.engine.make_shadow",
        lambda worker, layout: shadow_of(worker.model_runner.get_model(), layout),
    )


def test_a_worker_needs_memory_for_one_bucket(monkeypatch):
    # There is no trainer to connect to.
    monkeypatch.setattr(Receiver, "run", lambda self: None)
    receiver = Receiver(Worker(Shard()), group_of(layout_of(4)), None)
    assert receiver.memory.nbytes == 2 * WIDTH * WIDTH * 2
    # A group with other buckets needs other memory.
    second = Receiver(receiver.worker, group_of(layout_of(1)), receiver)
    assert second.shadow is not receiver.shadow and receiver.is_retired


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
    layout = layout_of(4)
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
    layout = layout_of(4)
    worker = Worker(Shard())
    store = transport.open_store("127.0.0.1", 0, LONG, server=True)
    group = group_of(layout, backend="nccl", port=store.port, timeout=FOREVER)
    first = Receiver(worker, group, None)
    store.set("all_here", "")
    wait_until(lambda: first.process_group)
    monkeypatch.setattr(FakeNCCL, "hangs", ["wait"])
    store.set("update/0", "1")
    wait_until(first.process_group.is_waiting.is_set)
    values = first.shadow.shadow.values()
    second = Receiver(worker, group, first)
    # Two threads abort the group: the one that gives it up, and the receiver's own as it ends.
    wait_until(lambda: first.process_group.aborts == 2)
    assert first.received is None and not store.check(["ready/0/1"])
    assert second.shadow is first.shadow
    assert equal(first.shadow.shadow.values(), values)
