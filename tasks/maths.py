"""Mathematics with a final answer in \\boxed{}: the task of the paper.

`--train_data` and `--eval_data`: short names of data sets below, files, directories, or data sets on the hub, with commas
between them (tasks/_data.py). Evaluations report each by its name.

`bash run.sh toy --task maths --train_data tests/maths.jsonl --eval_data tests/maths.jsonl --max_model_len 400` runs it
without a hub. tasks/_grading.py finds the answer of a completion and compares it with the reference, exactly. It accepts
only what can be read in one way, as a reward that guesses is exploited; anything else is `unparsable`.
`python bench/rewards.py` prints how often that is wrong. Deliberately absent: answers without \\boxed{}, partial credit.
"""

import re
import string

from plumbing.prompts import prompt_text, with_instruction
from tasks import _data as data
from tasks._grading import UNCLEAR, comparable_text, final_answer, is_same_answer

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
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
# A reference with more characters than this is a solution, not its final answer.
LONGEST_REFERENCE = 500
# what stands around mathematics that has a line of its own
AROUND_DISPLAY = re.compile(r"^\s*(\\\[|\$\$)?\s*|\s*(\\\]|\$\$)?\s*$")


def problems(split, seed=0, data_names=""):
    """Problems as tasks/_data.py reads them, with INSTRUCTION at the end of the prompt and a text as answer.

    Raises ValueError that names the file and line, or the set.
    """
    if not data_names:
        knob = "--train_data" if split == "train" else "--eval_data"
        known = ", ".join(SETS)
        raise ValueError(
            f"task maths needs {knob}: a .jsonl, .json, .csv or .parquet file, a directory of them, owner/name of a "
            f"data set on the hub, or one of {known}"
        )
    return data.problems(data_names, split, SETS, finish)


def finish(problem):
    """Complete a problem of tasks/_data.py: instruction and reference. Raises ValueError if it has no final answer."""
    if "answer" not in problem:
        wanted = ", ".join(data.ANSWER_COLUMNS)
        raise ValueError(f"no column holds the answer: it must be called one of {wanted}")
    if "\\boxed" not in prompt_text(problem["prompt"]):
        problem["prompt"] = with_instruction(problem["prompt"], INSTRUCTION)
    try:
        problem["answer"] = reference(data.as_text(problem["answer"]))
    except ValueError as e:
        raise ValueError(f"the answer cannot be used: {e}") from None


def reference(text):
    """The final answer that a data set's answer or solution states: what follows its last ####, as GSM8K's do, with
    commas in large numbers, or what its last box holds, or all of it. Raises ValueError if that is no final answer.

    "so 14 / 2 = 7\n#### 1,234" -> "1234";  "Thus $x = \\boxed{5}$." -> "5";  "5" -> "5"
    """
    if "####" in text:
        answer = re.sub(r"(?<=\d),(?=\d{3})", "", text.rpartition("####")[2]).strip()
    elif "\\boxed" in text:
        answer = final_answer(text)
    else:
        answer = AROUND_DISPLAY.sub("", text)
    if "\\begin{" in answer:
        # a matrix or a system may be written over several lines
        answer = " ".join(answer.split())
    is_long = "\n" in answer or len(answer) > LONGEST_REFERENCE
    if not answer or is_long or re.search(r"\banswer\b", answer, re.IGNORECASE):
        raise ValueError(
            f"it must be the final answer alone, in one line of at most {LONGEST_REFERENCE} characters, or a solution "
            f"that ends with \\boxed{{...}} or ####; it is {text[:100]!r}"
        )
    return answer


# ---- the answer of a completion


def answer(problem, completion):
    """What attempts are compared by when they vote (maj@k); None: no vote."""
    try:
        return comparable_text(final_answer(completion)) or None
    except UNCLEAR:
        return None


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    try:
        given = final_answer(completion)
        if not given:
            return "no_answer"
        prompt = prompt_text(problem.get("prompt", ""))
        return "correct" if is_same_answer(problem["answer"], given, prompt) else "wrong"
    except UNCLEAR:
        return "unparsable"


def demonstration(rng):
    """One example for a tiny base model, which is there to run without a hub, not to learn mathematics: a sum, often right."""
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    total = a + b
    if rng.random() >= 0.8:
        total = rng.randint(1, 100)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{total}}}", True)]
