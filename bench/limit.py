"""How much faster could a perfect pipeline be than perfect conventional RL on two CPU cores?

    python bench/limit.py [--quick] [--plot] [--port 8960]

This is the throughput model of tools/simulate.py (Appendix A of arXiv 2509.19128) with this
machine's own figures. On the task and with the knobs of bench/compare.py it measures, in turn:

    r(h)     tokens/s of one vLLM engine of one thread that always has h sequences
    request  seconds that a request costs the engine beside its tokens: the seconds of a short
             answer, less its tokens / r(64)
    train    seconds a sample of train.py's step on one core, while the engine rests
    busy     CPU seconds a sample of all processes of a pipeline run; both cores work, and cost
             each other time

From these it computes the seconds a sample, without waits and weight updates, of

    pipeline  busy / 2: both cores are always busy
    one core  conventional RL as in bench/compare.py: one engine starts all S = 64 G samples at
              once, so that h falls as the short ones end, then one rank trains them:
              sum over tokens l of (h(l) / r(h(l))) / S + request + train
    both      conventional RL with two engines of S / 2 samples each, then two ranks; both cores
              are always busy: the pipeline's CPU time, but for what the engines take at their h
              in place of 64
"""

import sys
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import cost, runs
from bench.common import measured, result_file, table
from bench.engines import Load, make_run, requests_of
from bench.runs import COMMON, PIPELINE, conventional
from tasks import tail
from tools.common import read_metrics
from tools.evaluate import start_engines, stop
from tools.simulate import conventional as throughput

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GENERATIONS = (1, 2, 4, 8, 16, 32)
# Tokens of each answer while rates are measured, and of the short answers
LENGTH = 200
SHORT = 20
# Seconds under load before a rate is measured
WARM_UP = 4.0


def rates(seconds, port):
    """({sequences in progress: tokens/s}, seconds that a request costs beside its tokens)."""
    config, run_dir = make_run(
        "limit",
        port=port,
        engine_threads=1,
        concurrency=max(SEQUENCES),
        task="tail",
        model=COMMON["model"],
        max_new_tokens=COMMON["max_new_tokens"],
        max_model_len=COMMON["max_model_len"],
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    problems = tail.problems("train", 0)[:512]
    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    loads = [(h, LENGTH) for h in SEQUENCES]
    loads.append((64, SHORT))
    engines = start_engines(config)
    measured_rates = []
    try:
        for h, length in loads:
            load = Load(config, run_dir, requests_of(prompts, [length], ignore_eos=True), h)
            time.sleep(WARM_UP)
            start = time.monotonic()
            time.sleep(seconds)
            end = time.monotonic()
            load.stop()
            measured_rates.append(load.rate(start, end))
    finally:
        stop(engines, 0)
    by_sequences = dict(zip(SEQUENCES, measured_rates))
    short_rate = measured_rates[-1]
    request = max(SHORT / short_rate - SHORT / by_sequences[64], 0.0)
    return by_sequences, request


def training(steps, port):
    """Seconds a sample of the trainer's step in a conventional run, where the engine rests."""
    knobs = COMMON | conventional(8) | dict(steps=steps, save_every=0, seed=0)
    run_dir = runs.run_to_its_end("limit-conventional", knobs, port)
    [lines] = read_metrics(run_dir, "step")
    # The median is taken because some steps meet an evaluation
    seconds = [x["step_s"] - x["wait_data_s"] - x["wait_sync_s"] for x in lines[cost.FIRST :]]
    return float(np.median(seconds)) / COMMON["batch_size"]


def answer_lengths():
    """Numbers of tokens of right answers of the task, with their end, [N]."""
    tokenizer = AutoTokenizer.from_pretrained(runs.MODEL)
    answers = [problem["answer"] for problem in tail.problems("train", 0)[:2000]]
    return np.array([len(tokenizer(answer)["input_ids"]) + 1 for answer in answers])


def seconds_of(result, lengths):
    """[(G, seconds a sample on one core, on both cores, of the pipeline)]; lengths: [N]."""
    sequences = [0, *map(int, result["r"])]
    speeds = [0.0, *result["r"].values()]

    def tokens_s(h):
        return np.interp(h, sequences, speeds)

    mean_length = lengths.mean()
    engine_at_64 = mean_length / result["r"]["64"]
    rows = []
    for g in GENERATIONS:
        # One or two devices, whose unit of time is a second
        on_one, _, _ = throughput(g, 1, COMMON["batch_size"], lengths, 1.0, tokens_s)
        on_two, _, _ = throughput(g, 2, COMMON["batch_size"], lengths, 1.0, tokens_s)
        one_core = mean_length / on_one + result["request"] + result["train"]
        both = (result["busy"] - engine_at_64 + 2 * mean_length / on_two) / 2
        rows.append((g, one_core, both, result["busy"] / 2))
    return rows


def print_result(result):
    """Print the rates, and how many times as fast the pipeline is for each G."""
    table(["sequences", "tokens/s"], [[h, round(rate)] for h, rate in result["r"].items()])
    names = ("request", "train", "busy")
    table(["ms a sample", *names], [["", *(f"{1000 * result[k]:.2f}" for k in names)]])
    print(f"the pipeline made {result['samples_s']:.0f} samples/s")
    rows = []
    for g, one_core, both, pipeline in seconds_of(result, answer_lengths()):
        samples_s = [f"{1 / seconds:.0f}" for seconds in (one_core, both, pipeline)]
        speedups = [f"{one_core / pipeline:.2f}", f"{both / pipeline:.2f}"]
        rows.append([f"G = {g}", *samples_s, *speedups])
    header = ["samples/s", "one core at a time", "both", "pipeline"]
    table([*header, "times one core", "times both"], rows)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=8960)
    a = p.parse_args(argv)
    runs.make_model()

    def measure(*_):
        steps = 2 * cost.FIRST if a.quick else 40
        by_sequences, request = rates(3.0 if a.quick else 10.0, a.port)
        train = training(steps, a.port + 1)
        knobs = COMMON | PIPELINE | dict(steps=steps, save_every=0, seed=0)
        run = cost.measure("limit-pipeline", knobs, a.port + 2)
        busy = sum(run[part] for part in cost.PARTS)
        # JSON has strings as keys
        r = {str(h): rate for h, rate in by_sequences.items()}
        return dict(r=r, request=request, train=train, busy=busy, samples_s=run["samples_s"])

    wanted = {"limit": dict(COMMON | PIPELINE, quick=a.quick)}
    path = result_file(a, "limit")
    results = measured(path, wanted, None if a.plot else measure, reuse=not a.quick)
    print(results["limit"]["machine"])
    print_result(results["limit"])


if __name__ == "__main__":
    main()
