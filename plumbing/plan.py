"""Where received weights go inside a vLLM model, learnt once from vLLM's own loaders.

`Plan` watches one dry run of a load and notes which slice of which tensor is copied where; later
updates are plain copies. A model that does more than copy takes vLLM's layerwise reload instead.
Used by plumbing/engine.py. Deliberately absent: networking, HTTP, threads.
"""

from collections import Counter
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.platforms import current_platform

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


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
    if current_platform.is_cpu() and current_platform.is_zen_cpu():
        raise NotOnlyCopies("zentorch may compute with the spare matrix itself")


def storage_of(tensor):
    """What tells whether two tensors are views of the same memory."""
    return tensor.untyped_storage()._cdata


def dry_run(model, layers, received):
    """Let vLLM load `received` into a model that, for a moment, is as it was before vLLM processed
    its weights, but on the meta device.

    Returns (copies [(tensor in use, target of the dry run, source or None)], {tensor in use: its
    counterpart in the dry run}).
    """
    whole = []
    for layer in layers:
        transient = set(layer._non_persistent_buffers_set)
        whole.append((dict(layer._parameters), dict(layer._buffers), transient))
    in_use = {}
    counterpart = {}
    try:
        for layer, (parameters, buffers, _) in zip(layers, whole):
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None:
                    used = parameters[name] if name in parameters else buffers[name]
                    in_use[storage_of(tensor)] = used
                    counterpart[used] = tensor
        with Copies() as copies:
            model.load_weights(iter(received))
    finally:
        for layer, (parameters, buffers, transient) in zip(layers, whole):
            layer._parameters = parameters
            layer._buffers = buffers
            layer._non_persistent_buffers_set = transient
    found = [(in_use.get(storage_of(target)), target, source) for target, source in copies.pairs]
    return found, counterpart


class Plan:
    """Where each received tensor ends up in the model.

    vLLM's CPU build computes with a packed copy of each matrix. For these, `prepare` fills a spare
    matrix and packs it while the model decodes; `swap` then exchanges the packed ones and copies
    what is not packed. On a GPU nothing is packed: `swap` copies everything into the tensors in use,
    whose addresses CUDA graphs know. Making one changes nothing; it raises NotOnlyCopies (quantised
    layers, experts, ...) or what vLLM's loaders raise.

    received: [(name, tensor)], whose memory later updates are received into.
    """

    @torch.no_grad()
    def __init__(self, model, received):
        layers = list(model.modules())
        refuse_special_layers(layers)
        copies, counterpart = dry_run(model, layers, received)
        self._check(model, copies, counterpart)
        linear = torch.nn.functional.linear
        self.attention = [x for x in layers if type(x) is Attention]
        self.packed = [x for x in layers if getattr(x, "cpu_linear", linear) is not linear]
        self.packed_ready = None
        # a tied head shares its embedding's
        self.spare = {}
        for layer in self.packed:
            like = counterpart[layer.weight]
            self.spare[layer.weight] = torch.zeros(like.shape, dtype=like.dtype)
        # (targets, sources) of the copies that `prepare` does, and of those that `swap` does
        self.before_swap = ([], [])
        self.at_swap = ([], [])
        for used, target, source in copies:
            if source is None:
                continue
            into = self.spare.get(used, used).data
            targets, sources = self.before_swap if used in self.spare else self.at_swap
            targets.append(self._slice(into, target, counterpart[used]))
            sources.append(source)
        for used, spare in self.spare.items():
            # an embedding: vLLM empties the others once they are packed
            if used.numel():
                self.at_swap[0].append(used.data)
                self.at_swap[1].append(spare)

    @staticmethod
    def _check(model, copies, counterpart):
        """Every parameter must be loaded whole, and nothing else."""
        loaded = Counter()
        for used, target, _ in copies:
            if used is None:
                raise NotOnlyCopies("a weight loader copies to somewhere else than a parameter")
            loaded[used] += target.numel()
        wrong = []
        for name, parameter in model.named_parameters():
            if loaded[parameter] != counterpart[parameter].numel():
                wrong.append(name)
        if wrong:
            raise ValueError(f"the trainer's parameters do not make up the model's {wrong}")

    @staticmethod
    def _slice(into, target, like):
        """The part of `into` that `target` is of `like`."""
        if (into.shape, into.stride()) != (like.shape, like.stride()):
            shapes = f"{tuple(like.shape)} to {tuple(into.shape)}"
            raise NotOnlyCopies(f"vLLM changed a tensor from {shapes}")
        offset = into.storage_offset() + target.storage_offset() - like.storage_offset()
        return into.as_strided(target.shape, target.stride(), offset)

    @torch.no_grad()
    def prepare(self):
        """All that can be done while the model decodes."""
        if self.spare:
            torch._foreach_copy_(*self.before_swap)
        self.packed_ready = [SimpleNamespace(weight=self.spare[x.weight]) for x in self.packed]
        for ready in self.packed_ready:
            # makes ready.cpu_linear
            dispatch_cpu_unquantized_gemm(ready, remove_weight=False)

    @torch.no_grad()
    def swap(self, dtype):
        """The rest, between two decode steps."""
        torch._foreach_copy_(*self.at_swap)
        for layer, ready in zip(self.packed, self.packed_ready):
            layer.cpu_linear = ready.cpu_linear
        self.packed_ready = None
        for layer in self.attention:
            # as vLLM does after every load
            layer.process_weights_after_loading(dtype)

    def holds(self):
        """Do the tensors in use hold what was received? (Of packed ones: what they are packed from.)"""
        pairs = [*zip(*self.before_swap), *zip(*self.at_swap)]
        # over gloo the sources are in host memory, and the targets of a GPU's model are not
        return all(torch.equal(target, source.to(target.device)) for target, source in pairs)


def reload(model, model_config, received):
    """vLLM's own way to load `received` into a model in use: slower, and knows every model."""
    initialize_layerwise_reload(model)
    model.load_weights(iter(received))
    finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu() and model_config.hf_config.tie_word_embeddings:
        # reloading renews the packed copies of all matrices but a tied output head's
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
