"""A plan of where received weights go inside a vLLM model, learnt from vLLM's own loaders.

`Plan` watches a load in which nothing is copied, and notes which slice of which tensor would be
copied where. Updates are then plain copies into the tensors in use. Deliberately absent: models
whose loading does more than copy (quantised, experts); they are refused by name.
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

from plumbing.transport import bucket_ranges, named_views

PLAIN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

# vLLM's CPU build computes with a packed copy of each matrix. It would also free the matrix itself,
# which updates are copied into and packed from again.
pack_matrix = functools.partial(utils.dispatch_cpu_unquantized_gemm, remove_weight=False)
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack_matrix(layer)

MORE_THAN_COPIES = "does more than copy: such a model cannot be updated in flight"


class Copies(TorchDispatchMode):
    """Notes the copies that vLLM's weight loaders ask for, as views (target, source), does none."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape:
            self.pairs.append((args[0], args[1]))
            return args[0]
        # The padding of a vocabulary is zero from the start.
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:
            self.pairs.append((args[0], None))
            return args[0]
        if not func.is_view:
            raise ValueError(f"a weight loader that calls {func} {MORE_THAN_COPIES}")
        return func(*args, **(kwargs or {}))


def storage_of(tensor):
    """The identity of a tensor's memory, which is the same for all views of it."""
    return tensor.untyped_storage()._cdata


class Plan:
    """The places in the model where the parts of an update go. layout: see plumbing.transport.

    Every parameter that is updated has a successor, which is filled while the model decodes and
    takes its place in the swap. Making a plan changes nothing. It raises ValueError, or any error
    of vLLM's loaders.
    """

    @torch.no_grad()
    def __init__(self, model, layout):
        layers = list(model.modules())
        for layer in layers:
            special = type(getattr(layer, "quant_method", None)) not in PLAIN_METHODS
            # Such a layer changes its weights after they are loaded.
            processes = hasattr(layer, "process_weights_after_loading")
            if special or (processes and type(layer) is not Attention):
                raise ValueError(f"{type(layer).__name__} {MORE_THAN_COPIES}")
        ranges = bucket_ranges(layout)
        # The buckets have no memory: only the positions of the tensors in them count.
        dtype = getattr(torch, layout["dtype"])
        buckets = [torch.empty(n, dtype=dtype, device="meta") for _, _, n in ranges]
        with Copies() as copies:
            model.load_weights(iter(named_views(layout, ranges, buckets)))
        updated = self._check(model, copies.pairs, layout["whole"])
        # A clone, as an update may leave a part of a fused matrix as it is.
        self.successor = {p: p.detach().clone() for p in updated.values()}
        number = {storage_of(bucket): k for k, bucket in enumerate(buckets)}
        # for each bucket: [(target tensor, (shape, stride, offset) of its source in the bucket)]
        self.copies = [[] for _ in buckets]
        for target, source in copies.pairs:
            if source is not None:
                parameter = updated[storage_of(target)]
                offset = target.storage_offset() - parameter.storage_offset()
                into = self.successor[parameter].as_strided(target.shape, target.stride(), offset)
                source_view = (source.shape, source.stride(), source.storage_offset())
                self.copies[number[storage_of(source)]].append((into, source_view))
        linear = torch.nn.functional.linear
        packed = [x for x in layers if getattr(x, "cpu_linear", linear) is not linear]
        self.packed = [x for x in packed if x.weight in self.successor]

    @staticmethod
    def _check(model, pairs, whole):
        """{storage: parameter} of the tensors that are loaded.

        Raises ValueError if a tensor is no parameter, or if a whole update leaves a part out.
        """
        loaded = Counter()
        for target, _ in pairs:
            loaded[storage_of(target)] += target.numel()
        parameters = {storage_of(p): p for p in model.parameters()}
        if loaded.keys() - parameters.keys():
            raise ValueError(f"a weight loader that fills buffers {MORE_THAN_COPIES}")
        for name, parameter in model.named_parameters():
            if whole and loaded[storage_of(parameter)] != parameter.numel():
                raise ValueError(f"the trainer's parameters do not make up the model's {name}")
        return {storage: parameters[storage] for storage in loaded}

    @torch.no_grad()
    def stage(self, k, bucket):
        """Copy the parts of bucket k that are needed out of it, while the model decodes."""
        for into, (shape, stride, offset) in self.copies[k]:
            into.copy_(bucket.as_strided(shape, stride, offset), non_blocking=True)
        if k == len(self.copies) - 1:
            # All buckets are here: pack the matrices now, so that the swap is short.
            self.ready = [SimpleNamespace(weight=self.successor[x.weight]) for x in self.packed]
            for ready in self.ready:
                # This sets ready.cpu_linear.
                pack_matrix(ready)

    @torch.no_grad()
    def swap(self):
        """Copy the new weights into the model, between two decode steps."""
        torch._foreach_copy_([p.data for p in self.successor], list(self.successor.values()))
        for layer, ready in zip(self.packed, self.ready):
            layer.cpu_linear = ready.cpu_linear
