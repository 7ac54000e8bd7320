"""Weight updates while sequences are being generated: the trainer's side (Sender) and vLLM's side (BroadcastEngine).

One torch.distributed group joins trainer rank 0 and every engine worker (gloo, or NCCL between GPUs). An update v -> v+1:

  1. POST /start_weight_update, /update_weights to every engine: a background thread of each worker starts receiving
     (during the trainer's last backward pass);
  2. all trainer ranks gather the parameters in one fixed order, rank 0 broadcasts them in flat buckets; decoding goes on;
  3. POST /pause (requests are kept), /finish_weight_update (load, stamp version v+1), /resume: the engines' only pause
     (during the trainer's next forward pass).

vLLM stays unmodified: `--worker-extension-cls weights.WorkerExtension` imports this file in its workers, which registers
BroadcastEngine with vLLM's factory. Every wait has the deadline `sync_timeout`; its error says which engine, which call.
Deliberately absent: retries (an update that fails is an error on both sides). The wire is a trusted network's.
"""
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import requests
import torch
import torch.distributed as dist


def join_group(backend, host, port, rank, world, timeout, is_server=False):
    """A process group of its own, beside whatever default group this process has. Returns (group, store)."""
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, world, is_server, timeout=limit, wait_for_workers=False)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, world, options), store
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, limit), store


def buckets(shapes, itemsize, bucket_bytes):
    """Cut the parameters, in order, into buckets of at most bucket_bytes (a larger parameter gets its own).

    shapes: list of shapes -> list of (first index, last index + 1, elements). Both sides compute it from the same list.
    """
    plan, first, elements = [], 0, 0
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        if elements and (elements + n) * itemsize > bucket_bytes:
            plan.append((first, i, elements))
            first, elements = i, 0
        elements += n
    return plan + [(first, len(shapes), elements)]


# ------------------------------------------------------------------------------------------------ the trainer's side

NO_UPDATE = {"sync_s": 0.0, "send_s": 0.0, "pause_s": 0.0}


class Sender:
    """Sends the model's weights to all engines. Made and called on every trainer rank; rank 0 talks to the engines."""

    def __init__(self, config, model, rank, device):
        self.config, self.model, self.rank = config, model, rank
        self.dtype = getattr(torch, config.dtype)
        self.armed = self.swapped = None
        self.last = NO_UPDATE
        self.urls = [f"http://{config.host}:{config.port + i}" for i in range(config.engines)]
        self.backend = config.weight_backend
        self.device = device if self.backend == "nccl" else torch.device("cpu")  # gloo goes through host memory
        if rank == 0:
            self.pool = ThreadPoolExecutor(len(self.urls))  # one call per engine at a time
            self.control = ThreadPoolExecutor(1)  # the order of calls: arm, swap, arm, swap, ...
            self.http = {url: requests.Session() for url in self.urls}
            self._connect()

    def _post(self, url, path, deadline, **body):
        """One HTTP call; raises RuntimeError naming the engine, the call and what it answered."""
        try:
            answer = self.http[url].post(url + path, json=body, timeout=max(deadline - time.monotonic(), 0.1))
        except requests.RequestException as e:
            raise RuntimeError(f"weights: engine {url} did not answer {path} within {self.config.sync_timeout:.0f} s ({type(e).__name__})") from None
        if answer.status_code != 200:
            raise RuntimeError(f"weights: engine {url} refused {path}: {answer.status_code} {answer.text[:500]}")

    def _all(self, path, **body):
        """The same call to every engine at once."""
        deadline = time.monotonic() + self.config.sync_timeout
        list(self.pool.map(lambda url: self._post(url, path, deadline, **body), self.urls))

    def _connect(self):
        deadline = time.monotonic() + self.config.start_timeout
        for url in self.urls:
            while True:
                try:
                    if requests.get(url + "/health", timeout=5).ok:
                        break
                except requests.RequestException:
                    pass
                if time.monotonic() > deadline:
                    raise TimeoutError(f"weights: engine {url} was not healthy within {self.config.start_timeout:.0f} s")
                time.sleep(0.2)
        sizes = [requests.get(url + "/get_world_size", timeout=self.config.sync_timeout).json()["world_size"] for url in self.urls]
        world = 1 + sum(sizes)
        limit = timedelta(seconds=self.config.sync_timeout)
        self.store = dist.TCPStore(self.config.host, 0, world, True, timeout=limit, wait_for_workers=False)
        info = dict(backend=self.backend, host=self.config.host, port=self.store.port, world=world, timeout=self.config.sync_timeout)
        deadline = time.monotonic() + self.config.sync_timeout
        joins = [self.pool.submit(self._post, url, "/init_weight_transfer_engine", deadline, init_info=info | {"first_rank": 1 + sum(sizes[:i])})
                 for i, url in enumerate(self.urls)]
        try:
            self.group, _ = join_group(self.backend, self.config.host, self.store.port, 0, world, self.config.sync_timeout)
        except Exception as e:
            failed = [str(j.exception()) for j in joins if j.done() and j.exception()]
            raise RuntimeError(f"weights: the group of {world} did not form: {'; '.join(failed) or e}") from None
        for j in joins:
            j.result()
        print(f"weights: {self.backend} group of {world} (trainer + {len(self.urls)} engines), in-flight updates with {'recomputed' if self.config.recompute_kv else 'stale'} KV cache", flush=True)

    def prepare(self):
        """Tell the engines, in the background, to get ready to receive; call it a little before `send`."""
        if self.rank == 0:
            named = [(n, list(p.shape)) for n, p in self.model.named_parameters()]
            info = dict(names=[n for n, _ in named], shapes=[s for _, s in named], dtype=self.config.dtype, bucket_bytes=self.config.bucket_mb << 20)

            def arm():
                self._all("/start_weight_update")
                self._all("/update_weights", update_info=info)

            self.armed = self.control.submit(arm)

    @torch.no_grad()
    def send(self, version, done):
        """Collective: broadcast the current weights. Returns when they are sent; the swap goes on in the background, and
        `done()` is called (in its thread) as soon as every engine serves `version`. `wait` joins it.
        """
        start = time.time()
        if self.rank == 0:
            self.armed.result(2 * self.config.sync_timeout)
        parameters = [p for _, p in self.model.named_parameters()]
        for first, last, elements in buckets([p.shape for p in parameters], self.dtype.itemsize, self.config.bucket_mb << 20):
            flat = torch.empty(elements, dtype=self.dtype, device=self.device) if self.rank == 0 else None
            offset = 0
            for p in parameters[first:last]:
                full = p.full_tensor() if hasattr(p, "full_tensor") else p  # the all-gather, on every rank in this order
                if self.rank == 0:
                    flat[offset:offset + full.numel()].copy_(full.reshape(-1))
                    offset += full.numel()
            if self.rank == 0:
                try:
                    self.group.broadcast(flat, 0).wait(timedelta(seconds=self.config.sync_timeout))
                except RuntimeError as e:
                    raise RuntimeError(f"weights: broadcast of version {version} to {', '.join(self.urls)} failed within {self.config.sync_timeout:.0f} s: {e}") from None
        sent = time.time()

        def swap():
            pause = time.time()
            self._all(f"/pause?mode=keep&clear_cache={'true' if self.config.recompute_kv else 'false'}")
            self._all("/finish_weight_update", weight_version=str(version))
            self._all("/resume")
            now = time.time()
            done()
            return {"sync_s": now - start, "send_s": sent - start, "pause_s": now - pause}

        if self.rank == 0:
            self.swapped = self.control.submit(swap)

    def failed(self):
        """Raise what went wrong in the background, if anything did."""
        for future in (self.armed, self.swapped):
            if future and future.done():
                future.result()

    def wait(self):
        """Wait until the last update is in the engines."""
        if self.swapped:
            self.last, self.swapped = self.swapped.result(4 * self.config.sync_timeout), None

    def timing(self):
        """Seconds of the last update, told once (zeros if there was none since): sync_s, all of it; send_s, of it the trainer was
        blocked; pause_s, of it the engines did not decode (at most: from the call to pause until the last one resumed)."""
        self.wait()
        last, self.last = self.last, NO_UPDATE
        return last


# ------------------------------------------------------------------------------------------------ vLLM's side

class WorkerExtension:
    """Named in `--worker-extension-cls` so that vLLM's workers import this module; adds nothing to the worker."""


if "vllm" in sys.modules:  # imported by a vLLM worker; the trainer does without vLLM's import time
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """How to join the group: its store's address, this engine's first rank in it, the size of it."""
        backend: str
        host: str
        port: int
        first_rank: int
        world: int
        timeout: float

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """What is about to be broadcast: parameters in order, and how they are cut into buckets."""
        names: list
        shapes: list
        dtype: str
        bucket_bytes: int

    class BroadcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        """Receives in a background thread while the model decodes; loads when the update is finished (requests paused)."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        group = thread = error = None

        def init_transfer_engine(self, info):
            """Join the trainer's group."""
            self.timeout = info.timeout
            self.receive_device = self.device if info.backend == "nccl" else torch.device("cpu")
            worker = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
            self.group, self.store = join_group(info.backend, info.host, info.port, info.first_rank + worker, info.world, info.timeout)

        def start_weight_update(self):
            """Nothing yet: the model must stay whole until all of the new weights are here."""

        def update_weights(self, update_info):
            """Start receiving and return at once (the base class would wait for the device)."""
            self.received, self.error = [], None
            self.thread = threading.Thread(target=self._receive, args=(self.parse_update_info(update_info),), daemon=True)
            self.thread.start()

        def receive_weights(self, info):
            """Receive every bucket and keep it; the tensors that will be loaded are views of the buckets."""
            dtype = getattr(torch, info.dtype)
            for first, last, elements in buckets(info.shapes, dtype.itemsize, info.bucket_bytes):
                flat = torch.empty(elements, dtype=dtype, device=self.receive_device)
                self.group.broadcast(flat, 0).wait(timedelta(seconds=self.timeout))
                parts = flat.split([torch.Size(s).numel() for s in info.shapes[first:last]])
                self.received += [(n, p.view(s)) for n, p, s in zip(info.names[first:last], parts, info.shapes[first:last])]

        def _receive(self, info):
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    with torch.cuda.stream(torch.cuda.Stream()):
                        self.receive_weights(info)
                        torch.cuda.current_stream().synchronize()
                else:
                    self.receive_weights(info)
            except Exception as e:  # reported by finish_weight_update, which the trainer waits for
                self.error = e

        def finish_weight_update(self):
            """Load what was received, between two decode steps. Raises if it did not all arrive; the old weights stay."""
            self.thread.join(self.timeout)
            if self.thread.is_alive() or self.error:
                raise RuntimeError(f"weight update: not received within {self.timeout:.0f} s: {self.error}")
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self.received))
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
                # vLLM's CPU build computes with a packed copy of each weight; reloading renews all but a tied output head's
                self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)
            self.received = []

        def shutdown(self):
            """Leave the group; not a collective."""
            self.group = self.store = None

    WeightTransferEngineFactory.register_engine("broadcast", BroadcastEngine)
