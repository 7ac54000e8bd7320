"""train.py with a FAKE weight sender, so that a test can run the real trainer, on any number of ranks, with no engine.

    python -m torch.distributed.run --nproc_per_node 2 tests/train_without_engines.py <run directory>
"""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from safetensors.torch import save_file

import train
from weights import NO_UPDATE


class FakeSender:
    """Announces every version as sent; sends nothing."""

    def __init__(self, config, model, rank, device, queues):
        self.rank, self.members = rank, []

    def send(self, version, done):
        if self.rank == 0:
            done([])

    def timing(self):
        return NO_UPDATE

    def agree(self, answer):
        return False  # rank 0 always finds a record: they were all written before

    last, prepare, wait, missing, hurry = NO_UPDATE, *[lambda self, *_: None] * 4


def clip_and_keep(parameters, max_norm, clip=torch.nn.utils.clip_grad_norm_, seen=[]):
    """clip_grad_norm_, that writes down the first step's gradients, whole, before they are clipped."""
    parameters = list(parameters)
    gradients = {str(i): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for i, p in enumerate(parameters)}
    if not seen and os.environ.get("RANK", "0") == "0":
        save_file(gradients, Path(sys.argv[1], "gradients.safetensors"))
    seen.append(True)
    return clip(parameters, max_norm)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.nn.utils.clip_grad_norm_ = clip_and_keep
    train.Sender = FakeSender
    train.main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # as train.py does
