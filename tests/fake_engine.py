"""A FAKE vLLM server for tests that start engines often; it is up in seconds.

Real in it: the contract's calls (plumbing/engine.py), the weight group, and sampling from the
Hugging Face model with the weights that arrived; each token is stamped with the version that
sampled it. A request that has a seed gets its random numbers from this seed. Missing: continuous
batching (waiting requests are sampled together, in waves), --recompute_kv and several workers. With
--enable-return-routed-experts it tells which experts transformers chose, as vLLM does on GPUs.
FAKE_KILLER in the environment holds the token ids of a prompt, with spaces between them, or "all":
a request with such a prompt kills the server.
"""

import argparse
import asyncio
import base64
import contextlib
import functools
import itertools
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The name of a file in the folder of fake_vllm; while it is there, nothing is sampled
STANDSTILL = "standstill"
sys.path.insert(0, str(ROOT))


def fake_vllm(folder):
    """Make a package folder/vllm and return the folder.

    With the folder in PYTHONPATH, run.sh starts this file in place of vLLM.
    """
    package = Path(folder, "vllm", "entrypoints", "openai")
    package.mkdir(parents=True)
    for p in (package, package.parent, package.parent.parent):
        (p / "__init__.py").touch()
    (package / "api_server.py").symlink_to(Path(__file__).resolve())
    return folder


@contextlib.contextmanager
def standing_still(folder):
    """Within this context, FAKE engines of this folder sample nothing. Weight updates go on."""
    Path(folder, STANDSTILL).touch()
    yield
    Path(folder, STANDSTILL).unlink()


class Engine:
    """The model, its weight updates, and the thread that samples.

    The thread calls the functions in `orders` between two decode steps.
    """

    def __init__(self, model, slots, seed, tells_experts=False):
        self.model = model
        self.routing = Routing(model.model) if tells_experts else None
        self.slots = slots
        self.random = random.Random(seed)
        self.parameters = dict(model.named_parameters())
        self.version = "0" if os.environ.get("PIPELINE_SERVE_AS_LOADED") == "1" else None
        self.received = {}
        self.groups = 0
        self.waiting = deque()
        self.orders = queue.SimpleQueue()
        # This file is <folder>/vllm/entrypoints/openai/api_server.py, a link
        self.standstill = Path(__file__).parents[3] / STANDSTILL
        threading.Thread(target=self.work, daemon=True).start()

    # ---- weight updates, as plumbing.engine.Receiver does them

    def receive_all(self, group, number):
        """Take part in a weight group until it breaks or another one has begun."""
        timeout = timedelta(seconds=group["timeout"])
        buckets_tensors = group["layout"]["buckets"]
        rank = group["first_rank"]
        try:
            store = transport.open_store(group["host"], group["port"], group["timeout"])
            store.set(f"here/{rank}", "")
            store.wait(["all_here"], timeout)
            wire = transport.join_group("gloo", store, rank, group["world"], group["timeout"])
            for n in itertools.count():
                store.wait([f"update/{n}"], timedelta(days=30))
                received = []
                for tensors in buckets_tensors:
                    bucket = torch.empty(transport.bucket_bytes(tensors), dtype=torch.uint8)
                    wire.broadcast(bucket, 0).wait(timeout)
                    received += transport.named_views(tensors, bucket)
                if number != self.groups:
                    return
                self.received = {store.get(f"update/{n}").decode(): received}
                store.set(f"ready/{n}/{rank}", "")
        except Exception as e:
            print(f"left the weight group: {e}", flush=True)

    def swap(self, version):
        """Load the received weights; called between two decode steps."""
        start = time.perf_counter()
        received = dict(self.received.pop(version))
        if not received.keys() <= self.parameters.keys():
            received = self.as_in_memory(received)
        for name, tensor in received.items():
            self.parameters[name].copy_(tensor)
        self.version = version
        return dict(version=version, pause_s=time.perf_counter() - start)

    def as_in_memory(self, tensors):
        """Tensors as they are on disk, {name: tensor}, under the names that the model has."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
            model = type(self.model).from_pretrained(folder, dtype=torch.float32)
        return dict(model.named_parameters())

    # ---- sampling

    def work(self):
        torch.set_grad_enabled(False)  # It holds for this thread alone
        while True:
            wave = [self.waiting.popleft() for _ in range(min(self.slots, len(self.waiting)))]
            if wave:
                self.sample(wave)
            else:
                self.carry_out_orders()
                time.sleep(0.002)

    def carry_out_orders(self):
        """Call the waiting orders between two decode steps; wait while engines stand still."""
        while self.standstill.exists() or not self.orders.empty():
            try:
                order, done = self.orders.get(timeout=0.05)
            except queue.Empty:
                continue
            try:
                done.set_result(order())
            except Exception as e:
                done.set_exception(e)

    def sample(self, wave):
        """Sample all of these requests, (body, future) each, to their ends.

        A row that has finished is answered at once and leaves the batch.
        """
        prompts = [body["token_ids"] for body, _ in wave]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        temperatures = [body["sampling_params"].get("temperature", 1.0) for body, _ in wave]
        temperatures = torch.tensor(temperatures)[:, None]
        rows = [(body["sampling_params"], future, [], []) for body, future in wave]
        seeds = [body["sampling_params"].get("seed") for body, _ in wave]
        # per row, where its random numbers come from
        sources = [self.random if seed is None else random.Random(seed) for seed in seeds]
        cache = DynamicCache()
        versions = []
        # per row, the experts of its tokens, a list of arrays [tokens, layers * k]
        experts = [[] for _ in wave]
        while rows:
            self.carry_out_orders()
            inputs = dict(input_ids=ids, attention_mask=seen, position_ids=positions)
            inputs |= dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = self.model(**inputs).logits[:, -1]
            if self.routing:
                choices = [choice.own for choice in self.routing.choices.values()]
                chosen = torch.cat(choices, 1).unflatten(0, ids.shape)
                new = seen[:, -ids.shape[1] :] > 0
                for i, _ in enumerate(rows):
                    experts[i].append(chosen[i][new[i]].numpy())
            logprobs = torch.log_softmax(logits.float() / temperatures.clamp(min=1e-6), -1)
            # A token is drawn where the sum of the probabilities passes a number between 0 and 1.
            drawn = torch.tensor([[source.random()] for source in sources], dtype=torch.float64)
            sums = logprobs.double().exp().cumsum(-1)
            tokens = torch.searchsorted(sums, drawn).clamp(max=sums.shape[-1] - 1)
            tokens = torch.where(temperatures == 0, logits.argmax(-1, keepdim=True), tokens)
            versions.append(self.version)
            sampled_logprobs = logprobs.gather(1, tokens)[:, 0].tolist()
            keep = []
            for i, (token, logprob) in enumerate(zip(tokens[:, 0].tolist(), sampled_logprobs)):
                params, future, sampled, behavior_logprobs = rows[i]
                sampled.append(token)
                behavior_logprobs.append(logprob)
                stop = token in params.get("stop_token_ids", [])
                if not stop and len(sampled) < params["max_tokens"]:
                    keep.append(i)
                    continue
                spans = [dict(version=v, start=k, end=k + 1) for k, v in enumerate(versions)]
                answer = dict(token_ids=sampled, behavior_logprobs=behavior_logprobs)
                answer |= dict(finish_reason="stop" if stop else "length", weight_versions=spans)
                if self.routing:
                    values = np.concatenate(experts[i]).astype("<i2")
                    values = values[params.get("routed_experts_prompt_start", 0) :]
                    answer["experts"] = base64.b64encode(values.tobytes()).decode()
                    answer["experts_shape"] = values.shape
                future.set_result(answer)
            ids = tokens[keep]
            positions = positions[keep, -1:] + 1
            seen = torch.cat([seen[keep], torch.ones(len(keep), 1, dtype=seen.dtype)], 1)
            temperatures = temperatures[keep]
            rows = [rows[i] for i in keep]
            sources = [sources[i] for i in keep]
            experts = [experts[i] for i in keep]
            if rows:
                cache.batch_select_indices(torch.tensor(keep))


class Server:
    """The HTTP calls. Answers and refusals are those of vLLM with plumbing.engine.Contract."""

    def __init__(self, engine):
        self.engine = engine
        self.secret = secret.secret_header(os.environ["PIPELINE_RUN_DIR"])[secret.SECRET_HEADER]
        self.handlers = {
            "/init_process_group": self.init_process_group,
            "/request_weight_update": self.request_weight_update,
            "/inference/v1/generate": self.generate,
        }

    async def health(self, request):
        return web.Response()

    async def call(self, request):
        if request.headers.get(secret.SECRET_HEADER) != self.secret:
            return web.json_response({"error": "not this run's secret"}, status=403)
        try:
            return await self.handlers[request.path](await request.json())
        except Exception as e:
            return web.json_response({"error": f"{type(e).__name__}: {e}"}, status=500)

    async def init_process_group(self, body):
        self.engine.groups += 1
        arguments = (body, self.engine.groups)
        threading.Thread(target=self.engine.receive_all, args=arguments, daemon=True).start()
        return web.json_response({})

    async def request_weight_update(self, body):
        if body["recompute_kv"]:
            raise ValueError("a fake engine cannot recompute KV")
        swap = functools.partial(self.engine.swap, str(body["version"]))
        return web.json_response(await self.order(swap))

    async def generate(self, body):
        if self.engine.version is None:
            return web.json_response({"error": "no weights from the trainer yet"}, status=503)
        if os.environ.get("FAKE_KILLER") in ("all", " ".join(map(str, body["token_ids"]))):
            os._exit(1)
        answer = {}
        if "prompt_logprobs" in body["sampling_params"]:
            prefill = functools.partial(prompt_logprobs, self.engine.model, body["token_ids"])
            answer["prompt_logprobs"] = await self.order(prefill)
        done = Future()
        self.engine.waiting.append((body, done))
        return web.json_response(answer | {"choices": [await asyncio.wrap_future(done)]})

    async def order(self, function):
        """Have a function called between two decode steps and return its result."""
        done = Future()
        self.engine.orders.put((function, done))
        return await asyncio.wrap_future(done)


def prompt_logprobs(model, ids):
    """Return the logprob of every token of a prompt but the first."""
    logprobs = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "host", "port", "seed", "max-num-seqs"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    args = parser.parse_known_args()[0]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tells_experts = args.enable_return_routed_experts
    server = Server(Engine(model, int(args.max_num_seqs), int(args.seed), tells_experts))
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post(path, server.call) for path in server.handlers])
    app.add_routes([web.get("/health", server.health)])
    web.run_app(app, host=args.host, port=int(args.port), handle_signals=False, print=None)


if __name__ == "__main__":
    import numpy as np
    import torch
    from aiohttp import web
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, DynamicCache

    from plumbing import secret, transport
    from plumbing.routing import Routing

    print("this is the FAKE engine of tests/fake_engine.py", flush=True)
    main()
