"""A queue between two stages is a directory of numbered record files.

A record is a flat dict. It is written to one .safetensors file: its numpy arrays as they are, and
everything else (numbers, strings, lists, dicts) as one more array, which holds JSON. So nothing
that is read from a queue can execute code. A file is written under a temporary name and then
renamed, so that a reader sees all of it or nothing. Records that were not acknowledged are seen
again by the next reader. Small values are published beside the queues, as JSON files.

A shared file system need promise no more than NFS does: a reader that does not see a file lists the
directory before it believes that the file is absent. Deliberately absent: a server, several writers
or readers.
"""

import errno
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

# seconds between two looks for the next record; on NFS a look costs a few round trips
POLL = 0.005


class Queue:
    """A directory used as an ordered, persistent queue of records: one writer, one reader.

    path: the directory, which is made if absent. The queue itself has no limit: the gate of
    actor.py bounds its number of records, and preprocess.py is at most one step ahead of the
    trainer.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.next_put = max(self._numbers(), default=-1) + 1
        self.next_get = 0
        # put may be called from several threads
        self.lock = threading.Lock()

    def __len__(self) -> int:
        """The number of records on disk that were not acknowledged."""
        return len(self._numbers())

    def file(self, number: int) -> Path:
        """The file of the record with this number."""
        return self.path / f"{number:010d}.safetensors"

    def put(self, record: dict) -> int:
        """Append a record; returns its number. Raises OSError if the disk is full or gone."""
        with self.lock:
            number = self.next_put
            _write_record(record, self.file(number))
            self.next_put = number + 1
        return number

    def get(self, timeout: float = 0.0) -> tuple[int, dict]:
        """(number of the next record, the record). timeout: seconds to wait; 0: look once.

        Raises TimeoutError, or RuntimeError that names a file which is no record.
        """
        deadline = time.monotonic() + timeout
        number = self._next()
        while number is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"queue {self.path}: nothing for {timeout:.0f} s")
            time.sleep(POLL)
            number = self._next()
        record = read_record(self.file(number))
        self.next_get = number + 1
        return number, record

    def ack(self, number: int, keep: int = 0) -> None:
        """Acknowledge the record with this number: nobody needs it in the queue any more.

        It is deleted. With `keep` it is moved into the folder kept/ instead, in which only the
        newest `keep` records stay.
        """
        if not keep:
            self.file(number).unlink(missing_ok=True)
            return
        kept = self.path / "kept"
        kept.mkdir(exist_ok=True)
        self.file(number).replace(kept / self.file(number).name)
        (kept / self.file(number - keep).name).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self.path.glob("*.safetensors"))

    def _next(self) -> int | None:
        """The number of the next unread record; None if there is none yet."""
        if self.file(self.next_get).exists():
            return self.next_get
        later = [number for number in self._numbers() if number >= self.next_get]
        # A number is missing if an earlier reader acknowledged it, or if its record appeared only
        # while the directory was listed.
        if later and self.file(self.next_get).exists():
            return self.next_get
        return later[0] if later else None


def _write_record(record: dict, file: Path) -> None:
    arrays = {}
    rest = {}
    for name, value in record.items():
        if isinstance(value, np.ndarray):
            # safetensors copies the memory of an array as it lies
            arrays[name] = np.asarray(value, order="C")
        else:
            rest[name] = value
    arrays["json"] = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    temporary = file.with_suffix(".tmp")
    try:
        save_file(arrays, temporary)
        os.rename(temporary, file)
    # a SafetensorError only passes on the system's error
    except (SafetensorError, OSError) as e:
        raise OSError(
            f"{file} cannot be written ({e}): free disk space, or mount the file system again; the "
            "same command continues the run"
        ) from None


def read_record(file: Path) -> dict:
    """The record in a file; its arrays can be written to.

    Raises RuntimeError that names the file if it holds no record.
    """
    try:
        record = load(file.read_bytes())
        return record | json.loads(record.pop("json").tobytes())
    # safetensors raises KeyError for a data type that numpy lacks
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as e:
        raise RuntimeError(
            f"{file} cannot be read ({type(e).__name__}: {e}); the same command continues the run"
        ) from None


def publish_json(path, **values) -> None:
    """Publish a few values for other processes, as a JSON file that is replaced atomically."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, path)


def read_json(path) -> dict:
    """The values that were last published at `path`; {} if there are none.

    It is also {} for a moment on NFS, while another node replaces the file (ESTALE).
    """
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return {}
