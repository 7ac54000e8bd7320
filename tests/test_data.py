"""Data files: which columns are read as prompt and answer, and what is refused with its file and
line.

The files are real ones in a temporary directory. Data sets of the hub are FAKE rows.
"""

import csv
import gzip
import json
import re

import pytest

import config as cfg
import tasks
from conftest import ROOT
from plumbing.problems import in_both, load_problems
from tasks import _data, maths

QUESTION = "What is 2 + 3?"
ASKED = QUESTION + maths.INSTRUCTION
MESSAGES = [{"role": "user", "content": QUESTION}]
ROW = {"question": QUESTION, "answer": "5"}


def write(path, rows):
    """Write a data file in the format that its name says; return its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    if kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        text = path.read_text()
    else:
        lines = [json.dumps(row) for row in rows]
        text = json.dumps(rows, indent=1) if kind == "json" else "\n".join(lines) + "\n"
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


def read(names, split="train"):
    """Return the problems of the task maths that are read from these files or data sets."""
    knob = {"train": "train_data", "test": "eval_data"}[split]
    return load_problems(cfg.Config(task="maths", **{knob: str(names)}), split)["maths"]


# Name of a convention -> (row, prompt, answer, source); the source None stands for the file's name
CONVENTIONS = {
    "verl": (
        dict(
            data_source="openai/gsm8k",
            prompt=MESSAGES,
            ability="math",
            reward_model={"ground_truth": "5", "style": "rule"},
            extra_info={"index": 3, "split": "train"},
        ),
        [{"role": "user", "content": ASKED}],
        "5",
        "openai/gsm8k",
    ),
    "trl": (dict(prompt=QUESTION, answer="5", difficulty=3), ASKED, "5", None),
    "trl messages": (
        dict(prompt=MESSAGES, ground_truth="5"),
        [{"role": "user", "content": ASKED}],
        "5",
        None,
    ),
    "openai": (
        dict(messages=[*MESSAGES, {"role": "assistant", "content": "It is $\\boxed{5}$."}]),
        [{"role": "user", "content": ASKED}],
        "5",
        None,
    ),
    "open-instruct": (
        dict(messages=MESSAGES, ground_truth="5", dataset="gsm8k"),
        [{"role": "user", "content": ASKED}],
        "5",
        "gsm8k",
    ),
    "slime": (dict(prompt=QUESTION, label="5", metadata={"a": 1}), ASKED, "5", None),
    "numina": (
        dict(
            source="olympiads",
            problem=QUESTION,
            solution="So $2 + 3 = \\boxed{5}$.",
            messages=[*MESSAGES, {"role": "assistant", "content": "\\boxed{5}"}],
        ),
        ASKED,
        "5",
        "olympiads",
    ),
    "openr1": (
        dict(problem=QUESTION, solution="long \\boxed{6}", answer="5", uuid="u"),
        ASKED,
        "5",
        None,
    ),
    "gsm8k": (
        dict(question=QUESTION, answer="2 + 3 = <<2+3=5>>5\n#### 1,005"),
        ASKED,
        "1005",
        None,
    ),
    "orz": (
        {"0": {"from": "human", "value": QUESTION}, "1": {"ground_truth": {"value": "5"}}},
        ASKED,
        "5",
        None,
    ),
}


def test_a_single_object_over_several_lines_may_be_compressed(tmp_path):
    text = json.dumps(ROW, indent=1).encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    assert [problem["answer"] for problem in read(tmp_path / "a.json.gz")] == ["5"]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "jsonl.gz"])
def test_conventions_are_read_from_their_columns(convention, ending, tmp_path):
    row, prompt, answer, source = CONVENTIONS[convention]
    problems = read(write(tmp_path / f"mine.{ending}", [row, row]))
    assert len(problems) == 2
    for problem in problems:
        assert (problem["prompt"], problem["answer"]) == (prompt, answer)
        assert problem["source"] == (source or "mine")
    # All other columns reach the reward under their own names
    named = {"prompt", "answer", "source", "messages"}
    for name in row.keys() - named:
        assert problems[0][name] == row[name]


def test_a_row_is_named_by_its_file_and_line(tmp_path):
    rows = [ROW, ROW, ROW]
    for name, wheres in [
        ("a.jsonl", [":1", ":2", ":3"]),
        ("a.json", [":2", ":6", ":10"]),
        ("a.csv", [":2", ":3", ":4"]),
        ("a.csv.gz", [":2", ":3", ":4"]),
        ("a.parquet", [": row 1", ": row 2", ": row 3"]),
    ]:
        path = write(tmp_path / name, rows)
        assert [problem["where"] for problem in read(path)] == [path + where for where in wheres]


@pytest.mark.parametrize(
    "value,answer",
    [
        (5, "5"),
        (5.0, "5"),
        (-0.25, "-0.25"),
        (1e16, "10000000000000000"),
        (1e-05, "0.00001"),
        (10**30, "1" + 30 * "0"),
        (["5"], "5"),
        ([5], "5"),
        ({"value": "5"}, "5"),
        ('["\\\\frac{1}{2}"]', "\\frac{1}{2}"),
        ("[5, 6]", "[5, 6]"),
        ("[34]", "34"),
        (" 5\n", "5"),
        ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\[\n5\n\\]", "5"),
        ("$$5$$", "5"),
        ("$5$", "$5$"),
        ("\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_answers_that_are_texts_or_numbers_are_read(value, answer, tmp_path):
    [problem] = read(write(tmp_path / "a.jsonl", [dict(question="q", answer=value)]))
    assert problem["answer"] == answer


@pytest.mark.parametrize(
    "value,complaint",
    [
        (float("nan"), "must be a text or a number, it is float 'nan'"),
        (float("inf"), "must be a text or a number, it is float 'inf'"),
        (True, "must be a text or a number, it is bool 'True'"),
        (["5", "6"], "must be a text or a number, it is list"),
        ('["5", "6"]', "it is a list or an object that was written as a text"),
        (["\frac12"], "the answer has the character '.x0c' before 'rac12'"),
        ('["\frac12"]', "the answer has the character '.x0c' before 'rac12'"),
        ([], "must be a text or a number, it is list"),
        ({"a": 5}, "must be a text or a number, it is dict"),
        (None, "column 'answer' is empty"),
        (" ", "column 'answer' is empty"),
        ("NaN", "it is empty: 'NaN'"),
        ("First this,\nthen that.", "must be the final answer alone, in one line"),
        ("The answer is 5.", "must be the final answer alone"),
        (600 * "1", "must be the final answer alone, in one line"),
        ("#### ", "must be the final answer alone, in one line"),
    ],
)
def test_answers_of_other_types_are_refused_by_file_and_line(value, complaint, tmp_path):
    path = write(tmp_path / "a.jsonl", [ROW, dict(question="q", answer=value)])
    with pytest.raises(cfg.ConfigError, match=f"{path}:2: .*{complaint}"):
        read(path)


def test_bytes_in_parquet_are_refused(tmp_path):
    for row in (dict(question=b"q", answer="5"), dict(question="q", answer=b"5")):
        path = write(tmp_path / "a.parquet", [row])
        with pytest.raises(cfg.ConfigError, match=f"{path}: row 1: .* it is bytes"):
            read(path)


@pytest.mark.parametrize(
    "prompt,complaint",
    [
        (["a"], "message 1 of column 'prompt' must be an object with a content and a role"),
        ([{"role": "bot", "content": "a"}], "one of system, developer, user, assistant, tool"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "no images or tool calls"),
        ([{"role": "user", "content": ""}], "message 1 of column 'prompt' is empty"),
        ([{"role": "user", "content": 5}], "must have a text as its content"),
        ([{"role": "system", "content": "a"}], "no message after the one of the system"),
        ([{"role": "assistant", "content": "a"}], "last message of a prompt must be the user's"),
        ([], "must be a text or a list of messages, it is list"),
        (5, "must be a text or a list of messages, it is int '5'"),
        ({"role": "user"}, "must be a text or a list of messages, it is dict"),
        (" ", "column 'prompt' is empty"),
        ("a \ud800", "'prompt' has half of a character .a lone surrogate, '.ud800'"),
        ([{"role": "user", "content": "\udfff"}], "'prompt' has half of a character"),
    ],
)
def test_prompts_that_are_neither_text_nor_messages_are_named(prompt, complaint, tmp_path):
    rows = [dict(prompt=x, answer="5") for x in (QUESTION, prompt)]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(cfg.ConfigError, match=f"{path}:2: .*{complaint}"):
        read(path)


def test_text_parts_of_a_message_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    row = dict(prompt=[{"role": "user", "content": parts}], answer=5)
    assert read(write(tmp_path / "a.jsonl", [row]))[0]["prompt"][0]["content"] == ASKED


@pytest.mark.parametrize(
    "rows,complaint",
    [
        ([dict(text="q", answer="5")], ":1: no column holds the prompt: it must be called one of"),
        ([dict(question="q", result="5")], ":1: .*no column holds the answer: it must be called"),
        (
            [dict(instruction="i", input="q", answer="5")],
            ":1: the columns 'input' and 'instruction' make one prompt",
        ),
        ([ROW, dict(problem="q", answer="5")], ":2: the columns of this row mean something else"),
        ([ROW, dict(ROW, final_answer="6"), dict(ROW, problem="p")], ":3: the columns of this row"),
        ([dict(ROW, choices=["4", "5"])], ":1: the columns 'question' and 'choices' make one"),
        ([dict(ROW, answer_choices=["4", "5"])], ":1: the columns 'question' and 'answer_choices'"),
        ([dict(ROW, options_text=["4", "5"])], ":1: the columns 'question' and 'options_text'"),
        ([dict(ROW, option_list=["4", "5"])], ":1: the columns 'question' and 'option_list'"),
        ([dict(ROW, A="0", B="1", C="2")], ":1: the columns 'question' and 'A' make one prompt"),
        (
            [dict(ROW, option_a="True", option_b="False")],
            ":1: the columns 'question' and 'option_a'",
        ),
        (
            [dict(ROW, question="<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n")],
            ":1: the prompt begins with '<.im_start.>', so it went through a chat template",
        ),
        ([dict(ROW, question="[INST] 2 + 3? [/INST]")], ":1: the prompt begins with '.INST.', so"),
        ([{"question": "q", " answer": "5"}], ":1: .*the row has 'question', ' answer'"),
        ([dict(ROW, option_a="4", option_b="5")], ":1: the columns 'question' and 'option_a' make"),
        ([dict(ROW, A="4", B="5")], ":1: the columns 'question' and 'A' make one prompt"),
        (
            [dict(prompt="q (A) 4 (B) 5", choices=["4", "5"], label=1)],
            ":1: column 'label' has the number 1 beside the choices in",
        ),
        (
            [dict(prompt="q", options=["x", "y"], answer="1")],
            ":1: column 'answer' has the number 1 beside the choices in",
        ),
        ([dict(ROW, answer="\frac12")], ":1: the answer has the character '.x0c' before 'rac12'"),
        (
            [dict(ROW, question="in \boxed{}")],
            ":1: the prompt has the character '.x08' before 'oxed",
        ),
        ([dict(ROW, image="x.png")], ":1: column 'image' has an image"),
        ([dict(ROW, decoded_image="x.png")], ":1: column 'decoded_image' has an image"),
        ([dict(ROW, has_image=True)], ":1: column 'has_image' has an image"),
        ([dict(ROW, has_image="True")], ":1: column 'has_image' has an image"),
        ([dict(ROW, num_images=1)], ":1: column 'num_images' has an image"),
        ([dict(ROW, image_1="x.png")], ":1: column 'image_1' has an image"),
        ([dict(ROW, question="See <image 1>.")], ":1: the prompt has an image, '<image 1>'"),
        ([dict(ROW, question="![](https://a.b/c.jpg) What?")], ":1: the prompt has an image"),
        ([dict(ROW, Body="A story.")], ":1: the columns 'question' and 'Body' make one prompt"),
        ([dict(ROW, article="A story.")], ":1: the columns 'question' and 'article' make one"),
        ([dict(ROW, endings=["a", "b"])], ":1: the columns 'question' and 'endings' make one"),
        ([dict(ROW, a="4", b="5")], ":1: the columns 'question' and 'a' make one prompt"),
        ([dict(ROW, opa="4")], ":1: the columns 'question' and 'opa' make one prompt"),
        (
            [dict(prompt="q", choices="['x', 'y']", answer=1)],
            ":1: column 'answer' has the number 1 beside the choices in 'choices'",
        ),
        (
            [dict(prompt="q", option_a="x", option_b="y", answer=1)],
            ":1: column 'answer' has the number 1 beside the choices in 'option_a'",
        ),
        (
            [dict(prompt="q", choices={"A": "12 apples", "B": "3"}, answer="1")],
            ":1: column 'answer' has the number 1 beside the choices in 'choices'",
        ),
        (
            [dict(prompt="q", choices=["1", "2", "3"], answer="2")],
            ":1: column 'answer' has the number 2 beside the choices in 'choices'",
        ),
        ([dict(ROW, answer="\tfrac{1}{2}")], ":1: the answer has the character '.t' before 'frac"),
        ([dict(ROW, answer="2\tan x")], ":1: the answer has the character '.t' before 'an x'"),
        ([dict(ROW, answer="\neq 3")], ":1: the answer has the character '.n' before 'eq 3'"),
        ([dict(ROW, question="\triangle ABC")], ":1: the prompt has the character '.t' before 'ri"),
        ([ROW, dict(question="q")], ":2: no column 'answer', which the first row has"),
        ([dict(ROW, where="here")], ":1: column 'where' has a name that every problem uses"),
        ([dict(ROW, source=5)], ":1: column 'source' must be a text, it is int '5'"),
        ([ROW, ["q", "5"]], ":2: a row must be a JSON object, this is list"),
    ],
)
def test_rows_whose_meaning_is_not_certain_are_refused(rows, complaint, tmp_path):
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(cfg.ConfigError, match=path + complaint):
        read(path)


@pytest.mark.parametrize(
    "row,answer",
    [
        (dict(ROW, A="what is A?"), "5"),
        (dict(ROW, has_image="False", image="None", context="N/A"), "5"),
        (dict(ROW, has_image=False, options=[]), "5"),
        (dict(ROW, num_choices=4, has_options=1, answer_choices="[]"), "5"),
        (dict(ROW, model_candidates=["4", "5"], possible_answers=["5", "5.0"]), "5"),
        (dict(ROW, question="What does <|user|> mean, and [INST] in assembler?"), "5"),
        (dict(ROW, answer="[12345678901234567890.5]"), "12345678901234567890.5"),
        (dict(prompt="q (A) 4 (B) 5", choices=["4", "5"], answer="B"), "B"),
        (dict(prompt="q", choices=["4", "5"], answer="5"), "5"),
        (dict(prompt="q", choices={"text": ["x", "y"], "label": ["1", "2"]}, answer="2"), "2"),
        (dict(ROW, question="a table:\ttext, \tan, \r\nend"), "5"),
    ],
)
def test_rows_whose_meaning_is_certain_are_read(row, answer, tmp_path):
    assert read(write(tmp_path / "a.jsonl", [row]))[0]["answer"] == answer


@pytest.mark.parametrize(
    "name,text,complaint",
    [
        ("a.jsonl", '{"question": "q", "answer"\n', ":1: not valid JSON"),
        ("a.json", '[{"question": "q", "answer": 1},\n{"question":}]', ":2: not valid JSON"),
        ("a.json", '[{"question": "q", "answer": 1}\n{"question": "r"}]', ":1: not valid JSON"),
        ("a.json", '[{"question": "q", "answer": 1}]\n[]', ":1: not valid JSON"),
        ("a.json", "[]", ": no problems in it"),
        ("a.json", '{\n "question": "q\n}', ":2: not valid JSON"),
        ("a.jsonl", '{"question": "q", "answer": 1, "answer": 2}', ":1: an object has 'answer' tw"),
        ("a.jsonl", '{"question": "q", "answer": ' + 3000 * "[", ":1: maximum recursion depth"),
        ("a.csv", "question,answer\na,1\n\n\nb\n", ":5: it has 1 values, and the first line has 2"),
        ("a.csv", "question,answer\na,1,2\n", ":2: it has 3 values, and the first line has 2"),
        ("a.csv", "\nquestion,answer\na,1\n", ":1: the first line must have the names"),
        ("a.csv", 'question,answer\n"a,1\n', ":2: not valid CSV"),
        ("a.csv", "question,answer,answer\na,1,2\n", ":1: two columns have the same name"),
        ("a.jsonl.gz", "no gzip", " cannot be read"),
        ("a.txt", "q", ": its name must end in .jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, text, complaint, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(cfg.ConfigError, match=f"{path}{complaint}"):
        read(path)


@pytest.mark.parametrize(
    "solution",
    [
        "We add and get 5.",
        "2+3 is 5.",
        "Final: 5",
        "By inspection $n=5$ works.",
        "\u7b54\u6848:5",
        "#### Final Result: 5",
        "We get $x=\\boxed{5}$ and then the sum is $\\boxed{6}$.",
        "proof",
        "notfound",
        "?",
        '"5"',
        "['5']",
        "{'value': '5'}",
        '{"inputs": ["1"]}',
        "\u200b",
        "N/A",
    ],
)
def test_solutions_without_one_final_answer_are_refused(solution, tmp_path):
    path = write(tmp_path / "a.jsonl", [dict(question="q", solution=solution)])
    with pytest.raises(cfg.ConfigError, match=f"{path}:1: "):
        read(path)


@pytest.mark.parametrize(
    "solution,answer",
    [
        ("### Step 1\nAdd\n#### Result: \\boxed{5}", "5"),
        ("#### Step 1\nAdd 2 and 3.\nSo \\boxed{5}.", "5"),
        ("so $\\fbox{5}$.", "5"),
        ("#### 5,100,2000", "5,100,2000"),
        ("so\n#### 18 dollars", "18 dollars"),
        ("so\n#### 10:30 AM", "10:30 AM"),
        ("#### 2sqrt(3)", "2sqrt(3)"),
        ("1e-5", "0.00001"),
        ("1e+5", "100000"),
        ("#### 0,125", "0,125"),
        ("#### (1,234)", "(1,234)"),
        ("#### $1,234,567.50", "$1234567.50"),
        ("<think>maybe 4</think>5", "5"),
        ("5\u200b", "5"),
        ("blue", "blue"),
        ("\\text{five apples}", "\\text{five apples}"),
        ("$\\frac{1}{2}$", "$\\frac{1}{2}$"),
        (10**400, "1" + 400 * "0"),
    ],
)
def test_the_final_answer_of_a_solution(solution, answer, tmp_path):
    [problem] = read(write(tmp_path / "a.jsonl", [dict(question="q", solution=solution)]))
    assert problem["answer"] == answer


def test_numbers_of_32_bits_have_their_own_digits(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    for name, value, kind in (
        ("answer", 0.1, pa.float32()),
        ("answer", [0.1], pa.list_(pa.float32())),
        ("reward_model", {"ground_truth": 0.1}, pa.struct([("ground_truth", pa.float32())])),
    ):
        columns = {"question": ["q"], name: pa.array([value], kind)}
        pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet")[0]["answer"] == "0.1"


def test_a_column_without_a_name_is_no_source(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",problem,answer\n0,q0,1\n1,q1,2\n")
    assert {problem["source"] for problem in read(path)} == {"a"}


def test_a_column_that_was_flattened_is_found_by_its_whole_name(tmp_path):
    row = {"prompt": "q", "reward_model.ground_truth": "5", "data_source": ["math"]}
    [problem] = read(write(tmp_path / "a.jsonl", [row]))
    assert (problem["answer"], problem["source"]) == ("5", "math")


@pytest.mark.parametrize("prompt", ["[{'content': 'q', 'role': 'user'}]", ' [{"role": "user"}]'])
def test_messages_that_were_written_as_a_text_are_refused(prompt, tmp_path):
    path = write(tmp_path / "a.csv", [dict(prompt=prompt, answer="5")])
    with pytest.raises(cfg.ConfigError, match=f"{path}:2: .*list of messages that was written"):
        read(path)


def test_a_prompt_ends_with_a_message_of_the_user(tmp_path):
    prefill = [*MESSAGES, {"role": "assistant", "content": "Let me think."}]
    path = write(tmp_path / "a.jsonl", [dict(prompt=prefill, answer="5")])
    with pytest.raises(cfg.ConfigError, match="must be the user's, it is the assistant's"):
        read(path)
    # A conversation with an answer of its own column ends with an answer that is left out.
    [problem] = read(write(tmp_path / "b.jsonl", [dict(messages=prefill, ground_truth="5")]))
    assert [message["role"] for message in problem["prompt"]] == ["user"]


def test_several_files_may_have_one_name_if_their_rows_name_different_sources(tmp_path):
    names = []
    for source in ("gsm8k", "math"):
        rows = [dict(ROW, data_source=source)]
        names.append(write(tmp_path / source / "test.jsonl", rows))
    assert [problem["source"] for problem in read(", ".join(names))] == ["gsm8k", "math"]
    other = write(tmp_path / "other" / "b.jsonl", [dict(ROW, data_source="math")])
    with pytest.raises(cfg.ConfigError, match="have a set called math, and evaluations"):
        read(f"{names[1]},{other}", "test")
    # Nothing tells the sets of training problems apart.
    assert len(read(f"{names[1]},{other}")) == 2


def test_a_byte_order_mark_and_separators_within_texts_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(dict(ROW, question="a\u2028b"), ensure_ascii=False), "utf-8-sig")
    assert read(path)[0]["prompt"].startswith("a\u2028b")
    path = write(tmp_path / "a.csv", [dict(question='say "a",\nthen b', answer="1")])
    assert read(path)[0]["prompt"].startswith('say "a",\nthen b')


def test_a_directory_is_all_files_below_it_or_those_of_one_split(tmp_path):
    folder = tmp_path / "set"
    for name, answer in [("train-1", 2), ("train-0", 1), ("deep/train-2", 3), ("test-0", 9)]:
        write(folder / f"{name}.jsonl", [dict(question="q", answer=answer)])
    (folder / "dataset_info.json").write_text("{}")
    (folder / ".hidden.jsonl").write_text("nonsense")
    assert [p["answer"] for p in read(f"{folder}@train")] == ["3", "1", "2"]
    assert [(p["answer"], p["source"]) for p in read(f"{folder}@test", "test")] == [("9", "set")]
    with pytest.raises(cfg.ConfigError, match=f"{folder}: its files are of several splits"):
        read(folder)
    with pytest.raises(cfg.ConfigError, match="whose name begins with 'dev'"):
        read(f"{folder}@dev")
    for split in ("train", "test"):
        write(folder / split / "algebra.jsonl", [ROW])
    with pytest.raises(cfg.ConfigError, match=f"several splits, test, train: .*{folder}/test"):
        read(f"{folder}@algebra")
    write(folder / "train-3.csv", [ROW])
    with pytest.raises(cfg.ConfigError, match="files of several kinds, .csv, .jsonl"):
        read(f"{folder}@train")


@pytest.mark.parametrize(
    "train,test",
    [
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
        ("a.train.jsonl", "a.heldout.jsonl"),
        ("training/a.jsonl", "testing/a.jsonl"),
        ("Train.jsonl", "Test.jsonl"),
        # The outermost name that names a split counts.
        ("train/test_cases.jsonl", "test/train_0.jsonl"),
    ],
)
def test_the_split_of_a_file_is_a_part_of_its_name(train, test, tmp_path):
    write(tmp_path / "set" / train, [dict(ROW, answer=1)])
    write(tmp_path / "set" / test, [dict(ROW, answer=2)])
    with pytest.raises(cfg.ConfigError, match="its files are of several splits"):
        read(tmp_path / "set")
    assert [problem["answer"] for problem in read(f"{tmp_path}/set@train")] == ["1"]


@pytest.mark.parametrize(
    "name", ["a-1.jsonl.zst", "a-2.ndjson", "a-3.tsv", "a-4.jsonl", "a.jsonl.gz"]
)
def test_files_of_a_directory_that_would_be_skipped_are_named(name, tmp_path):
    write(tmp_path / "set" / "a.jsonl", [ROW])
    if name == "a-4.jsonl":
        (tmp_path / "set" / name).symlink_to(tmp_path / "missing")
    else:
        (tmp_path / "set" / name).touch()
    with pytest.raises(cfg.ConfigError, match=f"{tmp_path}/set/{name}: "):
        read(tmp_path / "set")


def test_hidden_files_and_links_that_lead_back_are_left_out(tmp_path):
    write(tmp_path / "set" / "a.jsonl", [ROW])
    write(tmp_path / "set" / ".cache" / "b.jsonl.zst", [ROW])
    (tmp_path / "set" / ".missing.jsonl").symlink_to(tmp_path / "missing")
    (tmp_path / "set" / "back").symlink_to(tmp_path / "set")
    assert len(read(tmp_path / "set")) == 1


def test_a_part_of_a_directory_may_be_any_beginning_of_a_name(tmp_path):
    for number, name in enumerate(["training/a", "training/train-1", "testing/train-1"]):
        write(tmp_path / "set" / f"{name}.jsonl", [dict(ROW, answer=number)])
    for part, answers in [("training", ["0", "1"]), ("train", ["0", "1"]), ("test", ["2"])]:
        assert [problem["answer"] for problem in read(f"{tmp_path}/set@{part}")] == answers


def test_a_folder_that_is_a_link_and_a_file_of_one_object_are_read(tmp_path):
    folder = tmp_path / "algebra"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps(dict(problem="q", solution="\\boxed{5}"), indent=1))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(folder)
    assert [problem["answer"] for problem in read(tmp_path / "set")] == ["5"]


def test_a_path_comes_before_a_name_on_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(_data, "hub_rows", lambda *name: asked.append(name) or [("hub", ROW)])
    monkeypatch.chdir(tmp_path)
    assert read("owner/name")[0]["where"] == "hub"
    read("owner/name:main@train[:50%]", "test")
    read("gsm8k", "test")
    assert asked == [
        ("owner/name", None, "train"),
        ("owner/name", "main", "train[:50%]"),
        ("openai/gsm8k", "main", "test"),
    ]
    path = write(tmp_path / "owner" / "name" / "a.jsonl", [ROW])
    assert read("owner/name")[0]["where"] == f"{path.removeprefix(str(tmp_path) + '/')}:1"
    with pytest.raises(cfg.ConfigError, match="nothing.jsonl: no such file or directory"):
        read("nothing.jsonl")
    with pytest.raises(cfg.ConfigError, match="--train_data a.jsonl,: a name between two commas"):
        read("a.jsonl,")


def test_a_set_of_the_hub_leaves_out_rows_without_an_answer_and_counts_them(monkeypatch, capsys):
    rows = [("hub: row 1", ROW), ("hub: row 2", dict(question="q", answer="")), ("hub: row 3", ROW)]
    monkeypatch.setattr(_data, "hub_rows", lambda *name: rows)
    assert len(read("owner/name")) == 2
    said = capsys.readouterr().out
    assert "1 of 3 rows cannot be used and are left out, the first: hub: row 2: column" in said
    rows[2] = rows[1]
    with pytest.raises(cfg.ConfigError, match="owner/name: 2 of 3 rows cannot be used, the first"):
        read("owner/name")


def test_source_column_with_many_values_is_ignored(tmp_path):
    rows = [dict(ROW, source=f"https://example.org/{n}") for n in range(30)]
    problems = read(write(tmp_path / "a.jsonl", rows))
    assert {p["source"] for p in problems} == {"a"} and "source from" not in problems[0]["read_as"]
    problems = read(write(tmp_path / "b.jsonl", [dict(ROW, source=None), ROW | {"source": "x"}]))
    assert {p["source"] for p in problems} == {"b"}


def test_problem_names_the_columns_that_it_was_read_from(tmp_path):
    [problem] = read(write(tmp_path / "a.jsonl", [CONVENTIONS["numina"][0]]))
    assert problem["read_as"] == (
        "prompt from 'problem', answer from 'solution', source from 'source', not from 'messages'"
    )


def test_an_instruction_that_a_prompt_has_is_not_given_twice(tmp_path):
    row = dict(question="q? Answer in \\boxed{}.", answer=5)
    assert read(write(tmp_path / "a.jsonl", [row]))[0]["prompt"] == "q? Answer in \\boxed{}."


def test_the_task_of_the_documentation_reads_a_file(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "data.md").read_text().partition("## In a task of your own")[2]
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    (tmp_path / "mine_own.py").write_text(code)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    path = write(tmp_path / "a.csv", [dict(question=QUESTION, answer="5", level="easy")])
    config = cfg.Config(task="mine_own", train_data=path)
    [problem] = load_problems(config, "train")["mine_own"]
    assert problem["prompt"] == f"{QUESTION}\nAnswer with one word."
    assert problem["level"] == "easy"
    reward = cfg.load_task("mine_own").reward
    assert (reward(problem, " 5\n", True), reward(problem, "6", True)) == (1.0, 0.0)


def test_problems_in_both_splits_are_found_by_prompt_and_in_games_by_all_columns():
    one, two = dict(prompt="a", answer="1", where="f:1"), dict(prompt="b", answer="1", where="f:2")
    assert in_both([one, two], [dict(one, where="g:1"), dict(two, prompt="c")]) == 1
    game = [dict(prompt="guess", number=n) for n in range(10)]
    assert in_both(game, game[:3] + [dict(prompt="guess", number=99)]) == 3
    # A single message of the user is the same as its text, and the order of keys is no matter.
    message = [{"content": "a ", "role": "user"}]
    assert in_both([dict(one, prompt=message)], [one]) == 1
    several = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    turned = [dict(reversed(x.items())) for x in several]
    assert in_both([dict(one, prompt=several)], [dict(one, prompt=turned)]) == 1
    thrice = [dict(one, source="f", read_as="x", where=f"f:{n}") for n in range(3)]
    assert in_both(thrice, [dict(one, source="g", read_as="y")]) == 1
    # Rows that repeat a few problems, with a number each.
    repeated = [dict(one, extra_info={"index": n}) for n in range(9)]
    assert in_both(repeated, [dict(one, extra_info={"index": 99}), dict(one, answer="2")]) == 1
