"""MB/s of groups of 16k-token samples through one queue, put and get by two processes, and the memory it takes.

    python bench/queues.py [--groups 400] [--path out/bench/queue]

Beside it, in the same run, the same bytes written and read as bare files: what the disk gives.
"""
import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from queues import Queue

ATTEMPTS, TOKENS = 16, 16384


def group(i):
    """A group record as actor.py puts it: 16 attempts of 16k tokens, 3.4 MB."""
    n, rng = ATTEMPTS * TOKENS, np.random.default_rng(i % 8)
    return dict(tokens=rng.integers(0, 150000, n, dtype=np.int32), mask=np.arange(n) % TOKENS > 500, logprobs=-rng.random(n, np.float32), versions=np.full(n, i, np.int32),
                lengths=np.full(ATTEMPTS, TOKENS), rewards=np.zeros(ATTEMPTS, np.float32), finished=np.ones(ATTEMPTS, bool), outcomes=["wrong"] * ATTEMPTS, task="toy", run_id="r", index=i)


def peak():
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(path, groups):
    """The reader's process: get and acknowledge; prints its memory after a tenth and at the end."""
    queue, early = Queue(path), 0.0
    for i in range(groups):
        seq, record = queue.get(60)
        assert record["index"] == i and record["versions"][-1] == i
        queue.ack(seq)
        early = peak() if i == groups // 10 else early
    print(early, peak())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--groups", type=int, default=400)
    p.add_argument("--path", default="out/bench/queue")
    p.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.read:
        return read(a.path, a.groups)
    path, records = Path(a.path), [group(i) for i in range(8)]
    size = sum(v.nbytes for v in records[0].values() if isinstance(v, np.ndarray)) / 1e6
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    bare = np.concatenate([v.view(np.uint8).ravel() for v in records[0].values() if isinstance(v, np.ndarray)]).tobytes()
    start = time.perf_counter()
    for i in range(a.groups // 4):
        (path / "bare").write_bytes(bare)
        (path / "bare").read_bytes()
        os.unlink(path / "bare")
    disk = size * (a.groups // 4) / (time.perf_counter() - start)
    queue = Queue(path / "queue", maxlen=32)
    reader = subprocess.Popen([sys.executable, __file__, "--read", "--path", str(path / "queue"), "--groups", str(a.groups)], stdout=subprocess.PIPE, text=True)
    start, early = time.perf_counter(), 0.0
    for i in range(a.groups):
        queue.put(records[i % 8] | dict(index=i, versions=np.full(ATTEMPTS * TOKENS, i, np.int32)))
        early = peak() if i == a.groups // 10 else early
    told = reader.communicate(timeout=600)[0].split()
    rate = size * a.groups / (time.perf_counter() - start)
    print(f"{a.groups} groups of {ATTEMPTS} x {TOKENS} tokens, {size:.1f} MB each, {len(queue)} left on disk\n"
          f"put + get + ack, two processes   {rate:>8.0f} MB/s\nbare files, one process          {disk:>8.0f} MB/s\n"
          f"writer's memory, after 10% / end {early:>8.0f} / {peak():.0f} MB\nreader's memory, after 10% / end {float(told[0]):>8.0f} / {float(told[1]):.0f} MB")
    shutil.rmtree(path)


if __name__ == "__main__":
    main()
