"""Any data set of reasoning-gym, or a mixture, scored by its own verifier
(github.com/open-thought/reasoning-gym).

`--train_data` and `--eval_data`: names with settings and shares, such as
`chain_sum/max_terms=2/max_digits=1:0.7,spell_backward/max_word_len=5:0.3`. A value is JSON, or a
word without quotes. Evaluations report each set under its name and settings, as they are written.
DRAWN questions are divided among the sets by their shares. The setting `size` gives a set its own
number of questions, because some sets need a second for each. A question's checksum decides whether
it is held out, so that no question is both trained on and held out; held-out questions are drawn
from another seed.

`answer` finds the answer in a completion. It reads a completion in one way, which depends on the
form of the right answer and never on its value. To try several readings and take the best score
would find a few more right answers. But it would also reward two different guesses in one
completion, and attempts that vote (maj@k) would know what is right.

No text of a model is run as Python, although nine of the verifiers would run it. Deliberately
absent: the set `composite`, because commas make a mixture.
"""

import ast
import contextlib
import difflib
import functools
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
import typing
import zlib
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction

import numpy as np
import sympy
from pydantic import TypeAdapter, ValidationError

try:
    from reasoning_gym import create_dataset
except ImportError as e:
    raise ImportError(
        f"{e}: pip install -r requirements-smol.txt, as `bash run.sh smol` does"
    ) from e
from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
from reasoning_gym.factory import DATASETS
from reasoning_gym.games import n_queens

# the number of questions that are drawn; duplicates and those of the other split are then left out
DRAWN = 5000
# one question in so many is held out
HELD_OUT = 5
# seconds between two lines about the progress of a data set that is slow to draw
PROGRESS = 20


# ---- names, settings and shares

STRING = r'"(?:[^"\\]|\\.)*"'
# lists and objects, three levels deep
BRACKETS = r"\[\]"
for _ in range(3):
    BRACKETS = rf'[\[{{](?:[^"\[\]{{}}]|{STRING}|{BRACKETS})*[\]}}]'
SETTING = rf'/([^/:,=]*)=((?:[^/:,"\[\]{{}}]|{STRING}|{BRACKETS})*)'
# a name, settings, a share, and the comma before the next set
SET = re.compile(rf"([^/:,]*)((?:{SETTING})*)(?::([^,]*))?(,|$)")


def parse(data):
    """`name/setting=value/...:share,...` -> [(source, name, {setting: value}, share)].

    source: a set as it is written, without its share. Raises ValueError that names the set and what
    is wrong with it.
    """
    sets = {}
    rest = data
    while rest is not None:
        match = SET.match(rest)
        if not match:
            raise ValueError(f"{rest!r} cannot be read: write name/setting=value:share,...")
        name, settings, _, _, share, comma = match.groups()
        source = (name + settings).strip()
        if source in sets:
            raise ValueError(f"{source} is named twice: name it once")
        name = name.strip()
        sets[source] = (name, read_settings(name, settings), read_share(source, share))
        rest = rest[match.end() :] if comma else None
    return [(source, *fields) for source, fields in sets.items()]


def read_settings(name, text):
    """The settings of a data set: ("chain_sum", "/max_terms=2") -> {"max_terms": 2}.

    Raises ValueError.
    """
    if name == "composite":
        raise ValueError("composite: name its data sets themselves, with commas between them")
    if name not in DATASETS:
        similar = ", ".join(difflib.get_close_matches(name, DATASETS, 4, 0.4)) or "none"
        raise ValueError(f"reasoning-gym has no data set {name!r}; similar names: {similar}")
    settings = {}
    for key, value in re.findall(SETTING, text):
        if key in settings:
            raise ValueError(f"{name}: {key} is set twice")
        settings[key] = read_value(name, key, value)
    return settings


def read_value(name, key, text):
    """The value of a setting, of the type that the data set declares for it. Raises ValueError."""
    configuration = DATASETS[name][1]
    types = typing.get_type_hints(configuration)
    # the run's own --seed draws the questions
    types.pop("seed", None)
    if key not in types:
        raise ValueError(f"{name} has no setting {key!r}; its settings: {', '.join(types)}")
    adapter = TypeAdapter(types[key])
    default = getattr(configuration(), key)
    try:
        adapter.validate_python(default)
    # a few data sets declare a type that not even their own default has
    except ValidationError:
        adapter = TypeAdapter(types[key] | type(default))
    try:
        json.loads(text)
        validate = functools.partial(adapter.validate_json, strict=True)
    except ValueError:
        validate = adapter.validate_python
    try:
        value = validate(text)
    except ValidationError as e:
        raise ValueError(f"{name}/{key}={text}: {e.errors()[0]['msg']}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}/{key}={text}: it must be a finite number")
    return value


def read_share(source, text):
    """The share of a data set as a number; 1 if none is written. Raises ValueError."""
    try:
        share = 1.0 if text is None else float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError(f"{source}: its share is {text!r}, it must be a number above 0")
    return share


# ---- problems


def problems(split, seed=0, data=""):
    """Entries of the data sets, with two more fields, `prompt` and `source`.

    source is the set as it is written; it determines the verifier. Every process gets the same
    entries: some data sets draw from Python's sets, whose order changes from process to process, so
    they are drawn in a child process in which it is fixed. Raises ValueError that names the set.
    """
    if not data.strip():
        example = "chain_sum/max_terms=2"
        raise ValueError(
            f"--train_data and --eval_data must name data sets of reasoning-gym, as {example}"
        )
    sets = parse(data)
    hash_seed = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            drawn = child.submit(draw, sets, split, seed).result()
    finally:
        del os.environ["PYTHONHASHSEED"]
        if hash_seed is not None:
            os.environ["PYTHONHASHSEED"] = hash_seed
    random.Random(seed).shuffle(drawn)
    return drawn


def draw(sets, split, seed):
    """The problems of a split, set after set. sets: the result of `parse`.

    The output that data sets print is discarded.
    """
    drawn = []
    total = sum(share for *_, share in sets)
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            for source, name, settings, share in sets:
                size = max(round(DRAWN * share / total), 1)
                options = dict(size=size, seed=seed + 10**6 * (split == "test")) | settings
                try:
                    entries = list(all_entries(source, name, options))
                # data sets raise exceptions of any kind for bad settings, at once or at some entry
                except Exception as e:
                    reason = " ".join(str(e).split())[:300] or type(e).__name__
                    raise ValueError(f"{source}: {reason}") from None
                split_entries = {}
                for entry in entries:
                    prompt = entry["question"]
                    if (zlib.crc32(prompt.encode()) % HELD_OUT == 0) == (split == "test"):
                        split_entries[prompt] = dict(entry, prompt=prompt, source=source)
                if not split_entries:
                    raise ValueError(
                        f"{source}: it has too few different questions: of {len(entries)} that "
                        f"were drawn none belongs to the {split} split"
                    )
                drawn += split_entries.values()
    return drawn


def all_entries(source, name, options):
    """Yields the entries of a data set. Prints now and then how long a slow one will take."""
    # a few data sets draw from the global generators
    random.seed(options["seed"])
    np.random.seed(options["seed"])
    dataset = create_dataset(name, **options)
    began = last_line = time.monotonic()
    for number, entry in enumerate(dataset, 1):
        yield entry
        now = time.monotonic()
        if now - last_line > PROGRESS:
            last_line = now
            seconds = (now - began) / number * (len(dataset) - number)
            print(
                f"gym: {number} of {len(dataset)} questions of {source} are drawn, "
                f"{seconds:.0f} s to go; {name}/size=200 would draw 200",
                file=sys.__stdout__,
                flush=True,
            )


# ---- the answer in a completion

TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# patterns that may stand before an answer: a code block's first line, an empty line, the end of a
# line, words, signs
INTRODUCTIONS = [
    r"```\w*\n",
    r"\n\s*\n",
    r"\n",
    r"\b[Aa]nswer(?: is)?\b:?",
    r"\bis\b",
    r"=",
    r":(?!\d)|(?<!\d):",
]
# characters that may stand around an answer
WRAPPING = " \t\r\n*`\"'."
# the form of an answer, for the data sets whose entries have none
FORMS = {
    "boxnet": '[{"Agent[0.5, 0.5]": "move(box_red, target_red)"},\n{}]',
    "graph_color": '{"0": 1,\n"1": 2}',
    "propositional_logic": "(P ∧ Q)",
    "rubiks_cube": "R U'",
    "rush_hour": "A+1 B-2",
}


def answer(problem, completion):
    """The answer of a completion, a text, or None. It is also the attempt's vote (maj@k).

    It is the text in the last <answer> ... </answer>. Without such tags, each of INTRODUCTIONS that
    the right answer does not contain cuts off the text before its last match: for example all lines
    but the last one, if the right answer has one line, and the words up to the last "is", if there
    is no "is" in the right answer. Wrapping is removed, but for characters that wrap the right
    answer, too. Text in <think> ... </think> does not count.
    """
    right = problem["answer"]
    right = FORMS.get(name_of(problem), "") if right is None else str(right)
    text = completion.rpartition("</think>")[2].partition("<think>")[0]
    tagged = TAGGED.findall(text)
    if tagged:
        reading = unwrap(tagged[-1], right)
    else:
        reading = unwrap(text, right)
        for introduction in INTRODUCTIONS:
            if not re.search(introduction, right):
                reading = unwrap(re.split(introduction, reading)[-1], right)
    # an empty text is an answer only if the right answer is empty
    return reading if reading or not right else None


def unwrap(text, right):
    """A text without its wrapping, but for characters that also wrap the right answer.

    ("**The end.**", "So.") -> "The end."
    """
    begin, content, end = split_wrapping(text)
    right_begin, _, right_end = split_wrapping(right)
    begin = right_begin if begin.endswith(right_begin) else ""
    end = right_end if end.startswith(right_end) else ""
    return begin + content + end


def split_wrapping(text):
    """'"a".' -> ('"', "a", '".'). A number may begin with a point."""
    rest = text.lstrip(WRAPPING.replace(".", ""))
    content = rest.rstrip(WRAPPING)
    return text[: len(text) - len(rest)], content, rest[len(content) :]


# ---- the reward

# Their verifiers call eval on the answer: let it read a literal, which cannot do anything.
for module in (binary_matrix, n_queens, spiral_matrix, string_insertion):
    module.eval = ast.literal_eval


def is_arithmetic(reading, problem):
    """Whether a text has only integers, the signs of the four operations and round brackets."""
    return re.fullmatch(r"[0-9\s()+*/-]+", reading)


def is_formula(reading, problem):
    """Whether a text has only numbers, operators, round brackets, variables of one letter and
    functions of sympy.

    sympy runs the text that it parses as Python, so no other name, no quote and no underscore may
    reach it. An Integral is not allowed either, as it would only repeat the question.
    """
    names = set(re.findall(r"[A-Za-z]\w*", reading))
    names -= {name for name in names if len(name) == 1 or name in ("pi", "sqrt")}
    are_functions = all(isinstance(getattr(sympy, x, None), sympy.FunctionClass) for x in names)
    return are_functions and re.fullmatch(r"[A-Za-z0-9\s().+*/^-]+", reading)


def is_number(reading, problem):
    """Whether a text has no nan. A verifier that asks whether an answer is too far off accepts nan,
    because all comparisons with it are false.
    """
    return "nan" not in reading.lower()


def is_24(reading, problem):
    """Whether a text has the numbers of the problem, each once, and makes exactly 24."""
    numbers = sorted(map(int, re.findall("[0-9]+", reading)))
    has_numbers = numbers == sorted(problem["metadata"]["numbers"])
    return has_numbers and is_arithmetic(reading, problem) and sympy.parse_expr(reading) == 24


def is_near(reading, problem):
    """Whether a probability is right to 1e-4; the verifier's partial credit for equal digits is
    full credit for "0".
    """
    return abs(Fraction(reading) - Fraction(problem["answer"])) <= 1e-4


def has_sign(reading, problem):
    """Whether a text has a negative number just as the right answer does: the verifier does not
    look at the sign.
    """
    return bool(re.search(r"(?<!\w)-\d", reading)) == problem["answer"].startswith("-")


# Conditions that a text must meet before the verifier gets it, for the sets whose verifier in
# reasoning-gym 0.1.25 would run it or accept wrong answers. The right answer need not meet them.
CONDITIONS = {
    "coin_flip": is_near,
    "complex_arithmetic": is_number,
    "countdown": is_arithmetic,
    # its verifier accepts every text
    "game_of_life_halting": lambda reading, problem: False,
    "gsm_symbolic": has_sign,
    "intermediate_integration": is_formula,
    "number_sorting": is_number,
    "polynomial_multiplication": is_formula,
    "puzzle24": is_24,
    "simple_integration": is_formula,
}


def name_of(problem):
    """The name of a problem's data set."""
    return problem["source"].partition("/")[0]


@functools.cache
def dataset_of(source):
    """The data set that a source names, with its settings; verifiers depend on them."""
    [(_, name, settings, _)] = parse(source)
    return create_dataset(name, **settings)


def reward(problem, completion, finished):
    """The verifier's score, 0 to 1, if the model ended by itself and gave an answer; else 0.

    Verifiers raise exceptions of any kind at texts that they cannot read, and some return numbers
    outside of 0 to 1 for wrong answers: both score 0.
    """
    dataset = dataset_of(problem["source"])
    reading = answer(problem, completion)
    if not finished or reading is None:
        return 0.0
    condition = CONDITIONS.get(name_of(problem))
    try:
        if condition and reading != problem["answer"] and not condition(reading, problem):
            return 0.0
        score = float(dataset.score_answer(reading, problem))
    except Exception:
        return 0.0
    return score if 0 <= score <= 1 else 0.0
