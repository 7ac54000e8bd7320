"""Mathematics with a final answer in \\boxed{}, checked by the math-verify library: the task of the paper.

`--train_data` and `--eval_data`: names of data sets below, or .jsonl / .parquet files with columns `problem` (or `question`) and `answer`;
several with commas between them. Evaluations report each by its name.
"""
import functools
import re
import string
from pathlib import Path

from tasks import _data as data

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONGEST, DEEPEST = 500, 30  # characters and nested brackets of an answer; no real one comes near
TINY = dict(words=(INSTRUCTION, "\\boxed{"), characters=tuple(string.printable), positions=512)
# sympy computes 9^{9^9} and 10^{10^{100}} digit by digit: refuse what could only be meant to
HOSTILE = re.compile(r"\d\s*[})]*\s*(\^|\*\*)\s*[-{(\s]*\d+\s*[})!]*\s*(\^|\*\*)|(\^|\*\*)\s*[-{(\s]*\d{6,}|\d{5,}\s*!|![)}\]\s]*!|\d\s*(\^|\*\*)\s*[-{(\s]*\d+\s*!")


def boxed(text):
    """What the last \\boxed{...} of a text holds; None without one; ValueError if it never ends, is too long or too deep."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for k, c in enumerate(text[start + 6:start + 8 + LONGEST]):
        depth += (c == "{") - (c == "}")
        if depth > DEEPEST:
            break
        if not depth:
            return text[start + 7:start + 6 + k].strip()
    raise ValueError(f"the answer does not end within {LONGEST} characters, or is nested too deeply")


def after_hashes(text):
    """GSM8K: the final answer follows ####."""
    return text.rsplit("####", 1)[-1].strip().replace(",", "")


def orz(row):
    """OpenReasoner-Zero: a row is a dialogue, [{value: problem}, {ground_truth: {value: answer}}], with columns called "0" and "1"."""
    return row["0"]["value"], row["1"]["ground_truth"]["value"]


# name -> (hub name, configuration, split, row -> (problem, final answer))
SETS = {
    "orz57k": ("Open-Reasoner-Zero/orz_math_57k_collection", None, "train", orz),
    "orz72k": ("Open-Reasoner-Zero/orz_math_72k_collection_extended", None, "train", orz),
    "gsm8k_train": ("openai/gsm8k", "main", "train", lambda row: (row["question"], after_hashes(row["answer"]))),
    "gsm8k": ("openai/gsm8k", "main", "test", lambda row: (row["question"], after_hashes(row["answer"]))),
    "math_train": ("DigitalLearningGmbH/MATH-lighteval", None, "train", lambda row: (row["problem"], boxed(row["solution"]))),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", lambda row: (row["problem"], row["answer"])),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", lambda row: (row["problem"], row["answer"])),
    "aime25": ("math-ai/aime25", None, "test", lambda row: (row["problem"], row["answer"])),
    "amc23": ("math-ai/amc23", None, "test", lambda row: (row["question"], row["answer"])),
}


def problems(split, seed=0, data_names=""):
    """Dicts with prompt, answer, where (file:line) and source (name of the set), in the order of the files."""
    if not data_names:
        raise ValueError(f"task maths needs --{'train' if split == 'train' else 'eval'}_data: {', '.join(SETS)}, or a .jsonl or .parquet file")
    found = []
    for name in data_names.split(","):
        before, unusable, source = len(found), 0, name if name in SETS else Path(name).stem
        if source in {p["source"] for p in found}:
            raise ValueError(f"{name}: there is a set called {source} already: results are told apart by that name")
        if name in SETS:
            *hub, read = SETS[name]
            rows = data.hub(*hub)
        else:
            rows, read = data.rows(name), lambda row: (data.column(row, "problem", "question"), data.column(row, "answer"))
        for where, row in rows:
            try:
                problem, answer = read(row)
            except LookupError as e:
                raise ValueError(f"{where}: no {e}; the row has {', '.join(row)}") from None
            except ValueError as e:
                if name not in SETS:
                    raise ValueError(f"{where}: {e}") from None
                answer = None
            if not answer:  # only in a hub's set, which its reader cannot mend
                unusable += 1
                continue
            found.append(dict(prompt=problem + INSTRUCTION, answer=str(answer), where=where, source=source))
        if unusable:
            print(f"maths: {unusable} rows of {name} have no final answer to check against and are left out", flush=True)
        if len(found) == before:
            raise ValueError(f"{name}: no problems in it")
    return found


def answer(problem, completion):
    """What attempts are compared by when they vote (maj@k); None: no vote."""
    try:
        return boxed(completion) or None
    except ValueError:
        return None


@functools.cache
def library():
    """(parse, verify, how to find an answer, sympy's class of expressions), loaded when first needed: it takes a second."""
    import logging
    import math_verify
    from sympy import Expr
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it complains that its own time limits are off: ours kill
    return math_verify.parse, math_verify.verify, [math_verify.LatexExtractionConfig(boxed_match_priority=0)], Expr


@functools.lru_cache(10000)
def parsed(answer):
    """math-verify's reading of an answer; an empty list if it makes no sense of it."""
    parse, _, extraction, _ = library()
    return parse(f"\\boxed{{{answer}}}", extraction, parsing_timeout=None)


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
    if HOSTILE.search(answer) or max(answer.count(c) for c in "([_^") > DEEPEST or not parsed(answer):
        return "unparsable"
    gold, given = parsed(problem["answer"]), parsed(answer)
    _, verify, _, expression = library()
    unknowns = [bool(x[0].free_symbols) for x in (gold, given) if x and isinstance(x[0], expression)]
    if len(set(unknowns)) == 2:  # an expression in x can hardly be a number, and sympy may take minutes to find that out
        return "wrong"
    return "correct" if verify(gold, given, timeout_seconds=None) else "wrong"


def teacher(rng):
    """One example for a tiny base model, which is there to run the line without a hub, not to learn mathematics: a sum, often right."""
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{a + b if rng.random() < 0.8 else rng.randint(1, 100)}}}", True)]


def warm_up():
    """Called once before workers are forked: load what `reward` needs."""
    reward({"answer": "\\frac{x^2}{2}"}, "\\boxed{0.5 x^2 + (1, 2)}", True)
