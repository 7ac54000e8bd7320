"""LoRA: an engine that has the adapter, against an engine that has the merged weights.

    python bench/adapters.py out/RUN/checkpoints/step_000040 [--rounds 5]

The checkpoint is one of a run with --lora_rank, in bfloat16. One engine has the base model and the
adapter; the other one has the merged weights, as the engines of this project do. They decode in
turn. The mismatch, in nats a token of what was sampled at temperature 1, is that of the engine
against a forward pass of the trainer, which either adds the adapter's output to a layer's output
(as peft does), or merges the adapter into the weights and rounds them (plumbing/lora.py).
"""

import functools
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
from torch.nn.functional import linear

import config as cfg
import train
from bench.common import in_turn, keep, machine, median_and_range, parser, result_file, table
from plumbing import checkpoints, lora

SEQUENCES = 64
PROMPT_TOKENS = 8
SAMPLED_TOKENS = 48
# What the line of an answer begins with; vLLM writes other lines to stdout, too
ANSWER = "ANSWER"


def serve(checkpoint, base, rank):
    """The process of an engine; with rank 0 it has merged weights, else the base and the adapter.

    Each line of stdin is a JSON list of prompts (token ids) and a number of tokens; the answer is
    [seconds, sampled tokens, their logprobs]. vLLM 0.32's CPU build cannot score prompts with an
    adapter, so that only what is sampled has logprobs.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter_options = {}
    request = None
    if rank:
        adapter_options = dict(enable_lora=True, max_lora_rank=max(rank, 8))
        request = LoRARequest("a", 1, f"{checkpoint}/adapter")
    llm = LLM(
        base if rank else checkpoint,
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=4 * 10**8,
        enforce_eager=True,
        **adapter_options,
    )
    for line in sys.stdin:
        prompts, max_tokens = json.loads(line)
        inputs = [dict(prompt_token_ids=ids) for ids in prompts]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, logprobs=0)
        start = time.monotonic()
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=request)
        seconds = time.monotonic() - start
        tokens = []
        logprobs = []
        for output in outputs:
            completion = output.outputs[0]
            tokens.append(list(completion.token_ids))
            pairs = zip(completion.token_ids, completion.logprobs)
            logprobs.append([by_token[token].logprob for token, by_token in pairs])
        print(ANSWER, json.dumps([seconds, tokens, logprobs]), flush=True)


class Engine:
    """Another process that runs `serve`."""

    def __init__(self, checkpoint, base, rank):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(checkpoint), str(base), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # The first request waits until the engine is there, and warms it up
        self.generate([[1, 2]], 2)

    def generate(self, prompts, max_tokens):
        """(seconds, tokens [N][T], logprobs [N][T]) of N completions."""
        self.process.stdin.write(json.dumps([prompts, max_tokens]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        code = self.process.wait()
        raise RuntimeError(f"bench/adapters.py: an engine ended with exit code {code}, see above")

    def stop(self):
        self.process.kill()
        self.process.wait()


def load_policy(checkpoint, config, forward):
    """The trainer's model with the checkpoint's adapter, whose layers have this forward pass."""
    model = train.load_model(config, torch.bfloat16)
    lora.add(model, config)
    tensors = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    for name, layer in lora.adapted_layers(model).items():
        for attribute in ("lora_A", "lora_B"):
            value = tensors[f"base_model.model.{name}.{attribute}.weight"].bfloat16()
            setattr(layer, attribute, torch.nn.Parameter(value))
        layer.forward = MethodType(forward, layer)
    return train.Policy(model, config)


@torch.no_grad()
def trainer_logprobs(checkpoint, config, sequences, forward):
    """Logprobs [sequences, N - 1] of sequences of N tokens by the trainer's model."""
    policy = load_policy(checkpoint, config, forward)
    rows = []
    for ids in sequences:
        logprobs, _ = policy.logprobs(np.array(ids), np.arange(len(ids)), 1.0)
        rows.append(logprobs[1:].numpy())
    return np.array(rows)


def added(layer, x):
    """W x + scale B A x, where each of the two is rounded."""
    adapter_output = linear(linear(x, layer.lora_A), layer.lora_B) * layer.scale
    return linear(x, layer.weight, layer.bias) + adapter_output


FORWARD = {"merged": lora.Adapted.forward, "adapter": added}


def mismatch(engine, prompts, checkpoint, config):
    """{forward pass of the trainer: mean |engine logprob - trainer logprob|}."""
    _, tokens, logprobs = engine.generate(prompts, SAMPLED_TOKENS)
    sequences = [prompt + sampled for prompt, sampled in zip(prompts, tokens)]
    mismatches = {}
    for name, forward in FORWARD.items():
        trained = trainer_logprobs(checkpoint, config, sequences, forward)[:, PROMPT_TOKENS - 1 :]
        mismatches[name] = float(np.abs(trained - np.array(logprobs)).mean())
    return mismatches


def measure(checkpoint, config, rounds):
    """{engine: dict(seconds and ratio of every round, mismatch)}."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 20000, (SEQUENCES, PROMPT_TOKENS)).tolist()
    engines = {}
    try:
        engines["merged"] = Engine(checkpoint, config.model, 0)
        engines["adapter"] = Engine(checkpoint, config.model, config.lora_rank)

        def seconds_of(name, _):
            return engines[name].generate(prompts, SAMPLED_TOKENS)[0]

        contenders = {name: functools.partial(seconds_of, name) for name in engines}
        seconds = in_turn(contenders, rounds)
        results = {}
        for name, engine in engines.items():
            results[name] = dict(
                seconds=seconds[name],
                ratio=[a / b for a, b in zip(seconds[name], seconds["merged"])],
                mismatch=mismatch(engine, prompts, checkpoint, config),
            )
        return results
    finally:
        for engine in engines.values():
            engine.stop()


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args(argv)
    config = cfg.load(a.checkpoint.parent.parent)
    if not config.lora_rank:
        p.error(f"{a.checkpoint}: its run had no adapters; give one of a run with --lora_rank")
    results = measure(a.checkpoint, config, 1 if a.quick else a.rounds)
    rows = []
    for name, result in results.items():
        nats = [f"{value:.4f}" for value in result["mismatch"].values()]
        rows.append([name, median_and_range(result["ratio"]), *nats])
    table(["engine", "time to decode", "trainer merges", "trainer adds"], rows)
    version = checkpoints.state_of(a.checkpoint)["version"]
    raw = dict(machine=machine(), rank=config.lora_rank, version=version)
    keep(result_file(a, "adapters"), raw | results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
