"""The queue between two stages: a directory of numbered record files; values published beside it.

A record is a flat dict: its numpy arrays go into one .safetensors file as they are, the rest
(numbers, strings, lists, dicts) as one more array of JSON; nothing read from a queue can execute
code. A file is written under a temporary name and renamed, so a reader sees all of it or nothing.
What was not acknowledged is seen again by the next reader.

A shared file system need promise no more than NFS: a reader that misses a name lists the directory
before it believes it. Deliberately absent: a server, several writers or readers.
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

# seconds between two looks, each of which costs NFS a few round trips
POLL = 0.005


class Queue:
    """A directory used as an ordered, persistent queue of records: one writer, one reader.

    path: the directory, made if absent. How many records lie there is bounded by the gate (actor.py)
    and by preprocess.py, which keeps at most one step ahead of the trainer.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.next_put = max(self._numbers(), default=-1) + 1
        self.next_get = 0
        # put may be called from several threads
        self.lock = threading.Lock()

    def __len__(self) -> int:
        """Records on disk that were not acknowledged."""
        return len(self._numbers())

    def file(self, number: int) -> Path:
        """Where the record of this number lies."""
        return self.path / f"{number:010d}.safetensors"

    def put(self, record: dict) -> int:
        """Append a record; returns its number. Raises OSError if the disk is full or gone."""
        with self.lock:
            number = self.next_put
            _write_record(record, self.file(number))
            self.next_put = number + 1
        return number

    def get(self, timeout: float = 0.0) -> tuple[int, dict]:
        """The number of the next record, and the record; timeout: seconds to wait, 0 to look once.

        Raises TimeoutError, or RuntimeError naming a file that is no record.
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
        """The record of this number is dealt with: delete it, or move it to the folder kept, where so many stay."""
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
        """Number of the next unread record, None if there is none yet."""
        if self.file(self.next_get).exists():
            return self.next_get
        later = [number for number in self._numbers() if number >= self.next_get]
        # a gap was acknowledged by an earlier reader, unless the record appeared during the listing
        if later and self.file(self.next_get).exists():
            return self.next_get
        return later[0] if later else None


def _write_record(record: dict, file: Path) -> None:
    # safetensors takes the memory of an array as it lies
    arrays = {k: np.asarray(v, order="C") for k, v in record.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in record.items() if k not in arrays}
    arrays["json"] = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    temporary = file.with_suffix(".tmp")
    try:
        save_file(arrays, temporary)
        os.rename(temporary, file)
    # the first of the library's, which says no more than what the system said
    except (SafetensorError, OSError) as e:
        words = "free space, or mount it again; the same command continues"
        raise OSError(f"{file} cannot be written ({e}): {words}") from None


def read_record(file: Path) -> dict:
    """The record in a file; its arrays may be written to. Raises RuntimeError, by name, if it is none."""
    try:
        record = load(file.read_bytes())
        return record | json.loads(record.pop("json").tobytes())
    # a data type that numpy lacks is a KeyError
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as e:
        words = f"{type(e).__name__}: {e}); the same command continues the run"
        raise RuntimeError(f"{file} cannot be read ({words}") from None


def publish_json(path, **values) -> None:
    """Publish a few values for other processes: an atomically replaced JSON file."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, path)


def read_json(path) -> dict:
    """What was last published at `path`; {} if nothing was yet, or another node of NFS just replaces it."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return {}
