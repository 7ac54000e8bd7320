"""Problems from files and hubs, with errors that name file and line. (Not a task: the name starts with `_`.)"""
import json
from pathlib import Path


def rows(path):
    """(where, row dict) for each row of a .jsonl or .parquet file; where is "file:line". Raises ValueError naming it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet
        try:
            found = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as e:  # pyarrow's own errors are both
            raise ValueError(f"{path}: not a readable Parquet file ({str(e).splitlines()[0]})") from None
        yield from ((f"{path}: row {n}", row) for n, row in enumerate(found, 1))
        return
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path}: the name must end in .jsonl (a JSON object a line) or .parquet")
    with open(path, "rb") as file:
        for n, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{n}: not UTF-8") from None
            except ValueError as e:
                raise ValueError(f"{path}:{n}: not valid JSON ({e})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{n}: a line must be a JSON object, this is {type(row).__name__}")
            yield f"{path}:{n}", row


def hub(name, config, split):
    """(where, row dict) for each row of a data set on the Hugging Face hub, or in its local cache."""
    from datasets import load_dataset
    try:
        found = load_dataset(name, config, split=split)
    except Exception as e:  # the library raises dozens of kinds
        raise ValueError(f"data set {name}{f' ({config})' if config else ''}, split {split}, cannot be loaded ({type(e).__name__}: {str(e).splitlines()[0][:200]}); "
                         "without a connection give a local .jsonl or .parquet file") from None
    yield from ((f"{name}: row {n}", row) for n, row in enumerate(found, 1))


def column(row, *names):
    """The first of these columns that the row has, as text. Raises ValueError that says what it has instead."""
    for name in names:
        if row.get(name) is not None:
            text = str(row[name]).strip()
            if not text:
                raise ValueError(f"column '{name}' is empty")
            return text
    raise ValueError(f"no column '{names[0]}'; it has {', '.join(map(str, row)) or 'none'}")
