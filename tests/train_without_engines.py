"""train.py with a FAKE weight sender: the real trainer, on any number of ranks, without engines.

    accelerate launch --multi_gpu --num_processes 2 tests/train_without_engines.py RUN_DIR ...

The gradients of the first step are written to gradients.safetensors in each run directory. With
FUSED=1 in the environment AdamW is fused, as on GPUs.
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
from weights import TIMES

clip = torch.nn.utils.clip_grad_norm_


class FakeSender:
    """A sender that announces and sends nothing; every update is complete at once."""

    def __init__(self, config, model, ranks, run_dir):
        # The real sender keeps the parameters: they must be the trained ones and no gathered copies
        sharded = ranks.world > 1 or config.dtype != "float32"
        assert {isinstance(p, DTensor) for p in model.parameters()} == {sharded}

    def nothing(self, *arguments, **knobs):
        pass

    push = wait = check = announce = close = nothing

    def take_timing(self):
        return dict.fromkeys(TIMES, 0.0)


def whole(gradient):
    """Return a gradient as one whole tensor. If it is sharded, all ranks must call this."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def clip_and_keep(path, parameters, max_norm):
    """Clip as clip_grad_norm_ does; before, save the gradients of the first step."""
    parameters = list(parameters)
    gradients = {str(i): whole(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
    if os.environ.get("RANK", "0") == "0" and not path.exists():
        save_file(gradients, path)
    return clip(parameters, max_norm)


def take_fused_adamw():
    """AdamW in one fused kernel on the CPU, too, as train.py takes it on GPUs."""
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda groups, fused, **knobs: adamw(groups, fused=True, **knobs)


def main(run_dirs):
    torch.set_num_threads(1)
    if os.environ.get("FUSED") == "1":
        take_fused_adamw()
    train.Sender = FakeSender
    for run_dir in run_dirs:
        path = Path(run_dir, "gradients.safetensors")
        torch.nn.utils.clip_grad_norm_ = functools.partial(clip_and_keep, path)
        train.main(run_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    # train.py ends in the same way
    os._exit(0)
