"""The queue between two stages: a directory of numbered record files, and notices of a few values beside it.

A record is a flat dict: its numpy arrays go into one .safetensors file as they are, the rest (numbers, strings, lists,
dicts) as one more array of JSON; nothing read from a queue can execute code, and a file takes as much memory as it is
long. A file is written under a temporary name and renamed, so a reader sees all of it or nothing. What was not
acknowledged is seen again by the next reader. What is no record, or none that the reader believes, is set aside as
<name>.bad, named and counted, and the reader goes on.

A shared file system need promise no more than NFS: who opens a directory learns what is in it now, so a reader that
misses a name lists the directory before it believes it. Deliberately absent: a server, several writers or readers.

    python bench/queues.py
"""

import contextlib
import errno
import json
import os
import re
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

# seconds that put and get wait if they are not told
WAIT = 1800.0
# seconds between two looks, each of which costs NFS a few round trips
POLL = 0.005
# a number has one name
NAME = re.compile(r"([0-9]{10}|[1-9][0-9]{10,17})\.safetensors")


class Refused(ValueError):
    """A record that its reader does not believe. reason: a word to count it by."""

    def __init__(self, reason, words):
        super().__init__(f"{reason}: {words}")
        self.reason = reason


class Queue:
    """A directory used as a bounded, ordered, persistent queue of records: one writer, one reader.

    path: the directory, made if absent. maxlen: `put` waits while so many records lie there; 0: unbounded.
    largest: bytes; a longer file is no record. check(record, file): called before `get` returns a
    record, raises Refused for one that is to be set aside. refusals: [(number, reason)] of those.
    """

    def __init__(self, path, maxlen: int = 0, largest: int = 1 << 30, check=None):
        self.path = Path(path)
        self.maxlen = maxlen
        self.largest = largest
        self.check = check or (lambda record, file: None)
        self.refusals = []
        # found at the first put
        self.next_put = None
        self.next_get = 0
        # put may be called from several threads
        self.lock = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def refused(self) -> Counter:
        """How many records were refused, by reason."""
        return Counter(reason for _, reason in self.refusals)

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
        arrays = _pack(record)
        with self.lock:
            if self.next_put is None:
                self.next_put = max(self._numbers(), default=-1) + 1
            number = self.next_put
            try:
                self._write(self._file(number), arrays)
            # the first of the library's, which says no more than what the system said
            except (SafetensorError, OSError) as e:
                raise OSError(
                    f"queue {self.path}: a record cannot be written ({e}): free space, or mount it again; the same command continues"
                ) from None
            self.next_put = number + 1
        return number

    def get(self, timeout: float | None = None) -> tuple[int, dict]:
        """The next record and its number; timeout: seconds to wait, 0 to look once.

        Raises TimeoutError, or what `check` does beside Refused. The number of a record that was
        refused is passed over when there is a later one.
        """
        timeout = WAIT if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while True:
            number = self._next()
            if number is not None:
                file = self._file(number)
                try:
                    record = self._read(file)
                    self.check(record, file)
                    self.next_get = number + 1
                    return number, record
                except Refused as e:
                    self._set_aside(file, e)
                    continue
                except FileNotFoundError:
                    # gone since it was listed
                    pass
            if time.monotonic() >= deadline:
                so_far = f" ({dict(self.refused)} refused)" if self.refused else ""
                raise TimeoutError(
                    f"queue {self.path} gave nothing for {timeout:.0f} s{so_far}: its writer is dead or stuck"
                )
            time.sleep(POLL)

    def ack(self, seq: int, keep: Path | None = None) -> None:
        """The record of this number is dealt with: delete it, or make it this file of the same file system."""
        if keep is None:
            self._file(seq).unlink(missing_ok=True)
            return
        keep.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._file(seq), keep)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:010d}.safetensors"

    def _numbers(self) -> list[int]:
        """Of what may be records; files of other names are not the queue's."""
        names = map(NAME.fullmatch, os.listdir(self.path))
        return sorted(int(name[1]) for name in names if name)

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
        save_file(arrays, temporary)
        try:
            os.rename(temporary, file)
        except FileNotFoundError:
            # NFS may rename, lose the answer, and be asked again
            if file.name not in os.listdir(self.path):
                raise

    def _read(self, file: Path) -> dict:
        """Raises Refused, or FileNotFoundError."""
        try:
            return read_record(file, self.largest)
        except FileNotFoundError:
            raise
        except OSError as e:
            # NFS: it was replaced, or removed, while it was read
            if e.errno == errno.ESTALE:
                raise FileNotFoundError(file) from None
            raise Refused("unreadable", e.strerror) from None
        # a data type that numpy lacks is a KeyError
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
            if isinstance(e, Refused):
                raise
            raise Refused("damaged", f"{type(e).__name__} {e}") from None

    def _set_aside(self, file: Path, refusal: Refused) -> None:
        """Out of the reader's way, for people to look at."""
        self.refusals.append((int(file.stem), refusal.reason))
        words = str(refusal)[:300].encode("unicode_escape").decode()
        print(
            f"queue: {file} is refused ({words}), is now {file.name}.bad; so far {dict(self.refused)}",
            flush=True,
        )
        try:
            os.rename(file, f"{file}.bad")
        except FileNotFoundError:
            pass
        except OSError as e:
            raise OSError(e.errno, f"queue: {file} cannot be set aside ({e.strerror})") from None


def _pack(record: dict) -> dict:
    """A record as arrays alone."""
    # safetensors takes the memory of an array as it lies
    arrays = {k: np.asarray(v, order="C") for k, v in record.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in record.items() if k not in arrays}
    arrays["json"] = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    return arrays


def read_record(file: Path, largest: int = 1 << 30) -> dict:
    """The record in a file. Raises ValueError and others if it is none."""
    return _unpack(_content(file, largest))


def _unpack(content: bytes) -> dict:
    """The record that _pack made; its arrays may be written to. Raises ValueError and others."""
    record = load(content)
    rest = json.loads(record.pop("json").tobytes())
    if not isinstance(rest, dict) or rest.keys() & record.keys():
        raise ValueError("its JSON is no dict of other entries")
    return record | rest


def _content(file: Path, largest: int) -> bytes:
    """What is in a plain file; of anything else nothing is opened that could block, or be far away.

    Raises Refused, OSError.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("no_file", "is a directory, pipe or device")
        if found.st_size > largest:
            raise Refused("too_large", f"{found.st_size} bytes, at most {largest} are expected")
        with open(handle, "rb", closefd=False) as f:
            return f.read(found.st_size)
    finally:
        os.close(handle)


def publish_json(path, **values) -> None:
    """Publish a few values for other processes: an atomically replaced JSON file."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(values))
    os.replace(temporary, path)


def wait_for_json(path, seconds: float, complaint: str) -> dict:
    """What is published at `path`, once something is. TimeoutError(complaint) after so many seconds."""
    deadline = time.monotonic() + seconds
    found = read_json(path)
    while not found:
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.05)
        found = read_json(path)
    return found


def read_json(path) -> dict:
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
