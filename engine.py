"""vLLM's side of a weight update: what runs inside the engines. weights.py has the trainer's side and the whole story.

vLLM itself stays unmodified. `--worker-extension-cls engine.WorkerExtension` makes its workers import this file, which registers
BroadcastEngine with vLLM's own factory of weight transfer engines; `--middleware engine.Guard` puts two more calls into its HTTP
server, /arm and /swap. Deliberately absent: anything that generates.
"""
import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.platforms import current_platform

from weights import buckets, checksum, in_thread, join_group, settle


class WorkerExtension:
    """Methods that vLLM's workers get through `--worker-extension-cls`, which also makes them import this module. Neither raises: with
    several workers vLLM leaves the others' answers behind when one does."""

    def abandon_update(self):
        """Whatever update is open is over; its trainer gave it up."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()

    def update_problem(self):
        """What keeps this worker from taking the update that it received, or None."""
        receiving = self.weight_transfer_engine.receiving
        return "nothing was being received" if not receiving else "not all of it is here" if not receiving.done() else receiving.exception() and repr(receiving.exception())


# ------------------------------------------------------------------------------------------------ the HTTP server

class Guard:
    """ASGI middleware of the engine's HTTP server: adds /arm and /swap, refuses weight messages of another run (header x-run-id),
    and generates nothing before it has weights from a trainer.
    """
    guarded = {"/arm", "/swap", "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
               "/update_weight_version"}

    def __init__(self, app):
        self.app, self.ready, self.version, self.run_id = app, False, None, os.environ.get("PIPELINE_RUN_ID", "")
        self.armed, self.lock = None, asyncio.Lock()  # the version that is being received; one call at a time

    async def __call__(self, scope, receive, send):
        path, answer = scope.get("path"), None
        if path in self.guarded and (run_id := dict(scope["headers"]).get(b"x-run-id", b"").decode()) != self.run_id:
            print(f"weights: {path} from {scope['client']} refused: it is of run '{run_id}', this engine is of run '{self.run_id}'", flush=True)
            answer = JSONResponse({"error": f"this engine is of run '{self.run_id}', not '{run_id}'"}, 403)
        elif path == "/inference/v1/generate" and not self.ready:
            answer = JSONResponse({"error": "no weights from the trainer yet"}, 503)
        elif path in ("/arm", "/swap"):
            body, engine = await Request(scope, receive).json(), scope["app"].state.engine_client
            async with self.lock:
                try:
                    answer = JSONResponse(await (self.arm if path == "/arm" else self.swap)(body, engine))
                except Exception as e:
                    answer = JSONResponse({"error": f"{type(e).__name__}: {e}"}, 500)
        self.ready |= path == "/update_weight_version" and not answer
        await (answer or self.app)(scope, receive, send)

    async def arm(self, body, engine):
        """Begin to receive a version. Whatever update was begun before, and given up by its trainer, is over."""
        if body.get("serving") not in (None, self.version):
            raise ValueError(f"this engine serves version {self.version}, not {body['serving']}: it is not in the trainer's group any more")
        self.armed = None
        await engine.collective_rpc("abandon_update")
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info=body["update_info"]))
        self.armed = body["version"]
        return {}

    async def swap(self, body, engine):
        """Pause, load, stamp, resume: in one call, so that no caller's death leaves the engine paused."""
        if not body["update_info"] and self.armed != body["version"]:
            raise ValueError(f"version {body['version']} is not the one this engine was told to receive ({self.armed})")
        if not body["update_info"] and (problems := [x for x in await engine.collective_rpc("update_problem") if x]):
            raise RuntimeError(problems[0])
        start, self.armed = time.perf_counter(), None
        # pause_generation() without the 20 ms it sleeps afterwards, which vLLM says are not needed for correctness
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=body["clear_cache"])
        try:
            if body["update_info"]:
                await self.arm(body, engine)
            await engine.finish_weight_update(body["version"])
        except Exception:  # one worker's old weights are whole; of several, some may hold new ones
            self.ready &= engine.vllm_config.parallel_config.world_size == 1
            raise
        finally:
            await engine.resume_generation()
        self.ready, self.version = True, body["version"]
        return dict(version=await engine.get_weight_version(), pause_s=time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------ the workers

@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: an engine joins a group when an update tells it to."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What is about to be broadcast: parameters in order, how they are cut into buckets, whether checksums follow, whether to
    receive in the background, what to write into the group's store when ready to be paused; and the group: {backend, host, port,
    world, first_rank, timeout}.
    """
    names: list
    shapes: list
    dtype: str
    bucket_bytes: int
    verify: bool
    background: bool
    key: str
    wire: dict


class NotOnlyCopies(Exception):
    """Loading this model is more than copying, as far as Plan can tell."""


class Copies(TorchDispatchMode):
    """Notes the copies that vLLM's weight loaders ask for, as views (target, source), and does none of them."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape:
            self.pairs.append((args[0], args[1]))
            return args[0]
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:  # the padding of a vocabulary: zero ever since the start
            self.pairs.append((args[0], None))
            return args[0]
        if not func.is_view:
            raise NotOnlyCopies(f"a weight loader calls {func}")
        return func(*args, **(kwargs or {}))


class Plan:
    """Where each received tensor ends up in the model, learnt once from vLLM's loaders: later updates are plain copies.

    vLLM's CPU build computes with a packed copy of each matrix. For these, `prepare` fills a spare matrix and packs it
    while the model decodes; `swap` then exchanges the packed ones and copies what is not packed. On a GPU nothing is
    packed: `swap` copies everything into the tensors in use, whose addresses CUDA graphs know.
    Making one changes nothing; it raises NotOnlyCopies (quantised layers, experts, ...) or what vLLM's loaders raise.
    """

    @torch.no_grad()
    def __init__(self, model, received):
        layers = list(model.modules())
        self.attention = [x for x in layers if type(x) is Attention]
        for x in layers:
            method = getattr(x, "quant_method", None)
            if method and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) or hasattr(x, "process_weights_after_loading") and type(x) is not Attention:
                raise NotOnlyCopies(f"{type(x).__name__} has a treatment of its own")
        if current_platform.is_cpu() and current_platform.is_zen_cpu():
            raise NotOnlyCopies("zentorch may compute with the spare matrix itself")
        # A dry run of the load: for a moment the model is as it was before vLLM processed its weights, but on the meta device
        whole = [(dict(x._parameters), dict(x._buffers), set(x._non_persistent_buffers_set)) for x in layers]
        home, raw = {}, {}  # storage in the dry run -> the tensor in use; tensor in use -> the one of the dry run
        try:
            for x, (parameters, buffers, _) in zip(layers, whole):
                restore_layer_on_meta(x, get_layerwise_info(x))
                for name, t in [*x._parameters.items(), *x._buffers.items()]:
                    if t is not None:
                        used = parameters[name] if name in parameters else buffers[name]
                        home[t.untyped_storage()._cdata], raw[used] = used, t
            with Copies() as copies:
                model.load_weights(iter(received))
        finally:
            for x, (parameters, buffers, transient) in zip(layers, whole):
                x._parameters, x._buffers, x._non_persistent_buffers_set = parameters, buffers, transient
        pairs = [(home.get(target.untyped_storage()._cdata), target, source) for target, source in copies.pairs]
        loaded = Counter()
        for used, target, _ in pairs:
            if used is None:
                raise NotOnlyCopies("a weight loader copies to somewhere else than a parameter or buffer")
            loaded[used] += target.numel()
        if wrong := [name for name, p in model.named_parameters() if loaded[p] != raw[p].numel()]:
            raise ValueError(f"the trainer's parameters do not make up the model's {', '.join(wrong)}")

        linear = torch.nn.functional.linear
        self.packed = [x for x in layers if getattr(x, "cpu_linear", linear) is not linear]
        self.spare = {x.weight: torch.zeros(raw[x.weight].shape, dtype=raw[x.weight].dtype) for x in self.packed}  # a tied head shares its
        self.early, self.late = ([], []), ([], [])  # targets and sources of prepare, of swap
        for used, target, source in pairs:
            into, like = self.spare.get(used, used).data, raw[used]
            if (into.shape, into.stride()) != (like.shape, like.stride()):
                raise NotOnlyCopies(f"vLLM changed a tensor from {tuple(like.shape)} to {tuple(into.shape)}")
            if source is not None:
                targets, sources = self.early if used in self.spare else self.late
                targets.append(into.as_strided(target.shape, target.stride(), into.storage_offset() + target.storage_offset() - like.storage_offset()))
                sources.append(source)
        for used, spare in self.spare.items():
            if used.numel():  # an embedding: vLLM empties the others once they are packed
                self.late[0].append(used.data), self.late[1].append(spare)

    @torch.no_grad()
    def prepare(self):
        """All that can be done while the model decodes."""
        if self.spare:
            torch._foreach_copy_(*self.early)
        self.ready = [SimpleNamespace(weight=self.spare[x.weight]) for x in self.packed]
        for x in self.ready:
            dispatch_cpu_unquantized_gemm(x, remove_weight=False)  # makes x.cpu_linear

    @torch.no_grad()
    def swap(self, dtype):
        """The rest, between two decode steps."""
        torch._foreach_copy_(*self.late)
        for x, ready in zip(self.packed, self.ready):
            x.cpu_linear = ready.cpu_linear
        self.ready = None
        for x in self.attention:
            x.process_weights_after_loading(dtype)  # as vLLM does after every load

    def holds(self):
        """Do the tensors in use hold what was received? (Of packed ones: the matrices that they were packed from.)"""
        return all(torch.equal(target, source) for pair in (self.early, self.late) for target, source in zip(*pair))


class Inbox:
    """Memory that an update is received into, kept for the next one, and the plan of where its tensors go (None: not made yet; False:
    there is none, vLLM's layerwise reload has to do it)."""

    def __init__(self, info, device):
        self.flats, self.received, self.plan = [], [], None
        for first, last, elements in buckets(info.shapes, getattr(torch, info.dtype).itemsize, info.bucket_bytes):
            self.flats.append(torch.empty(elements, dtype=getattr(torch, info.dtype), device=device))
            parts = self.flats[-1].split([torch.Size(s).numel() for s in info.shapes[first:last]])
            self.received += [(name, part.view(shape)) for name, part, shape in zip(info.names[first:last], parts, info.shapes[first:last])]


@contextlib.contextmanager
def or_end():
    """What breaks off in here leaves weights that are half old, half new: the engine ends, and is started again."""
    try:
        yield
    except BaseException as e:
        print(f"weights: loading broke off ({type(e).__name__}: {e}): the weights are half old, half new, this engine ends", flush=True)
        os._exit(1)


class BroadcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives in a background thread while the model decodes; loads when the update is finished (requests paused).

    With `background` off it receives and loads bucket by bucket, paused all the while, and needs no room for a second copy;
    should that break off, the model is neither old nor new, and the engine ends itself to be started again.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    wire = tensors = receiving = None

    def init_transfer_engine(self, info):
        """Nothing: see InitInfo."""

    def start_weight_update(self):
        """Nothing yet: the model must stay whole until all of the new weights are here."""

    def receive_weights(self, info):
        """The base class's name for what `_receive` does."""

    def update_weights(self, update_info):
        """Start receiving and return at once (the base class would wait for the device). Joins the group first if it is a new one."""
        info = self.parse_update_info(update_info)
        self.verify = info.verify
        tensors = (info.names, info.shapes, info.dtype, info.bucket_bytes)
        if info.wire != self.wire:
            self.wire, w, self.tensors = info.wire, info.wire, None  # a thread that waits for a former group must not write into this one's memory
            self.timeout, self.receive_device = w["timeout"], self.device if w["backend"] == "nccl" else torch.device("cpu")
            self.rank = w["first_rank"] + self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
            self.joining = in_thread(join_group, w["backend"], w["host"], w["port"], self.rank, w["world"], w["timeout"])
        if not info.background:
            self.receiving = self.tensors = self.inbox = None
            return self._receive_and_load(info)
        if tensors != self.tensors:
            self.tensors, self.inbox = tensors, Inbox(info, self.receive_device)
        joining, key = self.joining, f"{info.key}/{self.rank}"
        self.receiving = in_thread(self._receive, joining, self.inbox, info)
        # the trainer waits for it before it lets the engine pause; not sooner, as update_problem looks whether all is done
        self.receiving.add_done_callback(lambda _: joining.result()[1].set(key, ""))

    def _receive(self, joining, inbox, info):
        """Receive every bucket and prepare the swap, while the model decodes. Returns the inbox once all is there and right."""
        group, _ = joining.result(self.timeout)
        interval, deadline = sys.getswitchinterval(), time.monotonic() + self.timeout
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device) if self.device.type == "cuda" else None):
                for flat in inbox.flats:
                    group.broadcast(flat, 0).wait(timedelta(seconds=self.timeout))
                self._verify(group, info, [checksum(flat) for flat in inbox.flats if info.verify])
                settle(self.device, lambda: time.monotonic() > deadline, "receiving")
            if inbox.plan:
                sys.setswitchinterval(2e-4)  # packing takes Python's lock some times per matrix, each time after up to 5 ms
                inbox.plan.prepare()
            return inbox
        finally:
            sys.setswitchinterval(interval)

    def _verify(self, group, info, sums):
        """Compare checksums of what arrived with what was sent, which comes after the last bucket."""
        if info.verify:
            expected = torch.empty(len(sums), dtype=torch.int64, device=self.receive_device)
            group.broadcast(expected, 0).wait(timedelta(seconds=self.timeout))
            if wrong := int((torch.stack(sums) != expected).sum()):
                raise ValueError(f"checksums differ: {wrong} of {len(sums)} buckets did not arrive as they were sent")

    def _receive_and_load(self, info):
        group, _ = self.joining.result(self.timeout)
        sums = []
        with or_end():
            initialize_layerwise_reload(self.model)
            for first, last, _ in buckets(info.shapes, getattr(torch, info.dtype).itemsize, info.bucket_bytes):
                part = Inbox(UpdateInfo(**vars(info) | dict(names=info.names[first:last], shapes=info.shapes[first:last])), self.receive_device)
                group.broadcast(part.flats[0], 0).wait(timedelta(seconds=self.timeout))
                sums += [checksum(part.flats[0])] if info.verify else []
                self.model.load_weights(iter(part.received))
            self._verify(group, info, sums)

    def finish_weight_update(self):
        """Load what was received, between two decode steps. Raises, and leaves the old weights whole, if it is not all there and right."""
        inbox, self.receiving = self.receiving.result(self.timeout) if self.receiving else None, None
        if inbox and inbox.plan is None:
            try:
                inbox.plan = Plan(self.model, inbox.received)
                inbox.plan.prepare()
            except NotOnlyCopies as e:
                inbox.plan = False
                print(f"weights: updates take vLLM's layerwise reload, the slow way: {e}", flush=True)
        if inbox and inbox.plan:
            inbox.plan.swap(self.model_config.dtype)
            with or_end():
                if self.verify and not inbox.plan.holds():
                    raise ValueError("the model does not hold what was received")
        else:
            with or_end():
                if inbox:
                    initialize_layerwise_reload(self.model)
                    self.model.load_weights(iter(inbox.received))
                finalize_layerwise_reload(self.model, self.model_config)
                if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
                    # reloading renews the packed copies of all matrices but a tied output head's
                    self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the next update is received into the same memory, on another stream

    def shutdown(self):
        """Leave the group; not a collective."""
        self.wire = self.tensors = self.receiving = self.joining = self.inbox = None


WeightTransferEngineFactory.register_engine("broadcast", BroadcastEngine)
