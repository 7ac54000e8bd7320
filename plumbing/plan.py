"""Where received weights go inside a vLLM model, learnt once from vLLM's own loaders.

`Plan` watches a load in which nothing is copied and notes which slice of which tensor would be copied
where; updates are then plain copies into the tensors in use. A model that does more than copy takes
vLLM's layerwise reload instead. Used by plumbing/engine.py. Deliberately absent: networking, threads.
"""

import functools
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

# vLLM's CPU build computes with a packed copy of each matrix. It would also free the matrix itself,
# which updates are copied into and packed from again.
pack_matrix = functools.partial(utils.dispatch_cpu_unquantized_gemm, remove_weight=False)
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack_matrix(layer)


class NotOnlyCopies(Exception):
    """Loading this model is more than copying, as far as Plan can tell."""


class Copies(TorchDispatchMode):
    """Notes the copies that vLLM's weight loaders ask for, as views (target, source), does none."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape:
            self.pairs.append((args[0], args[1]))
            return args[0]
        # the padding of a vocabulary: zero ever since the start
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:
            self.pairs.append((args[0], None))
            return args[0]
        if not func.is_view:
            raise NotOnlyCopies(f"a weight loader calls {func}")
        return func(*args, **(kwargs or {}))


def refuse_special_layers(layers):
    """Raise NotOnlyCopies if a layer treats its weights in a way of its own after loading."""
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        special = method is not None and type(method) not in PLAIN_METHODS
        treated = hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention
        if special or treated:
            raise NotOnlyCopies(f"{type(layer).__name__} has a treatment of its own")


def storage_of(tensor):
    """What tells whether two tensors are views of the same memory."""
    return tensor.untyped_storage()._cdata


class Plan:
    """Where each received tensor ends up in the model.

    Making one changes nothing. It raises NotOnlyCopies (quantised layers, experts, ...), ValueError
    if a parameter would not be loaded whole, or what vLLM's loaders raise.
    received: [(name, tensor)], whose memory later updates are received into.
    """

    @torch.no_grad()
    def __init__(self, model, received):
        layers = list(model.modules())
        refuse_special_layers(layers)
        with Copies() as copies:
            model.load_weights(iter(received))
        loaded = Counter()
        for target, _ in copies.pairs:
            loaded[storage_of(target)] += target.numel()
        wrong = []
        for name, parameter in model.named_parameters():
            if loaded.pop(storage_of(parameter), 0) != parameter.numel():
                wrong.append(name)
        if wrong:
            raise ValueError(f"the trainer's parameters do not make up the model's {wrong}")
        if loaded:
            raise NotOnlyCopies("a weight loader copies to somewhere else than a parameter")
        self.pairs = [(target, source) for target, source in copies.pairs if source is not None]
        linear = torch.nn.functional.linear
        self.packed = [x for x in layers if getattr(x, "cpu_linear", linear) is not linear]

    @torch.no_grad()
    def swap(self):
        """Copy what was received into the model, between two decode steps."""
        targets, sources = zip(*self.pairs)
        torch._foreach_copy_(targets, sources)
        for layer in self.packed:
            pack_matrix(layer)

    def holds(self):
        """Does the model hold what was received?"""
        # over gloo the sources are in host memory, and the targets of a GPU's model are not
        return all(torch.equal(target, source.to(target.device)) for target, source in self.pairs)


def reload(model, model_config, received):
    """vLLM's own way to load `received` into a model in use: slower, and knows every model."""
    initialize_layerwise_reload(model)
    model.load_weights(iter(received))
    finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu() and model_config.hf_config.tie_word_embeddings:
        # reloading renews the packed copies of all matrices but a tied output head's
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
