"""Tasks: problems, rewards, hostile answers, data files with mistakes, the tiny base models' tokenizer."""

import json
import random
import shutil
from fractions import Fraction

import pytest

import config as cfg
from conftest import ROOT
from plumbing.problems import load_problems
from plumbing.prompts import Prompter
from tasks import countdown, guess, maths, toy
from tools import base_model

MATHS = ROOT / "tests" / "maths.jsonl"


@pytest.mark.parametrize("task", [toy, countdown])
def test_no_test_problem_is_a_train_problem_and_the_given_answers_are_right(task):
    train, test = task.problems("train", 3), task.problems("test", 3)
    assert (
        not {p["prompt"] for p in train} & {p["prompt"] for p in test}
        and len(train) > 10000
        and len(test) > 100
    )
    assert {task.reward(p, p["answer"], True) for p in train[:300] + test} <= {1.0, "correct"}
    assert task.problems("test", 3) == test and task.problems("test", 4) != test


def test_countdown_arithmetic_by_hand():
    assert countdown.value("(3+5)*7 - 6/4", [3, 4, 5, 6, 7]) == Fraction(109, 2)
    p = dict(numbers=[3, 5, 7], target=26)
    assert countdown.reward(p, "3*7+5", True) == "correct"
    assert countdown.reward(p, "so \\boxed{5 + 3 \\times 7 = 26}, yes", True) == "correct"
    assert (
        countdown.reward(p, "3+5+7", True)
        == countdown.reward(p, "26", True)
        == countdown.reward(p, "3*7+5+3-3", True)
        == "wrong"
    )
    assert countdown.reward(p, "  \n", True) == "no_answer"
    for hostile in (
        "__import__('os').system('x')",
        "3**5**7**9**9",
        "(" * 100 + "3",
        "(" * 100000,
        "3//5",
        "3/(5-5)",
        "3 if 5 else 7",
        "5,7",
        "3_0",
        "+" * 190 + "3",
        "[3]*5",
    ):
        assert countdown.reward(p, hostile, True) in ("unparsable", "wrong")


def test_guess_by_hand():
    p = dict(number=300)
    assert (
        guess.respond(p, ["512"]) == "lower\n"
        and guess.respond(p, ["512", "I say 256!"]) == "higher\n"
    )
    assert guess.respond(p, ["512", "300"]) is None and guess.reward(
        p, ["512", "300"], True
    ) == pytest.approx(1.8)
    assert guess.respond(p, ["no idea"]) is None and guess.reward(p, ["no idea"], True) == 0
    assert guess.respond(p, ["1"] * 12) == "higher\n" and guess.respond(p, ["1"] * 13) is None
    assert (
        guess.reward(p, ["1"] * 12 + ["300"], True)
        == pytest.approx(guess.SUCCESS)
        == pytest.approx(0.7)
    )


def test_maths_accepts_its_own_answers_and_refuses_others():
    found = maths.problems("test", 0, str(MATHS))
    assert len(found) == 48 and found[0]["where"] == f"{MATHS}:1" and found[0]["source"] == "maths"
    for p in found:
        assert (
            maths.reward(p, f"Clearly \\boxed{{987654}}? No: \\boxed{{ {p['answer']} }}.", True)
            == "correct"
        ), p
        assert maths.reward(p, "The answer is \\boxed{987654}", True) == "wrong", p
        assert (
            maths.reward(p, f"The answer is {p['answer']}", True)
            == maths.reward(p, "\\boxed{}", True)
            == "no_answer"
        )


@pytest.mark.parametrize(
    "gold,answer",
    [
        ("\\frac{1}{2}", "0.5"),
        ("x^2-4", "(x-2)(x+2)"),
        ("1234", "1,234"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("5", "x = 5"),
        ("n = 4", "4"),
        ("\\{1, 3\\}", "\\{3,1\\}"),
        ("(2, 5)", "(2,5)"),
        ("B", "\\text{(B)}"),
        ("18", "18 \\text{ dollars}"),
        ("2^{2024}", "4^{1012}"),
    ],
)
def test_maths_knows_equal_forms(gold, answer):
    assert maths.reward({"answer": gold}, f"\\boxed{{{answer}}}", True) == "correct"


PAIRS = [json.loads(line) for line in (ROOT / "tests" / "maths_pairs.jsonl").open()]
CLASSES = sorted({(pair["class"], pair["equal"]) for pair in PAIRS})


@pytest.mark.parametrize("name,equal", CLASSES)
def test_maths_tells_equal_forms_from_near_misses(name, equal):
    """Of answers alike, and of those that are nearly right or say several things, every single one."""
    for pair in PAIRS:
        if (pair["class"], pair["equal"]) == (name, equal):
            completion = pair.get("completion") or f"\\boxed{{{pair['answer']}}}"
            problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
            outcome = maths.reward(problem, completion, True)
            assert (outcome == "correct") == equal, (pair, outcome)


def test_votes_for_the_same_answer_are_judged_alike():
    """A vote is a completion's answer in plain signs: attempts of one vote must have one verdict."""
    verdicts = {}
    for pair in PAIRS[::4]:
        completion = pair.get("completion") or f"\\boxed{{{pair['answer']}}}"
        problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
        vote = maths.answer(problem, completion)
        correct = maths.reward(problem, completion, True) == "correct"
        key = (pair["reference"], problem["prompt"], vote)
        assert verdicts.setdefault(key, correct) == correct, pair
        if vote:
            again = maths.reward(problem, f"\\boxed{{{vote}}}", True)
            assert (again == "correct") == correct, (pair, vote)


def test_boxed_takes_the_last_and_matches_brackets():
    assert (
        maths.boxed("a \\boxed{1} b \\boxed{\\frac{1}{2}} c") == "\\frac{1}{2}"
        and maths.boxed("none") is None
        and maths.boxed("\\boxed{ 3 }") == "3"
    )
    for endless in (
        "\\boxed{1",
        "\\boxed{" + "1" * 600 + "}",
        "\\boxed{" + "{" * 40 + "1" + "}" * 41,
    ):
        with pytest.raises(ValueError):
            maths.boxed(endless)


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "9^{9^{9^9}}",
        "(9^9)^{9^9}",
        "10^{10^{100}}",
        "99999999!",
        "((9!)!)!",
        "x^{1000000}",
        "{" * 400 + "1" + "}" * 400,
        "x^2" * 3500000,
    ],
)
def test_cheap_to_refuse(answer):
    """Those hostile answers that can be told by their looks; the others are for the sandbox."""
    assert maths.reward({"answer": "7"}, f"\\boxed{{{answer}}}", True) == "unparsable"


@pytest.mark.parametrize(
    "name,text,complaint",
    [
        (
            "a.jsonl",
            '{"problem": "p", "answer": "1"}\n{"problem": "p", "answer"\n',
            r"a.jsonl:2: not valid JSON",
        ),
        (
            "a.jsonl",
            '{"problem": "p", "answer": "1"}\n\n["p"]\n',
            r"a.jsonl:3: a line must be a JSON object, this is list",
        ),
        (
            "a.jsonl",
            '{"problem": "p", "answer": "1"}\n{"problem": "p", "solution": "1"}\n',
            r"a.jsonl:2: no column 'answer'; it has problem, solution",
        ),
        ("a.jsonl", '{"problem": " ", "answer": "1"}\n', r"a.jsonl:1: column 'problem' is empty"),
        ("a.jsonl", "", r"a.jsonl: no problems in it"),
        ("a.jsonl", b"\xff\xfe\n", r"a.jsonl:1: not UTF-8"),
        ("a.csv", "problem,answer\n", r"a.csv: the name must end in .jsonl .* or .parquet"),
        ("a.parquet", "nonsense", r"a.parquet: not a readable Parquet file"),
        ("", "", r"no such file"),
    ],
)
def test_mistakes_in_data_are_named_by_file_and_line(tmp_path, name, text, complaint):
    path = tmp_path / (name or "absent.jsonl")
    if name:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(cfg.ConfigError, match=complaint):
        load_problems(cfg.Config(task="maths", train_data=str(path)), "train")


def test_parquet_and_several_files(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(
        pa.table({"question": ["2+2?", "3+3?"], "answer": [4, 6]}), tmp_path / "sums.parquet"
    )
    found = load_problems(
        cfg.Config(task="maths", eval_data=f"{tmp_path}/sums.parquet,{MATHS}"), "test"
    )["maths"]
    assert len(found) == 50 and [p["source"] for p in found[:3]] == ["sums", "sums", "maths"]
    assert (
        found[1]["answer"] == "6"
        and found[1]["prompt"].startswith("3+3?")
        and found[1]["where"].endswith("sums.parquet: row 2")
    )
    (tmp_path / "other").mkdir()
    shutil.copy(MATHS, tmp_path / "other")
    with pytest.raises(cfg.ConfigError, match="there is a set called maths already"):
        load_problems(
            cfg.Config(task="maths", eval_data=f"{MATHS},{tmp_path}/other/maths.jsonl"), "test"
        )
    with pytest.raises(cfg.ConfigError, match="task maths needs --train_data"):
        load_problems(cfg.Config(task="maths"), "train")


def test_hub_sets_read_their_columns():
    """The hub is out of reach here: rows as its data cards show them."""
    read = {name: row[-1] for name, row in maths.SETS.items()}
    assert read["gsm8k"]({"question": "q", "answer": "so 1,000 / 2\n#### 1,234"}) == ("q", "1234")
    assert read["math_train"]({"problem": "q", "solution": "thus $\\boxed{\\frac{1}{2}}$."}) == (
        "q",
        "\\frac{1}{2}",
    )
    assert read["orz57k"](
        {
            "0": {"from": "human", "value": "q"},
            "1": {"from": "assistant", "ground_truth": {"value": "7"}},
        }
    ) == ("q", "7")
    assert (
        read["math500"]({"problem": "q", "answer": "7"})
        == read["amc23"]({"question": "q", "answer": "7"})
        == ("q", "7")
    )


def test_tasks_and_shares_of_a_mixture():
    assert cfg.task_weights("toy") == {"toy": 1.0} and cfg.task_weights("maths:3, countdown:1") == {
        "maths": 0.75,
        "countdown": 0.25,
    }
    for wrong in ("toy:0", "toy:x", "toy,toy", "toy:-1,guess:2"):
        with pytest.raises(cfg.ConfigError, match="shares, all above 0"):
            cfg.task_weights(wrong)
    with pytest.raises(cfg.ConfigError, match="no tasks/math.py. Tasks here: .*maths"):
        cfg.check(cfg.parse(["toy", "--task", "math"], 0))


@pytest.mark.parametrize(
    "names", [["toy"], ["countdown"], ["guess"], ["maths"], ["toy", "countdown", "guess"]]
)
def test_tiny_tokenizers_read_what_teachers_write_and_survive_saving(tmp_path, names):
    from transformers import AutoTokenizer, Qwen2Config

    tasks = [__import__(f"tasks.{n}", fromlist=[n]) for n in names]
    tokenizer = base_model.make_tokenizer(tasks)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    again, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(5)
    for text, _ in (part for t in tasks for _ in range(100) for part in t.teacher(rng)):
        ids = tokenizer(text)["input_ids"]
        assert (
            ids == again(text)["input_ids"]
            and tokenizer.pad_token_id not in ids
            and again.decode(ids) == text
        )


def prompter(tmp_path, template=None, merges=(), **knobs):
    """A Prompter with a byte-level tokenizer of the printable characters, these merges, and the specials <eos> and <|im_end|>."""
    from transformers import Qwen2Config, Qwen2Tokenizer

    vocabulary = (
        ["<pad>", "<eos>"]
        + [chr(i) for i in range(33, 127)]
        + ["Ġ", "Ċ"]
        + [a + b for a, b in merges]
    )
    tokenizer = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(vocabulary)},
        merges=list(merges),
        unk_token="<pad>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
    )
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    tmp_path.mkdir(exist_ok=True)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(eos_token_id=1).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, tokenizer.eos_token_id]})
    )
    return Prompter(cfg.Config(model=str(tmp_path), **knobs))


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_raw_and_templated_prompts(tmp_path):
    raw = prompter(tmp_path, system_prompt="Be brief. ")
    assert (
        raw.tokenizer.decode(raw.start({"prompt": "2+2?"})) == "Be brief. 2+2?"
        and raw.tokenizer.decode(raw.more("lower\n")) == "lower\n"
    )
    with pytest.raises(cfg.ConfigError, match="no chat template"):
        prompter(tmp_path, chat=True)
    chat = prompter(tmp_path, TEMPLATE, chat=True, system_prompt="Be brief.", thinking="off")
    assert chat.stop == {
        1,
        chat.tokenizer.eos_token_id,
    }  # several stop tokens, of the generation config
    first = chat.tokenizer.decode(chat.start({"prompt": "2+2?"}))
    assert (
        first
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    # what was sampled ends in <|im_end|>; what is appended goes on from there exactly as the template would
    sampled = chat.tokenizer("4<|im_end|>", add_special_tokens=False)["input_ids"]
    whole = chat.tokenizer.decode(chat.start({"prompt": "2+2?"}) + sampled + chat.more("And 3+3?"))
    assert (
        whole
        == first
        + "4<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    assert "user\nYOUR TURN: guess<|im_end|>" in chat.tokenizer.decode(
        chat.more("YOUR TURN: guess")
    )
    assert "<think>" not in prompter(tmp_path, TEMPLATE, chat=True).tokenizer.decode(
        prompter(tmp_path, TEMPLATE, chat=True).start({"prompt": "a"})
    )


@pytest.mark.parametrize("text", ["\u00e9", " ", " \u00e9\u00e9", "\u4f60\u597d" * 40])
def test_a_prompt_of_no_tokens_is_named(tmp_path, text):
    """This tokenizer leaves out what it does not know."""
    from transformers import Qwen2Config

    base_model.make_tokenizer([toy]).save_pretrained(tmp_path)
    Qwen2Config(eos_token_id=1).save_pretrained(tmp_path)
    p = Prompter(cfg.Config(model=str(tmp_path), max_model_len=100))
    fine = {"prompt": "ba="}
    p.check({"toy": [fine] * 3})
    with pytest.raises(cfg.ConfigError, match="task toy, problem 3: the prompt .* is no token"):
        p.check({"toy": [fine, fine, {"prompt": text}]})


def test_a_prompt_longer_than_the_context_is_named(tmp_path):
    p = prompter(tmp_path, max_model_len=20)
    p.check({"maths": [{"prompt": "a" * 19, "where": "f.jsonl:1"}]})
    with pytest.raises(
        cfg.ConfigError,
        match="f.jsonl:2: the prompt has 20 tokens, --max_model_len 20 leaves room for 19",
    ):
        p.check(
            {
                "maths": [
                    {"prompt": "a", "where": "f.jsonl:1"},
                    {"prompt": "a" * 20, "where": "f.jsonl:2"},
                ]
            }
        )
