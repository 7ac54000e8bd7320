"""Mathematics with a final answer in \\boxed{}, compared exactly (`_answers.py`): the task of the paper.

`--train_data` and `--eval_data`: names of data sets below, or .jsonl / .parquet files with columns `problem` (or
`question`) and `answer`; several with commas between them. Evaluations report each by its name.

`bash run.sh toy --task maths --train_data tests/maths.jsonl --eval_data tests/maths.jsonl --max_model_len 400` runs it
without a hub. The last box counts, with all that its sentence boxes: several different boxes are a list of answers.
Deliberately absent: answers without \\boxed{}, partial credit.
"""

import re
import string
from pathlib import Path

from tasks import _answers as answers
from tasks import _data as data

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# characters of an answer, boxes of a last statement; no real one comes near
LONGEST, MOST_BOXES = 500, 20
TINY = dict(words=(INSTRUCTION, "\\boxed{"), characters=tuple(string.printable), positions=512)
BOX = re.compile(r"\\boxed\s*(\{|[^\s{])")
# a sentence ends; what a last sentence begins with that takes back nothing
LETTERS = re.compile("[a-z]+")
END = re.compile(r"[.?!:;](?=\s)|\n")
OTHERWISE = set("or either maybe perhaps possibly alternatively otherwise also case option".split())


def _box(text, start):
    """(content, end) of the box at a place of a text; raises ValueError if it never ends, is too long or too deep."""
    opening = BOX.match(text, start)
    if opening and opening[1] != "{":
        return opening[1], opening.end()
    inside = opening.end() if opening else len(text)
    depth = 1
    for k, character in enumerate(text[inside : inside + LONGEST + 1]):
        depth += (character == "{") - (character == "}")
        if depth > answers.DEEPEST:
            break
        if depth == 0:
            return text[inside : inside + k].strip(), inside + k + 1
    message = f"the answer does not end within {LONGEST} characters, or is nested too deeply"
    raise ValueError(message)


def boxed(text):
    """What the last \\boxed{...} of a text holds; None without one; ValueError if it never ends, is too long or too deep."""
    start = text.rfind("\\boxed")
    return None if start < 0 else _box(text, start)[0]


def stated(text):
    """The contents of the boxes of a text's last statement, each once; raises ValueError like `boxed`.

    A chain of thought may box what it takes back or goes on with; only what stands in the sentence of the last box, right
    before it, or is joined to it by "or" is part of the answer: "\\boxed{9}. So we get \\boxed{7}" -> ["7"],
    "\\boxed{9}, \\boxed{7}" -> ["9", "7"].
    """
    start = text.rfind("\\boxed")
    if start < 0:
        return []
    found = [_box(text, start)[0]]
    for _ in range(MOST_BOXES):
        next_start = start
        start = text.rfind("\\boxed", 0, next_start)
        try:
            content, end = _box(text, start) if start >= 0 else (None, 0)
        except ValueError:
            # it never ends: nothing of it was ever seen
            break
        if content is None or end <= next_start and _apart(text[end:next_start]):
            break
        # a box around another one counts as a whole
        found = [content] if end > next_start else [content, *found]
    return list(dict.fromkeys(found))


def _apart(between):
    """Is what stands between two boxes more than a list's comma, or an "or"?"""
    _, *sentences = END.split(between.lower())
    sentences = [words for words in map(LETTERS.findall, sentences) if words]
    return bool(sentences) and not (len(sentences[-1]) <= 5 and sentences[-1][0] in OTHERWISE)


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


def final(completion):
    """The answer a completion ends with, as one text: what its last box holds, or a list if several boxes differ.

    None without an answer; raises ValueError if it cannot be read.
    """
    found = [content for content in stated(completion) if content]
    while len(found) > 1 and answers.same(found[-1], found[0]):
        found.pop(0)
    return ", ".join(found) or None


def answer(problem, completion):
    """What attempts are compared by when they vote (maj@k); None: no vote."""
    try:
        given = final(completion)
    except ValueError:
        return None
    return given and answers.plain(given)


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    percent = "percent" in problem.get("prompt", "").lower()
    try:
        given = final(completion)
        if not given:
            return "no_answer"
        return "correct" if answers.same(problem["answer"], given, percent) else "wrong"
    except ValueError:
        return "unparsable"


def teacher(rng):
    """One example for a tiny base model, which is there to run without a hub, not to learn mathematics: a sum, often right."""
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    total = a + b
    if rng.random() >= 0.8:
        total = rng.randint(1, 100)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{total}}}", True)]


def warm_up():
    """Called once before workers are forked: load what `reward` needs."""
    reward({"answer": "\\frac{x^2}{2}"}, "\\boxed{0.5 x^2 + \\sqrt{2}}", True)
