"""What actor.py costs: its tokens/s against a bare client's, same vLLM server, same concurrency, in turn.

    python bench/generation.py [--rounds 3] [--seconds 15] [--concurrency 256]

The bare client keeps `concurrency` requests in progress and reads only the number of tokens of each
answer. The actor is the real process, with rewards, groups and queue. Also usable to see what an engine
flag brings: --engine_args "--x y".
"""

import shlex
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.actor import intake
from bench.common import in_turn, keep, machine, parser, ratio_table, result_file
from bench.engines import Load, bodies, make_run
from plumbing import secret
from plumbing.launch import urls
from tasks import toy
from tools.evaluate import start_engines, stop_engines

# seconds until the engine is as full as it will be
WARM = 5.0


def bare(config, seconds):
    """Tokens/s of a client that does nothing but keep the server busy."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    prompts = [tokenizer(p["prompt"])["input_ids"] for p in toy.problems("train", 0)]
    stop = [tokenizer.eos_token_id]
    requests = bodies(prompts, [config.max_new_tokens], stop_token_ids=stop)
    headers = secret.header(Path(config.out, config.run))
    load = Load(urls(config, 0)[0], headers, requests, config.concurrency)
    time.sleep(WARM)
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    load.stop()
    return load.rate(start, end)


def through_actor(config, run_dir, seconds):
    """Tokens/s that arrive in queues/rollouts."""
    found = intake(config, run_dir, seconds)
    return found["tokens"] / found["seconds"]


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=15.0)
    p.add_argument("--concurrency", type=int, default=256)
    p.add_argument("--port", type=int, default=8620)
    p.add_argument("--engine_args", default="")
    a = p.parse_args(argv)
    if a.quick:
        a.rounds = 1
        a.seconds = 5.0
    config, run_dir = make_run(
        "generation",
        port=a.port,
        concurrency=a.concurrency,
        steps=10**7,
        max_lag=10**7,
        eval_problems=1,
        eval_every=0,
    )
    engines = start_engines(config, extra=shlex.split(a.engine_args))
    contenders = {
        "bare": lambda _: bare(config, a.seconds),
        "actor": lambda _: through_actor(config, run_dir, a.seconds),
    }
    try:
        results = in_turn(contenders, a.rounds)
    finally:
        stop_engines(engines)
    print(f"{machine()}; {a.concurrency} sequences in progress, toy model")
    header = ["round", "bare tok/s", "actor tok/s"]
    ratio_table(header, results["bare"], results["actor"])
    keep(result_file(a, "generation"), dict(machine=machine(), tokens_s=results))


if __name__ == "__main__":
    main()
