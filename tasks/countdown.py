"""Countdown: reach a target with given numbers, each used once, and + - * / and brackets.

The answer is what stands in \\boxed{}, else the last line. Arithmetic is computed by hand-written rules over
Python's syntax tree, never by eval.

`bash run.sh countdown` trains the tiny model this file makes; a hub model needs --model, and usually --chat True.
"""

import ast
import operator
import random
import re
from fractions import Fraction

# no powers, hence nothing that grows without end
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
OPERATIONS = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), SIGNS.values()))
# how many numbers a problem has, the largest of them, the largest target
NUMBERS, LARGEST, TARGET = 3, 9, 40
# chance that the tiny model's teacher changes an operator
SLOPPINESS = 0.2
PROMPT = (
    "Use each of ",
    " exactly once, with + - * / and brackets, to make ",
    ". Answer with the expression in \\boxed{}.\n",
)
TINY = dict(words=PROMPT + tuple(str(n) for n in range(10, TARGET + 1)), steps=600, layers=3)


def _combine(numbers, rng):
    """A random expression of these numbers in this order -> (text, value); None if it divides by 0."""
    parts = [(str(n), Fraction(n)) for n in numbers]
    while len(parts) > 1:
        k = rng.randrange(len(parts) - 1)
        left, x = parts[k]
        right, y = parts[k + 1]
        sign = rng.choice("+-*/")
        if sign == "/" and y == 0:
            return None
        parts[k : k + 2] = [(f"({left}{sign}{right})", SIGNS[sign](x, y))]
    return parts[0]


def _draw(rng):
    """Random numbers, and an expression of them whose value is a whole number from 1 to TARGET."""
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(NUMBERS)]
        combined = _combine(rng.sample(numbers, NUMBERS), rng)
        if combined is None:
            continue
        text, target = combined
        if target.denominator == 1 and 1 <= target <= TARGET:
            break
    use, make, how = PROMPT
    listed = ", ".join(str(n) for n in numbers)
    return {
        "prompt": f"{use}{listed}{make}{target}{how}",
        "numbers": numbers,
        "target": int(target),
        # without the outermost brackets
        "answer": text[1:-1],
    }


def _key(problem):
    """What makes two problems the same one, in any order of their numbers."""
    return tuple(sorted(problem["numbers"])), problem["target"]


def problems(split, seed=0):
    """Dicts with prompt, numbers, target, and one answer of several. No test problem is a train problem."""
    rng = random.Random(f"test{seed}")
    test = [_draw(rng) for _ in range(500)]
    if split == "test":
        return test
    held_out = {_key(p) for p in test}
    rng = random.Random(f"train{seed}")
    train = [_draw(rng) for _ in range(20000)]
    return [p for p in train if _key(p) not in held_out]


def _compute(node, used):
    """Exact value of a syntax tree; the numbers in it are appended to `used`. Raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left = _compute(node.left, used)
        right = _compute(node.right, used)
        return OPERATIONS[type(node.op)](left, right)
    raise ValueError("not an expression")


def value(text, numbers):
    """Exact value of an expression that uses exactly these numbers. ValueError says what is wrong with it."""
    if len(text) > 200 or not re.fullmatch(r"[\d\s+*/()-]+", text):
        raise ValueError("not an expression")
    used = []
    try:
        result = _compute(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    if sorted(used) != sorted(numbers):
        raise ValueError("other numbers")
    return result


def answer(problem, completion):
    """The expression given: in the last \\boxed{}, else the last line. What attempts are compared by when they vote (maj@k)."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    lines = completion.strip().splitlines()
    text = ""
    if boxed:
        text = boxed[-1]
    elif lines:
        text = lines[-1]
    for latex, sign in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/")):
        text = text.replace(latex, sign)
    return text.split("=")[0].strip() or None


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    given = answer(problem, completion)
    if given is None:
        return "no_answer"
    try:
        reached = value(given, problem["numbers"])
    except ValueError as e:
        return "wrong" if str(e) == "other numbers" else "unparsable"
    return "correct" if reached == problem["target"] else "wrong"


def teacher(rng):
    """One example for the tiny base model: the right answer, but for an operator now and then."""
    problem = _draw(rng)
    given = ""
    for character in problem["answer"]:
        if character in SIGNS and rng.random() < SLOPPINESS:
            character = rng.choice("+-*/")
        given += character
    return [(problem["prompt"], False), (given, True)]
