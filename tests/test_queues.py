"""The filesystem queue: order, acknowledgement, interrupted and several writers, garbage."""
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from queues import Queue, notice, noticed


def test_a_record_comes_back_as_it_went_in(tmp_path):
    q = Queue(tmp_path / "q")
    arrays = {"ids": np.arange(5, dtype=np.int32), "mask": np.array([True, False]), "empty": np.zeros(0, np.float32)}
    assert q.put(arrays | {"name": "a", "n": 3, "nested": {"x": [1, None]}}) == 0
    seq, record = q.get()
    assert seq == 0 and record["name"] == "a" and record["n"] == 3 and record["nested"] == {"x": [1, None]}
    for k, v in arrays.items():
        assert record[k].dtype == v.dtype and np.array_equal(record[k], v)


def test_order_ack_and_deletion(tmp_path):
    q = Queue(tmp_path / "q")
    assert [q.put({"i": i}) for i in range(12)] == list(range(12))
    assert len(q) == 12
    for i in range(7):
        seq, record = q.get()
        assert record["i"] == i
        if i != 3:
            q.ack(seq)
    assert len(q) == 6 and len(list((tmp_path / "q").rglob("*.npz"))) == 6
    later = Queue(tmp_path / "q")  # a restarted reader sees again what was not acknowledged, in order
    assert [later.get()[1]["i"] for _ in range(6)] == [3, 7, 8, 9, 10, 11]


def test_two_writers_do_not_collide_and_keep_their_own_order(tmp_path):
    def write(name):
        q = Queue(tmp_path / "q")
        for i in range(50):
            q.put({"writer": name, "i": i})
    threads = [threading.Thread(target=write, args=(n,)) for n in "ab"]
    [t.start() for t in threads]
    reader, seen, seqs = Queue(tmp_path / "q"), {"a": [], "b": []}, set()
    for _ in range(100):
        seq, record = reader.get(10)
        seen[record["writer"]].append(record["i"])
        seqs.add(seq)
        reader.ack(seq)
    assert seen == {"a": list(range(50)), "b": list(range(50))} and len(seqs) == 100 and len(reader) == 0


def test_a_writer_killed_in_the_middle_leaves_no_half_record(tmp_path):
    code = ("import sys, os, numpy as np; sys.path.insert(0, '.')\nimport queues\nq = queues.Queue(sys.argv[1])\nq.put({'i': 0})\n"
            "os.rename = lambda *a: os.kill(os.getpid(), 9)\nq.put({'i': 1, 'x': np.zeros(100000)})")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "q")])
    assert done.returncode == -9 and list((tmp_path / "q").rglob("*.tmp"))
    again = Queue(tmp_path / "q")
    again.put({"i": 2})  # the restarted writer
    assert [again.get(1)[1]["i"] for _ in range(2)] == [0, 2]
    with pytest.raises(TimeoutError):
        again.get(0)


def test_garbage_is_named_skipped_and_counted(tmp_path, capsys):
    q = Queue(tmp_path / "q", patience=0.2)
    for i in range(3):
        q.put({"i": i})
    bad = tmp_path / "q" / "0000" / "0000000001.npz"
    bad.write_bytes(bad.read_bytes()[:40])
    assert [q.get(1)[1]["i"] for _ in range(2)] == [0, 2]
    assert q.skipped == 1 and str(bad) in capsys.readouterr().out and bad.with_suffix(".bad").exists()


def test_a_record_that_is_seen_before_it_is_whole_is_waited_for(tmp_path):
    q = Queue(tmp_path / "q")
    q.put({"i": 0, "x": np.arange(1000)})
    file = tmp_path / "q" / "0000" / "0000000000.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    threading.Timer(0.5, file.write_bytes, (whole,)).start()
    assert np.array_equal(q.get(0)[1]["x"], np.arange(1000)) and q.skipped == 0


def test_what_nfs_may_do_loses_nothing(tmp_path, monkeypatch):
    """FAKE NFS client: it remembers that a name was not there until its directory is opened; renames happen, and report that they failed."""
    absent, exists, listdir, rename = set(), Path.exists, os.listdir, os.rename

    def remembered(path, **_):
        if path not in absent and not exists(path):
            absent.add(path)
        return path not in absent

    def opened(folder="."):
        absent.difference_update({p for p in absent if p.parent == Path(folder)})
        return listdir(folder)

    def twice(a, b):
        rename(a, b)
        raise FileNotFoundError(2, "No such file or directory", str(a))
    monkeypatch.setattr(Path, "exists", remembered), monkeypatch.setattr(os, "listdir", opened), monkeypatch.setattr(os, "rename", twice)
    q, reader = Queue(tmp_path / "q"), Queue(tmp_path / "q")
    for i in range(5):
        with pytest.raises(TimeoutError):
            reader.get(0)
        assert q.put({"i": i}) == i
        seq, record = reader.get(0)
        assert record["i"] == i
        reader.ack(seq)
    shutil.rmtree(tmp_path / "q")
    with pytest.raises(OSError, match="cannot be written"):
        q.put({"i": 5})


def test_pickles_are_refused(tmp_path):
    q = Queue(tmp_path / "q", patience=0.2)
    q.put({"i": 0})
    np.savez(open(tmp_path / "q" / "0000" / "0000000000.npz", "wb"), json=np.array([{"evil": print}], dtype=object), allow_pickle=True)
    with pytest.raises(TimeoutError):
        q.get(0)
    assert q.skipped == 1


def test_full_and_empty_waits_end_with_an_error_that_names_the_queue(tmp_path):
    q = Queue(tmp_path / "q", maxlen=1)
    q.put({})
    with pytest.raises(TimeoutError, match=f"{tmp_path / 'q'} has been full"):
        q.put({}, timeout=0.05)
    q.get()
    with pytest.raises(TimeoutError, match=f"{tmp_path / 'q'} gave nothing"):
        q.get(timeout=0.05)


def test_notices(tmp_path):
    assert noticed(tmp_path / "v.json") == {}
    notice(tmp_path / "v.json", version=3)
    assert noticed(tmp_path / "v.json") == {"version": 3}


def test_a_full_disk_is_named_and_loses_nothing(tmp_path):
    """A limit on file sizes stands for the disk: the kernel refuses the write in the same way."""
    code = ("import resource, sys, numpy as np; from queues import Queue\n"
            "q = Queue(sys.argv[1]); q.put(dict(a=np.zeros(10))); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "q.put(dict(a=np.zeros(100000)))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "q")], capture_output=True, text=True, cwd=ROOT)
    assert f"queue {tmp_path}/q: a record cannot be written (File too large)" in done.stderr.splitlines()[-1]
    queue = Queue(tmp_path / "q")
    assert len(queue) == 1 and queue.get(0)[1]["a"].shape == (10,)
    with pytest.raises(TimeoutError):
        queue.get(0)
