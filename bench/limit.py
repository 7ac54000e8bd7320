"""Which speed-up could a perfect pipeline reach on two CPU cores, over perfect conventional RL? Appendix A with this machine's own figures.

    python bench/limit.py [--quick] [--plot] [--port 8960]

On the task and with the knobs of bench/compare.py, measured here, one after the other:

    r(h)    tokens/s of one vLLM engine of one thread that always has h sequences; its clients have the other core
    core    CPU s a sample of vLLM's scheduler and worker, 64 sequences in progress, while no trainer runs (bench/cost.py)
    request what a request costs the engine beside its tokens: core - tokens / r(64)
    train   s a sample of train.py's step, on one core and on two, while nothing else runs
    busy    CPU s a sample of all processes of a pipeline run: both cores at work cost each other time
    two     what two processes that only compute get done together, in units of one alone

    conventional  all S = 64 G samples are started at once, so that h falls as the short ones end; then they are
                  trained, on one core or two, whichever is faster:
                  s a sample = sum over tokens l of (h(l) / r(h(l))) / S + request + train
    pipeline      both cores are always busy: s a sample = busy / 2

Weight updates, preprocessing and waits are left out of conventional RL's time. `equal cost`: the same with training as
dear as generation. The speed-up is over the best G of 1 to 8, up to which a sample teaches as much as
on-policy (the paper, section 5).
"""

import shutil
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import cost, runs
from bench.common import WORK, measured, result_file, table
from bench.engines import Load, bodies, make_run
from bench.runs import COMMON, PIPELINE, conventional
from plumbing import secret
from plumbing.launch import urls
from plumbing.queues import read_json
from tasks import tail
from tools import report
from tools.evaluate import start_engines, stop_engines
from tools.simulate import conventional as throughput

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GENERATIONS = (1, 2, 4, 8, 16, 32)
# up to here a sample teaches as much
AS_GOOD = 8
# tokens of each sequence, while rates are measured
LENGTH = 200
WARM = 4.0


def rates(seconds, port):
    """{sequences in progress: tokens/s}."""
    knobs = dict(task="tail", model=COMMON["model"], max_new_tokens=410, max_model_len=416)
    config, run_dir = make_run(
        "limit", port=port, engine_threads=1, concurrency=max(SEQUENCES), **knobs
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    problems = tail.problems("train", 0)[:512]
    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    headers = secret.header(run_dir)
    engines = start_engines(config)
    found = {}
    try:
        for h in SEQUENCES:
            requests = bodies(prompts, [LENGTH], ignore_eos=True)
            load = Load(urls(config, 0)[0], headers, requests, h)
            time.sleep(WARM)
            start = time.monotonic()
            time.sleep(seconds)
            end = time.monotonic()
            load.stop()
            found[h] = load.rate(start, end)
    finally:
        stop_engines(engines)
    return found


def training(threads, steps, port):
    """Seconds a sample of the trainer's step, in a conventional run, whose engine rests meanwhile."""
    knobs = COMMON | conventional(8) | dict(trainer_threads=threads, steps=steps, save_every=0)
    run_dir = runs.run_to_its_end(f"limit-{threads}", knobs | dict(seed=0), port)
    found, _ = report.read(run_dir)
    # the first ones also warm up; medians, as some steps meet an evaluation
    own = [line["step_s"] - line["wait_data_s"] - line["wait_sync_s"] for line in found[8:]]
    return float(np.median(own)) / COMMON["batch_size"]


def pipeline(steps, port):
    """{busy, train_busy: CPU s a sample of a pipeline run, of all processes and of the trainer; samples_s}."""
    run_dir = WORK / "runs" / "limit-pipeline"
    # an earlier run's versions are not to be seen
    shutil.rmtree(run_dir, ignore_errors=True)
    seen = []
    ended = threading.Event()

    def look():
        while not ended.wait(0.2):
            version = read_json(run_dir / "queues" / "version.json").get("version", 0)
            seen.append((version, time.monotonic(), busy_so_far(), trainer_so_far()))

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    knobs = COMMON | PIPELINE | dict(steps=steps, save_every=0, seed=0)
    runs.run_to_its_end("limit-pipeline", knobs, port)
    ended.set()
    watch.join()
    # the first ones also warm up
    within = [row for row in seen if 8 <= row[0] < steps]
    versions, seconds, cpu, trainer = (np.ptp(column) for column in zip(*within))
    samples = versions * COMMON["batch_size"]
    return dict(busy=cpu / samples, train_busy=trainer / samples, samples_s=samples / seconds)


def busy_so_far():
    """CPU seconds of this machine that were not idle."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def trainer_so_far():
    """CPU seconds of train.py, 0 if it does not run."""
    for process in psutil.process_iter(["cmdline"]):
        if "train.py" in (process.info["cmdline"] or []):
            return sum(process.cpu_times()[:2])
    return 0.0


def together(seconds):
    """What two processes get done, in units of one alone; the median of three tries."""
    found = []
    for _ in range(3):
        with ProcessPoolExecutor(2) as pool:
            alone = pool.submit(compute, seconds).result()
            both = list(pool.map(compute, [seconds] * 2))
        found.append(sum(both) / alone)
    return float(np.median(found))


def compute(seconds):
    """How many rounds of Python's arithmetic go into so many seconds."""
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        sum(i * i for i in range(20000))
        rounds += 1
    return rounds


def lengths():
    """Of right answers of the task, tokens with the end, [N]."""
    tokenizer = AutoTokenizer.from_pretrained(runs.MODEL)
    answers = [problem["answer"] for problem in tail.problems("train", 0)[:2000]]
    return np.array([len(tokenizer(answer)["input_ids"]) + 1 for answer in answers])


def of_task(found, drawn):
    """{r: {h: tokens/s}, core, train1, train2, busy: s a sample, tokens} -> rows of the table: G, s a sample, speed-up."""
    h = np.array([0, *map(int, found["r"])])
    speed = np.array([0.0, *found["r"].values()])

    def tokens_s(sequences):
        return np.interp(sequences, h, speed)

    ours = found["busy"] / 2
    train = min(found["train1"], found["train2"])
    rows = []
    for g in GENERATIONS:
        # one device, whose unit of time is a second
        r_gen, _, _ = throughput(g, 1, COMMON["batch_size"], drawn, 1.0, tokens_s)
        theirs = drawn.mean() / r_gen + request(found) + train
        rows.append((g, theirs, ours, theirs / ours))
    return rows


def request(found):
    """CPU s of the engine for a request, beside its tokens; its rate was found with many tokens a request."""
    in_progress = str(cost.TAIL["concurrency"])
    return max(found["core"] - found["tokens"] / found["r"][in_progress], 0.0)


def equal_cost(found):
    """The same machine, with a trainer as dear as the engine."""
    more = found["core"] / found["train1"]
    # in a pipeline's run training costs more than alone, like all the rest
    busy = found["busy"] + (more - 1) * found["train_busy"]
    return found | dict(busy=busy, train1=more * found["train1"], train2=more * found["train2"])


def say(found):
    drawn = lengths()
    table(["sequences", "tokens/s"], [[h, f"{rate:.0f}"] for h, rate in found["r"].items()])
    names = ("core", "train1", "train2", "busy")
    table(
        ["ms a sample", *names, "request"],
        [
            [name, *(f"{1000 * costs[k]:.2f}" for k in names), f"{1000 * request(costs):.2f}"]
            for name, costs in cases(found).items()
        ],
    )
    print(
        f"two processes do {found['two']:.2f} of what one does; the pipeline made {found['samples_s']:.0f} samples/s, "
        f"{found['samples_s'] * found['busy'] / 2:.0%} of what its CPU time allows"
    )
    for name, costs in cases(found).items():
        rows = of_task(costs, drawn)
        table(
            [name, "conventional /s", "pipeline /s", "speed-up"],
            [[f"G = {g}", f"{1 / a:.0f}", f"{1 / b:.0f}", f"{x:.2f}"] for g, a, b, x in rows],
        )
        limit = min(x for g, _, _, x in rows if g <= AS_GOOD)
        print(
            f"{name}: at most {limit:.2f} times the best G up to {AS_GOOD}; {rows[0][3]:.2f} times on-policy\n"
        )


def cases(found):
    return {"this task": found, "equal cost": equal_cost(found)}


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=8960)
    a = p.parse_args(argv)
    runs.make_model()
    seconds = 3.0 if a.quick else 10.0

    def measure(*_):
        cpu = cost.measure("tail", a.port, 3 * seconds, dict(model=COMMON["model"]))
        steps = 16 if a.quick else 40
        return dict(
            # names of JSON are strings
            r={str(h): rate for h, rate in rates(seconds, a.port + 1).items()},
            tokens=cpu["tokens"],
            core=cpu["core"] / 1000,
            train1=training(1, steps, a.port + 2),
            train2=training(2, steps, a.port + 3),
            two=together(seconds / 3),
            **pipeline(steps, a.port + 4),
        )

    wanted = {"limit": dict(COMMON | PIPELINE, quick=a.quick)}
    path = result_file(a, "limit")
    found = measured(path, wanted, None if a.plot else measure, not a.quick)["limit"]
    print(found["machine"])
    say(found)


if __name__ == "__main__":
    main()
