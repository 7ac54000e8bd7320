"""train.py with a FAKE weight sender, so that a test can run the real trainer, on any number of ranks, with no engine.

    python -m torch.distributed.run --nproc_per_node 2 tests/train_without_engines.py ONE RUN_DIR ...

ONE: one optimizer, train.py's own; TWO: Muon for the matrices of the layers, AdamW for the rest. Each
run directory also gets its first step's gradients, gradients.safetensors.
"""

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import train
from plumbing.attribution import Attribution
from plumbing.problems import announce_loaded
from weights import TIMES

clip = torch.nn.utils.clip_grad_norm_


class FakeSender:
    """Announces nothing, sends nothing; every update is complete at once."""

    unchanged = 0

    def __init__(self, config, model, ranks, run_dir):
        # the real one keeps them: they must be the ones that are trained, and not gathered copies
        kinds = {isinstance(p, DTensor) for p in model.parameters()}
        assert kinds == {ranks.sharded}, kinds

    def push(self, version, position):
        pass

    def wait(self):
        pass

    def check(self):
        pass

    def announce(self, version, position, done=False):
        pass

    def take_timing(self):
        return dict.fromkeys(TIMES, 0.0)

    def close(self):
        pass


async def fake_prefills(looking, samples):
    """A FAKE of engines that say what the trainer does."""
    return [(sample, sample["trainers"], 0) for sample in samples]


def whole(gradient):
    """A gradient that is not sharded. Collective if it is."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def clip_and_keep(path, parameters, max_norm):
    """clip_grad_norm_, that writes down the first step's gradients, whole, before they are clipped."""
    parameters = list(parameters)
    gradients = {str(i): whole(p.grad) for i, p in enumerate(parameters)}
    if os.environ.get("RANK", "0") == "0" and not path.exists():
        save_file(gradients, path)
    return clip(parameters, max_norm)


def two_optimizers(model, config, device):
    """What a researcher would write into train.make_optimizers."""
    in_layers = set(model.base_model.layers.parameters())
    matrices = [p for p in model.parameters() if p in in_layers and p.dim() == 2]
    rest = [p for p in model.parameters() if p not in in_layers or p.dim() != 2]
    muon = [{"params": matrices, "lr_scale": 10.0}]
    adam = [{"params": rest, "lr_scale": 1.0}]
    return [
        torch.optim.Muon(muon, lr=config.lr, weight_decay=0.0),
        torch.optim.AdamW(adam, lr=config.lr, betas=tuple(config.betas)),
    ]


def main(optimizers, run_dirs):
    torch.set_num_threads(1)
    train.Sender = FakeSender
    Attribution._ask = fake_prefills
    if optimizers == "TWO":
        train.make_optimizers = two_optimizers
    for run_dir in run_dirs:
        path = Path(run_dir, "gradients.safetensors")
        torch.nn.utils.clip_grad_norm_ = functools.partial(clip_and_keep, path)
        # the actor's notice, which has one writer
        if os.environ.get("RANK", "0") == "0":
            announce_loaded(f"{run_dir}/queues")
        train.main(run_dir)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    # as train.py does
    os._exit(0)
