"""Where received weights go inside a vLLM model, learnt once from vLLM's own loaders.

`Plan` watches a load in which nothing is copied and notes which slice of which tensor would be copied
where; updates are then plain copies into the tensors in use. A model that does more than copy takes
vLLM's layerwise reload instead.
"""

import functools
from collections import Counter
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import reload as layerwise
from vllm.platforms import current_platform

from plumbing.transport import named_views

PLAIN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

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
        special = type(getattr(layer, "quant_method", None)) not in PLAIN_METHODS
        treated = hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention
        if special or treated:
            raise NotOnlyCopies(f"{type(layer).__name__} has a treatment of its own")


def storage_of(tensor):
    """What tells whether two tensors are views of the same memory."""
    return tensor.untyped_storage()._cdata


class Plan:
    """Where each part of an update ends up in the model. layout, ranges: of plumbing.transport.

    Every parameter that is updated has a successor, which is filled while the model decodes and takes
    its place in the swap. Making a plan changes nothing. It raises NotOnlyCopies (quantised layers,
    experts, ...), ValueError if what is sent does not make up the model, or what vLLM's loaders raise.
    """

    @torch.no_grad()
    def __init__(self, model, layout, ranges):
        layers = list(model.modules())
        refuse_special_layers(layers)
        # tensors without memory, of which only the place in their bucket counts
        dtype = getattr(torch, layout["dtype"])
        buckets = [torch.empty(n, dtype=dtype, device="meta") for _, _, n in ranges]
        with Copies() as copies:
            model.load_weights(iter(named_views(layout, ranges, buckets)))
        self._check(model, copies.pairs, layout["whole"])
        targets = {storage_of(target) for target, _ in copies.pairs}
        updated = {storage_of(p): p for p in model.parameters() if storage_of(p) in targets}
        # of a fused matrix a part may stay as it is
        self.successor = {p: p.detach().clone() for p in updated.values()}
        number = {storage_of(bucket): k for k, bucket in enumerate(buckets)}
        # by bucket: which parts of it go where
        self.copies = [[] for _ in buckets]
        for target, source in copies.pairs:
            if source is not None:
                parameter = updated[storage_of(target)]
                successor = self.successor[parameter]
                if successor.stride() != parameter.stride():
                    raise NotOnlyCopies(f"a parameter of shape {tuple(parameter.shape)} has gaps")
                offset = target.storage_offset() - parameter.storage_offset()
                into = successor.as_strided(target.shape, target.stride(), offset)
                place = (source.shape, source.stride(), source.storage_offset())
                self.copies[number[storage_of(source)]].append((into, place))
        linear = torch.nn.functional.linear
        packed = [x for x in layers if getattr(x, "cpu_linear", linear) is not linear]
        self.packed = [x for x in packed if x.weight in self.successor]
        self.ready = []

    @staticmethod
    def _check(model, pairs, whole):
        """A whole update must load every parameter whole; none may load anything else."""
        loaded = Counter()
        for target, _ in pairs:
            loaded[storage_of(target)] += target.numel()
        for name, parameter in model.named_parameters():
            missing = parameter.numel() - loaded.pop(storage_of(parameter), 0)
            if missing < 0 or (missing and whole):
                raise ValueError(f"the trainer's parameters do not make up the model's {name}")
        if loaded:
            raise NotOnlyCopies("a weight loader copies to somewhere else than a parameter")

    @torch.no_grad()
    def stage(self, k, bucket):
        """Bucket k is here: copy what is needed out of it, while the model decodes."""
        for into, (shape, stride, offset) in self.copies[k]:
            into.copy_(bucket.as_strided(shape, stride, offset), non_blocking=True)
        if k == len(self.copies) - 1:
            # all are here: whatever else can be done before the swap
            self.ready = [SimpleNamespace(weight=self.successor[x.weight]) for x in self.packed]
            for ready in self.ready:
                # makes ready.cpu_linear
                pack_matrix(ready)

    @torch.no_grad()
    def swap(self):
        """The new weights into the model, between two decode steps."""
        torch._foreach_copy_([p.data for p in self.successor], list(self.successor.values()))
        for layer, ready in zip(self.packed, self.ready):
            layer.cpu_linear = ready.cpu_linear
        self.ready = []


def reload(model, model_config, received):
    """vLLM's own way to load `received` into a model in use: slower, and knows every model."""
    layerwise.initialize_layerwise_reload(model)
    model.load_weights(iter(received))
    layerwise.finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu() and model_config.hf_config.tie_word_embeddings:
        # reloading renews the packed copies of all matrices but a tied output head's
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
