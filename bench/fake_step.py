"""How much memory does a trainer's step take? Counted on tensors without contents.

    python bench/fake_step.py

It checks the arithmetic of tools/memory.py (`trainer_gb`): two real steps of train.py, with FSDP2,
run on FAKE tensors, which have shapes and no contents, in a FAKE process group of several ranks.
Every storage is counted while it is alive. The table has both numbers for each row. A deep model is
run with LAYERS layers, and the rest is extrapolated. Deliberately absent: what an allocator cannot
use, and the own memory of CUDA and NCCL.
"""

import sys
import weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM

import config as cfg
import plumbing.model
import train
from bench.common import keep, machine, parser, result_file, table
from plumbing import placement
from plumbing.metrics import Sums
from plumbing.samples import filler, join
from tools import memory

# A deeper model is run with both numbers of layers, and extrapolated.
LAYERS = (4, 6)
# Tensors with fewer elements that are made of no fake tensor keep their contents: these steer the
# code.
SMALL = 1 << 16
# What is counted: model, ranks, layers that are computed again, tokens of a row, rank of adapters
ROWS = [
    ("0.5B", 1, 99, 16384, 0),
    ("1.5B", 4, 99, 8192, 0),
    ("1.5B", 1, 0, 16384, 0),
    ("7B", 1, 99, 8192, 0),
    ("7B", 4, 99, 16384, 0),
    ("32B", 4, 0, 16384, 0),
    ("7B", 1, 99, 10240, 32),
    ("1.5B", 1, 99, 10240, 32),
    ("0.5B", 1, 0, 8192, 8),
    ("0.5B", 4, 0, 1024, 8),
    ("7B", 1, 99, 1024, 8),
]
CPU = torch.device("cpu")
RESIZE = torch.UntypedStorage.resize_


def tensors_in(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


class Counter(TorchDispatchMode):
    """Runs operations on fake tensors and adds up the bytes of all storages that are alive.

    alive: bytes now; peak: the most so far; reads: how often the CPU waited for values of a GPU. A
    number that the code asks of a fake tensor is 1.
    """

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        # {storage: its bytes}
        self.storages = {}
        self.alive = 0
        self.peak = 0
        self.reads = 0

    def __torch_dispatch__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(c, DTensor) for c in classes):
            # The operations on its local tensors come here, too.
            return NotImplemented
        inputs = tensors_in((args, kwargs))
        is_fake = any(isinstance(x, FakeTensor) for x in inputs)
        is_on_gpu = any(x.is_cuda for x in inputs)
        if is_fake and func is torch.ops.aten._local_scalar_dense.default:
            self.reads += is_on_gpu
            return torch.ones((), dtype=inputs[0].dtype).item()
        if inputs and not is_fake:
            out = func(*args, **kwargs)
        else:
            with self.fake:
                out = func(*args, **kwargs)
            if not inputs and sum(x.numel() for x in tensors_in(out)) < SMALL:
                out = func(*args, **kwargs)
        for x in tensors_in(out):
            self.count(x.untyped_storage())
        self.reads += is_on_gpu and any(x.is_cpu for x in tensors_in(out))
        return out

    def count(self, storage):
        """Count a storage with the size that it has now."""
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = 0
            weakref.finalize(storage, self.forget, key)
        self.alive += storage.nbytes() - self.storages[key]
        self.storages[key] = storage.nbytes()
        self.peak = max(self.peak, self.alive)

    def forget(self, key):
        self.alive -= self.storages.pop(key)

    def resize(self, storage, size):
        """UntypedStorage.resize_, with which FSDP2 frees memory and takes it again."""
        RESIZE(storage, size)
        self.count(storage)


def micro_batch(tokens, longest):
    """A micro-batch of so many tokens, in sequences of at most `longest`."""
    samples = []
    for length in [longest] * (tokens // longest) + [tokens % longest]:
        sample = filler(length) | dict(mask=np.ones(length, bool), outcome=0)
        # Sequences that begin alike would be computed once.
        sample["tokens"][:] = len(samples)
        samples.append(sample)
    return join([sample for sample in samples if len(sample["tokens"])])


def step(policy, optimizers, batches, config, device):
    sums = Sums()
    for batch in batches:
        loss, metrics, _ = train.micro_batch(policy, batch, 0, config, device)
        loss.backward()
        sums.add(metrics)
        del loss, metrics, _
    train.optimizer_step(policy, optimizers, sums, 0, config)


def counted(config, shape, device=CPU):
    """A Counter of a trainer rank's second step. shape: the config of transformers."""
    dist.init_process_group("fake", rank=0, world_size=config.trainers, store=fake_pg.FakeStore())
    counter = Counter()

    def load_model(config, dtype):
        with counter.fake:
            return AutoModelForCausalLM.from_config(
                shape, dtype=dtype, attn_implementation="packed"
            ).eval()

    patches = [
        mock.patch.object(train, "load_model", load_model),
        # torch cannot move fake parameters; these are where they belong.
        mock.patch.object(train, "hand_out", lambda part, device: None),
        mock.patch.object(train.Policy, "to", lambda policy, device: policy),
        mock.patch.object(plumbing.model, "flash_runs_on", lambda q, v: q.dtype != torch.float32),
        mock.patch.object(
            torch.UntypedStorage, "resize_", lambda storage, n: counter.resize(storage, n)
        ),
    ]
    small = micro_batch(8, 8)
    large = micro_batch(config.row_tokens, min(config.row_tokens, config.max_model_len))
    for patch in patches:
        patch.start()
    try:
        with counter:
            with device:
                policy, optimizers = train.build(config, device, config.trainers)
            for parameter in policy.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                counter.count(local.untyped_storage())
            # The first step makes the optimizer's state. For its plans DTensor runs operations on
            # whole shapes, which are not counted.
            step(policy, optimizers, [small], config, device)
            counter.peak = counter.alive
            counter.reads = 0
            step(policy, optimizers, [small, large], config, device)
    finally:
        for patch in patches:
            patch.stop()
        dist.destroy_process_group()
    return counter


def counted_gb(config):
    """The same in GB for `config.model`; a deep model is extrapolated from shallow ones."""
    shape = memory.model_config(config.model)
    layers = shape.num_hidden_layers
    peaks = []
    for depth in LAYERS:
        values = shape.to_dict() | {"num_hidden_layers": depth}
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:depth]
        peaks.append(counted(config, type(shape)(**values)).peak)
    slope = (peaks[1] - peaks[0]) / (LAYERS[1] - LAYERS[0])
    return (peaks[1] + slope * (layers - LAYERS[1])) / 1e9


def config_of(name, trainers, checkpointed, row_tokens, rank):
    lengths = "--max_model_len 8192 --max_new_tokens 4096 --row_tokens 16384"
    knobs = f"--checkpointed_layers {checkpointed} --lora_rank {rank}"
    argv = ["math", "--model", f"Qwen/Qwen2.5-{name}", *lengths.split(), *knobs.split()]
    config = placement.resolve(cfg.parse(argv), 8)
    config.trainers = trainers
    config.row_tokens = row_tokens
    return config


def main(argv=None):
    arguments = parser(__doc__).parse_args(argv)
    rows = []
    for row in ROWS[:1] if arguments.quick else ROWS:
        config = config_of(*row)
        estimate = sum(memory.trainer_gb(config).values())
        gb = counted_gb(config)
        rows.append([*row, round(gb, 2), round(estimate, 2), round(estimate / gb, 4)])
        print(rows[-1], flush=True)
    header = ["model", "ranks", "layers again", "row", "adapters' rank"]
    header += ["counted GB", "tools/memory.py", "ratio"]
    table(header, rows)
    keep(result_file(arguments, "fake_step"), dict(machine=machine(), header=header, rows=rows))


if __name__ == "__main__":
    main()
