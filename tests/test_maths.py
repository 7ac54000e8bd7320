"""The task maths: how a completion's answer is found, how it is read, and when it equals the
reference.
"""

import json
import subprocess
import sys

import pytest
import sympy

from bench import rewards
from conftest import ROOT
from tasks import maths
from tasks._exact import is_same_expression, is_same_number
from tasks._grading import (
    comparable_text,
    final_answer,
    is_rounded,
    is_same_answer,
    normalized_spelling,
)
from tasks._latex import Collection, Statement, read

MATHS = ROOT / "tests" / "maths.jsonl"
PAIRS = [json.loads(line) for line in (ROOT / "tests" / "maths_pairs.jsonl").open()]


def outcome(reference, answer):
    return maths.reward({"answer": reference}, f"\\boxed{{{answer}}}", True)


# ---- the answer of a completion


def test_maths_accepts_its_own_answers_and_refuses_others():
    problems = maths.problems("test", 0, str(MATHS))
    assert len(problems) == 48
    assert problems[0]["where"] == f"{MATHS}:1" and problems[0]["source"] == "maths"
    for p in problems:
        for text, expected in [
            (f"Clearly \\boxed{{987654}}? No: \\boxed{{ {p['answer']} }}.", "correct"),
            ("The answer is \\boxed{987654}", "wrong"),
            (f"The answer is {p['answer']}", "no_answer"),
            ("\\boxed{}", "no_answer"),
        ]:
            assert maths.reward(p, text, True) == expected, p


def test_a_word_is_no_product_of_its_letters():
    asked = "Which animal is it?"
    variables = "Let $a$ and $c$ be numbers, $t > 0$. Simplify."
    for prompt, reference, answer, expected in [
        (asked, "cat", "act", "wrong"),
        (asked, "\\text{cat}", "act", "wrong"),
        (asked, "cat", "\\text{cat}", "correct"),
        (asked, "Cat", "cat", "correct"),
        (asked, "iv", "vi", "wrong"),
        (asked, "iv", "(iv)", "correct"),
        (asked, "ii", "-1", "wrong"),
        (asked, "the cat", "cat the", "wrong"),
        (asked, "Tom, Ann", "Ann and Tom", "correct"),
        (asked, "Tom, Ann", "Ann, Mot", "wrong"),
        (variables, "cat", "act", "correct"),
        ("Factor a*b + 0.", "ab", "ba", "correct"),
        ("Simplify $xy + 0$.", "xy", "y \\cdot x", "correct"),
        (asked, "3 \\text{ cm}", "3 cm", "correct"),
        (asked, "cm", "\\text{cm}", "correct"),
    ]:
        problem = {"prompt": prompt, "answer": reference}
        assert maths.reward(problem, f"\\boxed{{{answer}}}", True) == expected, (reference, answer)


def test_the_last_statements_boxes_are_the_answer():
    for text, answer in [
        ("none", ""),
        ("\\boxed{ 3 }", "3"),
        ("\\boxed{1}. Then \\boxed{\\frac{1}{2}}, as was asked.", "\\frac{1}{2}"),
        ("\\boxed{9}? No: \\boxed{7}", "7"),
        ("\\boxed{9} or \\boxed{7}", "9, 7"),
        ("\\boxed{9}. Or maybe \\boxed{7}", "9, 7"),
        ("\\boxed{9}; or \\boxed{7}", "9, 7"),
        ("Case 1: \\boxed{9}. Case 2: \\boxed{7}.", "9, 7"),
        ("\\boxed{9}\n\\boxed{7}", "9, 7"),
        ("\\boxed{9 \\boxed{7}}", "9 \\boxed{7}"),
        ("\\boxed{9, \\boxed{7}", "7"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
    ]:
        assert final_answer(text) == answer


def test_the_same_answer_in_two_boxes_is_one_answer():
    for text, answer in [
        ("\\boxed{0.5}, that is, \\boxed{\\frac12}", "\\frac12"),
        ("\\boxed{14/2} = \\boxed{7}", "7"),
        ("\\boxed{x = 7}, so \\boxed{7}", "7"),
        ("\\boxed{12} = \\boxed{12\\text{ apples}}", "12\\text{ apples}"),
        ("\\boxed{12\\text{ apples}} = \\boxed{12}", "12"),
        ("\\boxed{7} or \\boxed{9} or \\boxed{7.0}", "9, 7.0"),
        ("\\boxed{0.5} = \\boxed{\\frac13}", "0.5, \\frac13"),
        ("\\boxed{9 7} = \\boxed{9 7}", "9 7"),
    ]:
        assert final_answer(text) == answer


def test_boxes_within_thinking_do_not_count():
    for text, answer in [
        ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("<think>Is it \\boxed{1}? No.</think> It is \\boxed{2} or \\boxed{3}.", "2, 3"),
        # The prompt ends with <think>.
        ("Is it \\boxed{1}?</think> It is \\boxed{2}", "2"),
        ("<think>\\boxed{1}</think> It is one.", ""),
        ("<think>\\boxed{1}", ""),
        ("\\boxed{2} <think>\\boxed{1}</think>", "2"),
        ("[THINK]\\boxed{1}[/THINK]\\boxed{2}", "2"),
        ("<Thinking>\\boxed{1}</Thinking>\\boxed{2}", "2"),
        ("<|begin_of_thought|>\\boxed{1}<|end_of_thought|>\\boxed{2}", "2"),
        ("<think>\\boxed{1", ""),
    ]:
        assert final_answer(text) == answer, text


def test_a_box_that_does_not_end_is_no_answer():
    box = "\\boxed{"
    for endless in (box + "1", "\\boxed 1", box + "1}, " + box + "2", box + "1" * 600 + "}"):
        assert maths.reward({"answer": "1"}, endless, True) == "unparsable"
        assert maths.answer({"answer": "1"}, endless) is None


def test_many_boxes_in_one_statement_are_no_answer():
    boxes = " ".join(f"\\boxed{{{i}}}" for i in range(100))
    assert maths.reward({"answer": "99"}, boxes, True) == "unparsable"
    assert maths.reward({"answer": "99"}, boxes.replace(" ", ". So it is "), True) == "correct"


# ---- spelling and reading


AROUND_5 = [
    "5",
    "5.",
    "\\[5\\]",
    "\\[\n5\n\\]",
    "$$5$$",
    "$5$",
    "\\(5\\)",
    "{5}",
    "**5**",
    "\\text{5}",
    "\\boxed{5}",
    "\\boxed{\\boxed{5}}",
    "\\[\\boxed{5}\\]",
    "$\\boxed{5}$.",
    "\\displaystyle 5",
    "\\large{5}",
    "\\left.5\\right.",
    "5\\\\",
]


@pytest.mark.parametrize("text", AROUND_5)
def test_markup_around_an_answer_is_removed(text):
    assert normalized_spelling(text) == "5"
    assert is_same_answer(text, "5") and is_same_answer("5", text)
    assert not is_same_answer(text, "6") and not is_same_answer("6", text)


def test_equal_words_and_choices_have_one_text():
    for texts in [
        ("\\text{Tuesday}", "tuesday", "Tuesday.", "\\(\\text{Tuesday}\\)"),
        ("\\text{(B)}", "B", "(B)", "\\textbf{B}", "B."),
        ("\\text{No}", "no", "NO"),
    ]:
        assert len({comparable_text(text) for text in texts}) == 1, texts
    for a, b in [("AB", "ab"), ("ABC", "abc"), ("A", "a"), ("6 7", "67"), ("1, 256", "1256")]:
        assert comparable_text(a) != comparable_text(b)


def test_statements_by_hand():
    x, y = sympy.symbols("x y")
    infinity = sympy.Symbol("\\infty")
    for text, statements in [
        ("x = \\frac{6}{2} = 3", [Statement("x", (3, 3), "=")]),
        ("y = 2x", [Statement("y", (2 * x,), "=", (y - 2 * x,))]),
        ("1, 2", [Statement(None, (1,)), Statement(None, (2,))]),
        ("3 \\pm 1", [Statement(None, (4,)), Statement(None, (2,))]),
        ("1,234", [Statement(None, (1234,))]),
        ("(1,234]", [Statement(None, (Collection("(]", (1, 234)),))]),
        ("x \\le 3", [Statement("x", (Collection("(]", (-infinity, 3)),))]),
        ("2 > x \\ge 1", [Statement("x", (Collection("[)", (1, 2)),))]),
        ("x + y < 7", [Statement(None, (), "<", (x + y - 7,))]),
        ("\\{1, 2\\}", [Statement(None, (Collection("{}", (1, 2)),))]),
        ("0.1\\overline{6}", [Statement(None, (sympy.Rational(1, 6),))]),
        ("-2\\frac{1}{2}", [Statement(None, (sympy.Rational(-5, 2),))]),
        ("2e-1", [Statement(None, (2 * sympy.E - 1,))]),
        ("2.5e-1", [Statement(None, (sympy.Rational(1, 4),))]),
        ("1e-05", [Statement(None, (sympy.Rational(1, 10**5),))]),
        ("\\sqrt[3]{-8}", [Statement(None, (-2,))]),
        ("\\sin^2 2x", [Statement(None, (sympy.sin(2 * x) ** 2,))]),
        ("\\sqrt{2} \\approx 1.41", [Statement(None, (sympy.sqrt(2),))]),
    ]:
        assert read(text) == statements, text


UNCLEAR = [
    # Numbers side by side, unclear ends of denominators and arguments, several signs
    "9 7",
    "1/2x",
    "\\sin 2/3",
    "x^2^3",
    "3!!",
    "+-5",
    "5 \\times",
    "2, , 3",
    "\\sqrt12",
    "\\frac123",
    "2\\frac{5}{3}",
    # Indices, primes, functions
    "7'",
    "7_9",
    "f(2)",
    "\\gcd(2,4)",
    "9 \\bmod 7",
    "\\sum_{i=1}^3 i",
    # Words
    "7 \\text{ maybe}",
    "5 \\text{ negative}",
    "\\text{ cm}",
    # Relations
    "9 \\Rightarrow 7",
    "\\approx 5",
    "\\sqrt{2} \\approx 1.5",
    "x < 3 > y",
    "x \\equiv 3",
    "2 \\cup 3",
    # Brackets that do not close, and an interval of three numbers
    "(1,2",
    "\\{1",
    "[1,2,3)",
    # Expressions without a value
    "1/0",
    "\\ln 0",
]


@pytest.mark.parametrize("text", UNCLEAR)
def test_ambiguous_answers_are_refused(text):
    with pytest.raises(ValueError):
        read(text)


def test_units_are_factors_and_words_of_the_problem_are_units():
    (statement,) = read("5\\text{ square km per hour}")
    assert statement == read("5\\text{ km}^2\\text{/h}")[0]
    apples = "How many apples are in the basket?"
    assert is_same_answer("5", "5\\text{ apples}", apples)
    assert is_same_answer("5\\text{ apples}", "5")
    assert not is_same_answer("5", "6\\text{ apples}", apples)
    assert not is_same_answer("5", "5\\text{ dozen apples}", apples + " Not a dozen!")
    with pytest.raises(ValueError, match="pears is no unit"):
        is_same_answer("5", "5\\text{ pears}", apples)


# ---- comparison


def test_rewards_of_maths_by_hand():
    for gold, answer, expected in [
        ("\\frac{1}{2}", "0.5", "correct"),
        ("\\frac{1}{6}", "0.1\\overline{6}", "correct"),
        ("x^2-4", "(x-2)(x+2)", "correct"),
        ("1234", "1,234", "correct"),
        ("2\\sqrt{3}", "\\sqrt{12}", "correct"),
        ("5", "x = \\frac{10}{2} = 5", "correct"),
        ("2,-3", "x=2 \\text{ or } x=-3", "correct"),
        ("\\{1, 3\\}", "3, 1", "correct"),
        ("(3,\\infty)", "x > 3", "correct"),
        ("B", "\\text{(B)}", "correct"),
        ("18", "18 \\text{ dollars}", "correct"),
        ("60\\text{ mph}", "60 \\text{ miles per hour}", "correct"),
        ("10\\%", "\\frac{1}{10}", "correct"),
        ("3+4i", "(2+i)^2", "correct"),
        ("2^{2024}", "4^{1012}", "correct"),
        ("\\frac13", "0.333333", "wrong"),
        ("(1,2)", "\\{1,2\\}", "wrong"),
        ("7", "7, 9", "wrong"),
        ("7", "9 = 7", "wrong"),
        ("5\\text{ cm}", "5\\text{ m}", "wrong"),
        ("2x", "2X", "wrong"),
        ("101_2", "101", "wrong"),
        ("7", "7'", "unparsable"),
        ("7", "9 7", "unparsable"),
        ("7", "9 \\Rightarrow 7", "unparsable"),
        ("7", "7 \\text{ maybe}", "unparsable"),
        ("7", "7_9", "unparsable"),
        ("15", "\\geq 15", "unparsable"),
    ]:
        assert outcome(gold, answer) == expected, (gold, answer)


def test_numbers_of_any_size_are_compared_exactly():
    for reference, answer, expected in [
        ("\\frac{1}{2004!}", "-\\frac{1}{2004!}", "wrong"),
        ("\\frac{1}{2004!}", "\\frac{1}{2003!}", "wrong"),
        ("\\frac{1}{2004!}", "(2004 \\cdot 2003!)^{-1}", "correct"),
        ("e^{-500}", "e^{-501}", "wrong"),
        ("e^{-500}", "(e^{-250})^2", "correct"),
        ("0", "e^{-9999}", "wrong"),
        ("\\sqrt{2}", "\\sqrt{2} + e^{-9999}", "wrong"),
        ("\\sqrt{2} + e^{-900}", "e^{-900} + \\frac{2}{\\sqrt{2}}", "correct"),
        ("\\sqrt{10^{40}+1}", "10^{20}", "wrong"),
        ("10^{5000}+1", "10^{5000}", "wrong"),
        ("1500", "1.5e3", "correct"),
        ("1.5e3", "1500", "correct"),
        ("1.5e3", "1501", "wrong"),
        ("1.5e3", "4.5e", "wrong"),
    ]:
        assert outcome(reference, answer) == expected, (reference, answer)


def test_equal_roots_are_equal_numbers_and_nearly_equal_ones_are_not():
    a, b = sympy.sqrt(2) + sympy.sqrt(3), sympy.sqrt(5 + 2 * sympy.sqrt(6))
    assert is_same_number(a, b) and is_same_number(a - b, sympy.Integer(0))
    assert not is_same_number(a, b + sympy.Rational(1, 10**300))
    assert not is_same_number(a + sympy.exp(-3000), b)
    with pytest.raises(ValueError, match="too many digits"):
        is_same_number(a + sympy.exp(-(10**6)), b)


def test_expressions_are_equal_where_both_are_defined():
    x = sympy.Symbol("x")
    for a, b, expected in [
        (sympy.log(x**2), 2 * sympy.log(x), True),
        (sympy.log(sympy.Abs(x)), sympy.log(x), False),
        (sympy.sqrt(x**2), x, False),
        (sympy.sqrt(x**2), sympy.Abs(x), True),
        (sympy.asin(x) + sympy.acos(x), sympy.pi / 2, True),
        ((x**2 - 1) / (x - 1), x + 1, True),
        (x, x + sympy.exp(-(x**2) - 400), False),
    ]:
        assert is_same_expression(a, b) is expected, (a, b)


def test_intervals_are_compared_as_they_are_written():
    """Some of these intervals are the same empty set."""
    intervals = "(3,3] [4,4) (4,4] [2,1] [1,2] (1,2) [1,2) (1,2] (2,1)".split()
    for a in intervals:
        for b in intervals:
            assert (outcome(a, b) == "correct") == (a == b), (a, b)


def test_no_verdict_on_a_known_pair_is_wrong():
    """The pairs are equal answers, and answers that are nearly right or say several things."""
    for equal, (count, wrong) in rewards.wrong_verdicts().items():
        assert count > 700 and not wrong, (equal, wrong)


def test_votes_for_the_same_answer_are_judged_alike():
    """A vote is the plain text of an answer: attempts with one vote must have one verdict."""
    verdicts = {}
    for pair in PAIRS:
        completion = pair.get("completion") or f"\\boxed{{{pair['answer']}}}"
        problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
        vote = maths.answer(problem, completion)
        correct = maths.reward(problem, completion, True) == "correct"
        key = (pair["reference"], problem["prompt"], vote)
        assert verdicts.setdefault(key, correct) == correct, pair
        if vote:
            vote_verdict = maths.reward(problem, f"\\boxed{{{vote}}}", True)
            assert (vote_verdict == "correct") == correct, (pair, vote)


def test_an_answer_equals_itself_in_other_spellings_and_no_other():
    """This holds for any reference: one that cannot be read still equals its own text.

    Of a reference that a program has rounded, the last digits do not count.
    """
    for reference in {pair["reference"] for pair in PAIRS}:
        for answer in (reference, f"\\[ {reference} \\]", f"{{{reference}}}.", f" {reference} "):
            assert outcome(reference, answer) == "correct", answer
        for answer in (
            f"{reference}, 987654",
            f"{reference} + 10^{{-{10 if is_rounded(reference) else 30}}}",
            f"{reference} = 987654",
        ):
            assert outcome(reference, answer) != "correct", answer


HOSTILE = [
    "(9999!)^{9999}",
    "9^{9^{9^9}}",
    "((((9!)!)!)!)!",
    "(" * 400,
    "\\{" * 200,
    "7^{" * 120 + "7" + "}" * 120,
    "-" * 400 + "7",
    "|" * 300,
    "x^{" * 29 + "x" + "}" * 29,
    "e^{" * 9 + "9" + "}" * 9,
    "(x+1)^{999999999}",
    "(x^{9999})!",
    "\\binom{10^{50}}{10^{49}}",
    "\\sqrt{10^{20000}+7}",
    "\\sqrt{2}^{10^{9}+1}",
    "\\sin(10^{30000})",
    "\\tan(\\tan(\\tan(10^{900})))",
    "\\lfloor e^{9000} \\rfloor",
    "\\sinh(\\sinh(\\sinh 9))",
    "\\sqrt{x+" * 25 + "1" + "}" * 25,
    "1e99999999999",
    "\\ln " * 100 + "x",
    "\\ln " * 100 + "x = 8",
    "abc" * 100 + " = 8",
    "0.(3)" * 90,
    "5\\text{ cm}^{99999999999}",
    "\\begin{pmatrix}" * 30,
    "\\pm 1," * 80 + "2",
    "x(",
    "\\mathbb{R} \\setminus \\{0\\} \\setminus \\{1\\}",
    "7" * 10000,
    "7+" * 5000 + "7",
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_not_correct_and_end(answer):
    references = ["7", "x^2+1", "\\sqrt{2}", "(1,2)", "\\{1,2\\}", "y=2x+1", f"{answer[:490]}+1"]
    for reference in references:
        assert outcome(reference, answer) in ("wrong", "unparsable")


@pytest.mark.parametrize(
    "reference,answer,prompt",
    [
        # The order of letters, and capital letters, matter.
        ("HTH", "HHT", ""),
        ("\\text{IV}", "\\text{VI}", ""),
        ("12AB", "12BA", ""),
        ("no", "on", ""),
        ("ACB, BCA", "ABC, BAC", ""),
        ("mgR - mgr", "mgr - mgR", ""),
        ("kQq", "kqq", ""),
        ("2Rrh", "2rrh", ""),
        # "and" between inequalities is no union.
        ("x<-1 \\text{ or } x>3", "x<-1 \\text{ and } x>3", ""),
        ("[0,5]\\cup[3,8]", "0\\le x\\le5 \\text{ and } 3\\le x\\le 8", ""),
        # Words of the prompt that change a number are no units.
        ("2", "2\\text{ thirds}", "Two thirds of what?"),
        ("5", "5\\text{ millions}", "How many millions?"),
        ("5", "5\\text{ degrees below zero}", "It is degrees below zero."),
        ("9", "9\\text{ is false}", "Which is false?"),
        # e is a number, and no exponent.
        ("2e+1", "20", ""),
        ("e^2+2e+1", "e^2+20", ""),
        ("0.5", "0.5\\%", "In a 20 percent solution, what fraction is water?"),
        # What is given in percent asks for no percent.
        ("10", "10\\%", "What is 20% of 50?"),
        ("10", "10\\%", "20 per cent of them are red. How many are red?"),
        # A number with a comma between thousands begins with no 0.
        ("0,100", "100", ""),
        ("0,125", "125", ""),
        # The text of a choice may name several.
        ("C", "C) A or B", ""),
        ("C", "C. 12, D. 13", ""),
        ("C", "D. Paris", ""),
        ("11", "\\sqrt{x}=11", ""),
        ("11", "\\ln x=11", ""),
        ("\\pm 1 \\pm i", "1+i, -1-i", ""),
        ("|k|", "k", ""),
        ("|x+3000|", "x+3000", ""),
    ],
)
def test_answers_that_look_like_the_reference_are_not_correct(reference, answer, prompt):
    completion = f"\\boxed{{{answer}}}"
    assert maths.reward({"answer": reference, "prompt": prompt}, completion, True) != "correct"


@pytest.mark.parametrize(
    "reference,answer,prompt",
    [
        ("2e+1", "1+2e", ""),
        ("(e+1)^2", "e^2+2e+1", ""),
        ("\\ln(1+e^x)", "\\ln(e^x+1)", ""),
        ("x^x(1+\\ln x)", "x^x+x^x\\ln x", ""),
        ("x^{1/x}", "\\sqrt[x]{x}", ""),
        ("ax^{a-1}", "\\frac{ax^a}{x}", ""),
        ("35", "35\\%", "What \\% of 200 is 70?"),
        ("60", "60\\%", "How much percent of them is it?"),
        ("60", "60\\%", "What is Emily's final percentage?"),
        ("C", "C. Paris", ""),
        ("C", "C) orange", ""),
        ("C", "C) sand", ""),
        ("Paris", "C. Paris", ""),
        ("0,100", "0, 100", ""),
        ("\\frac14", "25\\%", "There are 10 percent blue balls. Find the probability."),
        (
            "\\begin{pmatrix}2 & -1 \\\\ 0 & 3\\end{pmatrix}",
            "\\begin{pmatrix}2 & -1 \\\\[4pt] 0 & 3\\end{pmatrix}",
            "",
        ),
        ("\\textbf{(D)}\\ \\text{Monday}", "D", ""),
        ("D", "\\textbf{(D)}\\ 1,024", ""),
    ],
)
def test_the_reference_in_other_words_is_correct(reference, answer, prompt):
    completion = f"\\boxed{{{answer}}}"
    assert maths.reward({"answer": reference, "prompt": prompt}, completion, True) == "correct"


@pytest.mark.parametrize(
    "answer",
    [
        "(2x)^{10^9}",
        "\\ln(10^{20000}+1)",
        "\\binom{\\sqrt2}{1600}",
        "\\binom{\\binom{e}{C}}{\\sqrt2}",
        "\\arcsin(\\sin(10^{300}))",
    ],
)
def test_answers_that_would_take_long_are_unparsable(answer):
    assert maths.reward({"answer": "7", "prompt": ""}, f"\\boxed{{{answer}}}", True) != "correct"


def test_command_says_how_an_answer_is_graded():
    command = [sys.executable, "-m", "tasks.maths"]
    for arguments, printed in (
        (["\\frac12", "so \\boxed{0.5}"], ["correct", "\\frac12", "0.5"]),
        (["42", "\\boxed{42 bolts}"], ["unparsable", "42", "42 bolts", "bolts is no unit"]),
        (["42", "\\boxed{42 bolts}", "How many bolts?"], ["correct", "42", "42 bolts"]),
        (["42", "Answer: 42"], ["no_answer", "42", "none, it has no box"]),
    ):
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
        values = [line.partition(": ")[2] for line in done.stdout.splitlines()]
        assert values == printed, done
    done = subprocess.run([*command, "proof", "5"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "maths: the reference answer cannot be used: it must be the final"
    )


def test_the_test_split_of_a_known_set_is_not_trained_on():
    message = "this set is for evaluation; to train .* its whole name, openai/gsm8k:main@test; sets"
    with pytest.raises(ValueError, match=message):
        maths.problems("train", 0, "math_train,gsm8k")
