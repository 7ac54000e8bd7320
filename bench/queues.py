"""MB/s of groups of 16k-token samples through one queue, put and get by two processes, and the memory it takes.

    python bench/queues.py [--groups 400] [--path out/bench/queue]

Beside it, in the same run, the same bytes written and read as bare files: what the disk gives.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.queues import Queue  # noqa: E402

ATTEMPTS = 16
TOKENS = 16384


def group(i):
    """A group record as actor.py puts it: 16 attempts of 16k tokens, 3.4 MB."""
    n = ATTEMPTS * TOKENS
    rng = np.random.default_rng(i % 8)
    return dict(
        tokens=rng.integers(0, 150000, n, dtype=np.int32),
        mask=np.arange(n) % TOKENS > 500,
        logprobs=-rng.random(n, np.float32),
        versions=np.full(n, i, np.int32),
        lengths=np.full(ATTEMPTS, TOKENS),
        rewards=np.zeros(ATTEMPTS, np.float32),
        finished=np.ones(ATTEMPTS, bool),
        outcomes=["wrong"] * ATTEMPTS,
        task="toy",
        run_id="r",
        index=i,
    )


def peak():
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(path, groups):
    """The reader's process: get and acknowledge; prints its memory after a tenth and at the end."""
    queue = Queue(path)
    early = 0.0
    for i in range(groups):
        seq, record = queue.get(60)
        assert record["index"] == i and record["versions"][-1] == i
        queue.ack(seq)
        if i == groups // 10:
            early = peak()
    print(early, peak())


def bare_files(path, content, count):
    """MB/s of writing, reading and deleting `content`, count times."""
    start = time.perf_counter()
    for _ in range(count):
        path.write_bytes(content)
        path.read_bytes()
        path.unlink()
    seconds = time.perf_counter() - start
    return len(content) * count / 1e6 / seconds


def through_queue(path, records, size, groups):
    """MB/s of `groups` records, and the memory of writer and reader after a tenth and at the end, MB."""
    queue = Queue(path, maxlen=32)
    told = ["--path", str(path), "--groups", str(groups)]
    command = [sys.executable, __file__, "--read", *told]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    start = time.perf_counter()
    early = 0.0
    for i in range(groups):
        versions = np.full(ATTEMPTS * TOKENS, i, np.int32)
        queue.put(records[i % 8] | dict(index=i, versions=versions))
        if i == groups // 10:
            early = peak()
    printed = reader.communicate(timeout=600)[0].split()
    seconds = time.perf_counter() - start
    assert len(queue) == 0
    return size * groups / seconds, (early, peak()), [float(x) for x in printed]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--groups", type=int, default=400)
    p.add_argument("--path", default="out/bench/queue")
    p.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.read:
        read(a.path, a.groups)
        return
    path = Path(a.path)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    records = [group(i) for i in range(8)]
    values = records[0].values()
    content = b"".join(v.tobytes() for v in values if isinstance(v, np.ndarray))
    size = len(content) / 1e6
    disk = bare_files(path / "bare", content, a.groups // 4)
    rate, writer, reader = through_queue(path / "queue", records, size, a.groups)
    print(f"{a.groups} groups of {ATTEMPTS} x {TOKENS} tokens, {size:.1f} MB each")
    print(f"put + get + ack, two processes   {rate:>8.0f} MB/s")
    print(f"bare files, one process          {disk:>8.0f} MB/s")
    print(f"writer's memory, after 10% / end {writer[0]:>8.0f} / {writer[1]:.0f} MB")
    print(f"reader's memory, after 10% / end {reader[0]:>8.0f} / {reader[1]:.0f} MB")
    shutil.rmtree(path)


if __name__ == "__main__":
    main()
