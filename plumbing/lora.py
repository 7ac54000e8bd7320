"""LoRA (Hu et al. 2021, arXiv 2106.09685), trained through what is served: a frozen linear layer computes with
round(W + alpha / rank B A), and so do the engines, which know nothing of adapters.

In 16 bits a merge rounds much of a small update away: engines would sample from another policy than the one that is
trained. So the trainer's forward pass, too, uses the rounded matrix, made anew each time. Gradients pass the rounding as
if it were not there, and A and B stay in float32, where small updates add up. Deliberately absent: adapters of
embeddings and of the output head; merges into what is kept.
"""

import contextlib
import json

import torch
from safetensors.torch import save_file

from config import require
from plumbing.model import whole


class Adapted(torch.nn.Linear):
    """A linear layer with weight W [out, in], which is frozen, lora_A [rank, in] and lora_B [out, rank]."""

    # False: the base model
    on = True

    def forward(self, x):
        weight = self.merged(self.weight, self.lora_A, self.lora_B) if Adapted.on else self.weight
        return torch.nn.functional.linear(x, weight, self.bias)

    def merged(self, weight, A, B):
        """round(W + scale B A), in W's dtype, to which FSDP2 rounds A and B."""
        A, B = (x.to(weight.dtype).float() for x in (A, B))
        return (weight + self.scale * (B @ A)).to(weight.dtype)


def add(model, config):
    """Freeze a model and give all its linear layers but the output head an adapter. ConfigError if it has none."""
    model.requires_grad_(False)
    layers = [x for x in model.base_model.modules() if type(x) is torch.nn.Linear]
    require(layers, f"--lora_rank: {model.config.model_type} has no torch.nn.Linear for adapters")
    for layer in layers:
        layer.__class__ = Adapted
        layer.scale = config.lora_alpha / config.lora_rank
        layer.lora_A = torch.nn.Parameter(torch.empty(config.lora_rank, layer.in_features))
        layer.lora_B = torch.nn.Parameter(torch.zeros(layer.out_features, config.lora_rank))
        torch.nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)


def of(model):
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
    """{name: (function, tensors it is called with)} of what is trained, as engines have it."""
    found = {n: (torch.detach, [p]) for n, p in model.named_parameters() if p.requires_grad}
    for name, x in of(model).items():
        del found[f"{name}.lora_A"], found[f"{name}.lora_B"]
        found[f"{name}.weight"] = (x.merged, [x.weight, x.lora_A, x.lora_B])
    return found


def split(model, state):
    """Take the adapters out of a state dict, {name: tensor}, and put what is served in its weights' place."""
    adapters = {}
    for name, x in of(model).items():
        pair = {f"{name}.lora_{what}": state.pop(f"{name}.lora_{what}").clone() for what in "AB"}
        state[f"{name}.weight"] = x.merged(state[f"{name}.weight"], *pair.values())
        adapters |= pair
    return adapters


@torch.no_grad()
def survival(model):
    """{"merge_survival": |round(W + d) - W| / |d|} with d = scale B A, over all layers; {} without adapters. Collective."""
    kept = wanted = 0.0
    for x in of(model).values():
        weight, A, B = map(whole, (x.weight, x.lora_A, x.lora_B))
        kept += (x.merged(weight, A, B).float() - weight.float()).square().sum()
        wanted += (x.scale * (B @ A)).square().sum()
    return {"merge_survival": float((kept / wanted).sqrt())} if wanted else {}


def save(folder, adapters, config):
    """Adapters, as `split` has them, in the format of peft, which vLLM reads as well."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": x.contiguous() for name, x in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    about = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=config.model)
    about |= dict(r=config.lora_rank, lora_alpha=config.lora_alpha)
    about["target_modules"] = sorted({name.split(".")[-2] for name in adapters})
    (folder / "adapter_config.json").write_text(json.dumps(about))
