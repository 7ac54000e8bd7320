"""A FAKE vLLM server for tests that start engines many times: it is up in seconds, where vLLM takes half a minute.

The HTTP calls that actor.py and weights.py make, the real weight group (plumbing/transport.py), and real sampling from
the Hugging Face model with the weights that arrived, each token stamped with the version that sampled it: learning is real. What is
not: continuous batching (requests that wait are sampled together, in waves), --recompute_kv, several
workers.

`fake_vllm(folder)` writes a package `vllm` there, whose server is this file: with `folder` in PYTHONPATH, run.sh starts it as its engines.
"""

import argparse
import asyncio
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def fake_vllm(folder):
    """Make folder/vllm, so that `python -m vllm.entrypoints.openai.api_server` with `folder` in PYTHONPATH starts this file. Returns the folder."""
    package = Path(folder, "vllm", "entrypoints", "openai")
    package.mkdir(parents=True)
    for p in (package, package.parent, package.parent.parent):
        (p / "__init__.py").touch()
    (package / "api_server.py").symlink_to(Path(__file__).resolve())
    return folder


class Engine:
    """The model, its weight updates, and the thread that samples. `orders` are functions that it calls between two decode steps."""

    def __init__(self, model, slots, seed):
        self.model, self.slots, self.random = model, slots, torch.Generator().manual_seed(seed)
        self.parameters = dict(model.named_parameters())
        self.version = self.received = None
        self.generation = 0
        self.waiting, self.orders = deque(), queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    # ---- weight updates, as plumbing.engine.Receiver does them

    def join(self, group):
        """Take part in a weight group from now on, in a thread of its own."""
        self.received = None
        self.generation += 1
        threading.Thread(
            target=self.receive_all, args=(group, self.generation), daemon=True
        ).start()

    def receive_all(self, group, generation):
        """Receive update after update until the group breaks."""
        try:
            store = open_store(group["host"], group["port"], group["timeout"])
            rank = group["first_rank"]
            store.set(f"here/{rank}", "")
            store.wait(["all_here"], timedelta(seconds=group["timeout"]))
            wire = join_group(group["backend"], store, rank, group["world"], group["timeout"])
            for n in itertools.count():
                store.wait([f"update/{n}"], timedelta(days=30))
                update = json.loads(store.get(f"update/{n}"))
                received = self.receive(wire, group, update["verify"])
                if generation != self.generation:
                    return
                self.received = (update["version"], received)
                store.set(f"ready/{n}/{rank}", "")
        except Exception as e:
            print(f"left the weight group: {e}", flush=True)

    def receive(self, wire, group, verify):
        """Every bucket of an update -> {name: tensor}, while the model decodes."""
        timeout = timedelta(seconds=group["timeout"])
        dtype = getattr(torch, group["dtype"])
        received = {}
        sums = []
        for first, last, elements in buckets(
            group["shapes"], dtype.itemsize, group["bucket_bytes"]
        ):
            flat = torch.empty(elements, dtype=dtype)
            wire.broadcast(flat, 0).wait(timeout)
            sums.append(checksum(flat))
            shapes = [torch.Size(s) for s in group["shapes"][first:last]]
            parts = flat.split([s.numel() for s in shapes])
            for name, part, shape in zip(group["names"][first:last], parts, shapes):
                received[name] = part.view(shape)
        if verify:
            expected = torch.empty(len(sums), dtype=torch.int64)
            wire.broadcast(expected, 0).wait(timeout)
            if not torch.equal(torch.stack(sums), expected):
                raise ValueError("checksums differ")
        if received.keys() != self.parameters.keys():
            raise ValueError(
                f"the trainer's parameters are not the model's: {sorted(received.keys() ^ self.parameters.keys())}"
            )
        return received

    def swap(self, version):
        """Load what was received; called between two decode steps."""
        start = time.perf_counter()
        if self.received is None or self.received[0] != version:
            raise RuntimeError(f"version {version} is not here")
        for name, tensor in self.received[1].items():
            self.parameters[name].copy_(tensor)
        self.version = version
        self.received = None
        return dict(version=version, pause_s=time.perf_counter() - start)

    # ---- sampling

    def work(self):
        torch.set_grad_enabled(False)  # of this thread
        while True:
            wave = [self.waiting.popleft() for _ in range(min(self.slots, len(self.waiting)))]
            if wave:
                self.sample(wave)
            else:
                self.obey()
                time.sleep(0.002)

    def obey(self):
        while not self.orders.empty():
            order, done = self.orders.get()
            try:
                done.set_result(order())
            except Exception as e:
                done.set_exception(e)

    def sample(self, wave):
        """Sample all of these requests, (body, future) each, to their ends; a request whose row is finished is answered at once, and its row left out."""
        longest = max(len(body["token_ids"]) for body, _ in wave)
        ids = torch.tensor(
            [[0] * (longest - len(body["token_ids"])) + body["token_ids"] for body, _ in wave]
        )
        seen = torch.tensor(
            [
                [0] * (longest - len(body["token_ids"])) + [1] * len(body["token_ids"])
                for body, _ in wave
            ]
        )
        cache, rows, versions = (
            DynamicCache(),
            [(body["sampling_params"], future, [], []) for body, future in wave],
            [],
        )
        places = (seen.cumsum(1) - 1).clamp(min=0)
        temperatures = torch.tensor([body["sampling_params"]["temperature"] for body, _ in wave])[
            :, None
        ]
        while rows:
            self.obey()
            logits = self.model(
                input_ids=ids,
                attention_mask=seen,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            logprobs = torch.log_softmax(logits.float() / temperatures.clamp(min=1e-6), -1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self.random)
            tokens = torch.where(temperatures == 0, logits.argmax(-1, keepdim=True), tokens)
            versions.append(self.version)
            keep = []
            for i, (token, logprob) in enumerate(
                zip(tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist())
            ):
                params, future, sampled, said = rows[i]
                sampled.append(token), said.append(logprob)
                stop = token in params["stop_token_ids"]
                if not stop and len(sampled) < params["max_tokens"]:
                    keep.append(i)
                else:
                    future.set_result(
                        dict(
                            token_ids=sampled,
                            behavior_logprobs=said,
                            finish_reason="stop" if stop else "length",
                            weight_versions=[
                                dict(version=v, start=k, end=k + 1) for k, v in enumerate(versions)
                            ],
                        )
                    )
            ids, places = tokens[keep], places[keep, -1:] + 1
            seen = torch.cat([seen[keep], torch.ones(len(keep), 1, dtype=seen.dtype)], 1)
            temperatures, rows = temperatures[keep], [rows[i] for i in keep]
            if rows:
                cache.batch_select_indices(torch.tensor(keep))


class Server:
    """The HTTP calls. Answers and refusals are those of vLLM with plumbing.engine.Contract."""

    def __init__(self, engine):
        self.engine = engine
        self.random = random.Random(0)
        self.secret = secret.read(os.environ["PIPELINE_RUN_DIR"])

    async def health(self, request):
        return web.Response()

    async def init_process_group(self, request):
        body = await request.json()
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        self.engine.join(body)
        return web.json_response({})

    async def request_weight_update(self, request):
        body = await request.json()
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        if body["recompute_kv"]:
            return web.json_response({"error": "a fake engine cannot recompute KV"}, status=500)
        done = Future()
        self.engine.orders.put((lambda: self.engine.swap(str(body["version"])), done))
        try:
            return web.json_response(await asyncio.wrap_future(done))
        except Exception as e:
            return web.json_response({"error": f"{type(e).__name__}: {e}"}, status=500)

    def refuse(self, request):
        if request.headers.get(secret.HEADER) != self.secret:
            return web.json_response({"error": "not this run's secret"}, status=403)

    async def generate(self, request):
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        body, done = await request.json(), Future()
        if self.engine.version is None:
            return web.json_response({"error": "no weights from the trainer yet"}, status=503)
        self.engine.waiting.append((body, done))
        answer = json.dumps({"choices": [await asyncio.wrap_future(done)]}).encode()
        if False and "GARBLE" in os.environ:
            from bench.hostile import garbled

            answer = garbled(answer, self.random)
        return web.Response(body=answer, content_type="application/json")


def main():
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("model", str),
        ("host", str),
        ("port", int),
        ("seed", int),
        ("max-num-seqs", int),
    ):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_known_args()[0]
    server = Server(
        Engine(
            AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval(),
            args.max_num_seqs,
            args.seed,
        )
    )
    app = web.Application(client_max_size=1 << 28)
    app.add_routes(
        [
            web.get("/health", server.health),
            web.post("/init_process_group", server.init_process_group),
            web.post("/request_weight_update", server.request_weight_update),
            web.post("/inference/v1/generate", server.generate),
        ]
    )
    web.run_app(app, host=args.host, port=args.port, handle_signals=False, print=None)


if __name__ == "__main__":
    import torch
    from aiohttp import web
    from transformers import AutoModelForCausalLM, DynamicCache

    from plumbing import secret
    from plumbing.transport import buckets, checksum, join_group, open_store

    print("this is the FAKE engine of tests/fake_engine.py", flush=True)
    main()
