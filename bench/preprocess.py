"""What preprocess.py and a trainer rank's reader can carry: tokens per second of their own CPU time, by number of ranks.

    python bench/preprocess.py [--ranks 8,128,1024,2560] [--tokens 4000] [--millions 60]

The groups lie in queues/rollouts when the real process starts; a FAKE trainer (bench/pace.py) reads all
ranks' micro-batches in one process. A step is a row of 16k tokens for every rank, at least 1,024 samples.
"""

import multiprocessing
import sys
import time
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import cpu_seconds, keep, machine, parser, result_file, table
from bench.engines import make_run, start_stage
from bench.pace import Seen, draw_lengths, fake_trainer
from plumbing.problems import announce_loaded
from plumbing.prompts import Prompter
from plumbing.queues import Queue
from plumbing.samples import join
from tools.scale import step_samples

ROW = 16384
PROMPT = 100
TIMEOUT = 300.0


def group(config, index, lengths):
    """A group as actor.py puts it, of answers of these lengths [G]."""
    samples = []
    for k, length in enumerate(lengths):
        n = PROMPT + length
        mask = np.arange(n) >= PROMPT
        sample = dict(
            tokens=np.arange(n) % 50, mask=mask, behavior_logprobs=np.where(mask, -0.5, 0.0)
        )
        sample |= dict(versions=np.where(mask, 0, -1), num_versions=1)
        sample |= dict(number=index * len(lengths) + k)
        sample |= dict(task=0, temperature=1.0, reward=index % 2, outcome=0, finished=True)
        samples.append(sample)
    record = join(samples) | dict(run_id=config.run_id, index=index, failed=0)
    return record | dict(gen_tok_s=0.0, gen_idle=0.0)


def wait_for_steps(seen, steps, process):
    """Until the FAKE trainer has made so many."""
    deadline = time.monotonic() + TIMEOUT
    while seen.steps < steps:
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"preprocess made {seen.steps} of {steps} steps, see its log")
        time.sleep(0.01)


def measure(ranks, mean, least):
    """{steps of at least so many tokens in all, samples a step, tokens; CPU seconds of preprocess and of all
    readers; seconds}.
    """
    longest = ROW - PROMPT
    batch_size = step_samples(ranks, ROW, mean, 16, 1024)
    steps = int(np.ceil(least / (batch_size * mean)))
    config, run_dir = make_run(
        "preprocess",
        trainers=ranks,
        batch_size=batch_size,
        steps=10**6,
        row_tokens=ROW,
        max_new_tokens=longest,
        max_model_len=ROW + PROMPT,
    )
    queues = run_dir / "queues"
    rollouts = Queue(queues / "rollouts")
    lengths = np.minimum(draw_lengths(mean, 4096), longest)
    # the first step is not counted
    for index in range((steps + 1) * config.groups_per_step):
        of_group = np.take(lengths, np.arange(16 * index, 16 * index + 16), mode="wrap")
        rollouts.put(group(config, index, of_group))
    announce_loaded(queues)
    seen = RawValue(Seen)
    arguments = (config, run_dir, Prompter(config).vocabulary, seen)
    trainer = multiprocessing.Process(target=fake_trainer, args=arguments, daemon=True)
    trainer.start()
    process = start_stage("preprocess", run_dir)
    try:
        wait_for_steps(seen, 1, process)
        start = time.monotonic()
        cpu = [cpu_seconds(process.pid), cpu_seconds(trainer.pid)]
        tokens = seen.trained
        wait_for_steps(seen, steps + 1, process)
        cpu = [cpu_seconds(process.pid) - cpu[0], cpu_seconds(trainer.pid) - cpu[1]]
        tokens = seen.trained - tokens
        seconds = time.monotonic() - start
        found = dict(steps=steps, batch_size=batch_size, tokens=tokens, seconds=seconds)
        return found | dict(cpu_s=cpu[0], readers_cpu_s=cpu[1])
    finally:
        process.kill()
        trainer.kill()
        process.wait()
        trainer.join()


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--ranks", default="8,128,1024,2560")
    p.add_argument("--tokens", type=int, default=4000, help="mean length of an answer")
    p.add_argument(
        "--millions", type=float, default=60.0, help="tokens that are measured, at least"
    )
    a = p.parse_args(argv)
    if a.quick:
        a.ranks = "8"
        a.millions = 8.0
    results = {}
    rows = []
    for ranks in map(int, a.ranks.split(",")):
        r = measure(ranks, a.tokens, 1e6 * a.millions)
        results[ranks] = r
        rates = [f"{r['tokens'] / r[k] / 1e6:.1f}" for k in ("cpu_s", "readers_cpu_s")]
        rows.append([ranks, r["batch_size"], *rates, f"{r['cpu_s'] / r['seconds']:.2f}"])
    print(machine())
    header = ["ranks", "samples a step", "preprocess, M tokens/CPU s", "readers, likewise"]
    table([*header, "preprocess, cores"], rows)
    keep(result_file(a, "preprocess"), dict(machine=machine(), tokens=a.tokens, ranks=results))


if __name__ == "__main__":
    main()
