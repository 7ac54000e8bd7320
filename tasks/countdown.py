"""Countdown: reach a target with given numbers, each used once, and + - * / and brackets.

`bash run.sh toy --task countdown` trains the tiny model this file makes; a hub model needs --model, and usually --chat True. The answer
is what stands in \\boxed{}, else the last line. Arithmetic is parsed by hand-written rules over Python's syntax tree, never by eval.
"""
import ast
import operator
import random
import re
from fractions import Fraction

SYMBOLS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
NUMBERS, LARGEST, TARGET = 3, 9, 40  # how many numbers a problem has, the largest of them, the largest target
SLOPPINESS = 0.2  # chance that the tiny model's teacher changes an operator
PROMPT = ("Use each of ", " exactly once, with + - * / and brackets, to make ", ". Answer with the expression in \\boxed{}.\n")
TINY = dict(words=PROMPT + tuple(str(n) for n in range(10, TARGET + 1)), steps=600, layers=3)


def _draw(rng):
    """Random numbers, and an expression of them whose value is a whole number from 1 to TARGET."""
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(NUMBERS)]
        parts = [(str(n), Fraction(n)) for n in rng.sample(numbers, NUMBERS)]
        while len(parts) > 1:
            k = rng.randrange(len(parts) - 1)
            (a, x), (b, y) = parts[k:k + 2]
            sign = rng.choice("+-*/")
            if sign == "/" and not y:
                break
            value = {"+": x + y, "-": x - y, "*": x * y}[sign] if sign != "/" else x / y
            parts[k:k + 2] = [(f"({a}{sign}{b})", value)]
        text, value = parts[0]
        if len(parts) == 1 and value.denominator == 1 and 1 <= value <= TARGET:
            return {"prompt": f"{PROMPT[0]}{', '.join(map(str, numbers))}{PROMPT[1]}{value}{PROMPT[2]}", "numbers": numbers, "target": int(value), "answer": text[1:-1]}


def problems(split, seed=0):
    """Dicts with prompt, numbers, target, and one answer of several. No test problem is a train problem, in any order of its numbers."""
    key = lambda p: (tuple(sorted(p["numbers"])), p["target"])
    test = [_draw(rng) for rng in [random.Random(f"test{seed}")] for _ in range(500)]
    if split == "test":
        return test
    held_out, rng = set(map(key, test)), random.Random(f"train{seed}")
    return [p for p in (_draw(rng) for _ in range(20000)) if key(p) not in held_out]


def value(text, numbers):
    """Exact value of an expression that uses exactly these numbers. ValueError says what is wrong with it."""
    if len(text) > 200 or not re.fullmatch(r"[\d\s+*/()-]+", text):
        raise ValueError("not an expression")
    used = []

    def of(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in SYMBOLS:  # no powers, hence nothing that grows without end
            return SYMBOLS[type(node.op)](of(node.left), of(node.right))
        raise ValueError("not an expression")
    try:
        result = of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    if sorted(used) != sorted(numbers):
        raise ValueError("other numbers")
    return result


def answer(problem, completion):
    """The expression given: in the last \\boxed{}, else the last line. What attempts are compared by when they vote (maj@k)."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    text = boxed[-1] if boxed else (completion.strip().splitlines() or [""])[-1]
    return text.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/").split("=")[0].strip() or None


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    given = answer(problem, completion)
    if given is None:
        return "no_answer"
    try:
        return "correct" if value(given, problem["numbers"]) == problem["target"] else "wrong"
    except ValueError as e:
        return "wrong" if str(e) == "other numbers" else "unparsable"


def teacher(rng):
    """One example for the tiny base model: the right answer, but for an operator now and then."""
    p = _draw(rng)
    answer = "".join(rng.choice("+-*/") if c in "+-*/" and rng.random() < SLOPPINESS else c for c in p["answer"])
    return [(p["prompt"], False), (answer, True)]
