"""A second copy of the engine's model, which loads an update while the first copy decodes.

The first model, `live`, decodes. The second model, `shadow`, is only for updates. vLLM itself makes
it (`make_shadow` in plumbing/engine.py), loads each update into it and processes it as it does
after loading from disk (it packs matrices, packs experts, absorbs projections, ...). So whatever
vLLM can load can be updated, and tensor parallelism, fused matrices and padding are vLLM's own
business. The swap then copies every tensor that the first model computes with, and that an update
changes, from the second model into the first. Addresses stay as they are, so that captured CUDA
graphs stay valid.

vLLM's own reload is not used: it puts empty tensors into the model that decodes, and in vLLM 0.32
on CPU it was silently wrong for mixtures of experts and for tied heads.
"""

import bisect
import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plumbing.transport import named_views

# names of a module's attributes whose objects hold tensors, or record how they were processed
HELPERS = ("quant_method", "impl")


def storage_of(tensor):
    """The identity of a tensor's memory, which is the same for all views of it."""
    return tensor.untyped_storage()._cdata


class Accesses(TorchDispatchMode):
    """Notes which memory is written, and which sent tensors are read, while vLLM loads weights.

    views: [(name, tensor)] as they are given to vLLM. read: the set of names of those that were
    read. written: the set of identities (`storage_of`) of the storages that were written to.
    """

    def __init__(self, views):
        super().__init__()
        self.places = sorted((view.data_ptr(), view.nbytes, name) for name, view in views)
        self.starts = [start for start, _, _ in self.places]
        self.read = set()
        self.written = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        for argument, schema in zip(args, func._schema.arguments):
            if not isinstance(argument, torch.Tensor):
                continue
            if schema.alias_info is not None and schema.alias_info.is_write:
                self.written.add(storage_of(argument))
            else:
                self.note_read(argument)
        return result

    def note_read(self, tensor):
        i = bisect.bisect(self.starts, tensor.data_ptr()) - 1
        if i >= 0:
            start, size, name = self.places[i]
            if tensor.data_ptr() < start + size:
                self.read.add(name)


class ModulePair:
    """One module of the second model (`shadow`) and the same module of the first one (`live`).

    It can be any module of the model, not only a decoder layer. The constructor records the state
    of `shadow` before anything is loaded. `reset` restores that state: the same attributes, and the
    same memory for the parameters.
    """

    def __init__(self, name, live, shadow):
        self.name = name
        self.live = live
        self.shadow = shadow
        self.helpers = [x for x in map(vars(shadow).get, HELPERS) if hasattr(x, "__dict__")]
        self.helpers = [x for x in self.helpers if not isinstance(x, torch.nn.Module)]
        self.initial = [(x, self.copy_of(vars(x))) for x in (shadow, *self.helpers)]
        self.tensors = [(p, p.data, vars(p).copy()) for p in shadow.parameters(recurse=False)]
        # {id: (tensor, its storage)} of the tensors that `shadow` has before anything is loaded.
        # Their storages are recorded now, because processing may give a parameter another one:
        # whether it was loaded must be asked of the storage into which vLLM loaded.
        self.raw = {id(x): (x, storage_of(x)) for x in tensors_of(shadow).values()}

    @staticmethod
    def copy_of(attributes):
        """A dict of attributes whose dicts (of parameters, modules, ...) are copies, too."""
        return {k: copy.copy(v) if type(v) is dict else v for k, v in attributes.items()}

    def reset(self):
        for thing, attributes in self.initial:
            vars(thing).clear()
            vars(thing).update(self.copy_of(attributes))
        for parameter, data, attributes in self.tensors:
            parameter.data = data
            vars(parameter).clear()
            vars(parameter).update(attributes)

    def is_loaded(self, written):
        """Has loading written to this module? written: the storages that it has written to."""
        return any(storage in written for _, storage in self.raw.values())

    def pairs(self, written):
        """[(name, tensor of the first model, the same of the second one)] that an update changes.

        A tensor is left out if updates neither write to it nor make it anew, and if its name
        contains "cache" (the KV cache). Raises ValueError if a shape or dtype would change.
        """
        if self.raw and not self.is_loaded(written):
            return []
        pairs = []
        for live, shadow in ((self.live, self.shadow), *self.live_helpers()):
            before = tensors_of(live)
            for name, tensor in tensors_of(shadow).items():
                old = before.get(name)
                _, storage = self.raw.get(id(tensor), (None, None))
                untouched = storage is not None and storage not in written
                if old is None or old is tensor or untouched or "cache" in name:
                    continue
                if old.shape != tensor.shape or old.dtype != tensor.dtype:
                    raise ValueError(
                        f"{self.name}.{name} is {list(old.shape)} {old.dtype} in the engine, and "
                        f"an update makes it {list(tensor.shape)} {tensor.dtype}"
                    )
                pairs.append((f"{self.name}.{name}", old, tensor))
        return pairs

    def live_helpers(self):
        """Pairs of objects that hold tensors for the module, in both models."""
        names = [name for name in HELPERS if vars(self.shadow).get(name) in self.helpers]
        return [(getattr(self.live, name), getattr(self.shadow, name)) for name in names]

    def products(self, written):
        """[(this ModulePair, function of the first model, function of the second one)], functions
        of (x, weight, bias) with which vLLM's CPU build multiplies by a packed matrix. [] without.
        """
        old, new = (vars(x).get("cpu_linear") for x in (self.live, self.shadow))
        is_packed = new not in (None, torch.nn.functional.linear)
        return [(self, old, new)] if is_packed and self.is_loaded(written) else []

    def probe(self):
        """An input [4, matrix.shape[1]] in the matrix's dtype, for which different matrices give
        different products.
        """
        matrix = next(x for x, _ in self.raw.values() if x.dim() == 2)
        generator = torch.Generator().manual_seed(0)
        return torch.randn(4, matrix.shape[1], generator=generator).to(matrix.dtype)


def tensors_of(thing):
    """{name: tensor} of a module's parameters, buffers and other attributes, or of an object's."""
    tensors = {name: x for name, x in vars(thing).items() if isinstance(x, torch.Tensor)}
    if isinstance(thing, torch.nn.Module):
        tensors |= {name: x for name, x in thing._parameters.items() if x is not None}
        tensors |= {name: x for name, x in thing._buffers.items() if x is not None}
    return tensors


class Shadow:
    """The second model, and how updates get from buckets into it and from there into the first one.

    live: the model that decodes; shadow: the same one, without weights. process: a function that is
    called when all weights are loaded; layout: see plumbing/transport.py. Making one changes
    nothing in the model that decodes.
    """

    @torch.no_grad()
    def __init__(self, live, shadow, process, layout):
        self.shadow = shadow
        self.process = process
        self.layout = layout
        twins = zip(live.named_modules(), shadow.named_modules(), strict=True)
        self.modules = [ModulePair(name, a, b) for (name, a), (_, b) in twins]
        for module in self.modules:
            before = tensors_of(module.live)
            # Copy what the first model has loaded from disk: updates contain parameters only, so
            # buffers and other tensors would have no values. If only a part of the parameters is
            # sent, `make_shadow` has already loaded everything from disk.
            for name, tensor in tensors_of(module.shadow).items():
                old = before.get(name)
                is_same = (
                    old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype
                )
                if is_same and layout["whole"]:
                    tensor.copy_(old)
        # known after the first update: the storages that updates are loaded into
        self.written = None
        # what the next swap copies, see ModulePair.pairs and ModulePair.products
        self.pairs = []
        self.products = []
        self.swaps = 0

    @torch.no_grad()
    def stage(self, k, bucket):
        """Load bucket k into the second model, while the first one decodes.

        bucket: uint8 [bytes]; buckets come in order, from 0 on. Raises ValueError for a tensor that
        vLLM does not read (this is checked in the first update), for one whose shape or dtype would
        change, for a module that is loaded in vain, or any error of vLLM's loaders.
        """
        views = named_views(self.layout["buckets"][k], bucket)
        if k == 0:
            self.pairs = []
            self.products = []
            for module in self.modules:
                module.reset()
            self.written_so_far = set()
        if self.written is not None:
            self.shadow.load_weights(iter(views))
        else:
            with Accesses(views) as accesses:
                self.shadow.load_weights(iter(views))
            self.written_so_far |= accesses.written
            unread = [name for name, _ in views if name not in accesses.read]
            if unread:
                raise ValueError(f"vLLM does not load {unread[0]}, which is trained")
        if k == len(self.layout["buckets"]) - 1:
            if self.written is None:
                self.written = self.written_so_far
            self.process(self.shadow)
            for module in self.modules:
                pairs = module.pairs(self.written)
                products = module.products(self.written)
                if module.is_loaded(self.written) and not pairs + products:
                    raise ValueError(
                        f"{module.name} is loaded, and nothing that the engine computes with is "
                        "made of it"
                    )
                self.pairs += pairs
                self.products += products

    @torch.no_grad()
    def equal(self):
        """{name: is it equal in both models?} of what the next swap copies.

        Empty tensors are left out. Packed matrices are compared by a product with `probe`.
        """
        result = self.equal_pairs()
        for module, old, new in self.products:
            x = module.probe()
            product = old(x, module.live.weight, getattr(module.live, "bias", None))
            other = new(x, module.shadow.weight, getattr(module.shadow, "bias", None))
            result[f"{module.name}.weight"] = torch.equal(product, other)
        return result

    def equal_pairs(self):
        """`equal` without the packed matrices."""
        return {name: torch.equal(old, new) for name, old, new in self.pairs if old.numel()}

    @torch.no_grad()
    def swap(self):
        """Copy the new weights into the first model, which the caller has paused.

        The first two times it checks all tensors that it has copied: in 16 bits no later
        measurement is so precise that it would find a vector that is left out. (The first update of
        a new run has the values that are there already.) Raises RuntimeError if one is wrong.
        """
        old = [pair[1].data for pair in self.pairs]
        new = [pair[2].data for pair in self.pairs]
        torch._foreach_copy_(old, new)
        for module, _, product in self.products:
            module.live.cpu_linear = product
        self.swaps += 1
        if self.swaps <= 2:
            wrong = [name for name, is_equal in self.equal_pairs().items() if not is_equal]
            if wrong:
                raise RuntimeError(
                    f"{wrong[0]} is not what was sent ({len(wrong)} tensors are wrong)"
                )
