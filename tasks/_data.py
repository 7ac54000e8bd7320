"""Reads data sets of problems from files or from the Hugging Face hub.

A data set is named in one of these ways:

    path/to/file.jsonl          or .json or .csv, each of them perhaps with .gz, or .parquet
    path/to/directory           all such files below it
    path/to/directory@test      those of them whose names, or folders' names, begin with "test"
    owner/name:config@split     a data set on the hub; config and split may be left out

`--train_data` and `--eval_data` take several names, with commas between them. If a path exists, it
is used, and else the hub is asked. The first row of a data set decides what its columns mean
(`Columns.of_row`), and this is printed when a run starts. A value of an unexpected type is an error
that names file and line. docs/data.md describes the conventions that are understood. Deliberately
absent: images, tool calls, columns that one names by a flag.

This is not a task: its name starts with `_`.
"""

import csv
import functools
import gzip
import io
import json
import math
import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from plumbing.prompts import beginning, messages_of, prompt_text

# Of these columns, the first one that a data set has is used. `a.b` is the field b of the object in
# column a.
PROMPT_COLUMNS = ("problem", "question", "prompt", "messages", "input", "0.value")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth")
ANSWER_COLUMNS += ("reward_model.ground_truth", "solution", "1.ground_truth.value", "label")
SOURCE_COLUMNS = ("data_source", "dataset", "source")
# stands for the answer's column where a conversation ends with the right answer of the assistant
LAST_MESSAGE = "messages[-1]"
# A column with more different values than this does not hold the name of the set of a row.
MOST_SOURCES = 20
# These columns hold a part of the prompt that its own column lacks. Here and below, their names may
# also have capital letters.
PROMPT_PARTS = set(
    """
    context passage instruction system system_prompt body story article paragraph paragraphs table
    document documents pre_text post_text premise premises facts background dialogue
    """.split()
)
# columns with a list of choices
CHOICE_LISTS = re.compile(
    r"(?:answer_|multiple_choice_)?(?:choices|options)(?:_texts?)?|endings|candidates|distractors"
    r"|(?:option|choice)_list|mc[12]_targets"
)
# columns with one choice each: option_a, choice1, opa, distractor2; besides, there are A, B, C ...
CHOICE_COLUMN = re.compile(
    r"(?:choice|option|opt|ans|answer)[ _]?[a-e0-5]|op[a-e]|(?:distractor|incorrect.*)[ _]?\d"
)
IMAGE_COLUMN = re.compile(r"(?:.*_)?(?:image|img|figure|picture|photo)s?(?:[_ ]?\d+|_.*)?")
# an image in the middle of a prompt
IMAGE = re.compile(r"<image(?:[ _]?\d+)?>|!\[[^\]]*\]\(")
# the names that every problem has beside the columns of its row
OWN_NAMES = ("where", "read_as", "answer_column")
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^@]+))?(?:@(.+))?")
# A part of a file's or a folder's name that names a split: gsm8k_test.jsonl, train-00000-of-00002
SPLIT_NAME = re.compile(
    r"(?:^|[._-])(train|test|validation|valid|val|dev|eval|held_?out)(?:ing)?(?![a-z])"
)
# endings of files with data that are not read here
OTHER_KINDS = ".arrow .avro .bz2 .feather .jl .jsonlines .lz4 .ndjson .orc .pickle .pkl .tar .tgz"
OTHER_KINDS = tuple(f"{OTHER_KINDS} .tsv .xlsx .xz .zip .zst".split())
# files that Hugging Face writes beside the data
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# What becomes of LaTeX in JSON if a backslash is written once instead of twice: \b is a backspace
# in "\boxed{5}", \f a form feed in "\frac12", \t a tabulator in "\text{cm}".
HALF_ESCAPED = re.compile(
    "[\b\a\v]|\f(?=rac|orall|loor)|\t(?=(?:ext|ilde) ?{|(?:imes|heta|au)[^a-z]|frac|riangle)"
    "|\r(?=(?:ight|ho|angle|ceil|floor|ightarrow)[^a-z])|\n(?=(?:eq|abla)[^a-z])"
)
# In an answer of one line, a control character before a letter is nothing else.
HALF_ESCAPED_ANSWER = re.compile("[\b\a\v\f\t\r](?=[a-zA-Z])|^\n(?=[a-z])")
# The texts that stand for nothing in a column of this kind. A CSV file has texts alone: it writes
# "False" where a problem has no image.
EMPTY = {
    "image": ("False", "false", "None", "nan", "null", "N/A", "0"),
    "part": ("None", "nan", "NaN", "null", "<NA>", "N/A"),
    "choice": ("[]", "{}", " ", "None", "nan"),
}
# A prompt that begins so went through a chat template already.
TEMPLATED = re.compile(
    r"\s*(?:<s>\s*|<bos>)?(<\|im_start\|>|<\|begin_of_text\|>|<\|start_header_id\|>"
    r"|<start_of_turn>|<\|(?:user|system)\|>|\[INST\])"
)
# the most characters of an answer that is looked at in this way, because it is no solution
SHORT_ANSWER = 100
# a list of one text or number in JSON
SINGLE_ITEM = re.compile(r'\s*\[\s*(?:"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?)\s*\]\s*')
# characters that one does not see, and that str.strip leaves
INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"


# ---------------------------------------------------------------------------- problems


class Columns(NamedTuple):
    """The columns of a data set that hold prompt, answer and source; "" if there is none."""

    prompt: str
    answer: str
    source: str
    # other columns that could have been used instead
    others: tuple

    @classmethod
    def of_row(cls, row):
        """The columns of a data set that has this row. Raises ValueError if they are unclear."""
        prompts = [name for name in PROMPT_COLUMNS if _has(row, name)]
        answers = [name for name in ANSWER_COLUMNS if _has(row, name)]
        sources = [name for name in SOURCE_COLUMNS if _has(row, name)]
        if not prompts:
            raise ValueError(
                "no column holds the prompt: it must be called one of "
                f"{', '.join(PROMPT_COLUMNS)}; the row has {_names(row)}"
            )
        taken = [name for name in OWN_NAMES if name in row]
        if taken:
            raise ValueError(f"column '{taken[0]}' has a name that every problem uses: rename it")
        is_answered = prompts[0] == "messages" and _ends_with_assistant(row["messages"])
        if is_answered and answers in ([], ["label"]):
            # beside a whole conversation, a label says what kind it is
            answers = [LAST_MESSAGE, *answers]
        return cls(
            prompt=prompts[0],
            answer=answers[0] if answers else "",
            source=sources[0] if sources else "",
            others=(*prompts[1:], *answers[1:], *sources[1:]),
        )

    def __str__(self):
        text = f"prompt from '{self.prompt}'"
        if self.answer:
            text += f", answer from '{self.answer}'"
        if self.source:
            text += f", source from '{self.source}'"
        if self.others:
            text += f", not from {', '.join(map(repr, self.others))}"
        return text


def problems(names, split, known=None, finish=None):
    """The problems of data sets, in the order of the files.

    A problem is a dict with all columns of its row, and with

        prompt   a text, or a list of messages, each a dict with role and content (text)
        answer   the value in the row, of any type; absent if no column holds it
        source   the name of the set that the problem comes from: evaluations report each set
        where    "file:line", "file: row n" or "owner/name: row n"
        read_as  how the columns were understood, one line
        answer_column  the name of the column that holds the answer, or LAST_MESSAGE

    names: data sets with commas between them. split: "train" or "test", for data sets on the hub.
    known: {short name: data set}. finish: a function that completes a problem in place, and raises
    ValueError if it cannot be used. Such a row is an error in a file; in a data set on the hub,
    which one cannot edit, it is left out and counted. Raises ValueError that names the data set, or
    file and line.
    """
    known = known or {}
    all_problems = []
    # {source: the name of the data set that has it}
    sources = {}
    knob = "--train_data" if split == "train" else "--eval_data"
    if not names.strip():
        raise ValueError(f"{knob} is empty: give it a file, a directory or a data set on the hub")
    if not all(name.strip() for name in names.split(",")):
        raise ValueError(f"{knob} {names}: a name between two commas is empty")
    for name in names.split(","):
        stem = name if name in known else stem_of(name)
        set_problems = _read_set(known.get(name, name), stem, split, finish)
        for source in {problem["source"] for problem in set_problems}:
            # only evaluations tell sets apart
            if split == "test" and source in sources:
                raise ValueError(
                    f"{knob}: both {sources[source]} and {name} have a set called {source}, and "
                    "evaluations tell sets apart by that: rename a file, or name a source in each "
                    "row"
                )
            sources[source] = name
        all_problems += set_problems
    return all_problems


def _read_set(name, stem, split, finish):
    """The problems of one data set, see `problems`. stem: its name in evaluations."""
    is_on_hub = existing_path(name) is None
    columns = None
    set_problems = []
    complaints = []
    for where, row in rows(name, split):
        try:
            columns = columns or Columns.of_row(row)
            _check_columns(row, columns)
            problem = row | _problem(row, columns) | dict(where=where)
            _check_text(problem)
            if finish:
                finish(problem)
            set_problems.append(problem)
        except ValueError as e:
            complaints.append(f"{where}: {e}")
            if not is_on_hub or columns is None:
                raise ValueError(complaints[0]) from None
    if complaints and not set_problems:
        raise ValueError(f"{name}: no problems in it: {complaints[0]}")
    if not set_problems:
        raise ValueError(f"{name}: no problems in it")
    if len(complaints) > len(set_problems):
        raise ValueError(
            f"{name}: {len(complaints)} of {len(complaints) + len(set_problems)} rows cannot be "
            f"used, the first: {complaints[0]}"
        )
    if complaints:
        print(
            f"{name}: {len(complaints)} of {len(complaints) + len(set_problems)} rows cannot be "
            f"used and are left out, the first: {complaints[0]}",
            flush=True,
        )
    # the column with sources is used only if it names a set in every row
    sources = {problem["source"] for problem in set_problems}
    # a name of its own for each of many rows is no set's name
    all_differ = len(sources) == len(set_problems) > 3
    is_set_name = "" not in sources and len(sources) <= MOST_SOURCES and not all_differ
    read_as = str(columns if is_set_name else columns._replace(source=""))
    for problem in set_problems:
        problem["read_as"] = read_as
        problem["source"] = problem["source"] if is_set_name else stem
    return set_problems


def _check_columns(row, columns):
    """Raise ValueError if a row's columns mean something else than those of the first row, or if
    the prompt is not all in its column.
    """
    own = Columns.of_row(row)
    if own.prompt != columns.prompt or (own.answer and own.answer != columns.answer):
        raise ValueError(
            f"the columns of this row mean something else than those of the first row: {own}; "
            f"there: {columns}"
        )
    by_kind = {}
    for name in row:
        kind = _kind_of_column(name)
        if row[name] and row[name] not in EMPTY.get(kind, ()):
            by_kind.setdefault(kind, []).append(name)
    for name in by_kind.get("image", []):
        raise ValueError(f"column '{name}' has an image, and prompts can have texts alone")
    choices = by_kind.get("choice", [])
    letters = by_kind.get("letter", [])
    if {"a", "b"} <= {name.lower() for name in letters}:
        choices = choices + letters
    parts = by_kind.get("part", []) + choices
    if columns.prompt not in ("prompt", "messages") and parts:
        raise ValueError(
            f"the columns '{columns.prompt}' and '{parts[0]}' make one prompt in a way that is not "
            f"known here: write all of it to a column 'prompt', rename '{columns.prompt}', and "
            "write the right answer, for example the letter of a choice, to a column 'answer'"
        )
    texts = [text for name in choices for text in _texts(row[name])]
    labels = [label for name in choices for label in _labels(row[name])]
    if texts and _is_index(row, columns.answer, texts, labels):
        raise ValueError(
            f"column '{columns.answer}' has the number {_value(row, columns.answer)} beside the "
            f"choices in '{choices[0]}'. It would be taken as the answer itself: if it is the "
            "place of the right choice, write the choice's letter or text to a column 'answer', "
            "as the prompt asks for it, and remove the columns of choices"
        )


@functools.cache
def _kind_of_column(name):
    """What a column with this name holds, if it is neither the prompt nor the answer.

    "image"; "part", a part of the prompt; "choice", one choice or several; "letter", one choice if
    there are at least the columns A and B; "" for anything else.
    """
    name = name.lower()
    if IMAGE_COLUMN.fullmatch(name):
        return "image"
    if name in PROMPT_PARTS:
        return "part"
    if CHOICE_LISTS.fullmatch(name) or CHOICE_COLUMN.fullmatch(name):
        return "choice"
    return "letter" if name in ("a", "b", "c", "d", "e") else ""


def _texts(value):
    """The texts of choices: of a list, of an object's values, or of one that is written as text."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    if isinstance(value, str) and re.match(r"\s*[\[{]", value):
        try:
            return _texts(json.loads(value.replace("'", '"')))
        except json.JSONDecodeError:
            pass
    return [str(value).strip()]


def _labels(value):
    """The names of choices that are an object: its keys, and the texts in its list `label`."""
    return [*value, *_texts(value.get("label", []))] if isinstance(value, dict) else []


def _is_index(row, column, texts, labels):
    """Could the answer in a column be the place of one of these choices, from 0 or from 1 on?

    A number that is also the text of a choice may be either if it is not above their number. If it
    is the label of a choice, it is no place.
    """
    if not column or not _has(row, column):
        return False
    answer = _value(row, column)
    if isinstance(answer, bool) or not re.fullmatch(r"\s*\d+(\.0)?\s*", str(answer)):
        return False
    if str(answer).strip() in labels:
        return False
    return str(answer).strip() not in texts or float(answer) <= len(texts)


def _problem(row, columns):
    """The prompt, the source ("" if the row has none) and, if a column holds it, the answer."""
    prompt = _value(row, columns.prompt)
    if isinstance(prompt, str):
        if not visible(prompt):
            raise ValueError(f"column '{columns.prompt}' is empty")
        if re.match(r"\s*\[\s*\{.*['\"]role['\"]", prompt, re.DOTALL):
            raise ValueError(
                f"column '{columns.prompt}' has a list of messages that was written as a text: "
                "write it as a list, in a .jsonl or .parquet file"
            )
    else:
        prompt = messages_of(prompt, columns.prompt)
    problem = dict(prompt=prompt, source="", answer_column=columns.answer)
    source = row.get(columns.source) if columns.source else None
    if isinstance(source, list) and len(source) == 1:
        [source] = source
    if source is not None:
        if not isinstance(source, str):
            raise ValueError(f"column '{columns.source}' must be a text, it is {beginning(source)}")
        problem["source"] = " ".join(source.split())
    if columns.prompt == "messages" and prompt[-1]["role"] == "assistant":
        *prompt, answer = prompt
        problem["prompt"] = prompt
        if columns.answer == LAST_MESSAGE:
            problem["answer"] = answer["content"]
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] != "user"):
        last = f"it is the {prompt[-1]['role']}'s" if prompt else "there is none"
        raise ValueError(
            f"column '{columns.prompt}': the last message of a prompt must be the user's, {last}"
        )
    if columns.answer and columns.answer != LAST_MESSAGE:
        problem["answer"] = _value(row, columns.answer)
    if columns.answer and "answer" not in problem:
        raise ValueError("the last message must be the assistant's, as in the rows before")
    return problem


def _check_text(problem):
    """Raise ValueError if the prompt or the answer lacks something that texts cannot have, or has
    lost: images, and the backslashes of LaTeX that JSON has swallowed.
    """
    image = IMAGE.search(prompt_text(problem["prompt"]))
    if image:
        raise ValueError(f"the prompt has an image, {image[0]!r}, and can have texts alone")
    templated = TEMPLATED.match(prompt_text(problem["prompt"]))
    if templated:
        raise ValueError(
            f"the prompt begins with {templated[1]!r}, so it went through a chat template already: "
            "write the question alone, or a list of messages; --chat True puts it through the "
            "template of the model"
        )
    for name in ("prompt", "answer"):
        text = problem.get(name)
        text = prompt_text(text) if name == "prompt" else _single(text)
        if not isinstance(text, str):
            continue
        broken = HALF_ESCAPED.search(text)
        if name == "answer" and len(text) <= SHORT_ANSWER and "\n" not in text.strip():
            broken = broken or HALF_ESCAPED_ANSWER.search(text)
        if broken:
            rest = text[broken.end() :][:20]
            raise ValueError(
                f"the {name} has the character {broken[0]!r} before {rest!r}: in JSON a backslash "
                "is written twice, as in \\\\boxed"
            )


def visible(text):
    """A text without white space and invisible characters at its ends."""
    return text.strip().strip(INVISIBLE).strip()


def _single(value):
    """The value in a list of one value, in {"value": ...}, or in a text that is such a list.

    The text is JSON. Anything else stays as it is.
    """
    if isinstance(value, list) and len(value) == 1:
        return _single(value[0])
    if isinstance(value, dict) and list(value) == ["value"]:
        return _single(value["value"])
    if isinstance(value, str) and SINGLE_ITEM.fullmatch(value):
        try:
            return _single(json.loads(value, strict=False, parse_float=Decimal))
        except json.JSONDecodeError:
            pass
    return value


def as_text(value):
    """An answer, a text or a number, as text: 5.0 -> "5", 1e16 -> "10000000000000000".

    A list of one value, an object {"value": ...}, and a text that is such a list in JSON, count as
    the value in them. Raises ValueError for anything else, and for an empty text.
    """
    value = _single(value)
    if isinstance(value, str):
        text = visible(value)
        if text in ("", "nan", "NaN", "null", "<NA>", "N/A"):
            raise ValueError(f"it is empty: {value!r}")
        if re.match(r"""[\[{]\s*['"]""", text):
            raise ValueError(f"it is a list or an object that was written as a text: {text[:80]!r}")
        return text
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, (float, Decimal)) or not math.isfinite(value):
        raise ValueError(f"it must be a text or a number, it is {beginning(value)}")
    # the shortest digits that no other float has, without an exponent
    text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _has(row, column):
    """Does a row have a column? "a.b" is the column of this name, or the field "b" of the object
    in column "a".
    """
    if column in row:
        return True
    for name in column.split("."):
        if not isinstance(row, dict) or name not in row:
            return False
        row = row[name]
    return True


def _value(row, column):
    """A row's value in a column. Raises ValueError if the column or the value is absent."""
    if not _has(row, column):
        raise ValueError(f"no column '{column}', which the first row has; it has {_names(row)}")
    value = row
    for name in [column] if column in row else column.split("."):
        value = value[name]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"column '{column}' is empty")
    return value


def _names(row):
    """The names of a row's columns, for a message."""
    return ", ".join(map(str, row)) or "none"


def _ends_with_assistant(messages):
    """Is it a list of messages whose last one is the assistant's?"""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


# ---------------------------------------------------------------------------- rows


def existing_path(name):
    """The path that a data set's name means: (path, part of a directory); None if there is none.

    The part is what follows the @ of `directory@part`, or "".
    """
    whole = Path(name.strip()).expanduser()
    path, at, part = name.strip().rpartition("@")
    try:
        if whole.exists():
            return whole, ""
        if at and Path(path).expanduser().is_dir():
            return Path(path).expanduser(), part
    except OSError as e:
        raise ValueError(f"{name[:80]}...: {e.strerror}") from None
    return None


def stem_of(name):
    """The name of a data set in evaluations.

    `data/mine.jsonl.gz` -> "mine", `owner/name:config@test` -> "name".
    """
    path_and_part = existing_path(name)
    if path_and_part and path_and_part[0].is_dir():
        return path_and_part[0].absolute().name
    if path_and_part or _kind(Path(name)):
        return Path(name).name.split(".")[0]
    on_hub = HUB_NAME.fullmatch(name.strip())
    return on_hub[1].rpartition("/")[2] if on_hub else name


def rows(name, split):
    """Yields (where, row) for each row of a data set. row: {column: value}.

    split: "train" or "test", for a data set on the hub whose name has no split. Raises ValueError
    that names the data set or the file.
    """
    path_and_part = existing_path(name)
    if path_and_part:
        for file in files_of(*path_and_part):
            yield from READERS[_kind(file)](file)
        return
    on_hub = HUB_NAME.fullmatch(name.strip())
    if _kind(Path(name)) or not on_hub:
        raise ValueError(
            f"{Path(name).expanduser().absolute()}: no such file or directory (commas separate "
            "the names of data sets)"
        )
    yield from hub_rows(on_hub[1], on_hub[2], on_hub[3] or split)


def files_of(path, part=""):
    """The files of a data set: the file itself, or those below a directory, ordered by their paths.

    part: if it is not "", only files are taken that are of this split (`split_of`), or whose name,
    or a folder's name on the way to them, begins with it. Raises ValueError for a directory that
    has no file to read, files that cannot be read, files of several kinds, or several splits of
    which none is chosen.
    """
    if not path.is_dir():
        if not _kind(path):
            raise ValueError(
                f"{path}: its name must end in .jsonl, .json, .csv (or one of these and .gz) or "
                ".parquet"
            )
        return [path]
    begins = re.compile(re.escape(part.lower()) + r"(?![a-z])")
    files = []
    splits = set()
    for file in readable_below(path):
        # the names of folders on the way to the file, and its own name
        names = file.relative_to(path).parts
        split = split_of(names)
        is_named = any(begins.match(name.lower()) for name in names)
        is_other_split = split and split_of([part]) not in ("", split)
        if part and (is_other_split or not (is_named or split == part.lower())):
            continue
        files.append(file)
        splits |= {split} - {""}
    if not files:
        ending = f" whose name begins with {part!r}" if part else ""
        arrow = ", but .arrow files: write them by to_parquet" if any(path.rglob("*.arrow")) else ""
        raise ValueError(f"{path}: no .jsonl, .json, .csv or .parquet file{ending} in it{arrow}")
    if len(splits) > 1:
        first = sorted(splits)[0]
        advice = f"choose one, as {path}@{first}"
        if part:
            advice = f"name the files or the folder of one split, for example {path}/{first}"
        raise ValueError(
            f"{path}: its files are of several splits, {', '.join(sorted(splits))}: {advice}"
        )
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(
            f"{path}: it has files of several kinds, {', '.join(sorted(kinds))}: name the files"
        )
    return files


def readable_below(path):
    """The files below a directory that can be read, ordered by their paths, without hidden ones.

    Folders that are links are entered, each of them once. Raises ValueError for a file that would
    be skipped though it may have data, or read twice.
    """
    visible_files = set()
    entered = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        real_folder = os.path.realpath(folder)
        if real_folder in entered:
            folders.clear()
            continue
        entered.add(real_folder)
        visible_files |= {Path(folder, name) for name in names if not name.startswith(".")}
    for file in sorted(visible_files):
        name = file.name.lower()
        if name.endswith(OTHER_KINDS) or not file.exists():
            raise ValueError(
                f"{file}: a file of this kind, or a link to no file, is not read: write it as "
                ".jsonl or .parquet, or take it out of the directory"
            )
        if name.endswith(".gz") and file.with_suffix("") in visible_files:
            raise ValueError(f"{file}: the same file is there without .gz: remove one of them")
    return [file for file in sorted(visible_files) if _kind(file) and file.name not in METADATA]


def split_of(names):
    """The split that a file belongs to, "train", "test", ..., or "".

    names: those of the folders on the way to it, and its own; the first one that names a split
    counts.
    """
    for name in names:
        split = SPLIT_NAME.search(name.lower())
        if split:
            return split[1]
    return ""


def _kind(path):
    """The key in READERS for a file of this name: ".jsonl", ".csv", ...; "" if there is none."""
    name = path.name.lower()
    for kind in READERS:
        if name.endswith(kind) or (kind != ".parquet" and name.endswith(f"{kind}.gz")):
            return kind
    return ""


def _text(path):
    """The text of a file in UTF-8, decompressed if its name ends in .gz. Raises ValueError."""
    try:
        data = path.read_bytes()
        if path.name.lower().endswith(".gz"):
            data = gzip.decompress(data)
    except (OSError, EOFError, gzip.zlib.error) as e:
        raise ValueError(f"{path} cannot be read: {e}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 ({e.reason})") from None


def json_rows(path):
    """Yields (where, row) for a file with a JSON object in each line, or a JSON list of objects."""
    text = _text(path)
    if text.lstrip().startswith("["):
        values = _elements(text, path)
    elif re.match(r"\s*\{\s*\n", text) and path.name.removesuffix(".gz").endswith(".json"):
        # one object, written over several lines, as in the files of MATH
        values = _elements(f"[{text}]", path)
    else:
        values = _lines(text, path)
    for line, value in values:
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}:{line}: a row must be a JSON object, this is {beginning(value)}"
            )
        yield f"{path}:{line}", value


def _lines(text, path):
    """Yields (line number, value) for each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=_object)
            except json.JSONDecodeError as e:
                complaint = f"{e.msg}, at character {e.pos + 1}"
                raise ValueError(f"{path}:{number}: not valid JSON ({complaint})") from None
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{path}:{number}: {_first_line(e)}") from None


def _object(pairs):
    """A JSON object as a dict. Raises ValueError if a name is in it twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has '{twice}' twice")
    return row


def _elements(text, path):
    """Yields (number of its first line, value) for each element of a JSON list."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    space = re.compile(r"\s*")
    counted = 0
    line = 1
    position = text.index("[") + 1
    while True:
        position = space.match(text, position).end()
        line += text.count("\n", counted, position)
        counted = position
        if text.startswith("]", position):
            break
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}:{e.lineno}: not valid JSON ({e.msg})") from None
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{path}:{line}: {_first_line(e)}") from None
        yield line, value
        position = space.match(text, position).end()
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            raise ValueError(f"{path}:{line}: not valid JSON (the list does not go on or end here)")
    if text[position + 1 :].strip():
        raise ValueError(f"{path}:{line}: not valid JSON (something follows the end of the list)")


def csv_rows(path):
    """Yields (where, row) for a CSV file whose first line has the columns' names.

    All values are texts.
    """
    # lift the library's limit of 131,072 characters a value, as a solution may be longer
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    line = 1
    try:
        names = reader.fieldnames or []
        if not names:
            raise ValueError(f"{path}:1: the first line must have the names of the columns")
        if len(set(names)) < len(names):
            raise ValueError(f"{path}:1: two columns have the same name: {', '.join(names)}")
        for row in reader:
            line = reader.line_num
            values = [value for value in row.values() if isinstance(value, str)]
            # a value in quotes may have line breaks
            begin = line - sum(value.count("\n") for value in values)
            if None in row or None in row.values():
                count = len(values) + len(row.get(None, []))
                raise ValueError(
                    f"{path}:{begin}: it has {count} values, and the first line has {len(names)} "
                    "names"
                )
            yield f"{path}:{begin}", row
    except csv.Error as e:
        raise ValueError(f"{path}:{line + 1}: not valid CSV ({e})") from None


def _shortened(value, kind):
    """A value of Parquet whose numbers of 16 and 32 bits have no more digits than these have.

    0.1 in 32 bits is 0.10000000149011612 in Python -> 0.1. kind: the type in pyarrow. Numbers
    within lists and objects are shortened, too.
    """
    if isinstance(value, float) and str(kind) in ("halffloat", "float"):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict) and kind.num_fields:
        fields = {field.name: field.type for field in map(kind.field, range(kind.num_fields))}
        return {name: _shortened(item, fields.get(name, kind)) for name, item in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_shortened(item, kind.value_type) for item in value]
    return value


def parquet_rows(path):
    """Yields (where, row) for a Parquet file."""
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise ValueError(f"two columns have the same name: {', '.join(names)}")
        types = {field.name: field.type for field in file.schema_arrow}
        for batch in file.iter_batches(1000):
            for row in batch.to_pylist():
                number += 1
                row = {name: _shortened(value, types[name]) for name, value in row.items()}
                yield f"{path}: row {number}", row
    # the library raises errors of many kinds
    except Exception as e:
        if number:
            raise ValueError(
                f"{path}: not readable after row {number} ({_first_line(e)})"
            ) from None
        raise ValueError(f"{path}: not a readable Parquet file ({_first_line(e)})") from None


def hub_rows(name, config, split):
    """Yields (where, row) for a data set on the Hugging Face hub, or in its local cache."""
    from datasets import load_dataset

    try:
        loaded = load_dataset(name, config, split=split)
    # the library raises errors of dozens of kinds
    except Exception as e:
        raise ValueError(
            f"data set {name}, configuration {config or 'not given'}, split {split}: there is no "
            "such file or directory, and the hub does not give it "
            f"({type(e).__name__}: {_first_line(e)}); a name on the hub is written "
            "owner/name:config@split"
        ) from None
    for number, row in enumerate(loaded, 1):
        yield f"{name}: row {number}", row


def _first_line(error):
    """The first line of an error's message."""
    return str(error).partition("\n")[0][:200]


# {ending of a file's name: the function that yields its rows}
READERS = {".jsonl": json_rows, ".json": json_rows, ".csv": csv_rows, ".parquet": parquet_rows}
