"""AdamW whose moments take a byte each: torchao's, after Dettmers et al. 2021 (arXiv 2110.02861).

Importing torchao takes seconds: import this file only with --adam_8bit.
"""

import torch
from torchao import optim


class AdamW8bit(optim.AdamW8bit):
    """It takes learning rates that are numbers, as torch's own optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            # torchao compiles its step, and would compile a number into it.
            group["lr"] = torch.as_tensor(group["lr"])
        return super().step(closure)
