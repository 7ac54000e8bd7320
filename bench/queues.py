"""MB/s of groups of 16k-token samples through one queue, put and got by two processes, and the memory it takes; small records a second.

    python bench/queues.py [--groups 400] [--path out/bench/queue]

Beside it, in the same run, the same bytes written and read as bare files: what the disk gives. `--path`
on a shared file system says what that carries.
"""

import multiprocessing
import resource
import shutil
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import WORK, keep, machine, parser, result_file, table
from plumbing.queues import Queue

ATTEMPTS = 16
TOKENS = 16384


def group(i, tokens):
    """A group record as actor.py puts it: 16 attempts of so many tokens."""
    n = ATTEMPTS * tokens
    rng = np.random.default_rng(i)
    return dict(
        lengths=np.full(ATTEMPTS, tokens),
        tokens=rng.integers(0, 150000, n),
        mask=np.arange(n) % tokens > 500,
        behavior_logprobs=-rng.random(n, np.float32),
        versions=np.full(n, i),
        reward=np.zeros(ATTEMPTS, np.float32),
        finished=np.ones(ATTEMPTS, bool),
        run_id="r",
    )


def peak():
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(path, groups, memory):
    """The reader's process: get and acknowledge; puts its memory at first, after a tenth, at the end."""
    queue = Queue(path)
    memory.put(peak())
    for i in range(groups):
        seq, record = queue.get(60)
        assert record["index"] == i
        queue.ack(seq)
        if i == groups // 10:
            memory.put(peak())
    memory.put(peak())


def bare_files(path, content, count):
    """MB/s of writing, reading and deleting `content`, count times."""
    start = time.perf_counter()
    for _ in range(count):
        path.write_bytes(content)
        path.read_bytes()
        path.unlink()
    return len(content) * count / 1e6 / (time.perf_counter() - start)


def through_queue(path, records, groups):
    """(records/s of `groups` of them, memory of writer, of reader: after a tenth and at the end, MB)."""
    queue = Queue(path, maxlen=32)
    spawn = multiprocessing.get_context("spawn")
    memory = spawn.Queue()
    reader = spawn.Process(target=read, args=(path, groups, memory), daemon=True)
    reader.start()
    memory.get(timeout=60)
    writer = []
    start = time.perf_counter()
    for i in range(groups):
        queue.put(records[i % len(records)] | dict(index=i))
        if i == groups // 10:
            writer.append(peak())
    writer.append(peak())
    of_reader = [memory.get(timeout=600), memory.get(timeout=600)]
    return groups / (time.perf_counter() - start), writer, of_reader


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--groups", type=int, default=400)
    p.add_argument("--path", type=Path, default=WORK / "queue")
    a = p.parse_args(argv)
    if a.quick:
        a.groups = 40
    shutil.rmtree(a.path, ignore_errors=True)
    a.path.mkdir(parents=True)
    records = [group(i, TOKENS) for i in range(8)]
    arrays = [v for v in records[0].values() if isinstance(v, np.ndarray)]
    content = b"".join(v.tobytes() for v in arrays)
    size = len(content) / 1e6
    disk = bare_files(a.path / "bare", content, a.groups // 4)
    large_s, writer, reader = through_queue(a.path / "queue", records, a.groups)
    small = [group(i, 1) for i in range(8)]
    small_s, _, _ = through_queue(a.path / "small", small, 10 * a.groups)
    shutil.rmtree(a.path)
    print(f"{machine()}; {a.groups} groups of {ATTEMPTS} x {TOKENS} tokens, {size:.1f} MB each")
    found = {
        "put + get + ack, two processes, MB/s": [size * large_s],
        "small records/s": [small_s],
        "bare files, one process, MB/s": [disk],
        "writer's memory after 10%, at the end, MB": writer,
        "reader's memory after 10%, at the end, MB": reader,
    }
    table(["", ""], [[k, ", ".join(f"{x:.0f}" for x in v)] for k, v in found.items()])
    keep(result_file(a, "queues"), dict(machine=machine(), size_mb=size) | found)


if __name__ == "__main__":
    main()
