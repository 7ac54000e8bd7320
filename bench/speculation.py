"""Speculative decoding by n-grams: are its logprobs exact, and is it faster?

    python bench/speculation.py [--quick]

Two engines with SmolLM2 in float32 on one core each, with and without `--engine_flags` that guess
tokens. vLLM's build for CPUs is mended by tests/mended_speculation.py. Both get the same prompts:
sums, whose answers are short and new, and texts that are to be repeated, whose answers are known
from the prompt. They are measured in turn, one idle while the other works.

Columns: number of requests in progress; tokens per second without and with guesses; their ratio,
median and range over rounds; the share of the guessed tokens that are accepted; the mean of
|logprob of transformers - logprob of the engine| a token, without and with guesses. That the
sampled distribution stays the same is tested in tests/test_engine_flags.py.
"""

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "tests")]
import mended_speculation

import config as cfg
from bench.common import ROOT, keep, machine, median_and_range, parser, result_file, table
from bench.engines import (
    Load,
    guessed_and_accepted,
    make_run,
    requests_of,
    statistics,
    url_of,
)
from held_requests import registered
from plumbing import engine_flags as flags
from plumbing.secret import secret_header
from plumbing.supervise import stop
from tools import prepare
from tools.evaluate import start_engines
from train import token_logprobs

MODEL = cfg.SMOL["model"]
FLAGS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
FLAGS |= {"prompt_lookup_min": 2}
CONCURRENCY = (1, 8, 64)
LENGTH = 48
ROUNDS = 3
SECONDS = 5.0
WORDS = "red green blue seven eight nine river stone house garden window paper silver".split()


def prompts_of(kind, tokenizer, count=64):
    """Prompts as token ids."""
    rng = random.Random(0)
    prompts = []
    for _ in range(count):
        if kind == "sums":
            text = f"What is {rng.randrange(100)} + {rng.randrange(100)}?"
        else:
            text = "Repeat this text exactly: " + " ".join(rng.choices(WORDS, k=30))
        message = [dict(role="user", content=text)]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


@contextlib.contextmanager
def engine(name, port, engine_flags):
    """Yield (config, run directory) of a running engine that reports what it accepts."""
    knobs = dict(model=MODEL, dtype="float32", concurrency=max(CONCURRENCY), max_model_len=256)
    knobs |= dict(row_tokens=256, engine_threads=1, enforce_eager=True, port=port)
    flags._refuse_on_cpus = lambda: None
    config, run_dir = make_run(name, **knobs)
    config.engine_flags = engine_flags
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), before])
    try:
        plugin = Path(run_dir, "plugin")
        os.environ |= registered(plugin, mended_speculation.__file__)
        with statistics():
            engines = start_engines(config)
    finally:
        os.environ["PYTHONPATH"] = before
    try:
        yield config, run_dir
    finally:
        stop(engines, 0)


def speed(config, run_dir, prompts, concurrency, seconds):
    """Tokens per second of an engine under load."""
    load = Load(config, run_dir, requests_of(prompts, [LENGTH]), concurrency)
    time.sleep(seconds / 3)
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    load.stop()
    return load.rate(start, end)


def mismatch(config, run_dir, model, prompts):
    """Mean |logprob of transformers - logprob of the engine| of the answers' tokens."""
    differences = []
    for prompt in prompts:
        sampling = dict(max_tokens=LENGTH, temperature=1.0)
        body = dict(token_ids=prompt, sampling_params=sampling)
        url = f"{url_of(config)}/inference/v1/generate"
        answer = requests.post(url, headers=secret_header(run_dir), json=body, timeout=300)
        [choice] = answer.json()["choices"]
        ids = torch.tensor(prompt + choice["token_ids"])
        with torch.no_grad():
            own = token_logprobs(model, ids, torch.arange(len(ids)), 1.0)[0][len(prompt) :]
        differences.append(own - torch.tensor(choice["behavior_logprobs"]))
    return torch.cat(differences).abs().mean().item()


def main(argv=None):
    p = parser(__doc__)
    arguments = p.parse_args(argv)
    concurrencies = CONCURRENCY[:2] if arguments.quick else CONCURRENCY
    rounds, seconds = (1, 3.0) if arguments.quick else (ROUNDS, SECONDS)
    prepare.bring_model(MODEL, cfg.SMOL["task"])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    speculation = f"--speculative-config '{json.dumps(FLAGS)}'"
    rows, results = [], {}
    with engine("plain", 9300, "") as plain, engine("guessing", 9400, speculation) as guessing:
        for kind in ("sums", "repeated texts"):
            prompts = prompts_of(kind, tokenizer)
            checked = prompts[: 4 if arguments.quick else 8]
            errors = [mismatch(*one, model, checked) for one in (plain, guessing)]
            for concurrency in concurrencies:
                before = guessed_and_accepted(guessing[0])
                speeds = [
                    [speed(*one, prompts, concurrency, seconds) for one in (plain, guessing)]
                    for _ in range(rounds)
                ]
                guessed, accepted = guessed_and_accepted(guessing[0]) - before
                share = accepted / max(guessed, 1)
                ratios = [with_guesses / without for without, with_guesses in speeds]
                row = [kind, concurrency, *(f"{x:.0f}" for x in np.median(speeds, axis=0))]
                row += [median_and_range(ratios), f"{share:.0%}", *(f"{x:.1e}" for x in errors)]
                rows.append(row)
                results[f"{kind}, {concurrency}"] = dict(
                    speeds=speeds, guessed=guessed, accepted=accepted, mismatch=errors
                )
                print(row, flush=True)
    print(machine())
    header = ["prompts", "requests", "tokens/s", "with guesses", "ratio", "accepted"]
    table([*header, "mismatch", "with guesses"], rows)
    keep(result_file(arguments, "speculation"), dict(machine=machine(), flags=FLAGS) | results)


if __name__ == "__main__":
    main()
