"""LoRA: an adapter inside vLLM, against weights that it is merged into, which is what engines have here.

    python bench/adapters.py out/smol/checkpoints/step_000040 [--rounds 5]

The checkpoint is of a run with --lora_rank, in bfloat16. One engine has the base model and the adapter, the other one the
merged weights; they decode in turn. Mismatch, nats a token, of what was sampled at temperature 1: engine against a trainer's
forward pass that adds the adapter to a layer's output (as peft does), or merges it and rounds (plumbing/lora.py).
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import MethodType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from safetensors.torch import load_file

import config as cfg
import train
from bench.common import in_turn, keep, machine, median_and_range, parser, result_file, table
from plumbing import checkpoints, lora

SEQUENCES, PROMPT, SAMPLED = 64, 8, 48
linear = torch.nn.functional.linear


def serve(folder, base, rank):
    """The process of an engine, with the adapter unless rank is 0: token ids of prompts and a number from each line of stdin
    -> (seconds, (tokens sampled, their logprobs)). vLLM 0.32's CPU build cannot score prompts with an adapter.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    how = dict(dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=4 * 10**8, enforce_eager=True)
    if rank:
        how |= dict(enable_lora=True, max_lora_rank=max(rank, 8))
    llm = LLM(base if rank else folder, **how)
    request = LoRARequest("a", 1, f"{folder}/adapter") if rank else None
    for line in sys.stdin:
        prompts, most = json.loads(line)
        begin = time.monotonic()
        given = [dict(prompt_token_ids=ids) for ids in prompts]
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=0, logprobs=0)
        done = llm.generate(given, params, use_tqdm=False, lora_request=request)
        seconds = time.monotonic() - begin
        tokens = [list(x.outputs[0].token_ids) for x in done]
        places = [zip(ids, x.outputs[0].logprobs) for ids, x in zip(tokens, done)]
        found = [tokens, [[x[token].logprob for token, x in of_one] for of_one in places]]
        print("ANSWER", json.dumps([seconds, found]), flush=True)


class Engine:
    """Another process that does `serve`."""

    def __init__(self, *arguments):
        command = [sys.executable, __file__, "--serve", *map(str, arguments)]
        # vLLM writes to stdout, too
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, **pipes)
        self.ask([[1, 2]], 2)

    def ask(self, prompts, most):
        self.process.stdin.write(json.dumps([prompts, most]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                return json.loads(line.removeprefix("ANSWER"))
        raise RuntimeError(f"adapters: an engine ended with {self.process.wait()}")


@torch.no_grad()
def trainers_logprobs(folder, config, sequences, forward):
    """[[N - 1]] of sequences of N tokens, by the trainer's model with this forward pass of its adapted layers."""
    model = train.load_model(config, torch.bfloat16)
    lora.add(model, config)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name, x in lora.of(model).items():
        for which in "AB":
            value = adapter[f"base_model.model.{name}.lora_{which}.weight"]
            setattr(x, f"lora_{which}", torch.nn.Parameter(value.bfloat16()))
        x.forward = MethodType(forward, x)
    how = [(np.array(ids), np.arange(len(ids)), 1.0) for ids in sequences]
    return [train.token_logprobs(model, *x)[0][1:].numpy() for x in how]


def added(layer, x):
    """W x + scale B A x, each rounded."""
    more = linear(linear(x, layer.lora_A), layer.lora_B) * layer.scale
    return linear(x, layer.weight, layer.bias) + more


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args(argv)
    config = cfg.load(a.checkpoint.parent.parent)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 20000, (SEQUENCES, PROMPT)).tolist()
    ranks = {"merged": 0, "adapter": config.lora_rank}
    engines = {name: Engine(a.checkpoint, config.model, rank) for name, rank in ranks.items()}
    decode = {name: lambda _, x=x: x.ask(prompts, SAMPLED)[0] for name, x in engines.items()}
    seconds = in_turn(decode, a.rounds)
    passes = {"merged": lora.Adapted.forward, "adapter": added}
    found = {}
    for name, engine in engines.items():
        tokens, served = engine.ask(prompts, SAMPLED)[1]
        sequences = [p + s for p, s in zip(prompts, tokens)]
        own = {
            by: trainers_logprobs(a.checkpoint, config, sequences, f) for by, f in passes.items()
        }
        nats = {
            by: float(np.abs(np.array(x)[:, PROMPT - 1 :] - served).mean()) for by, x in own.items()
        }
        ratio = [x / y for x, y in zip(seconds[name], seconds["merged"])]
        found[name] = dict(seconds=seconds[name], ratio=ratio, mismatch=nats)
    rows = [
        [n, median_and_range(x["ratio"]), *(f"{y:.4f}" for y in x["mismatch"].values())]
        for n, x in found.items()
    ]
    table(["engine", "time to decode", "trainer merges", "trainer adds"], rows)
    version = checkpoints.state_of(a.checkpoint)["version"]
    keep(
        result_file(a, "adapters"),
        dict(machine=machine(), rank=config.lora_rank, version=version) | found,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main()
