"""A FAKE vLLM server for tests that start engines many times: it is up in seconds, where vLLM takes half a minute.

The HTTP calls that actor.py and weights.py make, the real weight group (weights.join_group, buckets, checksums), and real sampling from
the Hugging Face model with the weights that arrived, each token stamped with the version that sampled it: learning is real. What is
not: continuous batching (requests that wait are sampled together, in waves), --recompute_kv, --background_receive False, several workers.

`fake_vllm(folder)` writes a package `vllm` there, whose server is this file: with `folder` in PYTHONPATH, run.sh starts it as its engines.
"""
import argparse
import asyncio
import os
import queue
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
        self.version = self.wire = self.armed = self.receiving = self.joining = None
        self.waiting, self.orders = deque(), queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    # ---- weight updates, as engine.BroadcastEngine does them

    def arm(self, version, info):
        """Begin to receive a version, after joining the group if it is a new one."""
        if info["wire"] != self.wire:
            self.wire = w = info["wire"]
            self.joining = in_thread(join_group, w["backend"], w["host"], w["port"], w["first_rank"], w["world"], w["timeout"])
        joining, key = self.joining, f"{info['key']}/{self.wire['first_rank']}"
        self.armed, self.receiving = version, in_thread(self.receive, joining, info)
        self.receiving.add_done_callback(lambda _: joining.result()[1].set(key, ""))

    def receive(self, joining, info):
        """Every bucket of an update -> {name: tensor}, while the model decodes."""
        timeout, dtype = timedelta(seconds=info["wire"]["timeout"]), getattr(torch, info["dtype"])
        group, received, sums = joining.result()[0], {}, []
        for first, last, elements in buckets(info["shapes"], dtype.itemsize, info["bucket_bytes"]):
            flat = torch.empty(elements, dtype=dtype)
            group.broadcast(flat, 0).wait(timeout)
            sums += [checksum(flat)] if info["verify"] else []
            shapes = info["shapes"][first:last]
            received |= {n: part.view(s) for n, part, s in zip(info["names"][first:last], flat.split([torch.Size(s).numel() for s in shapes]), shapes)}
        if info["verify"]:
            expected = torch.empty(len(sums), dtype=torch.int64)
            group.broadcast(expected, 0).wait(timeout)
            if not torch.equal(torch.stack(sums), expected):
                raise ValueError("checksums differ")
        if received.keys() != self.parameters.keys():
            raise ValueError(f"the trainer's parameters are not the model's: {sorted(received.keys() ^ self.parameters.keys())}")
        return received

    def swap(self, version):
        """Load what was received; called between two decode steps."""
        start = time.perf_counter()
        for name, tensor in self.receiving.result(0).items():
            self.parameters[name].copy_(tensor)
        self.version, self.armed, self.receiving = version, None, None
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
        ids = torch.tensor([[0] * (longest - len(body["token_ids"])) + body["token_ids"] for body, _ in wave])
        seen = torch.tensor([[0] * (longest - len(body["token_ids"])) + [1] * len(body["token_ids"]) for body, _ in wave])
        cache, rows, versions = DynamicCache(), [(body["sampling_params"], future, [], []) for body, future in wave], []
        places = (seen.cumsum(1) - 1).clamp(min=0)
        temperatures = torch.tensor([body["sampling_params"]["temperature"] for body, _ in wave])[:, None]
        while rows:
            self.obey()
            logits = self.model(input_ids=ids, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            logprobs = torch.log_softmax(logits.float() / temperatures.clamp(min=1e-6), -1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self.random)
            tokens = torch.where(temperatures == 0, logits.argmax(-1, keepdim=True), tokens)
            versions.append(self.version)
            keep = []
            for i, (token, logprob) in enumerate(zip(tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist())):
                params, future, sampled, said = rows[i]
                sampled.append(token), said.append(logprob)
                stop = token in params["stop_token_ids"]
                if not stop and len(sampled) < params["max_tokens"]:
                    keep.append(i)
                else:
                    future.set_result(dict(token_ids=sampled, logprobs={"content": [{"logprob": x} for x in said]}, finish_reason="stop" if stop else "length",
                                           weight_versions=[dict(version=v, start=k, end=k + 1) for k, v in enumerate(versions)]))
            ids, places = tokens[keep], places[keep, -1:] + 1
            seen = torch.cat([seen[keep], torch.ones(len(keep), 1, dtype=seen.dtype)], 1)
            temperatures, rows = temperatures[keep], [rows[i] for i in keep]
            if rows:
                cache.batch_select_indices(torch.tensor(keep))


class Server:
    """The HTTP calls. Answers and refusals are those of vLLM with engine.Guard."""

    def __init__(self, engine):
        self.engine, self.run_id = engine, os.environ.get("PIPELINE_RUN_ID", "")

    async def health(self, request):
        return web.Response()

    async def world_size(self, request):
        return web.json_response({"world_size": 1})

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.engine.version})

    async def arm(self, request):
        body = await request.json()
        if (refusal := self.refuse(request)) is not None:
            return refusal
        if body["serving"] not in (None, self.engine.version):
            return web.json_response({"error": f"this engine serves version {self.engine.version}, not {body['serving']}"}, status=500)
        self.engine.arm(body["version"], body["update_info"])
        return web.json_response({})

    async def swap(self, request):
        body, done = await request.json(), Future()
        if (refusal := self.refuse(request)) is not None:
            return refusal
        receiving = self.engine.receiving
        if body["clear_cache"] or body["update_info"] or self.engine.armed != body["version"] or not receiving or not receiving.done() or receiving.exception():
            return web.json_response({"error": f"not ready for version {body['version']}, or asked for what a fake engine cannot do"}, status=500)
        self.engine.orders.put((lambda: self.engine.swap(body["version"]), done))
        return web.json_response(await asyncio.wrap_future(done))

    def refuse(self, request):
        if request.headers.get("x-run-id", "") != self.run_id:
            return web.json_response({"error": f"this engine is of run '{self.run_id}'"}, status=403)

    async def generate(self, request):
        body, done = await request.json(), Future()
        if self.engine.version is None:
            return web.json_response({"error": "no weights from the trainer yet"}, status=503)
        self.engine.waiting.append((body, done))
        return web.json_response({"choices": [await asyncio.wrap_future(done)]})


def main():
    parser = argparse.ArgumentParser()
    for name, kind in (("model", str), ("host", str), ("port", int), ("seed", int), ("max-num-seqs", int)):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_known_args()[0]
    server = Server(Engine(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval(), args.max_num_seqs, args.seed))
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.get("/health", server.health), web.get("/get_world_size", server.world_size), web.get("/weight_info", server.weight_info),
                    web.post("/arm", server.arm), web.post("/swap", server.swap), web.post("/inference/v1/generate", server.generate)])
    web.run_app(app, host=args.host, port=args.port, handle_signals=False, print=None)


if __name__ == "__main__":
    import torch
    from aiohttp import web
    from transformers import AutoModelForCausalLM, DynamicCache
    from weights import buckets, checksum, in_thread, join_group
    print("this is the FAKE engine of tests/fake_engine.py", flush=True)
    main()
