"""Mathematics with a final answer in \\boxed{}: the task of the paper.

`--train_data` and `--eval_data` name data sets, with commas between them: short names (`SETS`
below), files, directories, or data sets on the hub (tasks/_data.py). Evaluations report each set by
its name. The first command runs the task without a hub. The second one says how an answer is
graded: it takes the reference answer, a completion and, if units matter, the prompt.

    bash run.sh toy --task maths --train_data tests/maths.jsonl --eval_data tests/maths.jsonl \\
        --max_model_len 400
    .venv/bin/python -m tasks.maths '\\frac12' 'The result is \\boxed{0.5}.'

tasks/_grading.py finds the final answer of a completion and compares it with the reference,
exactly (except for references that a program has rounded). It accepts only answers that can be read
in one way, because a model exploits a reward that guesses; all others are `unparsable`. `python
bench/rewards.py` prints how often a verdict is wrong.
Deliberately absent: answers without \\boxed{}, partial credit.
"""

import re
import string
import sys
from decimal import Decimal

from plumbing.prompts import prompt_text, with_instruction
from tasks import _data as data
from tasks._grading import (
    UNCLEAR,
    comparable_text,
    final_answer,
    has_value,
    is_same_answer,
    outside_of_thinking,
)

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# the tiny model that is made if --model is empty: texts that are one token, other characters, and
# the length of its longest sequence
TINY = dict(words=(INSTRUCTION, "\\boxed{"), characters=tuple(string.printable), positions=512)


# ---- data sets

# short names of data sets on the hub
SETS = {
    "orz57k": "Open-Reasoner-Zero/orz_math_57k_collection@train",
    "orz72k": "Open-Reasoner-Zero/orz_math_72k_collection_extended@train",
    "gsm8k_train": "openai/gsm8k:main@train",
    "gsm8k": "openai/gsm8k:main@test",
    "math_train": "DigitalLearningGmbH/MATH-lighteval@train",
    "math500": "HuggingFaceH4/MATH-500@test",
    "aime24": "HuggingFaceH4/aime_2024@train",
    "aime25": "math-ai/aime25@test",
    "amc23": "math-ai/amc23@test",
}
# those that are made for evaluation, though the split of `aime24` is called train
EVALUATION_SETS = ("gsm8k", "math500", "aime24", "aime25", "amc23")
# A reference with more characters than this is a solution, not its final answer.
LONGEST_REFERENCE = 500
# the number of references that are read on trial at most, because a long one takes milliseconds
MOST_TRIED = 300
# 1,234 with commas in the right places, and in no list or interval
LARGE_NUMBER = re.compile(r"(?<![\d,(\[{.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
# what stands in data sets for an answer that is not known
PLACEHOLDERS = {"proof", "notfound", "not found", "unknown", "n/a", "na", "?", "-", "null", "tbd"}
PLACEHOLDERS |= {"see above", "see solution", "no solution provided", "image"}
# an answer that has none of these says nothing: `$ $`, `[]`
SAYS_SOMETHING = re.compile(r"[\w\\∞∅]")
# An answer after #### that has more words than this is a sentence.
MOST_WORDS = 2
# a very large or very small number as programs write it: 1e+16, 1.5e-05, 1e-5
PROGRAM_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?[eE](?:[-+]\d+|\d{2,})")
# a command of LaTeX, and a word of at least two letters
COMMAND = re.compile(r"\\text\{[^}]*\}|\\[a-zA-Z]+")
WORD = re.compile(r"[^\W\d_]{2,}")
# the delimiters of a formula that has a line of its own
AROUND_DISPLAY = re.compile(r"^\s*(\\\[|\$\$)?\s*|\s*(\\\]|\$\$)?\s*$")


def problems(split, seed=0, data_names=""):
    """Problems as tasks/_data.py reads them, with INSTRUCTION at the end of the prompt.

    The answer of a problem is a text. Raises ValueError that names the file and line, or the set.
    """
    if not data_names:
        knob = "--train_data" if split == "train" else "--eval_data"
        known = ", ".join(SETS)
        raise ValueError(
            f"task maths needs {knob}: a .jsonl, .json, .csv or .parquet file, a directory of "
            f"them, owner/name of a data set on the hub, or one of {known}"
        )
    for name in data_names.split(",") if split == "train" else []:
        if name in EVALUATION_SETS:
            raise ValueError(
                f"--train_data {name}: this set is for evaluation; to train on it all the same, "
                f"write its whole name, {SETS[name]}; sets for training are "
                f"{', '.join(x for x in SETS if x not in EVALUATION_SETS)}"
            )
    all_problems = data.problems(data_names, split, SETS, finish)
    tried = all_problems[:: len(all_problems) // MOST_TRIED + 1]
    words = [x for x in tried if not has_value(x["answer"], prompt_text(x["prompt"]))]
    if words:
        print(
            f"{data_names}: {len(words)} of the {len(tried)} reference answers that were tried "
            "cannot be read as a formula: only the same words count as right; the first is "
            f"{words[0]['where']}: {words[0]['answer'][:80]!r}",
            flush=True,
        )
    return all_problems


def finish(problem):
    """Add the instruction and the reference to a problem of tasks/_data.py.

    Raises ValueError if the problem has no final answer.
    """
    if "answer" not in problem:
        columns = ", ".join(data.ANSWER_COLUMNS)
        # a name such as ' answer' is seen only in quotation marks
        names = ", ".join(repr(name) for name in problem if name not in data.OWN_NAMES)
        raise ValueError(
            f"no column holds the answer: it must be called one of {columns}; the row has {names}"
        )
    if "\\boxed" not in prompt_text(problem["prompt"]):
        problem["prompt"] = with_instruction(problem["prompt"], INSTRUCTION)
    try:
        may_be_solution = problem["answer_column"] in ("solution", data.LAST_MESSAGE)
        problem["answer"] = reference(data.as_text(problem["answer"]), may_be_solution)
    except ValueError as e:
        raise ValueError(f"the answer cannot be used: {e}") from None


def reference(text, may_be_solution=False):
    """The final answer in the answer or the solution of a data set.

    It is the text after the last ####, without the commas in large numbers (GSM8K), or else the
    content of the last box, or else the whole text. may_be_solution: the whole text counts only if
    it is no sentence. Raises ValueError if there is no final answer, or several.

    "so 14 / 2 = 7\n#### 1,234" -> "1234";  "Thus $x = \\boxed{5}$." -> "5";  "5" -> "5"
    """
    solution = outside_of_thinking(text).replace("\\fbox", "\\boxed")
    after = solution.rpartition("####")[2].strip() if "####" in solution else ""
    # Four # also begin a heading, with the answer in a box below it.
    if "\\boxed" in solution and (not after or "\\boxed" in after or "\n" in after):
        answer = final_answer(solution)
        if answer != final_answer(solution[solution.rindex("\\boxed") :]):
            raise ValueError(
                f"its last boxes are several answers, {answer!r}, so that none is the final one: "
                "write the final answer into a column 'answer'"
            )
    elif "####" in solution:
        answer = LARGE_NUMBER.sub(lambda number: number[0].replace(",", ""), after)
        # `18 dollars` and `10:30 AM` are answers, `Result: 18` is a sentence.
        count = len(WORD.findall(COMMAND.sub(" ", answer)))
        may_be_solution = count > MOST_WORDS or not re.match(r"[-+$\\(\d.]", answer)
    else:
        answer = AROUND_DISPLAY.sub("", solution)
    if "\\begin{" in answer:
        # a matrix or a system may be written over several lines
        answer = " ".join(answer.split())
    words = WORD.findall(COMMAND.sub(" ", answer)) if may_be_solution else []
    is_sentence = bool(words) and words != [answer] and "\\boxed" not in solution
    if not answer or "\n" in answer or len(answer) > LONGEST_REFERENCE or is_sentence:
        raise ValueError(
            "it must be the final answer alone, in one line of at most "
            f"{LONGEST_REFERENCE} characters, or a solution that has it in \\boxed{{...}} or after "
            f"####; it is {text[:100]!r}"
        )
    if PROGRAM_NUMBER.fullmatch(answer) and abs(int(answer.lower().rpartition("e")[2])) < 100:
        return format(Decimal(answer), "f")
    # Python writes None where there is no answer; \text{None} is one.
    bare = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", answer).strip(" $.").lower()
    is_empty = answer == "None" or not SAYS_SOMETHING.search(answer)
    if is_empty or bare in PLACEHOLDERS or re.search(r"\banswer\b", answer, re.IGNORECASE):
        raise ValueError(f"it must be the final answer alone, it is {answer[:100]!r}")
    if len(answer) > 2 and answer[0] == answer[-1] and answer[0] in "\"'`":
        raise ValueError(f"it is in quotation marks, {answer[:100]!r}: write it without them")
    return answer


# ---- the answer of a completion


def answer(problem, completion):
    """The vote of an attempt (maj@k): its final answer in one spelling. None: no vote."""
    try:
        return comparable_text(final_answer(completion)) or None
    except UNCLEAR:
        return None


def reward(problem, completion, finished):
    """The outcome of an attempt: correct | wrong | no_answer | unparsable."""
    try:
        given = final_answer(completion)
        if not given:
            return "no_answer"
        prompt = prompt_text(problem.get("prompt", ""))
        return "correct" if is_same_answer(problem["answer"], given, prompt) else "wrong"
    except UNCLEAR:
        return "unparsable"


def demonstration(rng):
    """One example for a tiny base model: a sum, which is right in four of five examples.

    The model is there to try the task without a hub, and not to learn mathematics.
    """
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    total = a + b
    if rng.random() >= 0.8:
        total = rng.randint(1, 100)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{total}}}", True)]


def main(reference_text, completion, prompt=""):
    """Print the outcome of a completion, and the answers that were compared."""
    try:
        answer = reference(reference_text)
    except ValueError as e:
        sys.exit(f"maths: the reference answer cannot be used: {e}")
    print(f"outcome: {reward(dict(prompt=prompt, answer=answer), completion, True)}")
    print(f"reference answer: {answer}")
    try:
        given = final_answer(completion)
        print(f"answer of the completion: {given or 'none, it has no box'}")
        if given:
            is_same_answer(answer, given, prompt)
    except UNCLEAR as e:
        print(f"the answer of the completion cannot be read: {e}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m tasks.maths REFERENCE COMPLETION [PROMPT]")
    main(*sys.argv[1:])
