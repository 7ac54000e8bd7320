"""Inside vLLM: the contract of an engine, and the receiving end of weight updates.

vLLM itself stays unmodified. `--middleware plumbing.engine.Contract` puts two calls into its HTTP
server; `--worker-extension-cls plumbing.engine.WorkerExtension` gives its workers the methods that
these need. The calls, beside GET /health and /metrics, each with the run's secret (plumbing/secret.py):

    POST /inference/v1/generate  token ids in; token ids, logprobs, version spans out (generate.py)
    POST /init_process_group     join the trainer's weight group, from now on receive every update
    POST /request_weight_update  {version, recompute_kv}: the new weights are here: swap, stamp, go on

vLLM's other routes are out of reach.

A thread in every worker waits for the doorbell (a key in the group's store), receives while decoding
goes on, and sets a ready key; weights.py, the trainer's side, then asks for the swap. Deliberately
absent: what generates (plumbing/generate.py).
"""

import asyncio
import hmac
import itertools
import json
import os
import sys
import threading
import time
from datetime import timedelta

import msgspec
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from vllm.config import set_current_vllm_config
from vllm.exceptions import VLLMClientError

from plumbing import secret
from plumbing.generate import sample
from plumbing.plan import NotOnlyCopies, Plan, reload
from plumbing.transport import (
    buckets,
    checksum,
    join_group,
    leave_group,
    open_store,
    settle,
    weight_stream,
)

HEALTH = ("GET", "/health")
METRICS = ("GET", "/metrics")
GENERATE = ("POST", "/inference/v1/generate")
JOIN = ("POST", "/init_process_group")
UPDATE = ("POST", "/request_weight_update")
# of an order: bytes, and seconds that they may take to arrive
LARGEST_BODY = 64 << 20
BODY_TIMEOUT = 30


class Join(msgspec.Struct):
    """A weight group to join, see Receiver."""

    backend: str
    host: str
    port: int
    first_rank: int
    world: int
    timeout: float
    names: list
    shapes: list
    dtype: str
    bucket_bytes: int


class Update(msgspec.Struct):
    """The new weights are here."""

    version: int
    recompute_kv: bool


FORMS = {JOIN: Join, UPDATE: Update}


class Contract:
    """ASGI middleware of the engine's HTTP server, whose answer to all that is not the contract is 404.

    All but health and metrics needs the secret of the run, which lies in PIPELINE_RUN_DIR. Generates
    nothing before a trainer's weights are here, unless PIPELINE_SERVE_AS_LOADED=1: then what was
    loaded from disk is version 0.
    """

    def __init__(self, app):
        self.app = app
        self.secret = secret.read(os.environ["PIPELINE_RUN_DIR"]).encode()
        self.serves_as_loaded = os.environ.get("PIPELINE_SERVE_AS_LOADED") == "1"
        self.has_weights = False
        # weight groups joined: a trainer that continues from a checkpoint counts versions a second time
        self.groups = 0
        self.one_at_a_time = asyncio.Lock()
        self.orders = {JOIN: self.init_process_group, UPDATE: self.request_weight_update}

    async def __call__(self, scope, receive, send):
        answer = self.app
        if scope["type"] != "lifespan":
            answer = await self.answer(scope, receive)
        await answer(scope, receive, send)

    async def answer(self, scope, receive):
        """Who answers a request: vLLM, an order's result or a refusal."""
        # the path as vLLM's own router sees it: decoded, and with nothing before it
        call = (scope.get("method"), scope["path"])
        known = call in (HEALTH, METRICS, GENERATE, JOIN, UPDATE)
        if scope["type"] != "http" or scope.get("root_path") or not known:
            return JSONResponse({"error": "an engine of a run: no such call"}, 404)
        if call in (HEALTH, METRICS):
            return self.app
        given = dict(scope["headers"]).get(secret.HEADER.encode(), b"")
        if not hmac.compare_digest(given, self.secret):
            return JSONResponse({"error": f"{call[1]} needs the secret of this engine's run"}, 403)
        engine = scope["app"].state.engine_client
        if call in self.orders:
            return await self.obey(call, Request(scope, receive), engine)
        if not self.has_weights and not self.serves_as_loaded:
            return JSONResponse({"error": "no weights from the trainer yet"}, 503)
        if not self.has_weights:
            await engine.update_weight_version("0")
            self.has_weights = True
        return await self.generate(Request(scope, receive), engine)

    async def generate(self, request, engine):
        """The answer to a request for tokens: 200, or 400 for what is none, or 500 with the reason."""
        try:
            body = await read_body(request)
            answer = await sample(body, engine, request.receive, self.groups)
            return Response(answer, media_type="application/json")
        except (ValueError, VLLMClientError, TimeoutError, ClientDisconnect) as e:
            return JSONResponse({"error": f"{type(e).__name__}: {e}"}, 400)
        except Exception as e:
            return JSONResponse({"error": f"{type(e).__name__}: {e}"}, 500)

    async def obey(self, call, request, engine):
        """The answer to an order: 200, or 400 for what is none, or 500 with the reason."""
        try:
            body = await read_order(request, FORMS[call])
        except (ValueError, TimeoutError, ClientDisconnect) as e:
            return JSONResponse({"error": f"{call[1]}: {type(e).__name__}: {e}"}, 400)
        async with self.one_at_a_time:
            try:
                return JSONResponse(await self.orders[call](body, engine))
            except Exception as e:
                return JSONResponse({"error": f"{type(e).__name__}: {e}"}, 500)

    async def init_process_group(self, body, engine):
        """Join the group in the background; returns at once, as the others may not be there yet."""
        self.groups += 1
        await self.all_workers(engine, "join_weight_group", body)
        return {}

    async def request_weight_update(self, body, engine):
        """Pause, swap, stamp, resume: in one call, so that no caller's death leaves it paused."""
        version = str(body["version"])
        await self.all_workers(engine, "check_weight_update", version)
        # pause_generation() without the 20 ms that it sleeps afterwards, which vLLM's own comment
        # says are not needed for correctness
        pause = engine.engine_core.pause_scheduler_async(
            mode="keep", clear_cache=body["recompute_kv"]
        )
        try:
            # the engine obeys when its running step has ended: until then it does not pause
            _, clocks = await asyncio.gather(pause, engine.collective_rpc("clock"))
        except Exception:
            # it may be paused all the same
            await engine.resume_generation()
            raise
        # the engine obeys in this order; nobody waits for our hearing of each answer
        await asyncio.gather(
            engine.collective_rpc("swap_weights", args=(version,)),
            engine.update_weight_version(version),
            engine.resume_generation(),
        )
        self.has_weights = True
        return {"version": version, "pause_s": time.monotonic() - min(clocks)}

    async def all_workers(self, engine, method, argument):
        """Call a method of WorkerExtension on every worker; RuntimeError with the first problem."""
        problems = await engine.collective_rpc(method, args=(argument,))
        for problem in problems:
            if problem is not None:
                raise RuntimeError(problem)


async def read_body(request):
    """Its bytes. Raises ValueError if they are too many, TimeoutError if they do not come."""
    text = bytearray()
    async with asyncio.timeout(BODY_TIMEOUT):
        async for chunk in request.stream():
            text += chunk
            if len(text) > LARGEST_BODY:
                raise ValueError(f"the body has more than {LARGEST_BODY} bytes")
    return bytes(text)


async def read_order(request, form):
    """The body of an order, JSON of this form, as a dict. Raises ValueError or TimeoutError if it is none."""
    order = msgspec.json.decode(await read_body(request), type=form)
    return msgspec.structs.asdict(order)


class WorkerExtension:
    """Methods that vLLM's workers get. They return None or a problem in words, and never raise: with
    several workers vLLM leaves the others' answers behind when one does.
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

    def clock(self):
        """Seconds, of a clock that all processes of a machine share."""
        return time.monotonic()

    def swap_weights(self, version):
        """Load what was received, between two decode steps.

        The engine ends where that breaks off: its weights are half old, half new, and the stamp of
        the new version is on its way already. It is started again.
        """
        try:
            with set_current_vllm_config(self.vllm_config):
                self.weight_receiver.swap()
        except Exception as e:
            print(f"weights: loading broke off ({type(e).__name__}: {e}): this engine ends")
            sys.stdout.flush()
            os._exit(1)


class Inbox:
    """Where a worker receives updates, bucket by bucket, and what it keeps of them until the swap.

    Of each bucket the parts that go into this worker's model are copied out, its shards of them if
    it is one of several; the bucket's memory then takes the next one. A model that does more than
    copy (`plan` is None) gets vLLM's layerwise reload, for which everything is kept.
    group: as Receiver has it. Raises what Plan does.
    """

    def __init__(self, model, group, device):
        dtype = getattr(torch, group["dtype"])
        self.layout = (group["names"], group["shapes"], group["dtype"], group["bucket_bytes"])
        # held by whoever writes into this memory
        self.lock = threading.Lock()
        plan = buckets(group["shapes"], dtype.itemsize, group["bucket_bytes"])
        self.sizes = [elements for _, _, elements in plan]
        # learnt from tensors without memory, of which only the place in their bucket counts
        nowhere = [torch.empty(n, dtype=dtype, device="meta") for n in self.sizes]
        try:
            self.plan = Plan(model, self._views(nowhere, plan), nowhere)
            self.whole = None
            self.bucket = torch.empty(max(self.sizes), dtype=dtype, device=device)
        except NotOnlyCopies as e:
            print(f"weights: updates take vLLM's layerwise reload: {e}", flush=True)
            self.plan = None
            self.bucket = None
            self.whole = [torch.empty(n, dtype=dtype, device=device) for n in self.sizes]
        self.received = [] if self.plan else self._views(self.whole, plan)
        what = "the parts for this worker and a bucket" if self.plan else "all of the model"
        print(f"weights: updates take {self.size() / 1e9:.3g} GB here: {what}", flush=True)

    def size(self):
        """Bytes that updates take beside the model."""
        tensors = self.whole or [self.bucket, *self.plan.successor.values()]
        return sum(x.numel() * x.element_size() for x in tensors)

    def _views(self, flats, plan):
        """[(name, tensor)] of all parameters, each a part of its bucket."""
        names, shapes = self.layout[:2]
        views = []
        for flat, (first, last, _) in zip(flats, plan):
            of_bucket = [torch.Size(shape) for shape in shapes[first:last]]
            parts = flat.split([shape.numel() for shape in of_bucket])
            for name, part, shape in zip(names[first:last], parts, of_bucket):
                views.append((name, part.view(shape)))
        return views

    def memory(self, k):
        """What bucket k is received into."""
        return self.whole[k] if self.whole else self.bucket[: self.sizes[k]]

    def keep(self, k):
        """Bucket k has been received."""
        if self.plan:
            self.plan.keep(k, self.memory(k))


class Receiver:
    """One worker's part in a weight group, in a thread of its own.

    group: {backend, host, port, first_rank, world, timeout, names, shapes, dtype, bucket_bytes};
    before: the Receiver of the group before this one, if any. `received` is the version that lies
    ready to be swapped in, as text; `error` why there will be none. A group that broke is never
    mended: the trainer forms another one.
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
        self.ended = False
        self.inbox = None
        if before is not None:
            before.ended = True
            self.inbox = before.inbox
        layout = (group["names"], group["shapes"], group["dtype"], group["bucket_bytes"])
        if self.inbox is None or self.inbox.layout != layout:
            self.inbox = Inbox(self.model, group, self.device)
            # updates are written there on another stream than this one, which has just cleared it
            settle(worker.device, self.timeout, "making room for updates")
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        """Join, then receive update after update until the group breaks, or there is another."""
        group = None
        try:
            if self.worker.device.type == "cuda":
                # a new thread's is the first GPU
                torch.cuda.set_device(self.worker.device)
            store = open_store(self.group["host"], self.group["port"], self.timeout)
            store.set(f"here/{self.rank}", "")
            store.wait(["all_here"], timedelta(seconds=self.timeout))
            group = join_group(
                self.group["backend"],
                store,
                self.rank,
                self.group["world"],
                self.timeout,
                self.device,
            )
            for n in itertools.count():
                # the doorbell: the next update may be long in coming; a trainer that ends closes
                # the connection, which ends the wait
                store.wait([f"update/{n}"], timedelta(days=30))
                update = json.loads(store.get(f"update/{n}"))
                # who still receives for a former group must have ended
                with self.inbox.lock:
                    if self.ended:
                        break
                    self.receive(group, update["verify"])
                self.received = update["version"]
                store.set(f"ready/{n}/{self.rank}", "")
        except Exception as e:
            self.error = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        leave_group(group)

    def receive(self, group, verify):
        """Receive every bucket, while the model decodes."""
        inbox = self.inbox
        limit = timedelta(seconds=self.timeout)
        # where the model is; what is received may come through host memory
        device = self.worker.device
        self.received = None
        self.verify = verify
        sums = []
        with torch.cuda.stream(weight_stream(device)):
            for k in range(len(inbox.sizes)):
                flat = inbox.memory(k)
                group.broadcast(flat, 0).wait(limit)
                if verify:
                    sums.append(checksum(flat))
                inbox.keep(k)
            if verify:
                self.compare_checksums(group, torch.stack(sums), limit)
            if inbox.plan:
                inbox.plan.prepare()
            settle(device, self.timeout, "receiving")

    def compare_checksums(self, group, arrived, limit):
        """Compare checksums of what arrived with those of what was sent, which come last."""
        sent = torch.empty_like(arrived)
        group.broadcast(sent, 0).wait(limit)
        wrong = int((arrived != sent).sum())
        if wrong:
            raise ValueError(f"checksums differ: {wrong} of {len(sent)} buckets arrived otherwise")

    def swap(self):
        """The received weights into the model, which is not decoding now."""
        inbox = self.inbox
        self.received = None
        if inbox.plan:
            inbox.plan.swap()
        else:
            reload(self.model, self.worker.model_config, inbox.received)
        if self.verify and inbox.plan and not inbox.plan.holds():
            raise RuntimeError("the model does not hold what was received")
        # the next update is received into the same memory, on another stream
        settle(self.worker.device, self.timeout, "the swap")
