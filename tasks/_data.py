"""Rows of data files and of sets on the hub, with errors that name file and line. Not a task: the name starts with `_`."""

import json
from pathlib import Path


def rows(path):
    """(where, row dict) for each row of a .jsonl or .parquet file; where is "file:line". Raises ValueError naming it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{path.absolute()}: no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"{path}: the name must end in .jsonl (a JSON object a line) or .parquet")
    if path.suffix != ".parquet":
        for n, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                yield f"{path}:{n}", _object(line, f"{path}:{n}")
        return
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as e:
        first_line = str(e).partition("\n")[0]
        raise ValueError(f"{path}: not a readable Parquet file ({first_line})") from None
    for n, row in enumerate(found, 1):
        yield f"{path}: row {n}", row


def _object(line, where):
    """A line's JSON object; ValueError says where there is none."""
    try:
        row = json.loads(line)
    # UnicodeDecodeError is one
    except ValueError as e:
        raise ValueError(f"{where}: not valid JSON ({e})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a line must be a JSON object, this is {type(row).__name__}")
    return row


def hub(name, config, split):
    """(where, row dict) for each row of a data set on the Hugging Face hub, or in its local cache. Raises ValueError."""
    from datasets import load_dataset

    try:
        found = load_dataset(name, config, split=split)
    # the library raises dozens of kinds
    except Exception as e:
        why = f"{type(e).__name__}: {str(e).partition(chr(10))[0][:200]}"
        words = f"data set {name} ({config}), split {split}, cannot be loaded ({why})"
        raise ValueError(f"{words}; without a connection give a local file") from None
    for n, row in enumerate(found, 1):
        yield f"{name}: row {n}", row


def column(row, *names):
    """The first of these columns that the row has, as text. Raises ValueError that says what it has instead."""
    found = [str(row[name]).strip() for name in names if row.get(name) is not None]
    if not found:
        has = ", ".join(map(str, row)) or "none"
        raise ValueError(f"no column '{names[0]}'; it has {has}")
    if not found[0]:
        raise ValueError(f"column '{names[0]}' is empty")
    return found[0]
