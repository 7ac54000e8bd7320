"""Mixtures of experts: which experts a model's routers choose is counted, and can be prescribed.

The routers of transformers choose k of E experts for each token by one call of torch.topk, whatever
they do with scores before and afterwards. `Routing` watches these calls. To prescribe a choice it
gives them other indices, with the values that the router has computed for these: scores and their
gradients are the router's own. It costs nothing in models without experts.

Trainer and engine round differently in 16 bits, so that some tokens go to other experts than in the
engine that sampled them. With --replay_routing the engine's choice travels with each token.
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

    experts: the number of experts. prescribed [T, k]: the experts of each token, -1 where the
    router decides itself; None: it decides all. Afterwards `own` [T, k] is what the router would
    have chosen, and `taken` [T, k] what was computed.
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
        """[T] bool: the tokens whose experts were prescribed."""
        if self.prescribed is None:
            return self.own.new_zeros(len(self.own), dtype=torch.bool)
        return (self.prescribed >= 0).all(1)


class Routing:
    """The routers of a model's decoder, which is changed so that they are watched.

    replays: choices will be prescribed, see `prescribe`.
    `prescribed` [T, layers, k] or None holds for every forward pass until it is set again, the
    recomputation in the backward pass among them. Layers are counted as in vLLM, all of them.
    """

    def __init__(self, decoder, replays=False):
        self.replays = replays
        self.prescribed = None
        # [T] bool: the tokens that are no padding; None: all of them
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
        """Prescribe the choices of the next forward pass, whose tokens are `tokens` [Q] of a row.

        experts: int16 array [T, layers * k] of the row's tokens, with -1 where the router decides
        itself; None: it decides all. tokens: -1 for padding, which has no experts.
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
        """The forward pass of one block."""
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

        expert_load   tokens of the expert with most tokens, divided by the mean of all experts;
                      summed over tokens and layers
        router_flips  only with --replay_routing: for how many tokens and layers the router would
                      have chosen another set of experts
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
