"""Mathematics with a final answer in \\boxed{}, checked by the math-verify library: the task of the paper.

`--train_data` and `--eval_data`: names of data sets below, or .jsonl / .parquet files with columns `problem` (or
`question`) and `answer`; several with commas between them. Evaluations report each by its name.

`bash run.sh toy --task maths --train_data tests/maths.jsonl --eval_data tests/maths.jsonl --max_model_len 400` runs it
without a hub. Deliberately absent: answers without \\boxed{}, partial credit.
"""

import functools
import re
import string
from pathlib import Path

from tasks import _data as data

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# characters and nested brackets of an answer; no real one comes near
LONGEST, DEEPEST = 500, 30
TINY = dict(words=(INSTRUCTION, "\\boxed{"), characters=tuple(string.printable), positions=512)
# sympy computes 9^{9^9} and 10^{10^{100}} digit by digit: refuse what could only be meant to
HOSTILE = re.compile(
    r"\d\s*[})]*\s*(\^|\*\*)\s*[-{(\s]*\d+\s*[})!]*\s*(\^|\*\*)"
    r"|(\^|\*\*)\s*[-{(\s]*\d{6,}"
    r"|\d{5,}\s*!"
    r"|![)}\]\s]*!"
    r"|\d\s*(\^|\*\*)\s*[-{(\s]*\d+\s*!"
)


def boxed(text):
    """What the last \\boxed{...} of a text holds; None without one; ValueError if it never ends, is too long or too deep."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for k, character in enumerate(text[inside : inside + LONGEST + 1]):
        depth += (character == "{") - (character == "}")
        if depth > DEEPEST:
            break
        if depth == 0:
            return text[inside : inside + k].strip()
    message = f"the answer does not end within {LONGEST} characters, or is nested too deeply"
    raise ValueError(message)


# ---- data sets: readers of one row -> (problem, final answer)


def orz(row):
    """OpenReasoner-Zero: a row is a dialogue, [{value: problem}, {ground_truth: {value: answer}}], with columns called "0" and "1"."""
    return row["0"]["value"], row["1"]["ground_truth"]["value"]


def gsm8k(row):
    """The final answer follows ####, with commas in large numbers."""
    answer = row["answer"].rsplit("####", 1)[-1]
    return row["question"], answer.strip().replace(",", "")


def solution(row):
    """The final answer is what the solution puts into its last box."""
    return row["problem"], boxed(row["solution"])


def problem_answer(row):
    return row["problem"], row["answer"]


def question_answer(row):
    return row["question"], row["answer"]


def file_row(row):
    return data.column(row, "problem", "question"), data.column(row, "answer")


# name -> (hub name, configuration, split, reader)
SETS = {
    "orz57k": ("Open-Reasoner-Zero/orz_math_57k_collection", None, "train", orz),
    "orz72k": ("Open-Reasoner-Zero/orz_math_72k_collection_extended", None, "train", orz),
    "gsm8k_train": ("openai/gsm8k", "main", "train", gsm8k),
    "gsm8k": ("openai/gsm8k", "main", "test", gsm8k),
    "math_train": ("DigitalLearningGmbH/MATH-lighteval", None, "train", solution),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", problem_answer),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", problem_answer),
    "aime25": ("math-ai/aime25", None, "test", problem_answer),
    "amc23": ("math-ai/amc23", None, "test", question_answer),
}


def problems(split, seed=0, data_names=""):
    """Dicts with prompt, answer, where (file:line) and source (name of the set), in the order of the files.

    Raises ValueError that names the file and line, or the set.
    """
    if not data_names:
        knob = "--train_data" if split == "train" else "--eval_data"
        known = ", ".join(SETS)
        raise ValueError(f"task maths needs {knob}: {known}, or a .jsonl or .parquet file")
    sources = {}
    for name in data_names.split(","):
        source = name if name in SETS else Path(name).stem
        if source in sources:
            raise ValueError(
                f"{name}: there is a set called {source} already: results are told apart by that name"
            )
        sources[source] = _hub_set(name) if name in SETS else _file(name)
        if not sources[source]:
            raise ValueError(f"{name}: no problems in it")
    return [
        dict(prompt=problem + INSTRUCTION, answer=str(answer), where=where, source=source)
        for source, found in sources.items()
        for where, problem, answer in found
    ]


def _file(path):
    """[(where, problem, answer)] of a file, all of whose rows must be usable."""
    found = []
    for where, row in data.rows(path):
        try:
            problem, answer = file_row(row)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        found.append((where, problem, answer))
    return found


def _hub_set(name):
    """[(where, problem, answer)] of one of SETS; nobody here can mend its rows, so unusable ones are left out."""
    *hub, read = SETS[name]
    found = []
    unusable = 0
    for where, row in data.hub(*hub):
        try:
            problem, answer = read(row)
        except LookupError as e:
            has = ", ".join(row)
            raise ValueError(f"{where}: no {e}; the row has {has}") from None
        except ValueError:
            # what is in the box of its solution cannot be read
            answer = None
        if answer:
            found.append((where, problem, answer))
        else:
            unusable += 1
    if unusable:
        why = "have no final answer to check against and are left out"
        print(f"maths: {unusable} rows of {name} {why}", flush=True)
    return found


# ---- the reward


def answer(problem, completion):
    """What attempts are compared by when they vote (maj@k); None: no vote."""
    try:
        return boxed(completion) or None
    except ValueError:
        return None


@functools.cache
def library():
    """The math_verify module, loaded when first needed: it takes a second."""
    import logging

    import math_verify

    # it complains that its own time limits are off: the sandbox has its own
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


@functools.lru_cache(10000)
def parsed(answer):
    """math-verify's reading of an answer; an empty list if it makes no sense of it."""
    extraction = [library().LatexExtractionConfig(boxed_match_priority=0)]
    return library().parse(f"\\boxed{{{answer}}}", extraction, parsing_timeout=None)


def _hostile(answer):
    """Would reading this answer take unreasonably long?"""
    brackets = max(answer.count(character) for character in "([_^")
    return brackets > DEEPEST or HOSTILE.search(answer) is not None


def _has_unknowns(found):
    """Is there an x in the first reading of an answer? None if that is no expression."""
    from sympy import Expr

    if not found or not isinstance(found[0], Expr):
        return None
    return bool(found[0].free_symbols)


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    try:
        answer = boxed(completion)
    except ValueError:
        return "unparsable"
    if not answer:
        return "no_answer"
    if answer == problem["answer"]:
        return "correct"
    if _hostile(answer) or not parsed(answer):
        return "unparsable"
    gold, given = parsed(problem["answer"]), parsed(answer)
    # an expression in x can hardly be a number, and sympy may take minutes to find that out
    if {_has_unknowns(gold), _has_unknowns(given)} == {True, False}:
        return "wrong"
    return "correct" if library().verify(gold, given, timeout_seconds=None) else "wrong"


def teacher(rng):
    """One example for a tiny base model, which is there to run without a hub, not to learn mathematics: a sum, often right."""
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    total = a + b
    if rng.random() >= 0.8:
        total = rng.randint(1, 100)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{total}}}", True)]


def warm_up():
    """Called once before workers are forked: load what `reward` needs."""
    reward({"answer": "\\frac{x^2}{2}"}, "\\boxed{0.5 x^2 + (1, 2)}", True)
