"""The queue between two stages: a directory of numbered record files, and the two small notice files beside it.

A record is a flat dict. Its numpy arrays go into one .npz file as they are, everything else (numbers, strings, lists,
dicts) into one JSON entry of it; nothing read from a queue can execute code. A record is written under a temporary name
and renamed, so a reader sees all of it or nothing. Each `Queue` object that puts makes a sub-directory of its own (mkdir
is atomic, on NFS too), so any number of writers on any number of nodes share a queue without locks, and a restarted
writer cannot collide with its former self.

What is asked of a shared file system is what NFS promises: mkdir of a name that exists fails; who opens a file after another
node has closed it reads what that one wrote; who opens a directory learns what is in it now. So a reader that misses a
name lists the directory before it believes it. Whether a rename is seen at once, or a rename or mkdir whose answer was lost
and that was sent again reports an error, makes no difference, nor do clocks; a record that does not parse is read again for
10 s before it is given up. Each look costs a few round trips: `poll` may be raised.

One reader per queue. It sees each writer's records in order, the writers in turn. `ack` deletes; a record that was not
acknowledged is seen again by the next reader. A file that does not parse is renamed to .bad, named in the log and counted.
Deliberately absent: a server, a network protocol, several readers.
"""
import errno
import io
import json
import os
import threading
import time
import zipfile
from pathlib import Path

import numpy as np

WRITER = 1 << 40  # seq = writer * WRITER + n: the first writer's records are simply 0, 1, 2, ...


class Queue:
    """A directory used as a bounded, ordered, persistent queue of records.

    path: the directory, made if absent. maxlen: `put` waits while so many records lie unread; 0: unbounded.
    poll: seconds between two looks; patience: for how many a record that does not parse is read again. Attribute `skipped`: unreadable files this reader has set aside.
    """

    def __init__(self, path, maxlen: int = 0, poll: float = 0.005, patience: float = 10.0):
        self.path, self.maxlen, self.poll, self.patience = Path(path), maxlen, poll, patience
        self.path.mkdir(parents=True, exist_ok=True)
        self.writer, self.next_put = None, 0  # claimed at the first put
        self.next_get: dict[int, int] = {}  # writer -> number of its next record
        self.turn, self.skipped = -1, 0
        self.lock = threading.Lock()  # put may be called from several threads

    def __len__(self) -> int:
        """Records on disk that were not acknowledged."""
        return sum(name.endswith(".npz") for w in self._writers() for name in os.listdir(self._dir(w)))

    def put(self, record: dict, timeout: float = 1800.0) -> int:
        """Append a record; returns its sequence number. Raises TimeoutError if the queue stays full, OSError if the disk is."""
        deadline = time.monotonic() + timeout
        while self.maxlen and len(self) >= self.maxlen:
            if time.monotonic() > deadline:
                raise TimeoutError(f"queue {self.path} has been full ({self.maxlen} records) for {timeout:.0f} s: its reader is dead or stuck")
            time.sleep(self.poll)
        arrays = {k: v for k, v in record.items() if isinstance(v, np.ndarray)}
        rest = {k: v for k, v in record.items() if not isinstance(v, np.ndarray)}
        arrays["json"] = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
        with self.lock:
            if self.writer is None:
                self.writer = self._claim()
            final = self._file(self.writer, self.next_put)
            temporary = final.with_suffix(".tmp")
            try:
                with open(temporary, "wb") as f:
                    np.savez(f, **arrays)
                try:
                    os.rename(temporary, final)
                except FileNotFoundError:  # NFS may rename, lose the answer, and be asked again
                    if not final.parent.is_dir():
                        raise
            except OSError as e:
                raise OSError(e.errno, f"queue {self.path}: a record cannot be written ({e.strerror}): free space, or mount it again; the same command continues") from None
            self.next_put += 1
            return self.writer * WRITER + self.next_put - 1

    def get(self, timeout: float | None = None) -> tuple[int, dict]:
        """The next record and its sequence number, without acknowledging it.

        timeout: seconds to wait, 0 to look once; None waits half an hour. Raises TimeoutError naming the queue.
        """
        timeout = 1800.0 if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while True:
            writers = self._writers()
            for w in [w for w in writers if w > self.turn] + [w for w in writers if w <= self.turn]:
                while (n := self._next(w)) is not None:
                    self.next_get[w] = n + 1
                    record = self._read(self._file(w, n))
                    if record is not None:
                        self.turn = w
                        return w * WRITER + n, record
            if time.monotonic() >= deadline:
                raise TimeoutError(f"queue {self.path} gave nothing for {timeout:.0f} s: its writer is dead or stuck")
            time.sleep(self.poll)

    def ack(self, seq: int) -> None:
        """The record is dealt with: delete it."""
        self._file(*divmod(seq, WRITER)).unlink(missing_ok=True)

    def clear(self) -> int:
        """Delete all records, before any process uses the queue; returns how many there were."""
        count = 0
        for w in self._writers():
            for file in self._dir(w).iterdir():
                count += file.suffix == ".npz"
                file.unlink()
        return count

    def _writers(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.path) if name.isdigit())

    def _dir(self, writer: int) -> Path:
        return self.path / f"{writer:04d}"

    def _file(self, writer: int, n: int) -> Path:
        return self._dir(writer) / f"{n:010d}.npz"

    def _claim(self) -> int:
        writer = max(self._writers(), default=-1) + 1
        while True:
            try:
                self._dir(writer).mkdir()
                return writer
            except FileExistsError:
                writer += 1

    def _next(self, writer: int) -> int | None:
        """Number of the writer's next unread record, None if there is none yet."""
        expected = self.next_get.get(writer, 0)
        if self._file(writer, expected).exists():
            return expected
        later = sorted(int(name[:-4]) for name in os.listdir(self._dir(writer)) if name.endswith(".npz"))
        later = [n for n in later if n >= expected]
        # A gap is a record that an earlier reader acknowledged, unless it appeared while the directory was being listed.
        return expected if later and self._file(writer, expected).exists() else next(iter(later), None)

    def _read(self, file: Path) -> dict | None:
        deadline = time.monotonic() + self.patience
        while True:
            try:
                with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as npz:
                    record = {k: npz[k] for k in npz.files}
                return record | json.loads(record.pop("json").tobytes())
            except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as e:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                return self._set_aside(file, e)

    def _set_aside(self, file, error) -> None:
        self.skipped += 1
        print(f"queue: skipped unreadable record {file} ({type(error).__name__}: {error}), kept as .bad, {self.skipped} so far", flush=True)
        os.rename(file, file.with_suffix(".bad"))


def notice(path, **values) -> None:
    """Publish a few values for other processes: an atomically replaced JSON file."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, path)


def noticed(path) -> dict:
    """What was last published at `path`; {} if nothing was yet."""
    path = Path(path)
    while True:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            # NFS may remember for a minute that a file was not there, unless its directory is opened
            if not path.parent.is_dir() or path.name not in os.listdir(path.parent):
                return {}
            time.sleep(0.01)
        except OSError as e:
            if e.errno != errno.ESTALE:  # NFS: it was replaced while it was read
                raise
