"""Which speed-up could a perfect pipeline reach on two CPU cores, over perfect conventional RL? Appendix A with this machine's own figures.

    python bench/limit.py [--quick] [--plot] [--port 8960]

On the task and with the knobs of bench/compare.py, measured here, one after the other:

    r(h)     tokens/s of one vLLM engine of one thread that always has h sequences
    request  what a request costs the engine beside its tokens: s of a short answer - tokens / r(64)
    train    s a sample of train.py's step, on one core, while the engine rests
    busy     CPU s a sample of all processes of a pipeline run: both cores at work cost each other time

Seconds a sample, without waits and weight updates:

    pipeline  busy / 2: both cores are always busy
    one core  conventional RL as in bench/compare.py: one engine starts all S = 64 G samples at once, so that h
              falls as the short ones end; then one rank trains them: sum over tokens l of (h(l) / r(h(l))) / S
              + request + train
    both      two engines with S / 2 samples each, then two ranks, and both cores are always busy: the pipeline's
              CPU, but for what the engines take at their h instead of at 64
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
from tools import report
from tools.evaluate import start_engines, stop
from tools.simulate import conventional as throughput

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GENERATIONS = (1, 2, 4, 8, 16, 32)
# tokens of each answer, while rates are measured; and of short ones
LENGTH = 200
SHORT = 20
WARM = 4.0


def rates(seconds, port):
    """({sequences in progress: tokens/s}, seconds of a request beside its tokens)."""
    knobs = dict(task="tail", model=COMMON["model"], max_new_tokens=410, max_model_len=416)
    config, run_dir = make_run(
        "limit", port=port, engine_threads=1, concurrency=max(SEQUENCES), **knobs
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    problems = tail.problems("train", 0)[:512]
    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    engines = start_engines(config)
    found = []
    try:
        for h, length in [*((h, LENGTH) for h in SEQUENCES), (64, SHORT)]:
            load = Load(config, run_dir, requests_of(prompts, [length], ignore_eos=True), h)
            time.sleep(WARM)
            start = time.monotonic()
            time.sleep(seconds)
            end = time.monotonic()
            load.stop()
            found.append(load.rate(start, end))
    finally:
        stop(engines, 0)
    by_h = dict(zip(SEQUENCES, found))
    return by_h, max(SHORT / found[-1] - SHORT / by_h[64], 0.0)


def training(steps, port):
    """Seconds a sample of the trainer's step, in a conventional run, whose engine rests meanwhile."""
    knobs = COMMON | conventional(8) | dict(steps=steps, save_every=0, seed=0)
    run_dir = runs.run_to_its_end("limit-conventional", knobs, port)
    found, _ = report.read(run_dir)
    # medians, as some steps meet an evaluation
    own = [x["step_s"] - x["wait_data_s"] - x["wait_sync_s"] for x in found[cost.FIRST :]]
    return float(np.median(own)) / COMMON["batch_size"]


def lengths():
    """Of right answers of the task, tokens with the end, [N]."""
    tokenizer = AutoTokenizer.from_pretrained(runs.MODEL)
    answers = [problem["answer"] for problem in tail.problems("train", 0)[:2000]]
    return np.array([len(tokenizer(answer)["input_ids"]) + 1 for answer in answers])


def seconds_of(found, drawn):
    """[(G, s a sample of one core, of both, of the pipeline)]; found: as measured, drawn: lengths [N]."""
    h = [0, *map(int, found["r"])]
    speed = [0.0, *found["r"].values()]

    def tokens_s(sequences):
        return np.interp(sequences, h, speed)

    at_64 = drawn.mean() / found["r"]["64"]
    rows = []
    for g in GENERATIONS:
        # one device or two, whose unit of time is a second
        of_one, _, _ = throughput(g, 1, COMMON["batch_size"], drawn, 1.0, tokens_s)
        of_two, _, _ = throughput(g, 2, COMMON["batch_size"], drawn, 1.0, tokens_s)
        one = drawn.mean() / of_one + found["request"] + found["train"]
        both = (found["busy"] - at_64 + 2 * drawn.mean() / of_two) / 2
        rows.append((g, one, both, found["busy"] / 2))
    return rows


def say(found):
    table(["sequences", "tokens/s"], [[h, round(rate)] for h, rate in found["r"].items()])
    names = ("request", "train", "busy")
    table(["ms a sample", *names], [["", *(f"{1000 * found[k]:.2f}" for k in names)]])
    print(f"the pipeline made {found['samples_s']:.0f} samples/s")
    rows = []
    for g, *seconds in seconds_of(found, lengths()):
        one, both, ours = seconds
        rates_s = [f"{1 / x:.0f}" for x in seconds]
        rows.append([f"G = {g}", *rates_s, f"{one / ours:.2f}", f"{both / ours:.2f}"])
    header = ["samples/s", "one core at a time", "both", "pipeline"]
    table([*header, "times one core", "times both"], rows)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=8960)
    a = p.parse_args(argv)
    runs.make_model()

    def measure(*_):
        steps = 2 * cost.FIRST if a.quick else 40
        by_h, request = rates(3.0 if a.quick else 10.0, a.port)
        train = training(steps, a.port + 1)
        knobs = COMMON | PIPELINE | dict(steps=steps, save_every=0, seed=0)
        run = cost.measure("limit-pipeline", knobs, a.port + 2)
        busy = sum(run[part] for part in cost.PARTS)
        # names of JSON are strings
        r = {str(h): rate for h, rate in by_h.items()}
        return dict(r=r, request=request, train=train, busy=busy, samples_s=run["samples_s"])

    wanted = {"limit": dict(COMMON | PIPELINE, quick=a.quick)}
    path = result_file(a, "limit")
    found = measured(path, wanted, None if a.plot else measure, not a.quick)["limit"]
    print(found["machine"])
    say(found)


if __name__ == "__main__":
    main()
