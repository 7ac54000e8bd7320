"""Problems from files and hubs, with errors that name file and line. Not a task: the name starts with `_`.

Deliberately absent: caching, streaming, columns of other types than text.
"""

import json
from pathlib import Path


def rows(path):
    """(where, row dict) for each row of a .jsonl or .parquet file; where is "file:line". Raises ValueError naming it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix in (".jsonl", ".json"):
        return _json_lines(path)
    raise ValueError(f"{path}: the name must end in .jsonl (a JSON object a line) or .parquet")


def _parquet(path):
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as e:
        # pyarrow's own errors are both
        reason = str(e).partition("\n")[0]
        raise ValueError(f"{path}: not a readable Parquet file ({reason})") from None
    for n, row in enumerate(found, 1):
        yield f"{path}: row {n}", row


def _json_lines(path):
    with open(path, "rb") as file:
        for n, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{n}"
            yield where, _json_object(line, where)


def _json_object(line, where):
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8") from None
    except ValueError as e:
        raise ValueError(f"{where}: not valid JSON ({e})") from None
    if isinstance(row, dict):
        return row
    kind = type(row).__name__
    raise ValueError(f"{where}: a line must be a JSON object, this is {kind}")


def hub(name, config, split):
    """(where, row dict) for each row of a data set on the Hugging Face hub, or in its local cache. Raises ValueError."""
    from datasets import load_dataset

    try:
        found = load_dataset(name, config, split=split)
    except Exception as e:
        # the library raises dozens of kinds
        which = name
        if config:
            which += f" ({config})"
        kind = type(e).__name__
        first_line = str(e).partition("\n")[0]
        raise ValueError(
            f"data set {which}, split {split}, cannot be loaded ({kind}: {first_line[:200]}); "
            "without a connection give a local .jsonl or .parquet file"
        ) from None
    for n, row in enumerate(found, 1):
        yield f"{name}: row {n}", row


def column(row, *names):
    """The first of these columns that the row has, as text. Raises ValueError that says what it has instead."""
    for name in names:
        if row.get(name) is None:
            continue
        text = str(row[name]).strip()
        if not text:
            raise ValueError(f"column '{name}' is empty")
        return text
    has = ", ".join(map(str, row)) or "none"
    raise ValueError(f"no column '{names[0]}'; it has {has}")
