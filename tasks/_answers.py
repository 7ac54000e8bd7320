"""Are two final answers in LaTeX the same? `same("\\frac12", "0.5")` -> True; `same("7", "9 or 7")` -> False.

What an answer is made of (lists, sets, brackets, equations, units) is read here; the expressions in it by the parser of
math-verify, which is lenient: it adds up `3 4` and drops the 2 of `11_2`, so only what is known to have one meaning is
given to it. Numbers are compared exactly. What is read decides, not what may have been meant:

- kinds must agree: `(1,2)`, `\\{1,2\\}` and a matrix differ, the order matters in brackets alone. A list without brackets is a set;
- `x = 5` is 5, and `5` is `x = 5`; another name is another answer; the value of `y = 2x` is no equation;
- a chain `a = b = c` is an answer if all its parts are equal, a decimal behind `\\approx` if it is the rounded value;
- a decimal is the number it shows: 0.333 is not 1/3, 3.14 is not pi;
- a unit may be left out on either side, another one is another answer; 7\\% is 7/100;
  if the problem asks for percent, then % is a unit: 7\\% is 7, and not 7/100;
- words are compared as words.

Deliberately absent: conversion of units, sums, integrals and limits that are not worked out.
"""

import contextlib
import functools
import random
import re
from collections import namedtuple

import sympy
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

# brackets of an answer, one in the other; no real one comes near
DEEPEST = 30
# sympy computes 9^{9^9} and 10^{10^{100}} digit by digit: refuse what could only be meant to
HOSTILE = re.compile(
    r"\d\s*[})]*\s*(\^|\*\*)\s*[-{(\s]*\d+\s*[})!]*\s*(\^|\*\*)"
    r"|(\^|\*\*)\s*[-{(\s]*\d{6,}"
    r"|\d{5,}\s*!"
    r"|![)}\]\s]*!"
    r"|\d\s*(\^|\*\*)\s*[-{(\s]*\d+\s*!"
)
# irrational numbers that agree to so many digits are equal if nothing in them is beyond 10^TAME or 10^-TAME
DIGITS, TAME = 400, 100
# points at which expressions in x are compared; how many of them must be in both domains
POINTS, ENOUGH = 8, 3

# all names of each unit
UNITS = """
percent
degree degrees deg
dollar dollars usd
cent cents
euro euros
pound pounds lb lbs
rupee rupees rs
yuan
unit units
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
acre acres
g gram grams
mg milligram milligrams
kg kilogram kilograms
oz ounce ounces
ton tons
l liter liters litre litres
ml milliliter milliliters
gallon gallons
quart quarts
cup cups
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years
mi/h mph
km/h kmh kph
radian radians rad
people person persons
student students
child children
man men
woman women
boy boys
girl girls
apple apples
book books
ball balls
coin coins
marble marbles
ticket tickets
page pages
piece pieces
point points
time times
way ways
game games
car cars
"""
UNIT = {name: line.split()[0] for line in UNITS.split("\n") for name in line.split()}

# signs that stand for commands here
COMMANDS = """
« lbrace
» rbrace
( langle
) rangle
[ lbrack
] rbrack
| vert lvert rvert
< lt
> gt
≤ le leq leqslant
≥ ge geq geqslant
≠ ne neq
≈ approx
∪ cup
∈ in
± pm
∞ infty
* cdot times ast
«» emptyset varnothing
\\frac dfrac tfrac cfrac
\\binom dbinom tbinom
\\text textbf textit textrm textnormal mathrm mathbf mathit mbox hbox
"""
SIGNS = {name: line.split()[0] for line in COMMANDS.split("\n") for name in line.split()[1:]}
SIGNS |= dict(lor=" or ", quad=" ", qquad=" ")
# what only places something on the page
SIGNS |= dict.fromkeys("left right displaystyle textstyle limits".split(), "")
SIGNS |= dict.fromkeys("big Big bigl bigr Bigl Bigr".split(), "")
# other spellings of the same
LAYOUT = [
    (r"\\(?:left|right)\.", ""),
    (r"\\\{", "«"),
    (r"\\\}", "»"),
    (r"\\([a-zA-Z]+)", lambda found: SIGNS.get(found[1], found[0])),
    (r"\{\\rm\s+([^{}]*)\}", r"\\text{\1}"),
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})|\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\s+", " "),
    (r"\^ ?\{? ?\\circ ?\}?|\\degree|°", r"\\text{degree}"),
    (r"\\(?:mathbb|Bbb) ?\{?R\}?|ℝ", "(-∞,∞)"),
    ("<=", "≤"),
    (">=", "≥"),
    ("∅", "«»"),
    (r"\*\*", "^"),
    ("[×·∙]", "*"),
    ("[−–]", "-"),
    (r"π|(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<![a-zA-Z\\])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√ ?(\d+)", r"\\sqrt{\1}"),
    ("²", "^2"),
    ("³", "^3"),
    (r"\\text ?\{ ?(or|and) ?\}", r" \1 "),
]
LAYOUT = [(re.compile(pattern), new) for pattern, new in LAYOUT]
PERCENT = re.compile(r"(?:\\ )?\s*(?:\\?%|\\(?:text|mathrm) ?\{\s*percent\s*\}|\bpercent\b)")

# what the parser is trusted with
LETTERS = """
pi alpha beta gamma delta epsilon theta lambda mu nu rho
sigma tau phi varphi omega psi xi eta zeta
"""
FUNCTIONS = """
frac sqrt binom div lfloor rfloor lceil rceil log ln exp
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh
"""
LETTERS = set(LETTERS.split())
KNOWN = LETTERS | set(FUNCTIONS.split())
TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|[a-zA-Z]|[-+*/^_(){}|!\[\]∞]")
# mixed numbers, and arguments without their braces
SPELLING = [
    (
        r"(?<![\w}^.])(\d+) ?\\frac ?(?:\{(\d+)\}|(\d)) ?(?:\{(\d+)\}|(\d))",
        r"(\1+\\frac{\2\3}{\4\5})",
    ),
    (r"^(-?)(\d+) (\d+)/(\d+)$", r"\1(\2+\\frac{\3}{\4})"),
    (r"\\frac ?([\da-z]) ?([\da-z])", r"\\frac{\1}{\2}"),
    (r"\\frac ?([\da-z]|\\pi) ?(?=\{)", r"\\frac{\1}"),
    (r"\\frac ?(\{[^{}]*\}) ?([\da-z])", r"\\frac\1{\2}"),
    (r"\\frac ?\\pi ?(\d)", r"\\frac{\\pi}{\1}"),
    (r"\\sqrt ?([\da-z])", r"\\sqrt{\1}"),
    (r"\\log_ ?(?:(\w)|\{(\w+)\}) ?(\d+|[a-z])", r"\\log_{\1\2}{\3}"),
]
SPELLING = [(re.compile(pattern), new) for pattern, new in SPELLING]
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot) ?\{?(\d+)\}?")
# is 1/2x a half of x? is 2^3! 64?
AMBIGUOUS = re.compile(
    r"/ ?(?:\d+|[a-zA-Z]|\\pi|\\sqrt ?\{[^{}]*\}|\([^()]*\)) ?(?:[a-zA-Z(]|\\(?!div))|\^ ?\w+ ?!|![!\w]|[(|*/^]!"
)
TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
ABBREVIATED = re.compile(r"(?<=[a-zA-Z])\.")
WORDS = re.compile(
    r"[A-Za-z][a-z]{2,}(?:[ '-][A-Za-z]?[a-z]+)*|[A-Za-z][a-z]+(?: [A-Za-z]?[a-z]+)+"
)
NAME = re.compile(
    r"([a-zA-Z]|[A-Z]{2,3}|\\[a-z]+)(_\w|_\{\w+\})?|[a-zA-Z]?\([a-zA-Z](, ?[a-zA-Z])*\)"
)
NUMBER = re.compile(r"([-+]?)(\d+|\d{1,3}(?:[, ]\d{3})+|)(\.\d+)?")
# 2mg may be 2 times m times g
WITH_UNIT = re.compile(
    r"(.*?[\d})]|.*\\pi) ?(?:\\text ?\{ ?([a-zA-Z%./ ]+?) ?\}|((?<= )[a-zA-Z/][a-zA-Z./ ]*[a-zA-Z]|[cmk]m|kg))(?:\^\{?([23])\}?)?"
)
DOLLARS = re.compile(r"-?\\?\$.*|.*\\\$")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
MATRIX = re.compile(
    r"[\[(]?\\begin\{([pb]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}[\])]?", re.DOTALL
)
LETTER_OR_TIME = re.compile(r"[A-Z]|\d+(?: ?: ?\d+)+(?: ?[aApP][mM])?")
BASED = re.compile(r"\(?([0-9A-F]*[0-9][0-9A-F]*)\)?_(?:(\d+)|\{(?:\\text\{)?(\w+)\}?\})")
OPENING, CLOSING = "([{«", ")]}»"
FLIPPED = {">": "<", "≥": "≤"}

# kind: value (parts: an expression; mark: its unit) | named (mark: the name) | list, set, union | bracket (mark: "(]") |
# range (an inequality in one unknown, mark: its name) | relation (mark: = < ≤ ≠) | matrix (mark: columns) | text (mark: words)
Answer = namedtuple("Answer", "kind mark parts")


class Unreadable(ValueError):
    """This is no answer, or more than one."""


def same(reference, given, percent=False):
    """Is `given` the answer `reference`, both in LaTeX? percent: the problem asks for a percentage.

    Raises Unreadable if `given` has no meaning, or more than one. A reference like that is equal to its own words alone.
    """
    per_cent = "\\\\text{percent}" if percent else "/100"
    reference = PERCENT.sub(per_cent, reference)
    given = PERCENT.sub(per_cent, given)
    if plain(reference) == plain(given):
        return True
    theirs = read(given)
    try:
        ours = read(reference)
    except Unreadable:
        return False
    with _any_error_is_unreadable(given):
        return _same_answer(ours, theirs)


@functools.lru_cache(10000)
def read(text):
    """The Answer that a LaTeX text is; raises Unreadable."""
    brackets = max(text.count(character) for character in "([_^")
    if brackets > DEEPEST or HOSTILE.search(text):
        raise Unreadable(f"too large: {text[:80]}")
    with _any_error_is_unreadable(text):
        return _statement(layout(text))


@contextlib.contextmanager
def _any_error_is_unreadable(text):
    """The parser and sympy raise errors of all classes; what needs too much of the machine is the sandbox's."""
    try:
        yield
    except (MemoryError, RecursionError, Unreadable):
        raise
    except Exception as e:
        raise Unreadable(f"{text[:80]}: {e}") from e


def layout(text):
    """The text without what only places it on the page, and one spelling of each sign."""
    for pattern, new in LAYOUT:
        text = pattern.sub(new, text)
    text = " ".join(text.split()).removeprefix("\\boxed").strip()
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 3 and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    while len(text) > 2 and text[0] == "{" and _closes_at_end(text):
        text = text[1:-1].removeprefix("\\boxed").strip()
    words = TEXT.fullmatch(text)
    return (words[1] if words else text).removesuffix(".").strip()


def plain(text):
    """Words of a text in small letters, or its signs without spaces that do not matter."""
    text = layout(text)
    words = _words(text)
    if WORDS.fullmatch(words):
        return words.lower()
    return words if len(words) == 1 else re.sub(r"(?<!\w) | (?!\w)", "", text)


def _words(text):
    """`\\text{(B)}` -> `B`."""
    words = text
    if "\\text" in text:
        words = TEXT.sub(r"\1", text)
        words = ABBREVIATED.sub("", words)
        words = " ".join(words.split())
    choice = re.fullmatch(r"\(?([A-Z])\)?\.?", words)
    return choice[1] if choice else words


# ---- reading: a statement is made of lists of relations between values


def _statement(text):
    if not re.search(r"[(\[«]", text):
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    items = _split(text, r",? ?\b(?:or|and)\b ?|[,;]")
    if len(items) == 1:
        return _relation(text)
    answers = [_relation(item) for item in items]
    kinds = {answer.kind for answer in answers}
    names = {answer.mark for answer in answers if answer.kind == "named"}
    if len(names) == 1 and answers[0].kind == "named":
        values = [answer.parts[0] if answer.kind == "named" else answer for answer in answers]
        return Answer("named", names.pop(), (_list(values),))
    if kinds == {"range"}:
        if re.search(r"\band\b|,", text):
            raise Unreadable("inequalities that hold together")
        return Answer("union", None, tuple(answer.parts[0] for answer in answers))
    return _list(answers)


def _list(answers):
    """Lists within a list, as `1, \\pm 2` has one, are part of it."""
    parts = []
    for answer in answers:
        parts += answer.parts if answer.kind == "list" else [answer]
    return Answer("list", None, tuple(parts))


def _relation(text):
    belongs = re.fullmatch(r"([a-zA-Z]) ?∈ ?(.*)", text)
    if belongs:
        return Answer("named", belongs[1], (_value(belongs[2]),))
    sides = _split(text, "[=<>≤≥≠≈]")
    if len(sides) == 1:
        return _value(text)
    signs = [sign for sign in text if sign in "=<>≤≥≠≈"]
    if len(signs) != len(sides) - 1:
        raise Unreadable("a relation in brackets")
    if set(signs) <= {"=", "≈"}:
        return _equation(sides, signs)
    return _inequality([_expression(side) for side in sides], signs)


def _equation(sides, signs):
    """`x = 6/2 = 3` -> named x; `6/2 = 3` -> its value; `y = 2x` -> a relation."""
    name = None
    if NAME.fullmatch(sides[0]) and signs[0] == "=":
        name = re.sub("[{}]", "", sides[0])
    values = [_value(side) for side in sides[bool(name) :]]
    first = values[0]
    for side, sign, value in zip(sides[::-1], signs[::-1], values[:0:-1]):
        if sign == "≈" and not _is_rounded(first, value, side):
            raise Unreadable("not the rounded value")
        if sign == "=" and not _same_answer(first, value):
            return _open_equation(sides)
    is_open = first.kind == "value" and bool(first.parts[0].free_symbols)
    if name and is_open and "(" not in name:
        return _open_equation(sides)
    return Answer("named", name, (first,)) if name else first


def _open_equation(sides):
    left, right = (_expression(side) for side in sides)
    if not (left - right).free_symbols:
        raise Unreadable("different numbers are not equal")
    return Answer("relation", "=", (left - right, left, right))


def _is_rounded(exact, decimal, digits):
    """Is a decimal, with so many digits, the rounded value of an expression?"""
    places = len(digits.partition(".")[2])
    error = abs(exact.parts[0] - decimal.parts[0]).evalf(50)
    return bool(NUMBER.fullmatch(digits)) and bool(error <= sympy.Rational(1, 2 * 10**places))


def _inequality(sides, signs):
    """`1 < x ≤ 2` -> a range; of two unknowns: a relation."""
    if signs[0] in FLIPPED:
        sides = sides[::-1]
        signs = [FLIPPED.get(sign, "?") for sign in signs[::-1]]
    if not set(signs) <= {"<", "≤"}:
        if signs != ["≠"]:
            raise Unreadable("a chain of different relations")
        return Answer("relation", "≠", (sides[0] - sides[1],))
    unknown = [side.is_Symbol for side in sides]
    closed = [not side.free_symbols for side in sides]
    if len(sides) == 2 and not (any(unknown) and any(closed)):
        return Answer("relation", signs[0], (sides[0] - sides[1],))
    if len(sides) == 2:
        sides = [-sympy.oo, *sides] if unknown[0] else [*sides, sympy.oo]
        signs = ["<", *signs] if unknown[0] else [*signs, "<"]
        closed = [True, False, True]
    if len(sides) != 3 or closed != [True, False, True] or not sides[1].is_Symbol:
        raise Unreadable("a chain that is no range")
    opening = "(" if signs[0] == "<" else "["
    closing = ")" if signs[1] == "<" else "]"
    ends = Answer("value", None, (sides[0],)), Answer("value", None, (sides[2],))
    return Answer("range", str(sides[1]), (Answer("bracket", opening + closing, ends),))


def _value(text):
    text = text.strip()
    if not text:
        raise Unreadable("an empty place")
    number = _number(text)
    if number is not None:
        return Answer("value", None, (number,))
    for reading in (_union, _matrix, _in_brackets, _with_unit, _plus_minus):
        answer = reading(text)
        if answer:
            return answer
    words = _words(text)
    if LETTER_OR_TIME.fullmatch(words):
        return Answer("text", words.replace(" ", "").lower() if ":" in words else words, ())
    if len(words) > 3 and WORDS.fullmatch(words):
        return Answer("text", words.lower(), ())
    based = BASED.fullmatch(text)
    if based:
        return Answer("text", f"{based[1]} in base {based[2] or based[3]}", ())
    return Answer("value", None, (_expression(text),))


def _number(text):
    """An exact number from `-1,234.5`, None if it is none."""
    found = NUMBER.fullmatch(text)
    if not found or not (found[2] or found[3]):
        return None
    sign, whole, fraction = found.groups()
    digits = re.sub("[, ]", "", whole) or "0"
    return sympy.Rational(sign + digits + (fraction or ""))


def _union(text):
    parts = _split(text, "∪")
    if len(parts) > 1:
        return Answer("union", None, tuple(_value(part) for part in parts))


def _matrix(text):
    found = MATRIX.fullmatch(text)
    if found:
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2].strip())]
        if not "".join(rows[-1]).strip():
            rows.pop()
        if len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of different lengths")
        cells = tuple(_value(cell) for row in rows for cell in row)
        return Answer("matrix", str(len(rows[0])), cells)


def _in_brackets(text):
    """Sets, points, intervals; None for `(x+1)`."""
    if text[0] not in "([«" or not _closes_at_end(text):
        return None
    if (text[0] == "«") != (text[-1] == "»"):
        raise Unreadable("brackets that do not match")
    inside = text[1:-1].strip()
    items = _split(inside, "[,;]") if inside else []
    if text[0] == "«":
        return Answer("set", None, _list(map(_value, items)).parts)
    if len(items) > 1:
        parts = tuple(_value(item) for item in items)
        return Answer("bracket", text[0] + text[-1], parts)


def _with_unit(text):
    """A number and its unit; None without one."""
    if DOLLARS.fullmatch(text):
        number = _number(re.sub(r"\\?\$ ?", "", text, count=1).strip())
        return Answer("value", "dollar", (number,)) if number is not None else None
    found = WITH_UNIT.fullmatch(text)
    if not found:
        return None
    words = found[2] or found[3]
    power = found[4] or ""
    unit = _unit(words.lower().replace(".", ""), power)
    if unit is None:
        return None
    value = _value(found[1])
    if value.kind != "value" or value.mark or value.parts[0].free_symbols:
        return None
    return Answer("value", unit, value.parts)


def _unit(words, power):
    """`square metres` -> `m2`, `miles per hour` -> `mi/h`; None if it is none."""
    area = re.fullmatch(r"(square|sq|cubic) (.*)", words)
    if area:
        words, power = area[2], "3" if area[1] == "cubic" else "2"
    names = [UNIT.get(word) for word in re.split(r" per |/", UNIT.get(words, words))]
    return None if None in names else "/".join(names) + power


def _plus_minus(text):
    """`1 ± \\sqrt{2}` -> a list of two."""
    if text.count("±") == 1:
        both = (_value(text.replace("±", sign)) for sign in "+-")
        return Answer("list", None, tuple(both))


def _split(text, pattern):
    """Parts of a text between the matches of a pattern that are outside of all brackets, without their spaces."""
    depths = [0]
    for character in text:
        depths.append(depths[-1] + (character in OPENING) - (character in CLOSING))
    if depths[-1] or min(depths) < 0:
        raise Unreadable("brackets that do not match")
    cuts = [found.span() for found in re.finditer(pattern, text) if depths[found.start()] == 0]
    starts = [0, *(end for _, end in cuts)]
    ends = [*(start for start, _ in cuts), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends)]


def _closes_at_end(text):
    """Is the bracket that opens a text closed by its last character?"""
    depth = 0
    for k, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return k == len(text) - 1
    return False


# ---- expressions


def _expression(text):
    """A sympy expression whose numbers are exact; raises Unreadable unless it has one meaning."""
    text = REPEATING.sub(_repeating, text)
    for pattern, new in SPELLING:
        text = pattern.sub(new, text)
    tokens = TOKEN.findall(text)
    if TOKEN.sub("", text).strip() or AMBIGUOUS.search(text):
        raise Unreadable("signs of unknown meaning")
    exact = []
    followers = [*tokens[1:], ""]
    before = ""
    for token, after in zip(tokens, followers):
        _check(before, token, after)
        exact.append(_exact(token, after))
        before = token
    found = _parsed(" ".join(exact).replace("∞", "\\infty"))
    if not isinstance(found, sympy.Expr):
        raise Unreadable("no expression")
    found = found.subs(sympy.Symbol("i", real=True), sympy.I).doit()
    if found.has(AppliedUndef, sympy.nan, sympy.zoo, sympy.Float):
        raise Unreadable("no value")
    return found


def _parsed(text):
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # A is not a; mixed numbers have been read
    config = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)


def _repeating(found):
    """`0.1\\overline{6}` -> `(\\frac{15}{90})`."""
    whole, fixed, period = found.groups()
    denominator = 10 ** len(fixed) * (10 ** len(period) - 1)
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return f"(\\frac{{{numerator}}}{{{denominator}}})"


def _exact(token, after):
    """`2.50` -> `\\frac{250}{100}`: the parser would round it."""
    whole, point, fraction = token.partition(".")
    if not point:
        return token
    exact = f"\\frac{{{whole}{fraction}}}{{1{'0' * len(fraction)}}}"
    return f"({exact})" if after in ("^", "!") else exact


def _check(before, token, after):
    """Three neighbours of an expression: numbers beside one another, indices of numbers and the like have no meaning."""
    command = before[1:] if before.startswith("\\") else None
    if token.startswith("\\") and token[1:] not in KNOWN:
        raise Unreadable(f"unknown {token}")
    ended = command in LETTERS if command else before.isalnum() or before in (")", "}", "]", "!")
    if token[0].isdigit() and ended:
        raise Unreadable("a number right after something else")
    if token == "_" and not (before.isalpha() or command):
        raise Unreadable("an index of a number")
    if token == "{" and not (command or before in ("^", "_", "}", "]")):
        raise Unreadable("a group")
    if token == "[" and command != "sqrt" or token == "]" and after != "{":
        raise Unreadable("a bracket")
    if token in ("-", "+") and before in ("-", "+"):
        raise Unreadable("two signs")


# ---- comparison


def _same_answer(reference, given):
    if reference.kind == given.kind == "named" and reference.mark != given.mark:
        return False
    if reference.kind == "named":
        reference = reference.parts[0]
    if given.kind == "named":
        given = given.parts[0]
    kinds = reference.kind, given.kind
    if kinds == ("value", "relation") and given.mark == "=":
        return _is_definition(reference, given)
    if kinds == ("range", "bracket"):
        return _same_answer(reference.parts[0], given)
    if kinds == ("bracket", "range"):
        return _is_interval(reference) and _same_answer(reference, given.parts[0])
    if set(kinds) != {"list", "set"} and kinds[0] != kinds[1]:
        return False
    if kinds[0] in ("list", "set", "union"):
        return _same_members(reference.parts, given.parts, "list" in kinds)
    if kinds[0] == "value":
        units = {reference.mark, given.mark} - {None}
        return len(units) < 2 and equal(reference.parts[0], given.parts[0])
    if reference.mark != given.mark or len(reference.parts) != len(given.parts):
        return False
    if kinds[0] == "relation":
        return _proportional(reference.parts[0], given.parts[0], reference.mark)
    return all(map(_same_answer, reference.parts, given.parts))


def _is_definition(reference, given):
    """`y = 2x + 1` where 2x + 1 is asked for."""
    _, left, right = given.parts
    new = left.is_Symbol and left not in right.free_symbols
    return new and equal(reference.parts[0], right)


def _is_interval(bracket):
    """`(1,2)` may be a point."""
    endless = any(end.kind == "value" and end.parts[0].is_infinite for end in bracket.parts)
    return endless or bracket.mark != "()"


def _same_members(ours, theirs, countable):
    """Has each member its like on the other side? countable: and one of its own?"""
    if countable and len(ours) != len(theirs):
        return False
    left = list(theirs)
    for a in ours:
        likes = [b for b in left if _alike(a, b)]
        if not likes:
            return False
        if countable:
            left.remove(likes[0])
    return countable or all(any(_alike(a, b) for a in ours) for b in theirs)


def _alike(a, b):
    """In `x=2, y=3` the names are part of the answer."""
    return (a.kind == "named") == (b.kind == "named") and _same_answer(a, b)


def _proportional(ours, theirs, sign):
    """Is one difference of sides a multiple of the other, by a positive number in an inequality?"""
    if ours.free_symbols != theirs.free_symbols:
        return False
    for point in _points(ours.free_symbols):
        a, b = ours.subs(point), theirs.subs(point)
        if a.is_finite and b.is_finite and not _vanishes(a) and not _vanishes(b):
            positive = sign in "=≠" or bool(a * b > 0)
            return positive and equal(ours * b, theirs * a)
    return False


def equal(a, b):
    """Are two sympy expressions the same number, or the same function of their unknowns?"""
    unknowns = a.free_symbols | b.free_symbols
    if a == b or not unknowns:
        return a == b or _same_number(a, b)
    seen = 0
    for point in _points(unknowns):
        ours, theirs = a.subs(point), b.subs(point)
        if ours.is_finite and theirs.is_finite:
            if not _same_number(ours, theirs):
                return False
            seen += 1
    return seen >= ENOUGH


def _same_number(a, b):
    """Exactly if both are rational; else to so many digits that nothing in them could make the difference."""
    if a == b or a.is_Rational and b.is_Rational:
        return a == b
    if not (a.is_finite and b.is_finite and _vanishes(a - b)):
        return False
    return _is_tame(a) and _is_tame(b) or (a - b).expand() == 0


def _vanishes(number):
    """Is a number 0, as far as DIGITS digits tell?"""
    if number.is_Rational:
        return number == 0
    if number.is_real is not True:
        real, imaginary = number.as_real_imag()
        if imaginary != 0:
            return _vanishes(real) and _vanishes(imaginary)
    try:
        return number.evalf(5, maxn=DIGITS, strict=True) == 0
    except PrecisionExhausted:
        return True


def _is_tame(number):
    """Is nothing in a number so large or so small that it could hide behind DIGITS digits?"""
    sizes = (abs(part.evalf(5)) for part in sympy.preorder_traversal(number))
    return all(
        size == 0 or sympy.Float(10) ** -TAME < size < sympy.Float(10) ** TAME for size in sizes
    )


def _points(unknowns):
    """Values of the unknowns, in no order an answer could be made for, ever closer to 0; the first half of them positive."""
    names = sorted(unknowns, key=str)
    rng = random.Random(str(names))
    for k in range(POINTS):
        low = 1 if k < POINTS // 2 else -3000
        yield {name: sympy.Rational(rng.randint(low, 3000), 1009 * 2**k) for name in names}
