"""Inside vLLM: the contract of an engine, and the receiving end of weight updates.

vLLM itself stays unmodified. `--middleware plumbing.engine.Contract` puts two calls into its HTTP
server; `--worker-extension-cls plumbing.engine.WorkerExtension` gives its workers the methods that
these need. The calls, beside vLLM's own POST /inference/v1/generate and GET /health:

    POST /init_process_group     join the trainer's weight group, from now on receive every update
    POST /request_weight_update  {version, recompute_kv}: the new weights are here: swap, stamp, go on

A thread in every worker waits for the doorbell (a key in the group's store), receives while decoding
goes on, and sets a ready key; weights.py, the trainer's side, then asks for the swap. Deliberately
absent: anything that generates.
"""

import asyncio
import itertools
import json
import os
import threading
import time
from datetime import timedelta

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.config import set_current_vllm_config

from plumbing.plan import NotOnlyCopies, Plan, reload
from plumbing.wire import buckets, checksum, join_group, open_store, settle

GENERATE = "/inference/v1/generate"


class Contract:
    """ASGI middleware of the engine's HTTP server.

    Refuses orders of another run (header x-run-id), and generates nothing before a trainer's weights
    are here, unless PIPELINE_SERVE_AS_LOADED=1: then what was loaded from disk is version 0.
    """

    def __init__(self, app):
        self.app = app
        self.run_id = os.environ.get("PIPELINE_RUN_ID", "")
        self.serves_as_loaded = os.environ.get("PIPELINE_SERVE_AS_LOADED") == "1"
        self.has_weights = False
        self.one_at_a_time = asyncio.Lock()
        self.orders = {
            "/init_process_group": self.init_process_group,
            "/request_weight_update": self.request_weight_update,
        }

    async def __call__(self, scope, receive, send):
        path = scope.get("path")
        answer = self.app
        if path in self.orders:
            answer = await self.obey(path, scope, receive)
        elif path == GENERATE and not self.has_weights:
            if self.serves_as_loaded:
                await scope["app"].state.engine_client.update_weight_version("0")
                self.has_weights = True
            else:
                answer = JSONResponse({"error": "no weights from the trainer yet"}, 503)
        await answer(scope, receive, send)

    async def obey(self, path, scope, receive):
        """The answer to an order: 200, or 403 for another run's, or 500 with the reason."""
        run_id = dict(scope["headers"]).get(b"x-run-id", b"").decode()
        if run_id != self.run_id:
            reason = f"{path} is of run '{run_id}', this engine is of run '{self.run_id}'"
            print(f"weights: refused, from {scope['client']}: {reason}", flush=True)
            return JSONResponse({"error": reason}, 403)
        body = await Request(scope, receive).json()
        async with self.one_at_a_time:
            try:
                return JSONResponse(await self.orders[path](body, scope["app"].state.engine_client))
            except Exception as e:
                return JSONResponse({"error": f"{type(e).__name__}: {e}"}, 500)

    async def init_process_group(self, body, engine):
        """Join the group in the background; returns at once, as the others may not be there yet."""
        await self.all_workers(engine, "join_weight_group", body)
        return {}

    async def request_weight_update(self, body, engine):
        """Pause, swap, stamp, resume: in one call, so that no caller's death leaves it paused."""
        version = str(body["version"])
        await self.all_workers(engine, "check_weight_update", version)
        start = time.perf_counter()
        # pause_generation() without the 20 ms that it sleeps afterwards, which vLLM's own comment
        # says are not needed for correctness
        await engine.engine_core.pause_scheduler_async(
            mode="keep", clear_cache=body["recompute_kv"]
        )
        try:
            await self.all_workers(engine, "swap_weights", version)
            await engine.update_weight_version(version)
            self.has_weights = True
        except Exception:
            # one worker's old weights are whole; of several, some may hold new ones
            self.has_weights &= engine.vllm_config.parallel_config.world_size == 1
            raise
        finally:
            await engine.resume_generation()
        return {"version": version, "pause_s": time.perf_counter() - start}

    async def all_workers(self, engine, method, argument):
        """Call a method of WorkerExtension on every worker; RuntimeError with the first problem."""
        problems = await engine.collective_rpc(method, args=(argument,))
        for problem in problems:
            if problem is not None:
                raise RuntimeError(problem)


class WorkerExtension:
    """Methods that vLLM's workers get. Each returns None or a problem in words, and never raises:
    with several workers vLLM leaves the others' answers behind when one does.
    """

    def join_weight_group(self, group):
        """Begin to take part in the weight group that `group` describes, see Receiver."""
        before = getattr(self, "weight_receiver", None)
        try:
            self.weight_receiver = Receiver(self, group, before)
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    def check_weight_update(self, version):
        """What keeps this worker from swapping to this version."""
        receiver = getattr(self, "weight_receiver", None)
        if receiver is None:
            return "this engine is in no weight group"
        if receiver.error is not None:
            return f"receiving failed: {receiver.error}"
        if receiver.received != version:
            return f"version {version} is not here, what is here is {receiver.received}"

    def swap_weights(self, version):
        """Load what was received, between two decode steps; on a problem the old weights are whole."""
        try:
            with set_current_vllm_config(self.vllm_config):
                self.weight_receiver.swap()
        except Exception as e:
            return f"{type(e).__name__}: {e}"


class Inbox:
    """Memory that updates are received into, and the plan of where its tensors go (None: not made
    yet; False: there is none, vLLM's layerwise reload has to do it).
    """

    def __init__(self, group, device):
        self.layout = (group["names"], group["shapes"], group["dtype"], group["bucket_bytes"])
        self.flats = []
        self.received = []
        self.plan = None
        dtype = getattr(torch, group["dtype"])
        plan = buckets(group["shapes"], dtype.itemsize, group["bucket_bytes"])
        for first, last, elements in plan:
            flat = torch.empty(elements, dtype=dtype, device=device)
            shapes = [torch.Size(shape) for shape in group["shapes"][first:last]]
            parts = flat.split([shape.numel() for shape in shapes])
            self.flats.append(flat)
            for name, part, shape in zip(group["names"][first:last], parts, shapes):
                self.received.append((name, part.view(shape)))


class Receiver:
    """One worker's part in a weight group, in a thread of its own.

    group: {backend, host, port, first_rank, world, timeout, names, shapes, dtype, bucket_bytes}.
    `received` is the version that lies ready to be swapped in, as text; `error` why there will be
    none. A group that broke is never mended: the trainer forms another one.
    """

    def __init__(self, worker, group, before):
        self.worker = worker
        self.group = group
        self.model = worker.model_runner.get_model()
        self.rank = group["first_rank"] + worker.parallel_config.rank
        self.timeout = group["timeout"]
        self.device = worker.device if group["backend"] == "nccl" else torch.device("cpu")
        self.received = None
        self.error = None
        self.verify = False
        layout = (group["names"], group["shapes"], group["dtype"], group["bucket_bytes"])
        reusable = before is not None and not before.thread.is_alive()
        if reusable and before.inbox.layout == layout and before.device == self.device:
            self.inbox = before.inbox
        else:
            # a thread that still waits for a former group must not write into this one's memory
            self.inbox = Inbox(group, self.device)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        """Join, then receive update after update until the group breaks."""
        try:
            store = open_store(self.group["host"], self.group["port"], self.timeout)
            group = join_group(
                self.group["backend"], store, self.rank, self.group["world"], self.timeout
            )
            for n in itertools.count():
                # the doorbell: the next update may be long in coming; a trainer that ends closes
                # the connection, which ends the wait
                store.wait([f"update/{n}"], timedelta(days=30))
                update = json.loads(store.get(f"update/{n}"))
                self.receive(group, update["verify"])
                self.received = update["version"]
                store.set(f"ready/{n}/{self.rank}", "")
        except Exception as e:
            self.error = f"{type(e).__name__}: {str(e).splitlines()[0]}"

    def receive(self, group, verify):
        """Receive every bucket, while the model decodes."""
        limit = timedelta(seconds=self.timeout)
        # no stream, no effect
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.received = None
        self.verify = verify
        with torch.cuda.stream(stream):
            for flat in self.inbox.flats:
                group.broadcast(flat, 0).wait(limit)
            if verify:
                self.compare_checksums(group, limit)
            settle(self.device, self.timeout, "receiving")

    def compare_checksums(self, group, limit):
        """Compare checksums of what arrived with those of what was sent, which come last."""
        arrived = torch.stack([checksum(flat) for flat in self.inbox.flats])
        sent = torch.empty_like(arrived)
        group.broadcast(sent, 0).wait(limit)
        wrong = int((arrived != sent).sum())
        if wrong:
            raise ValueError(f"checksums differ: {wrong} of {len(sent)} buckets arrived otherwise")

    def swap(self):
        """The received weights into the model, which is not decoding now."""
        inbox = self.inbox
        self.received = None
        if inbox.plan is None:
            try:
                inbox.plan = Plan(self.model, inbox.received)
            except NotOnlyCopies as e:
                inbox.plan = False
                print(f"weights: updates take vLLM's layerwise reload: {e}", flush=True)
        if inbox.plan:
            inbox.plan.swap()
            if self.verify and not inbox.plan.holds():
                end_of_engine("the model does not hold what was received")
        else:
            try:
                reload(self.model, self.worker.model_config, inbox.received)
            except Exception as e:
                end_of_engine(f"{type(e).__name__}: {e}")
        if self.worker.device.type == "cuda":
            # the next update is received into the same memory, on another stream
            torch.cuda.current_stream().synchronize()


def end_of_engine(why):
    """The weights are half old, half new: this engine ends, and is started again."""
    print(f"weights: loading broke off ({why}): this engine ends", flush=True)
    os._exit(1)
