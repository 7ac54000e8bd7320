"""Mixtures of experts: count which experts the routers choose, or tell the routers what to choose.

In transformers a router chooses k of E experts for each token with one call of torch.topk. `Choice`
watches this call. To prescribe a choice it replaces the indices that torch.topk returns, and
returns the router's own scores at these indices; so gradients still flow through the router. Models
without experts are not changed.

Trainer and engine round differently in 16 bits, so for some tokens the trainer's router chooses
other experts than the engine did. With --replay_routing the engine's choice is stored with each
token, and prescribed in the trainer.
"""

import functools

import numpy as np
import torch
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from plumbing.model import layers_of, to_device

TOPK = (torch.topk, torch.Tensor.topk)


def expert_blocks(layer):
    """[(module, number of experts)] of the modules of a layer that hold a router and its experts.

    Experts are the only matrices that are kept as one tensor of three dimensions.
    """
    blocks = {}
    for name, module in layer.named_modules():
        parameters = [] if isinstance(module, _ConvNd) else module._parameters.values()
        for p in parameters:
            if p is not None and p.dim() == 3:
                blocks[name.rpartition(".")[0]] = p.shape[0]
    return [(layer.get_submodule(name), count) for name, count in blocks.items()]


class Choice(TorchFunctionMode):
    """Within this context the router of one block chooses its experts.

    experts: the number of experts. prescribed [Q, k] int64: the experts of each computed token, -1
    where the router decides itself; None: it decides all. Afterwards `own` [Q, k] is what the
    router would have chosen, and `taken` [Q, k] what was computed; None if it calls no torch.topk.
    """

    def __init__(self, experts, prescribed):
        super().__init__()
        self.experts = experts
        self.prescribed = prescribed
        self.own = None
        self.taken = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in TOPK:
            return result
        scores = args[0] if args else kwargs["input"]
        # Some routers first choose groups of experts, by other calls.
        if scores.dim() != 2 or scores.shape[1] != self.experts:
            return result
        self.own = self.taken = result[1]
        if self.prescribed is None:
            return result
        self.taken = torch.where(self.prescribed < 0, self.own, self.prescribed)
        return torch.return_types.topk((scores.gather(1, self.taken), self.taken))

    def is_known(self):
        """[Q] bool: the tokens whose experts were prescribed."""
        if self.prescribed is None:
            return self.own.new_zeros(len(self.own), dtype=torch.bool)
        return (self.prescribed >= 0).all(1)


class Routing:
    """Watches the routers of a model's decoder, and can prescribe their choices.

    The constructor replaces `forward` of every block with experts. replays: True if choices will be
    prescribed. `prescribed` [Q, layers, k] int64, or None, holds from one call of `prescribe` to
    the next; the recomputation of layers in the backward pass therefore uses the same choices.
    `layers` is the number of all layers, with and without experts, because vLLM counts them so.
    """

    def __init__(self, decoder, replays=False):
        self.replays = replays
        self.prescribed = None
        # [Q] bool: the tokens that are not padding; None: all of them
        self.is_token = None
        # {layer: Choice} of the last forward pass
        self.choices = {}
        layers = layers_of(decoder)
        self.layers = len(layers)
        self.blocks = 0
        for i, layer in enumerate(layers):
            for block, experts in expert_blocks(layer):
                block.forward = functools.partial(self.forward, i, experts, block.forward)
                self.blocks += 1

    def prescribe(self, experts, tokens, device):
        """Prepare the next forward pass and its recomputation in the backward pass.

        The pass computes Q tokens. tokens [Q], int: the index in the row of each of them, or -1 for
        padding, which has no experts. experts [T, layers * k], int16: what to choose for each of
        the row's T tokens, -1 where the router decides; None: it decides for all tokens. Sets
        `prescribed` [Q, layers, k], or None, and `is_token` [Q], or None without padding.
        """
        self.choices = {}
        self.prescribed = None
        self.is_token = None
        if tokens.min() < 0:
            [self.is_token] = to_device(device, tokens >= 0)
        if experts is None:
            return
        chosen = np.where(tokens[:, None] < 0, -1, experts[tokens]).astype(np.int64)
        [chosen] = to_device(device, chosen)
        self.prescribed = chosen.unflatten(1, (self.layers, -1))

    @torch.compiler.disable
    def forward(self, layer, experts, forward, *args, **kwargs):
        """The forward pass of one block. Raises RuntimeError if its router calls no torch.topk."""
        prescribed = None if self.prescribed is None else self.prescribed[:, layer]
        with Choice(experts, prescribed) as choice:
            result = forward(*args, **kwargs)
        if choice.own is None and prescribed is not None:
            raise RuntimeError(
                f"--replay_routing: the router of layer {layer} chooses its experts without "
                "torch.topk, so that no choice can be prescribed"
            )
        self.choices[layer] = choice
        return result

    @torch.no_grad()
    def sums(self):
        """{metric: (sum, number)} of the last forward pass; {} for a model without experts.

        expert_load   the tokens of the busiest expert, divided by the mean over experts; a mean
                      over layers, each weighted by its number of tokens
        router_flips  only with --replay_routing: of all pairs of a token and a layer whose experts
                      were prescribed, those where the router's own set of experts is another one
        """
        loads = []
        tokens = []
        flips = []
        known = []
        for choice in self.choices.values():
            if choice.own is None:
                continue
            is_token = self.is_token
            if is_token is None:
                is_token = torch.ones_like(choice.taken[:, 0], dtype=torch.bool)
            counts = torch.zeros(choice.experts, device=is_token.device)
            for taken in choice.taken.unbind(1):
                counts.index_add_(0, taken, is_token.float())
            loads.append(counts.max() / counts.mean() * is_token.sum())
            tokens.append(is_token.sum())
            is_known = choice.is_known()
            is_other = (choice.own.sort(1)[0] != choice.taken.sort(1)[0]).any(1)
            flips.append((is_other & is_known).sum())
            known.append(is_known.sum())
        if not loads:
            return {}
        sums = {"expert_load": (loads, tokens)}
        if self.replays:
            sums["router_flips"] = (flips, known)
        return {name: (torch.stack(x).sum(), torch.stack(n).sum()) for name, (x, n) in sums.items()}
