"""Where updates are received, on a small model with loaders like vLLM's: fused matrices and shards, in one bucket's memory."""

import pytest
import torch

from plumbing import transport
from plumbing.engine import Inbox, Receiver
from plumbing.plan import NotOnlyCopies, Plan

WIDTH = 6
NAMES = ["q", "k", "down", "norm"]
SHAPES = [[WIDTH, WIDTH], [WIDTH, WIDTH], [WIDTH, 2 * WIDTH], [WIDTH]]


class Shard(torch.nn.Module):
    """Worker `rank` of two: rows of q and k fused, columns of down, all of norm."""

    def __init__(self, rank):
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
                into = self.qk.data.narrow(0, half * (name == "k"), half)
                into.copy_(weight.narrow(0, self.rank * half, half))

    def holds(self, sent):
        half = WIDTH // 2
        rows = slice(self.rank * half, self.rank * half + half)
        columns = slice(self.rank * WIDTH, self.rank * WIDTH + WIDTH)
        return (
            torch.equal(self.qk, torch.cat([sent["q"][rows], sent["k"][rows]]))
            and torch.equal(self.down, sent["down"][:, columns])
            and torch.equal(self.norm, sent["norm"])
        )


def group(bucket_bytes):
    return dict(
        names=NAMES,
        shapes=SHAPES,
        dtype="float32",
        bucket_bytes=bucket_bytes,
        first_rank=1,
        world=2,
        backend="gloo",
        host="127.0.0.1",
        port=1,
        timeout=1,
    )


def inbox_of(model, bucket_bytes=200):
    return Inbox(model, group(bucket_bytes), torch.device("cpu"))


def send(inbox, seed):
    """What the trainer sends, bucket after bucket; returns it by name."""
    generator = torch.Generator().manual_seed(seed)
    sent = {n: torch.randn(s, generator=generator) for n, s in zip(NAMES, SHAPES)}
    plan = transport.buckets(SHAPES, 4, inbox.layout[3])
    for k, (first, last, _) in enumerate(plan):
        parts = [sent[name].reshape(-1) for name in NAMES[first:last]]
        inbox.memory(k).copy_(torch.cat(parts))
        inbox.keep(k)
    return sent


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_a_worker_gets_its_shards_bucket_by_bucket(rank, bucket_bytes):
    model = Shard(rank)
    inbox = inbox_of(model, bucket_bytes)
    for seed in (0, 1):
        before = {n: p.clone() for n, p in model.named_parameters()}
        sent = send(inbox, seed)
        # nothing of it is served before the swap
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        inbox.plan.prepare()
        inbox.plan.swap()
        assert inbox.plan.holds() and model.holds(sent)


def test_a_worker_needs_memory_for_one_bucket_and_its_own_shards():
    model = Shard(0)
    inbox = inbox_of(model, bucket_bytes=300)
    own = sum(p.numel() for p in model.parameters())
    assert sum(x.numel() for x in inbox.plan.successor.values()) == own
    assert inbox.bucket.numel() == max(n for _, _, n in transport.buckets(SHAPES, 4, 300))
    assert inbox.whole is None
    assert inbox.size() == 4 * (own + inbox.bucket.numel())


def test_a_model_that_does_more_than_copy_keeps_everything():
    class Scaled(Shard):
        def load_weights(self, weights):
            super().load_weights((name, weight * 2) for name, weight in weights)

    inbox = inbox_of(Scaled(0))
    assert inbox.plan is None
    assert inbox.size() == 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
    sent = send(inbox, 0)
    assert all(torch.equal(tensor, sent[name]) for name, tensor in inbox.received)


def test_what_is_not_loaded_whole_is_refused():
    class Forgetful(Shard):
        def load_weights(self, weights):
            super().load_weights((n, w) for n, w in weights if n != "k")

    with pytest.raises(ValueError, match="do not make up the model's .*qk"):
        inbox_of(Forgetful(0))


def test_copies_to_elsewhere_are_no_plan():
    class Elsewhere(Shard):
        def load_weights(self, weights):
            weights = list(weights)
            super().load_weights(weights)
            self.statistics.copy_(dict(weights)["norm"])

    model = Elsewhere(0)
    model.register_buffer("statistics", torch.zeros(WIDTH))
    flats = [torch.empty(3 * WIDTH * WIDTH + WIDTH * WIDTH + WIDTH)]
    parts = flats[0].split([torch.Size(s).numel() for s in SHAPES])
    received = [(n, part.view(s)) for n, part, s in zip(NAMES, parts, SHAPES)]
    with pytest.raises(NotOnlyCopies, match="somewhere else"):
        Plan(model, received, flats)


class Worker:
    """What Receiver asks of vLLM's worker."""

    def __init__(self, model):
        self.device = torch.device("cpu")
        self.model_runner = self
        self.parallel_config = self
        self.rank = 0
        self.get_model = lambda: model


def test_groups_that_follow_each_other_share_the_memory(monkeypatch):
    # there is no trainer to connect to
    monkeypatch.setattr(Receiver, "run", lambda self: None)
    worker = Worker(Shard(0))
    first = Receiver(worker, group(200), None)
    second = Receiver(worker, group(200), first)
    assert second.inbox is first.inbox
    # a group of other tensors needs other memory
    other = Receiver(worker, group(10**6), second)
    assert other.inbox is not second.inbox
