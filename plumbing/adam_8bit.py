"""AdamW whose two moments take a byte each: torchao's, after Dettmers et al. 2021 (arXiv 2110.02861). A slow import."""

import torch
from torchao import optim


class AdamW8bit(optim.AdamW8bit):
    """With learning rates that are numbers, as torch's optimizers have them."""

    def step(self, closure=None):
        for group in self.param_groups:
            # a number would be compiled into the step
            group["lr"] = torch.as_tensor(group["lr"])
        return super().step(closure)
