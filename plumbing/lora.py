"""LoRA (Hu et al. 2021, arXiv 2106.09685), trained through the matrices that are served.

A linear layer with the frozen weight W computes with round(W + alpha / rank B A). The engines get
exactly this matrix, and know nothing of adapters. In 16 bits the rounding swallows much of a small
update: if the trainer did not round, the engines would sample from another policy than the one that
is trained. So the trainer's forward pass rounds, too, each time anew. Gradients pass the rounding
as if it were not there (a straight-through estimator), and A and B stay in float32, where small
updates add up.

Deliberately absent: adapters of embeddings and of the output head; merging for good.
"""

import contextlib
import json

import torch
from safetensors.torch import save_file

from config import require
from plumbing.model import decoder_of, whole


class Adapted(torch.nn.Linear):
    """A linear layer with a frozen weight W [out, in], lora_A [rank, in] and lora_B [out, rank]."""

    # False while the base model is computed, in all layers of the process
    on = True

    def forward(self, x):
        weight = self.merged(self.weight, self.lora_A, self.lora_B) if Adapted.on else self.weight
        return torch.nn.functional.linear(x, weight, self.bias)

    def merged(self, weight, A, B):
        """round(W + scale B A), in the dtype of W, to which FSDP2 has rounded A and B, too."""
        A, B = (x.to(weight.dtype).float() for x in (A, B))
        return (weight + self.scale * (B @ A)).to(weight.dtype)


def add(model, config):
    """Freeze a model, and give all its linear layers but the output head an adapter.

    Raises ConfigError if it has no linear layers.
    """
    model.requires_grad_(False)
    layers = [x for x in decoder_of(model).modules() if type(x) is torch.nn.Linear]
    require(layers, f"--lora_rank: {model.config.model_type} has no torch.nn.Linear for adapters")
    for layer in layers:
        layer.__class__ = Adapted
        layer.scale = config.lora_alpha / config.lora_rank
        layer.lora_A = torch.nn.Parameter(torch.empty(config.lora_rank, layer.in_features))
        layer.lora_B = torch.nn.Parameter(torch.zeros(layer.out_features, config.lora_rank))
        torch.nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)


def adapted_layers(model):
    """{name: layer} of a model's adapted layers."""
    return {name: x for name, x in model.named_modules() if isinstance(x, Adapted)}


@contextlib.contextmanager
def adapters_off():
    """The models of this process compute as their base models do."""
    Adapted.on = False
    try:
        yield
    finally:
        Adapted.on = True


def served(model):
    """{name: (function, tensors it is called with)} of all that is trained: function(*tensors) is
    the parameter of this name as engines get it.
    """
    sent = {n: (torch.detach, [p]) for n, p in model.named_parameters() if p.requires_grad}
    for name, x in adapted_layers(model).items():
        del sent[f"{name}.lora_A"]
        del sent[f"{name}.lora_B"]
        sent[f"{name}.weight"] = (x.merged, [x.weight, x.lora_A, x.lora_B])
    return sent


def split(model, state):
    """Take the adapters out of a state dict, {name: tensor}: returns them, {name: tensor}. The
    merged matrices, which are served, take the place of the frozen ones.
    """
    adapters = {}
    for name, x in adapted_layers(model).items():
        pair = {f"{name}.lora_{k}": state.pop(f"{name}.lora_{k}").clone() for k in "AB"}
        state[f"{name}.weight"] = x.merged(state[f"{name}.weight"], *pair.values())
        adapters |= pair
    return adapters


@torch.no_grad()
def survival(model):
    """{"merge_survival": |round(W + d) - W| / |d|}, with d = scale B A and norms over all layers.

    {} if the model has no adapters, or they are 0. Collective.
    """
    kept = wanted = 0.0
    for x in adapted_layers(model).values():
        weight, A, B = map(whole, (x.weight, x.lora_A, x.lora_B))
        kept += (x.merged(weight, A, B).float() - weight.float()).square().sum()
        wanted += (x.scale * (B @ A)).square().sum()
    return {"merge_survival": float((kept / wanted).sqrt())} if wanted else {}


def save(folder, adapters, config):
    """Adapters, as `split` has them, in the format of peft, which vLLM reads as well."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": x.contiguous() for name, x in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter_config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=sorted({name.split(".")[-2] for name in adapters}),
    )
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
