"""What prefix caching brings where attempts share a long prompt: one real engine, shared and unshared in turn.

    python bench/prefixes.py [--prompt 1000] [--attempts 16] [--sampled 4] [--rounds 3] [--seconds 10]

A random Qwen2 of 21M parameters; `places` requests are always in progress, the attempts at a prompt one
after the other. Shared: with the salt that the actor gives attempts of one version; alone: without, so
that each computes its own prompt, as with --prefix_caching off. Prompt tokens/s count every attempt's.
"""

import itertools
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import WORK, in_turn, keep, machine, parser, ratio_table, result_file
from bench.engines import Load, make_run
from bench.weights import make_model
from plumbing import secret
from plumbing.launch import urls
from tools.evaluate import start_engines, stop_engines

PLACES = 64
# until the engine has its usual mixture of old and new requests
WARM = 3.0


def bodies(a, salt):
    """Endless requests: `attempts` in a row for every prompt of random ids, none of which comes twice."""
    rng = random.Random(salt)
    params = dict(max_tokens=a.sampled, temperature=1.0, ignore_eos=True)
    while True:
        prompt = [rng.randrange(3, 40) for _ in range(a.prompt)]
        body = dict(token_ids=prompt, sampling_params=params, cache_salt=salt)
        yield from itertools.repeat(body, a.attempts)


def prompt_tokens(config, run_dir, a, salt):
    """Prompt tokens/s."""
    url = urls(config, 0)[0]
    load = Load(url, secret.header(run_dir), bodies(a, salt), PLACES)
    time.sleep(WARM)
    start = time.monotonic()
    time.sleep(a.seconds)
    end = time.monotonic()
    load.stop()
    return load.rate(start, end) / a.sampled * a.prompt


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--prompt", type=int, default=1000, help="tokens")
    p.add_argument("--attempts", type=int, default=16)
    p.add_argument("--sampled", type=int, default=4, help="tokens of each attempt")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--port", type=int, default=8660)
    a = p.parse_args(argv)
    if a.quick:
        a.rounds = 1
        a.seconds = 3.0
    longest = a.prompt + a.sampled + 8
    make_model(WORK / "prefixes-model", tied=True, positions=longest)
    config, run_dir = make_run(
        "prefixes",
        model=WORK / "prefixes-model",
        port=a.port,
        concurrency=PLACES,
        max_new_tokens=a.sampled,
        max_model_len=longest,
        prefix_caching="on",
        engine_threads=1,
    )
    engines = start_engines(config)
    contenders = {
        "alone": lambda _: prompt_tokens(config, run_dir, a, None),
        "shared": lambda i: prompt_tokens(config, run_dir, a, str(i)),
    }
    try:
        results = in_turn(contenders, a.rounds)
    finally:
        stop_engines(engines)
    print(f"{machine()}; prompts of {a.prompt} tokens, {a.attempts} attempts")
    header = ["round", "alone, prompt tok/s", "shared, prompt tok/s"]
    ratio_table(header, results["alone"], results["shared"])
    keep(result_file(a, "prefixes"), dict(machine=machine(), prompt_tokens_s=results))


if __name__ == "__main__":
    main()
