"""The task gym: every data set of reasoning-gym, how answers are read, hostile answers, mistakes
in settings.

The data sets, their verifiers and the worker processes are real.
"""

import asyncio
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import config as cfg
from plumbing.problems import load_problems
from plumbing.sandbox import Sandbox

pytest.importorskip("reasoning_gym")
from tasks import gym


def load_gym(data, split="train"):
    return load_problems(cfg.Config(task="gym", train_data=data, eval_data=data), split)["gym"]


def test_gym_problems_are_held_out_and_scored_by_their_verifier():
    data = "chain_sum/max_terms=3/max_digits=1:0.7,spell_backward/max_word_len=5:0.3"
    train, test = load_gym(data), load_gym(data, "test")
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in test}
    for problems in (train, test):
        sums = [p["source"] == "chain_sum/max_terms=3/max_digits=1" for p in problems]
        # Some sums are drawn twice.
        assert len(problems) > 300 and 0.2 < np.mean(sums) < 0.75 and 0 < sum(sums[:20]) < 20
    assert {gym.reward(p, p["answer"], True) for p in test} == {1.0}
    problem = dict(source="chain_sum", question="3 + 4 =", answer="7", metadata={})
    for text, reading, reward in [
        ("7", "7", 1.0),
        ("3 + 4 = 7", "7", 1.0),
        ("I see.\nThe answer is **7**.", "7", 1.0),
        ("<answer>8</answer> no, <answer> 7 </answer> is the answer", "7", 1.0),
        ("7 or 8", "7 or 8", 1 / 6),
        ("8", "8", 0.0),
        (" \n", None, 0.0),
    ]:
        assert gym.answer(problem, text) == reading
        assert gym.reward(problem, text, True) == pytest.approx(reward)
        assert gym.reward(problem, text, False) == 0.0


def test_smol_keeps_its_prompts_and_its_split():
    """The README's figures are measured on these prompts."""
    data = cfg.SMOL["train_data"]
    for split, digest in [
        ("train", "149 7a89ab9df23b4638b795b8c47e188629"),
        ("test", "51 a7fe5abad1f9cc832e20b2b9523d289c"),
    ]:
        prompts = [problem["prompt"] for problem in gym.problems(split, 0, data)]
        md5 = hashlib.md5(json.dumps(prompts).encode()).hexdigest()
        assert f"{len(prompts)} {md5}" == digest


@pytest.mark.parametrize(
    "data,complaint",
    [
        ("", "must name data sets of reasoning-gym"),
        ("chain_sums", "no data set 'chain_sums'; similar names: chain_sum, "),
        ("hanoi", "no data set 'hanoi'; similar names: tower_of_hanoi"),
        ("chain_sum,", "no data set ''"),
        ("composite", "composite: name its data sets themselves"),
        ("data/sums.jsonl", "'data/sums.jsonl' cannot be read: write name/setting=value:share"),
        ("chain_sum/max_terms", "'chain_sum/max_terms' cannot be read"),
        ('basic_arithmetic/operators=["+"', "cannot be read"),
        ("chain_sum/max_term=3", "chain_sum has no setting 'max_term'; .* max_terms"),
        ("chain_sum/seed=3", "chain_sum has no setting 'seed'"),
        ("chain_sum/max_terms=many", "chain_sum/max_terms=many: .* integer"),
        ("chain_sum/max_terms=2.5", "chain_sum/max_terms=2.5: .* integer"),
        ("chain_sum/max_terms=true", "chain_sum/max_terms=true: .* integer"),
        ("chain_sum/max_terms=", "chain_sum/max_terms=: .* integer"),
        ("chain_sum/max_terms=2/max_terms=3", "chain_sum: max_terms is set twice"),
        ("manipulate_matrix/w_map=nan", "manipulate_matrix/w_map=nan: it must be a finite number"),
        ("basic_arithmetic/operators=plus", "basic_arithmetic/operators=plus: .* list"),
        ("word_sorting/transformation=big", "word_sorting/transformation=big: .* 'uppercase'"),
        ("chain_sum/max_terms=1", "chain_sum/max_terms=1: max_terms must be >= min_terms"),
        ("chain_sum/size=0", "chain_sum/size=0: size must be positive"),
        ("chain_sum/min_terms=1/max_terms=1/max_digits=1/size=1", "too few different questions"),
        ("chain_sum:half", "chain_sum: its share is 'half', it must be a number above 0"),
        ("chain_sum:0", "chain_sum: its share is '0'"),
        ("chain_sum:-1,lcm", "chain_sum: its share is '-1'"),
        ("chain_sum:nan", "chain_sum: its share is 'nan'"),
        ("chain_sum:", "chain_sum: its share is ''"),
        ("lcm,chain_sum:0.2, lcm:0.3", "lcm is named twice"),
    ],
)
def test_a_mistake_in_the_names_of_gym_is_one_line(data, complaint):
    with pytest.raises(cfg.ConfigError, match=f"task gym: .*{complaint}") as e:
        load_gym(data, "test")
    assert "\n" not in str(e.value)


def test_settings_are_of_the_types_that_data_sets_declare():
    data = [
        'basic_arithmetic/operators=["+","/"]/allow_parentheses=False/size=9:2',
        "word_sorting/transformation=uppercase/size=9",
        "time_intervals/min_date=2020-01-01/max_date=2021-01-01/size=9",
        'polynomial_multiplication/variables=["x","y","z","t"]/size=9',
        "rearc/diff_ub=0.3/rng_difficulty_ranges=[[0.0,0.5]]/rng_difficulty_weights=[1.0]/size=9",
    ]
    problems = load_gym(",".join(data))
    assert {p["source"] for p in problems} == {data[0].removesuffix(":2"), *data[1:]}
    assert {gym.reward(p, p["answer"], True) for p in problems} == {1.0}
    assert all("(" not in p["metadata"]["expression"] for p in problems if "+" in p["source"])


# ---- each data set with its settings

PLACES = "decimal_arithmetic/min_num_decimal_places={0}/max_num_decimal_places={0}"


def test_a_data_set_named_twice_has_two_verifiers_with_their_own_settings():
    sources = [PLACES.format(places) for places in (2, 8)]
    problems = load_gym(",".join(source + "/size=20" for source in sources))
    for source, reward in zip(sources, (1.0, 0.0)):
        [problem, *_] = [p for p in problems if p["source"].startswith(source)]
        wrong = f"{float(problem['answer']) + 1e-4:.10f}"
        assert gym.reward(problem, wrong, True) == reward
        assert gym.reward(problem, problem["answer"], True) == 1.0


def test_equal_questions_of_two_sets_belong_to_both():
    names = ["lcm/size=20", "lcm/size=20/max_value=100"]
    problems = load_gym(",".join(names))
    prompts = [sorted(p["prompt"] for p in problems if p["source"] == name) for name in names]
    assert prompts[0] == prompts[1] and prompts[0]


UNORDERED = "isomorphic_strings list_functions polynomial_multiplication ransom_note word_ladder"
DIGEST = """
import hashlib, sys
from tasks import gym
if __name__ == "__main__":
    problems = gym.problems("train", 3, sys.argv[1])
    print(hashlib.md5(repr(problems).encode()).hexdigest())
"""


def test_every_process_draws_the_same_problems(tmp_path):
    """Some data sets draw from Python's sets or from the global generator."""
    data = ",".join(f"{name}/size=4" for name in UNORDERED.split())
    (tmp_path / "digest.py").write_text(DIGEST)
    command = [sys.executable, str(tmp_path / "digest.py"), data]
    digests = set()
    for seed in "12":
        env = os.environ | {"PYTHONHASHSEED": seed}
        digests.add(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert len(digests) == 1


def test_workers_score_with_the_settings_of_the_set_and_survive_what_a_verifier_raises(tmp_path):
    data = [PLACES.format(8), "prime_factorization", "complex_arithmetic", "countdown"]
    problems = {}
    for problem in load_gym(",".join(name + "/size=20" for name in data)):
        problems.setdefault(problem["source"].partition("/")[0], problem)
    decimal = problems["decimal_arithmetic"]
    attempts = [(problem, problem["answer"], 1.0) for problem in problems.values()]
    attempts += [
        (decimal, f"{float(decimal['answer']) + 1e-4:.10f}", 0.0),
        (problems["prime_factorization"], "two times two", 0.0),
        (problems["complex_arithmetic"], "nan", 0.0),
        (problems["countdown"], f"exec('open({str(tmp_path / 'run')!r}, \"w\")')", 0.0),
    ]

    async def replies():
        sandbox = Sandbox(cfg.Config(task="gym"))
        await sandbox.start()
        try:
            return [await sandbox.call("gym", "reward", p, text, True) for p, text, _ in attempts]
        finally:
            sandbox.close()

    assert asyncio.run(replies()) == [{"value": reward} for *_, reward in attempts]
    assert not list(tmp_path.iterdir())


# ---- answers

SEVEN = dict(source="chain_sum", question="3 + 4 =", answer="7", metadata={})
GRID = SEVEN | dict(answer="1 2\n3 4")
TIME = SEVEN | dict(answer="03:22:03")
LETTERS = SEVEN | dict(answer="A=1,B=2")
SENTENCE = SEVEN | dict(answer='He said: "This is it."')
KNAVES = SEVEN | dict(answer="Zoey is a knave.")
MOVES = SEVEN | dict(source="rubiks_cube", answer=None)
PLAN = SEVEN | dict(source="graph_color", answer=None)


@pytest.mark.parametrize(
    "problem,completion,reading",
    [
        (SEVEN, "7.", "7"),
        (SEVEN, "Answer: 7", "7"),
        (SEVEN, "Answer:7", "7"),
        (SEVEN, "**Final answer:** `7`", "7"),
        (SEVEN, "It is .7", ".7"),
        (SEVEN, "It is -7", "-7"),
        (SEVEN, "7 is 8", "8"),
        (SEVEN, "7\n8", "8"),
        (SEVEN, "It is 7:30", "7:30"),
        (SEVEN, "```python\n7\n```", "7"),
        (SEVEN, "<think>So 8.\n<answer>8</answer></think>\n7", "7"),
        (SEVEN, "it may be 8</think><answer>7</answer>", "7"),
        (SEVEN, "<think>it is 7", None),
        (SEVEN, "<answer>it is 7</answer>", "it is 7"),
        (SEVEN, "<answer>8, or <answer>7</answer></answer>", "7"),
        (SEVEN, "<answer></answer>", None),
        (GRID, "1 2\n3 4", "1 2\n3 4"),
        (GRID, "The grid is:\n1 2\n3 4\n", "1 2\n3 4"),
        (GRID, "First 5 6\n7 8.\n\nSo:\n\n```text\n1 2\n3 4\n```", "1 2\n3 4"),
        (TIME, "03:22:03", "03:22:03"),
        (TIME, "Answer: 03:22:03", "03:22:03"),
        (LETTERS, "The letters are: A=1,B=2.", "A=1,B=2"),
        (SENTENCE, 'He said: "This is it."', 'He said: "This is it."'),
        (SENTENCE, '**He said: "This is it.".**', 'He said: "This is it."'),
        (KNAVES, "I see.\nThe answer is Zoey is a knave.", "Zoey is a knave."),
        (KNAVES, "Zoey is a knave", "Zoey is a knave"),
        (MOVES, "The moves: R U'", "R U'"),
        (PLAN, 'Here it is:\n```json\n{\n"0": 1\n}\n```', '{\n"0": 1\n}'),
        (SEVEN | dict(answer=""), '""', ""),
        (SEVEN | dict(answer=7), "It is 7", "7"),
    ],
)
def test_an_answer_is_read_by_the_form_of_the_right_one(problem, completion, reading):
    assert gym.answer(problem, completion) == reading


# How many questions are drawn of each data set: fewer of the slow ones
DRAWN = dict.fromkeys(sorted(gym.DATASETS), 8) | dict(knight_swap=3, futoshiki=4)
# Rewards of right answers where the verifier refuses "P" although "P" is its own example
DOUBTFUL = {"propositional_logic": {0.05, 1.0}}
# These data sets have no answers. A test below answers them by hand.
WITHOUT = {"boxnet", "rush_hour"}


@pytest.fixture(scope="module")
def problems_of():
    """{name: [problem, ...]} of all data sets; "right" of a problem is a right answer to it."""
    names = [f"{name}/size={size}" for name, size in DRAWN.items() if name != "composite"]
    problems_of = {}
    for problem in load_gym(",".join(names)):
        metadata = problem["metadata"]
        right = problem["answer"]
        if "possible_answer" in metadata:
            right = json.dumps(metadata["possible_answer"])
        elif right is None:
            right = metadata.get("example_answer") or metadata.get("example_correct_answer")
        name = problem["source"].partition("/")[0]
        problems_of.setdefault(name, []).append(problem | dict(right=right))
    assert len(problems_of) == len(names)
    return problems_of


FORMS = [
    "{}",
    "{}\n",
    "<think>\nIt is 3 = 4: no.\n\n<answer>5</answer>\n</think>\n\n{}",
    "So the answer is: 5?\n<answer>{}</answer>",
    "<answer>\n{}\n</answer> is the answer.",
    "Let me see: 3 = 4.\n\n```\n{}\n```",
    "The answer is: {}.",
    "**Answer:** {}",
]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_set_accepts_its_own_answers(problems_of, form):
    for name, problems in problems_of.items():
        for problem in problems:
            if name in WITHOUT:
                assert problem["right"] is None
                continue
            verifier = gym.dataset_of(problem["source"]).score_answer
            reward = gym.reward(problem, form.format(problem["right"]), True)
            assert reward == verifier(problem["right"], problem), (problem["source"], form)
            assert reward in DOUBTFUL.get(name, {1.0})


@pytest.mark.parametrize("form", FORMS)
def test_sets_without_answers_accept_right_ones(form):
    board = "oooooo" * 2 + "AAoooo" + "oooooo" * 3
    rush_hour = dict(source="rush_hour", answer=None, metadata=dict(board_config=board))
    grid = {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"]}
    boxnet = dict(source="boxnet", answer=None, metadata=dict(initial_state=grid))
    first_move = '{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"}'
    second_move = '{"Agent[0.5, 1.5]": "move(box_red, target_red)"}'
    for problem, right, wrong in [
        (rush_hour, "A+4", "A+3"),
        (boxnet, f"[{first_move}, {second_move}]", f"[{first_move}]"),
        (boxnet, f"[{first_move},\n{second_move}]", "[]"),
    ]:
        assert gym.reward(problem, form.format(right), True) == 1.0
        assert gym.reward(problem, form.format(wrong), True) < 1.0


HOSTILE = [
    *("", " \n", "nan", "NaN + nanj", "[NaN, NaN, NaN]", "inf", "-1e999", "None", "null", "\x00"),
    *("[]", "{}", "[[]]", "[{}]", "()", "0", "1", "-1", "x", "C", "0.", "word", "some words more"),
    *("\ud800", "answer", "oracle_answer", "entry['answer']", "self", "Integral(x, x)"),
]
HUGE = ["word " * 20000, "1 " * 20000, "[" * 20000, "(" * 20000, "9" * 5000, "\n" * 20000]
HUGE += ["<answer>" * 20000, '{"a":' * 20000, "=" * 20000]
# In these data sets an answer to one problem is right for others, too.
SEVERAL = {
    "graph_color",
    "jugs",
    "n_queens",
    "propositional_logic",
    "quantum_lock",
    "time_intervals",
}


@pytest.mark.slow
def test_no_set_accepts_a_wrong_answer(problems_of, tmp_path):
    code = f"open({str(tmp_path / 'run')!r}, 'w')"
    programs = [code, f"exec({code!r})", f"[{code}]", f"(lambda: {code})()", f"{code}!"]
    for name, problems in problems_of.items():
        answers = {p["right"] for p in problems if p["right"]} - {"Yes", "No", "True", "False"}
        other_answers = set() if name in SEVERAL else answers
        if name == "coin_flip":
            # The verifier accepts 0 for a chance below its tolerance.
            problems = [problem for problem in problems if float(problem["answer"]) > 1e-3]
        for number, problem in enumerate(problems[:3]):
            right = str(problem["right"]).lower().removesuffix(".0")
            for text in [*HOSTILE, *programs, *other_answers, *(HUGE if number == 0 else [])]:
                for completion in (text, f"<answer>{text}</answer>"):
                    reading = gym.answer(problem, completion)
                    reward = gym.reward(problem, completion, True)
                    context = (problem["source"], right, text[:99])
                    assert isinstance(reward, float) and 0 <= reward <= 1, context
                    is_right = reading is not None and reading.lower().removesuffix(".0") == right
                    assert reward < 1 or is_right, context
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_attempts_with_one_vote_have_one_reward(problems_of):
    for problem in [p for problems in problems_of.values() for p in problems[:2]]:
        rewards = {}
        texts = [*HOSTILE[:20], *(f"{problem['right']}{end}" for end in ("", "1", ", 1", " or 1"))]
        for completion in [form.format(text) for form in FORMS for text in texts]:
            vote = gym.answer(problem, completion)
            reward = gym.reward(problem, completion, True)
            assert rewards.setdefault(vote, reward) == reward, (problem["source"], completion)
            assert vote is None or gym.answer(problem, f"<answer>{vote}</answer>") == vote


@pytest.mark.parametrize(
    "name,right,wrong",
    [
        ("coin_flip", "0.3125", "0"),
        ("coin_flip", "5/16", "0.3"),
        ("game_of_life_halting", "True", "False"),
        ("gsm_symbolic", "28", "-28"),
        ("number_sorting", "['1.0', '2.0', '3.0']", "[NaN, NaN, NaN]"),
        ("complex_arithmetic", "8.0 + 3.0i", "nan"),
        ("puzzle24", "1*2*3*4", "6*4*1*1"),
        ("puzzle24", "4*3*2*1", "(3 + 4)*7/2"),
        ("puzzle24", "4*3*2*1", "3*4*2*1 + 1/2"),
        ("spell_backward", "abcdefghi", "abcdefghijk"),
        ("intermediate_integration", "x**2/2 + C", "Integral(x, x)"),
    ],
)
def test_wrong_answers_that_verifiers_accept_score_0(name, right, wrong):
    metadata = dict(numbers=[1, 2, 3, 4], direction="ascending", result=(8, 3), integrand="x")
    answer = dict(coin_flip="0.3125").get(name, right)
    problem = dict(source=name, answer=answer, metadata=metadata | dict(variable="x"))
    verifier = gym.dataset_of(name).score_answer
    assert verifier(wrong, problem) >= 1.0 or name == "puzzle24"
    assert gym.reward(problem, right, True) == 1.0
    assert gym.reward(problem, wrong, True) == 0.0


def test_all_verifiers_that_evaluate_answers_are_known():
    evaluating_sets = set()
    for name, (dataset, _) in gym.DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        if re.search(r"\beval\(|\bsympify\(|(?<!def )\bparse_expr\(", source):
            evaluating_sets.add(name)
    literals = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
    for name in literals:
        module = sys.modules[gym.DATASETS[name][0].__module__]
        with pytest.raises(ValueError, match="malformed"):
            module.eval("print()")
    # The verifier of number_sorting evaluates the right answer alone.
    assert evaluating_sets - literals - {"number_sorting"} <= set(gym.CONDITIONS)
    assert evaluating_sets >= literals and len(evaluating_sets) == 10
