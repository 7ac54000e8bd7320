"""The filesystem queue: order, acknowledgement, killed writers, damaged files, a full disk, NFS.

Files, processes and kills are real. NFS is FAKE, and a limit on file sizes stands for the full
disk.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from plumbing.queues import Queue, publish_json, read_json


def take(reader, count):
    """The entry `i` of the next records."""
    return [reader.get(1)[1]["i"] for _ in range(count)]


def fill(queue, count):
    """Records with i = 0, 1, ...; returns their numbers."""
    return [queue.put({"i": i}) for i in range(count)]


def assert_empty(reader):
    with pytest.raises(TimeoutError, match=f"{reader.path}: nothing for"):
        reader.get(0.01)


def python(code, folder):
    """Run a program on the queue in this folder, to its end."""
    command = [sys.executable, "-c", code, str(folder / "q")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_record_comes_back_as_it_went_in(tmp_path):
    q = Queue(tmp_path / "q")
    arrays = dict(ids=np.arange(5, dtype=np.int32), mask=np.array([True, False]))
    arrays["empty"] = np.zeros(0, np.float32)
    # a part of another array, of which every second value counts
    arrays["strided"] = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
    others = {"name": "a", "n": 3, "nested": {"x": [1, None]}}
    assert q.put(arrays | others) == 0
    seq, record = q.get()
    assert seq == 0
    assert {k: record[k] for k in others} == others
    for k, v in arrays.items():
        assert record[k].dtype == v.dtype
        assert np.array_equal(record[k], v)
        assert record[k].flags.writeable


def test_order_ack_and_deletion(tmp_path):
    q = Queue(tmp_path / "q")
    assert fill(q, 12) == list(range(12))
    assert len(q) == 12
    for i in range(7):
        seq, record = q.get()
        assert record["i"] == i
        if i != 3:
            q.ack(seq)
    assert len(q) == len(list(tmp_path.glob("q/*.safetensors"))) == 6
    # a restarted reader sees again what was not acknowledged, in order
    assert take(Queue(tmp_path / "q"), 6) == [3, 7, 8, 9, 10, 11]


def test_a_writer_that_starts_again_goes_on_after_the_highest_number(tmp_path):
    first = Queue(tmp_path / "q")
    reader = Queue(tmp_path / "q")
    assert fill(first, 3) == [0, 1, 2]
    for _ in range(2):
        reader.ack(reader.get()[0])
    again = Queue(tmp_path / "q")
    assert again.put({"i": 3}) == 3
    assert again.put({"i": 4}) == 4
    assert take(reader, 3) == [2, 3, 4]
    assert take(Queue(tmp_path / "q"), 3) == [2, 3, 4]


def test_threads_of_the_writer_may_all_put(tmp_path):
    q = Queue(tmp_path / "q")
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(fill, [q, q], [50, 50]))
    assert sorted(sum(numbers, [])) == list(range(100))
    # of each writer in order
    written = {number: i for of_writer in numbers for i, number in enumerate(of_writer)}
    assert take(Queue(tmp_path / "q"), 100) == [written[number] for number in range(100)]


KILLED = """
import os, sys
import numpy as np
from plumbing.queues import Queue
q = Queue(sys.argv[1])
q.put({'i': 0})
os.rename = lambda *a: os.kill(os.getpid(), 9)
q.put({'i': 1, 'x': np.zeros(100000)})
"""


def test_a_writer_killed_in_the_middle_leaves_no_half_record(tmp_path):
    assert python(KILLED, tmp_path).returncode == -9
    assert list(tmp_path.glob("q/*.tmp"))
    again = Queue(tmp_path / "q")
    again.put({"i": 2})
    assert take(again, 2) == [0, 2]
    assert_empty(again)


def test_stale_nfs_directory_loses_no_record(tmp_path, monkeypatch):
    """FAKE NFS client: it remembers that a name was not there until its directory is opened."""
    absent = set()
    exists = Path.exists
    glob = Path.glob

    def remembered(path, **_):
        if path not in absent and not exists(path):
            absent.add(path)
        return path not in absent

    def listed(folder, pattern):
        absent.clear()
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "exists", remembered)
    monkeypatch.setattr(Path, "glob", listed)
    q = Queue(tmp_path / "q")
    reader = Queue(tmp_path / "q")
    for i in range(5):
        assert_empty(reader)
        assert q.put({"i": i}) == i
        seq, record = reader.get(0)
        assert record["i"] == i
        reader.ack(seq)


def test_published_json_is_read_back(tmp_path):
    assert read_json(tmp_path / "v.json") == {}
    publish_json(tmp_path / "v.json", version=3)
    assert read_json(tmp_path / "v.json") == {"version": 3}


FULL = """
import resource, sys
import numpy as np
from plumbing.queues import Queue
q = Queue(sys.argv[1])
q.put(dict(a=np.zeros(10)))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
q.put(dict(a=np.zeros(100000)))
"""


def test_a_full_disk_is_named_and_loses_nothing(tmp_path):
    """A limit on file sizes stands for the disk: the kernel refuses the write in the same way."""
    said = python(FULL, tmp_path).stderr.splitlines()[-1]
    assert f"{tmp_path}/q/0000000001.safetensors cannot be written (" in said
    assert "File too large" in said
    queue = Queue(tmp_path / "q")
    assert len(queue) == 1
    assert queue.get(0)[1]["a"].shape == (10,)
    assert_empty(queue)


def test_a_file_that_is_no_record_is_named(tmp_path):
    queue = Queue(tmp_path / "q")
    queue.put({"i": 0})
    queue.file(0).write_bytes(b"no record")
    with pytest.raises(RuntimeError, match="0000000000.safetensors cannot be read .*continues"):
        queue.get(0)
