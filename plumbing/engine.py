"""Inside vLLM: the contract of an engine, and the receiving end of weight updates.

vLLM itself stays unmodified: `--middleware plumbing.engine.Contract` is in front of its HTTP
server, and `--worker-extension-cls plumbing.engine.WorkerExtension` gives its workers methods.
Beside GET /health and /metrics there are these calls, each with the run's secret
(out/<run>/secret):

    POST /inference/v1/generate  token ids in; token ids, logprobs, version spans out, see `sample`
    POST /init_process_group     join the trainer's weight group, from now on receive every update
    POST /request_weight_update  {version, recompute_kv}: swap in the new weights, stamp, go on

and vLLM's own /v1/chat/completions/render and derender, for plumbing/endpoint.py.
"""

import asyncio
import contextlib
import copy
import hmac
import itertools
import logging
import os
import threading
import time
from datetime import timedelta

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.config import set_current_vllm_config
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.exceptions import EngineDeadError

from plumbing import transport
from plumbing.secret import SECRET_HEADER, secret_header
from plumbing.shadow import Shadow

OPEN_CALLS = [("GET", "/health"), ("GET", "/metrics")]
# This lock is held while a bucket is loaded into the shadow, which the next group may use, too.
STAGING = threading.Lock()


class Contract:
    """ASGI middleware of the engine's HTTP server; it answers calls outside the contract with 404.

    The run's secret lies in PIPELINE_RUN_DIR. Nothing is generated before the trainer's weights are
    here, unless PIPELINE_SERVE_AS_LOADED=1: then the weights loaded from disk are version 0. The
    engine is not healthy if its core answers nothing for PIPELINE_CORE_TIMEOUT seconds.
    """

    def __init__(self, app):
        self.app = app
        self.secret = secret_header(os.environ["PIPELINE_RUN_DIR"])[SECRET_HEADER].encode()
        self.serves_as_loaded = os.environ.get("PIPELINE_SERVE_AS_LOADED") == "1"
        self.core_timeout = float(os.environ["PIPELINE_CORE_TIMEOUT"])
        # the latest question to vLLM's core, see `core_hangs`
        self.question = None
        self.asked_at = 0.0
        self.has_weights = False
        # the number of weight groups joined: a trainer that continues from a checkpoint counts some
        # versions a second time
        self.groups = 0
        self.one_at_a_time = asyncio.Lock()
        self.handlers = {
            ("POST", "/inference/v1/generate"): self.generate,
            ("POST", "/init_process_group"): self.init_process_group,
            ("POST", "/request_weight_update"): self.request_weight_update,
            # vLLM's own: chat templates and parsers of tool calls
            ("POST", "/v1/chat/completions/render"): None,
            ("POST", "/v1/chat/completions/derender"): None,
        }

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] != "lifespan":
            app = await self.respond(scope, receive)
        await app(scope, receive, send)

    async def respond(self, scope, receive):
        """The ASGI app that answers a request: vLLM's, or the response to a call, or a refusal."""
        # the path as vLLM's own router sees it: decoded; a websocket has no method
        call = (scope.get("method"), scope["path"])
        if call == ("GET", "/health") and self.core_hangs(scope["app"].state.engine_client):
            problem = f"vLLM's core has answered nothing for {self.core_timeout:.0f} s"
            print(f"engine: {problem}", flush=True)
            return JSONResponse({"error": problem}, 503)
        if call in OPEN_CALLS:
            return self.app
        if call not in self.handlers:
            return JSONResponse({"error": "an engine of a run: no such call"}, 404)
        given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        if not hmac.compare_digest(given, self.secret):
            return JSONResponse({"error": f"{call[1]} needs the secret of this engine's run"}, 403)
        if self.handlers[call] is None:
            return self.app
        try:
            engine = scope["app"].state.engine_client
            return await self.handlers[call](Request(scope, receive), engine)
        except EngineDeadError as e:
            # vLLM would go on to answer errors for seconds. All connections are to break now, as
            # when an engine dies in another way.
            print(f"engine: {call[1]}: {e}: the server ends", flush=True)
            os._exit(1)
        except Exception as e:
            code = 400 if isinstance(e, (ValueError, VLLMClientError)) else 500
            return JSONResponse({"error": f"{call[1]}: {type(e).__name__}: {e}"}, code)

    def core_hangs(self, engine):
        """Has vLLM's core, which decodes, left a question unanswered for too long?

        vLLM's own answer to GET /health says only that the core's process lives. Each call asks a
        question, unless the one before is still unanswered; the core answers it between two steps.
        Before the first weights nothing is asked: until then the core may load models.
        """
        if not self.has_weights:
            return False
        if self.question is None or self.question.done():
            self.question = asyncio.ensure_future(_ask_core(engine))
            self.asked_at = time.monotonic()
        return time.monotonic() > self.asked_at + self.core_timeout

    async def generate(self, request, engine):
        if not self.has_weights:
            if not self.serves_as_loaded:
                return JSONResponse({"error": "no weights from the trainer yet"}, 503)
            await engine.update_weight_version("0")
            self.has_weights = True
        answer = await sample(await request.body(), engine, request.receive, self.groups)
        return Response(answer, media_type="application/json")

    async def init_process_group(self, request, engine):
        """Join in the background; returns at once, as the others may not be there yet."""
        group = await request.json()
        async with self.one_at_a_time:
            self.groups += 1
            await self.all_workers(engine, "join_weight_group", group)
        return JSONResponse({})

    async def request_weight_update(self, request, engine):
        """Pause, swap, stamp, resume: in one call, so that no caller's death leaves it paused."""
        order = await request.json()
        version = str(order["version"])
        # This is pause_generation() without its sleep of 20 ms, which vLLM calls unnecessary.
        pause = engine.engine_core.pause_scheduler_async
        async with self.one_at_a_time:
            try:
                await pause(mode="keep", clear_cache=order["recompute_kv"])
                start = time.monotonic()
                await self.all_workers(engine, "swap_weights", version)
                await engine.update_weight_version(version)
                self.has_weights = True
            finally:
                await engine.resume_generation()
        return JSONResponse({"version": version, "pause_s": time.monotonic() - start})

    async def all_workers(self, engine, method, argument):
        """Call a method of WorkerExtension on every worker; RuntimeError with the first problem."""
        answers = await engine.collective_rpc(method, args=(argument,))
        for problem in filter(None, answers):
            raise RuntimeError(problem)


async def _ask_core(engine):
    """Return once the core has answered. What else may happen is told by vLLM's own /health."""
    with contextlib.suppress(Exception):
        await engine.is_sleeping()


class Prompt(msgspec.Struct):
    """A request for tokens. cache_salt: only prompts of the same salt share their KV cache."""

    token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str | None = None


REQUEST_IDS = itertools.count()


async def sample(body, engine, receive, group):
    """Sample the tokens that a request asks for: body -> answer, or None if the client left.

        {"token_ids": [...], "sampling_params": {...}, "cache_salt": "..."}
        {"choices": [{"token_ids": [...], "behavior_logprobs": [...],
                      "finish_reason": "stop" or "length",
                      "weight_versions": [{"version": "2", "start": 0, "end": 110}, ...],
                      "experts": base64 or null, "experts_shape": [...] or null}],
         "cached_tokens": 96}

    `cached_tokens` is the number of the prompt's tokens that were not computed again. With
    `prompt_logprobs: 0` among the parameters the answer also has the `prompt_logprobs` of all
    prompt tokens but the first. `experts` is there with --replay_routing: the experts that the
    engine chose, int16 [tokens, layers * k], for the tokens of prompt and answer from number
    `routed_experts_prompt_start` on, but for the last one, which has not been computed. group: the
    number of the versions' weight group. vLLM's own call of this name makes and checks objects for
    every token, which here costs half of the server's CPU.
    """
    request = msgspec.json.decode(body, type=Prompt)
    params = request.sampling_params
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.logprobs = 0
    params.flat_logprobs = True
    params.detokenize = False
    # No other request holds these parameters, so that vLLM need not copy them.
    params.skip_clone = True
    # vLLM accepts ids that the tokenizer has and the model has not, and dies of them.
    vocabulary = engine.model_config.get_vocab_size()
    for token in (min(request.token_ids), max(request.token_ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"the model has no token {token}, its ids are 0 to {vocabulary - 1}")
    request_id = str(next(REQUEST_IDS))
    # A prompt without a salt shares its KV cache with no other.
    salt = request_id if request.cache_salt is None else f"{group}/{request.cache_salt}"
    prompt = tokens_input(request.token_ids, cache_salt=salt)
    work = asyncio.ensure_future(_final_output(engine.generate(prompt, params, request_id)))
    # `receive` returns once the client has hung up, and not before.
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return _encode(work.result(), params) if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _final_output(outputs):
    """The last one of a request's outputs, which has all of it."""
    last = None
    async for output in outputs:
        last = output
    return last


def _encode(output, params):
    """The answer, from vLLM's output for one prompt."""
    [completion] = output.outputs
    choice = dict(
        token_ids=list(completion.token_ids),
        behavior_logprobs=completion.logprobs.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        experts=None,
        experts_shape=None,
    )
    if completion.routed_experts is not None:
        experts = completion.routed_experts.reshape(len(completion.routed_experts), -1)
        choice |= dict(experts=experts.astype("<i2").tobytes(), experts_shape=experts.shape)
    answer = dict(choices=[choice], cached_tokens=output.num_cached_tokens)
    if params.prompt_logprobs is not None:
        # the logprob of each token but the first, at temperature 1
        tokens = enumerate(output.prompt_token_ids[1:], 1)
        answer["prompt_logprobs"] = [output.prompt_logprobs[k][x].logprob for k, x in tokens]
    return msgspec.json.encode(answer)


class WorkerExtension:
    """Methods that vLLM gives to its workers. They return None, or a problem as a text.

    They do not raise: vLLM would then not read the answers of the other workers.
    """

    # Are the weights in use those that vLLM has loaded from disk?
    has_loaded_weights = True

    def join_weight_group(self, group):
        """Begin to take part in the weight group that `group` describes, see Receiver."""
        before = getattr(self, "weight_receiver", None)
        try:
            self.weight_receiver = Receiver(self, group, before)
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    def swap_weights(self, version):
        """Copy the received version into the model, which must be paused between two decode steps.

        Returns a problem as text if this version is not here. If the copying fails the weights may
        be half old and half new, so the process ends.
        """
        receiver = getattr(self, "weight_receiver", None)
        if receiver is None or receiver.received != version:
            return f"version {version} is not here"
        try:
            receiver.swap()
            self.has_loaded_weights = False
        except Exception as e:
            print(f"weights: copying the new weights failed ({e!r}): this engine ends", flush=True)
            os._exit(1)


class Receiver:
    """One worker's part in a weight group, in a thread of its own.

    group: {backend, host, port, first_rank, world, timeout, as_loaded, layout
    (plumbing/transport.py)}, with the timeout in seconds. before: the Receiver of the group before
    this one, or None. `received` is the version, as text, of the last complete update, or None. It
    is also set after the first update of a proof and after a failure; the trainer asks for no swap
    then. All buckets are received into the same memory, one after the other: each is loaded into
    the shadow before the next one arrives. After a failure the trainer forms a new group.

    as_loaded: the group was formed at version 0, whose weights the engines have loaded from disk.
    If this worker still has those weights in use, the first two updates are a proof. Before it
    loads the first one, this worker changes the values (`move`): every tensor that an update writes
    (ModulePair.pairs) must then differ from the one in use. The second update is loaded unchanged:
    no tensor may differ. If the proof fails, the text in ready/<n>/<rank> names a tensor.
    """

    def __init__(self, worker, group, before):
        self.worker = worker
        self.group = group
        self.rank = group["first_rank"] + worker.parallel_config.rank
        self.timeout = group["timeout"]
        self.device = worker.device if group["backend"] == "nccl" else torch.device("cpu")
        self.layout = group["layout"]
        self.received = None
        self.process_group = None
        self.is_retired = False
        if before is not None:
            before.retire()
        if before is not None and before.layout == self.layout:
            # A new one would take the model's memory once more.
            self.shadow = before.shadow
        else:
            self.shadow = make_shadow(worker, self.layout)
        # The memory is this receiver's own: a former group may still receive into its memory.
        self.sizes = [transport.bucket_bytes(tensors) for tensors in self.layout["buckets"]]
        self.memory = torch.empty(max(self.sizes), dtype=torch.uint8, device=self.device)
        # updates are written on another stream than this one, which has just made room for them
        transport.synchronize(worker.device)
        threading.Thread(target=self.run, daemon=True).start()

    def retire(self):
        """Another group takes the place of this one, whose thread is to write nothing more."""
        with STAGING:
            self.is_retired = True
        transport.in_thread(transport.abort_group, self.process_group)

    def run(self):
        """Join, then receive update after update until the group breaks, or there is another."""
        try:
            if self.worker.device.type == "cuda":
                # A new thread uses GPU 0 unless it is told otherwise.
                torch.cuda.set_device(self.worker.device)
            store = transport.open_store(self.group["host"], self.group["port"], self.timeout)
            store.set(f"here/{self.rank}", "")
            store.wait(["all_here"], timedelta(seconds=self.timeout))
            self.process_group = transport.join_group(
                self.group["backend"],
                store,
                self.rank,
                self.group["world"],
                self.timeout,
                self.device,
            )
            for n in itertools.count():
                # The next update may come after days. If the trainer ends, the connection breaks.
                store.wait([f"update/{n}"], timedelta(days=30))
                self.received = None
                is_proof = self.group["as_loaded"] and n < 2 and self.worker.has_loaded_weights
                try:
                    self.receive(moved=is_proof and n == 0)
                    problem = self.problem(moved=n == 0) if is_proof else ""
                # What is trained must arrive where it is used: the trainer ends the run.
                except ValueError as e:
                    problem = str(e)
                self.received = store.get(f"update/{n}").decode()
                store.set(f"ready/{n}/{self.rank}", problem)
        except Exception as e:
            print(f"weights: left the group: {e!r}", flush=True)
        transport.abort_group(self.process_group)

    def receive(self, moved=False):
        """Receive every bucket, while the model decodes.

        moved: every tensor is changed before it is loaded. Raises ValueError for weights that this
        model cannot take.
        """
        # The model's device: what is received may come through host memory.
        device = self.worker.device
        with torch.cuda.stream(transport.weight_stream(device)):
            problem = None
            for k, size in enumerate(self.sizes):
                bucket = self.memory[:size]
                self.process_group.broadcast(bucket, 0).wait(timedelta(seconds=self.timeout))
                with STAGING:
                    if self.is_retired:
                        raise RuntimeError("there is another weight group")
                    if problem:
                        # The broadcasts that are left must still be received.
                        continue
                    if moved:
                        move(transport.named_views(self.layout["buckets"][k], bucket))
                    try:
                        self.shadow.stage(k, bucket)
                    except Exception as e:
                        # Each of vLLM's loaders raises its own kinds of errors.
                        problem = ValueError(f"{type(e).__name__}: {e}")
            transport.synchronize(device)
            if problem:
                raise problem

    def problem(self, moved):
        """What is wrong with the weights that were received as a proof; "" if nothing is.

        moved: True if all tensors must differ from those in use, False if all must be equal.
        """
        is_equal = self.shadow.equal()
        wrong = [name for name, equal in is_equal.items() if equal == moved]
        if not wrong:
            return ""
        count = f"{len(wrong)} of {len(is_equal)} tensors"
        if moved:
            return (
                f"{wrong[0]} stays as it is when all weights that were loaded from disk change "
                f"({count})"
            )
        return f"{wrong[0]} changes with the very weights that were loaded from disk ({count})"

    def swap(self):
        """Copy the received weights into the model, which is not decoding now."""
        self.received = None
        self.shadow.swap()
        # The next update is received into the same memory, on another stream.
        transport.synchronize(self.worker.device)


@torch.no_grad()
def move(views):
    """Change the values of the tensors [(name, tensor)], in place.

    Zeros and ones change, too. Only -0.5, and in 16 bits what is close to it, stays the same.
    """
    for _, view in views:
        view.mul_(1.25).add_(0.125)


def second_model(vllm_config):
    """A model as vLLM makes it before it loads weights: (the model, its VllmConfig)."""
    config = copy.copy(vllm_config)
    # Layers register themselves in these two fields of the config, and vLLM decodes with the layers
    # that it finds there. The second model must not register in the config of the first one.
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    device = config.load_config.device or config.device_config.device
    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        return initialize_model(config), config


def is_wanted(record):
    """Is this record of vLLM's log wanted? vLLM warns at each update of each vector.

    Vectors are sent in float32, and it is intended that vLLM rounds them to the engine's dtype.
    """
    return "Attempted to load weight %s with dtype %s" not in str(record.msg)


@torch.no_grad()
def make_shadow(worker, layout):
    """The Shadow of a vLLM worker's model, which takes the model's memory once more.

    Raises whatever vLLM raises when it makes a model, or loads one.
    """
    logging.getLogger("vllm.model_executor.models.utils").addFilter(is_wanted)
    live = worker.model_runner.get_model()
    shadow, config = second_model(worker.vllm_config)
    if not layout["whole"]:
        # An update contains only some parameters. vLLM fuses several of them into one matrix, so
        # the parts that are not sent must come from disk.
        with set_current_vllm_config(config):
            get_model_loader(config.load_config).load_weights(shadow, config.model_config)
    device = torch.device(config.load_config.device or config.device_config.device)

    def process(model):
        with set_current_vllm_config(config):
            process_weights_after_loading(model, config.model_config, device)

    return Shadow(live, shadow, process, layout)
