"""The queue between two stages: a directory of numbered record files, and notices of a few values beside it.

A record is a flat dict: its numpy arrays go into one .npz file as they are, the rest (numbers, strings, lists, dicts)
as one JSON entry; nothing read from a queue can execute code. A file is written under a temporary name and renamed,
so a reader sees all of it or nothing. What was not acknowledged is seen again by the next reader.

A shared file system need promise no more than NFS: who opens a directory learns what is in it now, so a reader that
misses a name lists the directory before it believes it. Deliberately absent: a server, several writers or readers.

    python bench/queues.py
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

# seconds that put and get wait if they are not told
WAIT = 1800.0
# seconds between two looks, each of which costs NFS a few round trips
POLL = 0.005


class Queue:
    """A directory used as a bounded, ordered, persistent queue of records: one writer, one reader.

    path: the directory, made if absent. maxlen: `put` waits while so many records lie there; 0: unbounded.
    """

    def __init__(self, path, maxlen: int = 0):
        self.path = Path(path)
        self.maxlen = maxlen
        # found at the first put
        self.next_put = None
        self.next_get = 0
        # put may be called from several threads
        self.lock = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """Records on disk that were not acknowledged."""
        return len(self._numbers())

    def put(self, record: dict, timeout: float = WAIT) -> int:
        """Append a record; returns its number. TimeoutError: the queue stays full; OSError: the disk is."""
        deadline = time.monotonic() + timeout
        while self.maxlen and len(self) >= self.maxlen:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"queue {self.path} has been full ({self.maxlen} records) for {timeout:.0f} s: its reader is dead or stuck"
                )
            time.sleep(POLL)
        arrays = {k: v for k, v in record.items() if isinstance(v, np.ndarray)}
        rest = {k: v for k, v in record.items() if k not in arrays}
        arrays["json"] = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
        with self.lock:
            if self.next_put is None:
                self.next_put = max(self._numbers(), default=-1) + 1
            number = self.next_put
            try:
                self._write(self._file(number), arrays)
            except OSError as e:
                words = f"queue {self.path}: a record cannot be written ({e.strerror}): free space, or mount it again; the same command continues"
                raise OSError(e.errno, words) from None
            self.next_put = number + 1
        return number

    def get(self, timeout: float | None = None) -> tuple[int, dict]:
        """The next record and its number; timeout: seconds to wait, 0 to look once.

        Raises TimeoutError, or RuntimeError naming a record that does not parse.
        """
        timeout = WAIT if timeout is None else timeout
        deadline = time.monotonic() + timeout
        number = self._next()
        while number is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"queue {self.path} gave nothing for {timeout:.0f} s: its writer is dead or stuck"
                )
            time.sleep(POLL)
            number = self._next()
        self.next_get = number + 1
        return number, self._read(self._file(number))

    def ack(self, seq: int) -> None:
        """The record of this number is dealt with: delete it."""
        self._file(seq).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:010d}.npz"

    def _numbers(self) -> list[int]:
        return sorted(int(name[:-4]) for name in os.listdir(self.path) if name.endswith(".npz"))

    def _next(self) -> int | None:
        """Number of the next unread record, None if there is none yet."""
        expected = self._file(self.next_get)
        if expected.exists():
            return self.next_get
        later = [number for number in self._numbers() if number >= self.next_get]
        if not later:
            return None
        # A gap was acknowledged by an earlier reader, unless the record appeared during the listing.
        return self.next_get if expected.exists() else later[0]

    def _write(self, file: Path, arrays: dict) -> None:
        temporary = file.with_suffix(".tmp")
        with open(temporary, "wb") as f:
            np.savez(f, **arrays)
        try:
            os.rename(temporary, file)
        except FileNotFoundError:
            # NFS may rename, lose the answer, and be asked again
            if file.name not in os.listdir(self.path):
                raise

    def _read(self, file: Path) -> dict:
        try:
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as npz:
                record = {k: npz[k] for k in npz.files}
            return record | json.loads(record.pop("json").tobytes())
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as e:
            raise RuntimeError(
                f"queue: {file} is no record ({type(e).__name__}: {e}); the same command continues without it"
            ) from e


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
            # NFS: it was replaced while it was read
            if e.errno != errno.ESTALE:
                raise
