"""Reads a final answer in LaTeX: text -> tokens -> statements about numbers, tuples, sets,
intervals and matrices.

    read("x = \\frac{6}{2} = 3")  ->  [Statement(name="x", values=(3, 3), relation="=")]

`Reader` is the grammar: its methods go from lists down to single factors. It raises ValueError for
an answer that could be read in two ways (`9 7`, `1/2x`, `7'`, words that are no unit), or that
would be too large to compute (tasks/_exact.py). So an answer cannot mean several things, and cannot
keep the machine busy. Decimals are fractions, and units are factors. Deliberately absent: sums,
integrals, limits and `f(2)`, which are no final answers, and decimal commas.

This is not a task: its name starts with `_`.
"""

import re
from typing import NamedTuple

import sympy

from tasks._exact import (
    applied,
    binomial,
    defined,
    factorial,
    is_expression,
    logarithm,
    power,
)

# the most characters of an answer
LONGEST = 500
# the most brackets within each other
DEEPEST = 30
# More letters side by side are a word, and not a product of variables.
LONGEST_PRODUCT = 4


class Unit(sympy.Symbol):
    """A unit is a factor: `5 \\text{ km/h}` is 5 * km / h."""


INFINITY = sympy.Symbol("\\infty")
DEGREE = Unit("degree")


class Collection(NamedTuple):
    """Several values. kind tells how they are written:

    "()", "[]", "[)", "(]"  in these brackets, a point or an interval
    "open"                  an open interval, which cannot be a point
    "{}"                    a set
    "\\cup"                 a union of intervals and sets
    ":"                     a ratio, or a time
    "\\pmod"                a residue and its modulus
    """

    kind: str
    items: tuple


class Statement(NamedTuple):
    """A value, or a relation. Values are expressions and matrices of sympy's, and Collections."""

    # `x` in `x = 3`; None if there is no name
    name: str | None
    # the values that are equal, without the name; () for an inequality
    values: tuple
    # "" for a value, "=", "\\in" for an interval, or the signs of an inequality, such as "< \\le"
    relation: str = ""
    # left side - right side, for each sign between expressions
    differences: tuple = ()


# ---- tokens

# Units, each followed by its other names, without a plural's s.
UNITS = """
mm millimeter millimetre | cm centimeter centimetre | m meter metre | km kilometer kilometre
in inch inche | ft foot feet | yd yard | mi mile | l liter litre | ml milliliter millilitre | gallon
mg milligram | g gram | kg kilogram | pound lb | ounce | degree deg | rad radian
celsius | fahrenheit
s sec second | ms millisecond | min minute | h hr hour | am | pm | day | week | month | year yr
newton | joule | watt | volt | ampere amp | kelvin | pascal | hertz
dollar usd buck | cent | euro eur | percent | unit | people person | student | way | time | piece
"""
UNITS = [names.split() for names in re.split(r"[|\n]", UNITS.strip())]
UNITS = {name: names[0] for names in UNITS for name in names}
RATES = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h"}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
MULTIPLES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
UNIT_WORDS = {*UNITS, *RATES, *POWERS, *MULTIPLES, "per"}
# Single letters that are units in \text or \mathrm after a number, and variables elsewhere.
LETTER_UNITS = dict(N="newton", J="joule", W="watt", V="volt", A="ampere", K="kelvin", L="liter")
# Units that need no \text even where they touch a number: `15cm`; but `5ft` is f times t.
TOUCHING = {"cm", "mm", "km", "kg"}
CURRENCIES = {
    "\\$": "dollar",
    "$": "dollar",
    "€": "euro",
    "£": "sterling",
    "¥": "yen",
    "₹": "rupee",
}
# Words that change a number, and are never a unit.
NO_UNITS = """
or and not no if unless else but to from about approximately roughly maybe than more less at least
most plus minus negative positive squared cubed one two three four five six seven eight nine ten
half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth
millionth factorial root reciprocal inverse binary base pair couple zero below under above over
debt loss deficit par double twice triple opposite except excluding fewer false wrong incorrect
impossible cannot is are be
"""
NO_UNITS = set(NO_UNITS.split())

TRIGONOMETRIC = "sin cos tan cot sec csc sinh cosh tanh".split()
TRIGONOMETRIC = {name: getattr(sympy, name) for name in TRIGONOMETRIC}
INVERSE = {name: getattr(sympy, "a" + name) for name in TRIGONOMETRIC}
FUNCTIONS = TRIGONOMETRIC | {"arc" + name: function for name, function in INVERSE.items()}
FUNCTIONS |= dict(tg=sympy.tan, ctg=sympy.cot, arctg=sympy.atan, arcctg=sympy.acot)
FUNCTIONS |= dict(exp=lambda value: power(sympy.E, value))
BASES = {"log": sympy.Integer(10), "lg": sympy.Integer(10), "ln": sympy.E}
FUNCTION_COMMANDS = {"\\" + name for name in (*FUNCTIONS, *BASES)}
# words that are commands even without a backslash
COMMAND_WORDS = {*FUNCTIONS, *BASES, "sqrt", "pi", "infty", "infinity"}

SYNONYMS = r"""
\frac \dfrac \tfrac \cfrac | \binom \dbinom \tbinom | \cdot \times \ast * | / \div | \% % | , ;
\le \leq \leqslant <= | \ge \geq \geqslant >= | \ne \neq != | < \lt | > \gt | \infty \infinity
\{ \lbrace | \} \rbrace | ( \langle | ) \rangle | | \lvert \rvert \vert \mid | \bar \overline
\emptyset \varnothing | \cup \bigcup | \setminus \backslash | \mathbb \Bbb
\phi \varphi | \epsilon \varepsilon | \theta \vartheta
"""
SYNONYMS = [names.split() for names in re.split(r" \| (?=\S)|\n", SYNONYMS.strip())]
SYNONYMS = {name: names[0] for names in SYNONYMS for name in names}
FONT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|it|bf|sf)|boldsymbol|bm|[mh]box|operatorname)[ ]?"


def token_pattern(thousands):
    """The regular expression of a token. thousands: signs that may stand between thousands."""
    return re.compile(
        rf"""[ ]*(?:
        (?P<number>
            [1-9]\d{{0,2}} (?: (?:{thousands}) \d{{3}} )+ (?!,?\d) (?:\.\d+)?    # 12,345.6
          | \d*\.\d* (?: \\(?:overline|bar|dot)[ ]?\{{?\d+\}}? | \(\d+\) )       # 0.1\overline{{6}}
          | \d*\.\d+ [eE][+-]?\d+ (?![\w.])                                      # 1.5e3
          | \d+ (?: E[+-]?\d+ | e\d+ | e-\d\d+ ) (?![\w.])                       # not 2e+1
          | \d+\.?\d* | \.\d+ )
        | \\(?P<edge>begin|end)[ ]?\{{(?P<environment>[a-z]+)\*?\}} (?:[ ]?\{{[clr| ]+\}})?
        | (?P<font>{FONT})\{{(?P<content>[^{{}}]*)\}}
        | \\[a-zA-Z]+ | \\. | [<>]= | (?<=[ ])!= | (?P<letters>[a-zA-Z]+) | \S )""",
        re.X,
    )


# the word "and", which is read as a comma
AND = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])")
TOKEN = token_pattern(r"\{,\}|,|[ ]")
# In brackets a comma separates: (1,234) is a point, and not a number.
TOKEN_IN_BRACKETS = token_pattern(r"\{,\}|[ ]")


def tokens_of(text, nouns=()):
    """`\\dfrac12 \\text{ cm}` -> ["\\frac", "12", "\\text{cm}"]; one spelling of each sign.

    nouns: words that are units here, and need no \\text.
    """
    tokens = []
    depth = 0
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = (TOKEN_IN_BRACKETS if depth else TOKEN).match(text, position)
        position = match.end()
        for token in spelled(match, nouns):
            last = tokens[-1] if tokens else ""
            # "or" and "and" are commas, too
            is_list_word = token == "," and (match["font"] or match["letters"])
            if last.startswith("\\text{") and token.startswith("\\text{"):
                tokens[-1] = last[:-1] + " " + token.removeprefix("\\text{")
            elif last != "," or not is_list_word:
                tokens.append(token)
            depth += (token in ("(", "[", "\\{")) - (token in (")", "]", "\\}"))
    return tokens


def spelled(match, nouns):
    """The tokens that a match of TOKEN stands for."""
    text = match[0].lstrip()
    if match["number"]:
        return [text.replace(" ", "") if "\\" in text else re.sub("[ ,{}]", "", text)]
    if match["environment"]:
        return [f"\\{match['edge']}{{{match['environment']}}}"]
    if match["letters"]:
        return spelled_letters(text, nouns, before=match.string[: match.start("letters")])
    if not match["font"]:
        return [SYNONYMS.get(text, text)]
    content = " ".join(match["content"].strip(" .").split())
    if content in ("or", "and", ","):
        return [","]
    if content in COMMAND_WORDS and (content not in UNITS or "operatorname" in match["font"]):
        return [SYNONYMS.get("\\" + content, "\\" + content)]
    is_after_number = re.search(r"[\d}] ?$", match.string[: match.start("font")])
    is_upright = re.match(r"\\(text|mathrm)(?![a-z])", match["font"])
    if content in LETTER_UNITS and is_after_number and is_upright:
        return [f"\\text{{{LETTER_UNITS[content]}}}"]
    is_unit = content in UNITS and not re.match(r"\\(mathbf|mathit|b)", match["font"])
    if re.fullmatch(r"[a-zA-Z]|[\d.]+|", content) and not is_unit:
        return [content] if content else []
    return [f"\\text{{{content}}}"]


def spelled_letters(word, nouns, before):
    """The tokens of letters outside of \\text: a separator, a function, a unit, or variables."""
    if word in ("or", "and"):
        return [","]
    if word in COMMAND_WORDS:
        return [SYNONYMS.get("\\" + word, "\\" + word)]
    is_apart = len(word) == 2 and re.search(r"[\d}] $", before)
    is_word = len(word) > 2 or word in TOUCHING or is_apart
    is_unit = is_word and word.lower().removesuffix("s") in {*UNIT_WORDS, *nouns}
    if is_unit or len(word) > LONGEST_PRODUCT:
        return [f"\\text{{{word.lower()}}}"]
    return list(word)


def join(tokens):
    """A text that has these tokens: ["x", "_", "{", "1", "}", ",", "2"] -> "x_1, 2"."""
    kept = list(tokens)
    for i in reversed(range(len(kept) - 3)):
        if (
            kept[i] in ("^", "_")
            and kept[i + 1] == "{"
            and kept[i + 3] == "}"
            and kept[i + 2].isalnum()
        ):
            kept[i + 1 : i + 4] = [kept[i + 2]]
    text = re.sub(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", "", " ".join(kept))
    return text.replace(",", ", ")


# ---- numbers and collections


def number_of(token):
    """A number as a fraction: `0.1\\overline{6}` -> 1/6. Raises ValueError if it is too large."""
    repeating = re.fullmatch(r"(\d*)\.(\d*)(?:\\[a-z]+\{?|\()(\d+)[})]?", token)
    if repeating:
        whole, fixed, period = repeating.groups()
        exact = int(whole + fixed or 0) + sympy.Rational(int(period), 10 ** len(period) - 1)
        return exact / 10 ** len(fixed)
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    scale = power(sympy.Integer(10), sympy.Integer(int(exponent or 0) - len(decimals)))
    return int(whole + decimals or 0) * scale


def operand(value):
    """A value as part of a larger expression, in which `[x]` is x in brackets, and not a list."""
    is_group = isinstance(value, Collection) and value.kind == "[]" and len(value.items) == 1
    return value.items[0] if is_group else value


def added(left, right):
    """left + right, of expressions or matrices. Raises ValueError for anything else."""
    left, right = operand(left), operand(right)
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        if left.shape != right.shape:
            raise ValueError("matrices of different shapes are added")
        return left + right
    return defined(left) + defined(right)


def multiplied(left, right):
    """left * right, one of which may be a matrix. Raises ValueError for anything else."""
    left, right = operand(left), operand(right)
    is_matrix = [isinstance(side, sympy.MatrixBase) for side in (left, right)]
    if is_matrix == [True, False]:
        return left * defined(right)
    if is_matrix == [False, True]:
        return defined(left) * right
    return defined(left) * defined(right)


def letters(expression):
    """The variables of an expression: neither units nor infinity."""
    return {s for s in expression.free_symbols if not isinstance(s, Unit) and s != INFINITY}


def interval(brackets, ends):
    """An interval, which is no point even if its brackets are (). Its ends stay as written."""
    return Collection("open" if brackets == "()" else brackets, tuple(ends))


REALS = interval("()", (-INFINITY, INFINITY))


def is_interval(value):
    """May it be an interval?"""
    is_kind = isinstance(value, Collection) and value.kind in ("open", "()", "[]", "[)", "(]")
    return is_kind and len(value.items) == 2


def union(parts):
    """A Collection of intervals and sets. Raises ValueError if a part is neither."""
    for part in parts:
        is_set = isinstance(part, Collection) and part.kind == "{}"
        if not is_set and not is_interval(part):
            raise ValueError("only intervals and sets can be united")
    return Collection("\\cup", tuple(interval(*part) for part in parts))


def without_points(whole, points):
    """`\\mathbb{R} \\setminus \\{0\\}` as a union of intervals. Raises ValueError for others."""
    if whole != REALS or not isinstance(points, Collection) or points.kind != "{}":
        raise ValueError("points can only be taken out of the real numbers")
    if not all(defined(point).is_real for point in points.items):
        raise ValueError("only real numbers can be taken out of the real numbers")
    ends = [-INFINITY, *sorted(points.items), INFINITY]
    return union([interval("()", pair) for pair in zip(ends, ends[1:])])


# ---- relations

RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\equiv")
FLIPPED = {">": "<", "\\ge": "\\le"}
# The name of a value may stand left of `=`: x, a_n, \vec{v}, \text{Area}, \frac{AB}{CD}, f(x),
# f(2), f^{-1}(x), AB, |z|, (x,y), and combinations of them, such as m+n and xy.
# Quantifiers that end with + do not backtrack, because that could take for ever.
VARIABLE = (
    r"(?:[a-zA-Z]|\\(?!sqrt|ln|lg|log|bar\{z|overline\{z)[a-zA-Z]++(?:\{[a-zA-Z]++\}){0,2}+)"
    r"(?:_(?:[a-zA-Z]|\d++|\{[^{}]*+\}))?+'*+"
)
NAMED = rf"{VARIABLE}(?:\^\{{-1\}}(?=\())?+(?:\((?:-?\d++|{VARIABLE}(?:,{VARIABLE})*+)\))?+"
COMBINED = re.compile(rf"(?![A-Z]+$){NAMED}(?:[-+/:]?{NAMED})++")
NAME = re.compile(
    rf"{NAMED}|[A-Z]{{2,3}}|\|(?:{VARIABLE})+\||\({VARIABLE}(?:,{VARIABLE})+\)|{COMBINED.pattern}"
)
CONSTANTS = {"\\pi": sympy.pi, "e": sympy.E, "i": sympy.I, "\\infty": INFINITY}
GREEK = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi
omega ell Gamma Delta Theta Lambda Sigma Phi Psi Omega
"""
GREEK = {"\\" + name for name in GREEK.split()}


def equation(name, sides):
    """A Statement of sides that are equal."""
    if name is None and is_expression(sides[-1]) and sides[-1].is_Symbol:
        # 5 = x
        sides = sides[::-1]
        name = str(sides[0])
    are_expressions = len(sides) == 2 and all(map(is_expression, sides))
    differences = (sides[0] - sides[1],) if are_expressions else ()
    return Statement(name, tuple(sides[1:] if name else sides), "=", differences)


def inequality(sides, signs):
    """The Statement of an inequality. `x > 3` is the interval (3, oo) named x, `x \\ne 3` are two.

    Raises ValueError if the signs do not go together.
    """
    sides = [defined(side) for side in sides]
    if set(signs) <= set(FLIPPED):
        sides, signs = sides[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", "\\le"} and signs != ["\\ne"]:
        raise ValueError(f"the relations {' '.join(signs)} do not go together")
    differences = tuple(left - right for left, right in zip(sides, sides[1:]))
    relation = " ".join(signs)
    if len(sides) == 2 and sides[0].is_Symbol:
        sides, signs = [-INFINITY, *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, INFINITY], [*signs, "<"]
    low, variable, high = sides if len(sides) == 3 else (None, None, None)
    if variable is None or letters(low) or letters(high) or letters(variable) != {variable}:
        return Statement(None, (), relation, differences)
    if "\\ne" in signs:
        point = high if low == -INFINITY else low
        return Statement(str(variable), (without_points(REALS, Collection("{}", (point,))),))
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Statement(str(variable), (interval(brackets, (low, high)),))


# ---- the grammar

# A factor that is multiplied without a sign does not begin with these.
NO_FACTOR = r"+ - , : ) ] } / ! ^ _ ' & \} \% \\ \pm \mp \cdot \cup \setminus \pmod \rfloor \rceil"
NO_FACTOR = {*NO_FACTOR.split(), *RELATIONS, ""}
MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array")


class Reader:
    """Reads the tokens of one answer from left to right. A method reads the thing of its name.

    nouns: words that are units. percent: the value of `%`. All methods raise ValueError for tokens
    that they do not read.
    """

    def __init__(self, tokens, nouns, percent):
        self.tokens = tokens
        self.nouns = nouns
        self.percent = percent
        self.position = 0
        # the number of open brackets
        self.depth = 0
        # the number of open bars (|) in the innermost brackets
        self.bars = 0
        # the sign that \pm stands for
        self.sign = 1
        # whether there was a \pm since the last comma
        self.has_two_signs = False

    @property
    def token(self):
        """The next token, "" at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *wanted):
        """Take the next token, which must be one of these, if any are wanted."""
        token = self.token
        if not token or (wanted and token not in wanted):
            expected = " or ".join(wanted) or "something else"
            raise ValueError(f"{token or 'the end'} stands where {expected} should")
        self.position += 1
        return token

    def nested(self, read_inside, bars=0):
        """What read_inside() reads between brackets. bars: the number of | that may be closed."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets within each other")
        bars_outside = self.bars
        self.bars = bars
        value = read_inside()
        self.bars = bars_outside
        self.depth -= 1
        return value

    # ---- lists and relations

    def answer(self):
        """All statements of the answer."""
        statements = self.separated(self.statement)
        if self.token:
            raise ValueError(f"nothing is read where {self.token} stands")
        return statements

    def separated(self, read_item):
        """`3, 1 \\pm x` -> what read_item makes of `3`, `1 + x` and `1 - x`."""
        items = []
        while not items or self.token == ",":
            if items:
                self.take(",")
            start = self.position
            self.has_two_signs = False
            items.append(read_item())
            if self.tokens[start : self.position].count("\\pm") > 1:
                raise ValueError("several \\pm, whose signs may or may not be the same")
            if self.has_two_signs:
                self.position = start
                self.sign = -1
                items.append(read_item())
                self.sign = 1
                self.has_two_signs = False
        return items

    def statement(self):
        """`x = 6/2 = 3`, `2 < x \\le 3`, `x \\equiv 3 \\pmod{7}`, or a value."""
        name, left = self.name()
        sides = [left] if name else [self.side()]
        signs = []
        while self.token in RELATIONS:
            signs.append(self.take())
            sides.append(self.side())
        if self.token == "\\pmod":
            return self.residue(name, sides, signs)
        if signs and signs[-1] == "\\approx":
            self.check_rounded(*sides[-2:])
            sides, signs = sides[:-1], signs[:-1]
        if not signs:
            return Statement(None, tuple(sides))
        if set(signs) <= {"=", "\\in"}:
            statement = equation(name, sides)
            is_in_interval = signs[-1] == "\\in" and is_interval(statement.values[-1])
            return statement._replace(relation="\\in") if is_in_interval else statement
        return inequality(sides, signs)

    def name(self):
        """("x", x) of `x = ...`, ("f'", None) of `f' = ...`; (None, None) if there is no NAME."""
        start = self.position
        end = start
        while end < len(self.tokens) and self.tokens[end] not in RELATIONS:
            end += 1
        name = join(self.tokens[start:end]).replace(" ", "")
        is_name = NAME.fullmatch(name) and name not in CONSTANTS and name != "\\text{not}"
        if self.tokens[end : end + 1] not in (["="], ["\\in"]) or not is_name:
            return None, None
        try:
            left = self.sum()
        except ValueError:
            # `f'(x)` is a name, and no expression
            left = None
        self.position = end
        return name, left

    def residue(self, name, sides, signs):
        """The rest of `x \\equiv 3 \\pmod{7}` or `3 \\pmod{7}`."""
        self.take("\\pmod")
        modulus = self.argument()
        if signs not in ([], ["\\equiv"], ["="]):
            raise ValueError("a modulus without \\equiv")
        if signs and not name:
            name = str(sides[0])
        return Statement(name, (Collection("\\pmod", (defined(sides[-1]), modulus)),))

    def check_rounded(self, value, rounded):
        """`\\sqrt{2} \\approx 1.41` says \\sqrt{2}, which must have these digits."""
        approx, digits = self.tokens[self.position - 2 : self.position]
        decimals = digits.partition(".")[2]
        is_number = is_expression(value) and value.is_number and value.is_real
        if not is_number or approx != "\\approx" or not isinstance(rounded, sympy.Rational):
            raise ValueError("\\approx does not stand between a number and its digits")
        rest = (abs(value) - abs(rounded)).evalf(20) * 10 ** len(decimals)
        if not -0.5 <= rest < 1:
            raise ValueError("\\approx stands before other digits than those of the number")

    def side(self):
        """A value, `A \\cup B`, `\\mathbb{R} \\setminus \\{0\\}`, or `3 : 4`."""
        values = [self.sum()]
        separator = self.token
        if separator == "\\setminus":
            self.take()
            return without_points(*values, self.sum())
        if separator not in ("\\cup", ":"):
            return values[0]
        while self.token == separator:
            self.take()
            values.append(self.sum())
        return (
            union(values) if separator == "\\cup" else Collection(":", tuple(map(defined, values)))
        )

    # ---- sums, products, powers

    def sum(self):
        """`x + 2y - 3`."""
        total = (
            self.signed_product() if self.token in ("+", "-", "\\pm", "\\mp") else self.product()
        )
        while self.token in ("+", "-", "\\pm", "\\mp"):
            total = added(total, self.signed_product())
        return total

    def signed_product(self):
        """A product with a sign before it; `\\pm` has the sign that is read at the moment."""
        sign = {"+": 1, "-": -1, "\\pm": self.sign, "\\mp": -self.sign}[self.token]
        self.has_two_signs |= self.take() in ("\\pm", "\\mp")
        return multiplied(sign, self.product())

    def product(self):
        """Factors with \\cdot, / or nothing between them. `a/bc` has two meanings."""
        total = self.power()
        has_slash = False
        while True:
            if self.token == "\\cdot":
                self.take()
                total = multiplied(total, self.power())
            elif self.token == "/":
                self.take()
                divisor = self.unit() if self.token.startswith("\\text{") else self.power()
                total = multiplied(total, power(operand(divisor), -1))
                has_slash = True
            elif self.token == "\\%":
                self.take()
                total = multiplied(total, self.percent)
            elif self.token.startswith("\\text{"):
                total = multiplied(total, self.unit())
            elif not self.begins_factor():
                return total
            elif has_slash:
                raise ValueError("a factor after a denominator, which it may belong to")
            else:
                total = multiplied(total, self.power())

    def begins_factor(self):
        """Does the next token begin a factor? Raises ValueError for numbers side by side."""
        is_other = self.token in NO_FACTOR or self.token.startswith(("\\end{", "\\text{"))
        if is_other or (self.token == "|" and self.bars):
            return False
        before = self.tokens[self.position - 1]
        first, second = [*(x for x in self.tokens[self.position :] if x != "{"), "", ""][:2]
        # \$5, 3!5!, n 2^n
        may_touch = before in (*CURRENCIES, "!") or (second == "^" and not before[0].isdigit())
        if re.match(r"\d|\.", first) and not may_touch:
            raise ValueError("a number right behind another factor")
        if re.fullmatch(r"[a-zA-Z] \( \d+ \)", " ".join(self.tokens[self.position - 1 :][:4])):
            raise ValueError("a function of a number is equal to its own text alone")
        return True

    def power(self):
        """A factor with a sign after it: `x!`, `x^2`, `90^\\circ`."""
        value = self.factor()
        if self.token == "!":
            self.take()
            value = factorial(operand(value))
        if self.token == "^":
            self.take()
            if self.token == "\\circ":
                self.take()
                value = multiplied(value, DEGREE)
            else:
                value = power(operand(value), self.exponent())
        if self.token in ("!", "^", "_", "'"):
            raise ValueError(f"{self.token} may belong to several things")
        return value

    def exponent(self):
        """`{...}`, or one sign, or all of a number: `2^10`."""
        if self.token == "-":
            self.take()
            return -self.exponent()
        if self.token == "{":
            return defined(self.braces())
        if re.match(r"\d|\.", self.token):
            return number_of(self.take())
        return defined(self.nested(self.factor))

    # ---- units

    def unit(self):
        """The factor that `\\text{ square km per hour}`, or `\\text{cm}^2`, stands for."""
        words = self.take()[len("\\text{") : -1].replace(".", "")
        # N/m and J/K, but not `grade A`
        in_rate = r"\b[A-Z](?= ?/)|(?<=/)[A-Z]\b"
        words = re.sub(in_rate, lambda word: LETTER_UNITS.get(word[0], word[0]), words).lower()
        words = re.sub("[a-z]+", lambda word: RATES.get(word[0], word[0]), words)
        words = re.findall(r"[^\W\d_]+|\S", words)
        factor = sympy.Integer(1)
        # -1 after "per" or "/"
        direction = 1
        exponent = 1
        for word in words[:-1]:
            if word in ("per", "/"):
                direction = -1
            elif word in POWERS:
                exponent = POWERS[word]
            else:
                factor *= self.unit_called(word) ** (direction * exponent)
                exponent = 1
        if self.token == "^":
            self.take()
            exponent = self.exponent()
        return factor * self.unit_called(words[-1]) ** (direction * exponent)

    def unit_called(self, word):
        # `ms` are no metres
        singular = word.removesuffix("s") if len(word) > 2 else word
        if singular in MULTIPLES:
            return sympy.Integer(MULTIPLES[singular])
        unit = UNITS.get(word) or UNITS.get(singular)
        if unit == "percent":
            return self.percent
        forms = {word, singular}
        if not unit and (forms & NO_UNITS or not forms & set(self.nouns)):
            raise ValueError(f"{word} is no unit")
        return Unit(unit or singular)

    # ---- single factors

    def factor(self):
        """A number, a variable, a function, a fraction, a root, or something in brackets."""
        if re.match(r"\d|\.", self.token):
            return self.number()
        if self.token in FUNCTION_COMMANDS:
            return self.function()
        if self.token in self.BY_FIRST_TOKEN:
            return self.BY_FIRST_TOKEN[self.token](self)
        token = self.take()
        if token in CURRENCIES:
            return Unit(CURRENCIES[token])
        if token in CONSTANTS and self.token != "_":
            return CONSTANTS[token]
        if token in GREEK or re.fullmatch("[a-zA-Z]", token):
            return self.variable(token)
        if token.startswith("\\begin{"):
            return self.matrix(token[len("\\begin{") : -1])
        raise ValueError(f"{token} is not read")

    def number(self):
        """A number, or a mixed one: `2\\frac{1}{3}` is 7/3, but `2\\frac{x}{3}` is a product."""
        token = self.take()
        value = number_of(token)
        if self.token == "_":
            raise ValueError("a number in another base is equal to its own text alone")
        start = self.position
        fraction = self.fraction() if self.token == "\\frac" and token.isdigit() else None
        if not isinstance(fraction, sympy.Rational):
            self.position = start
            return value
        if not 0 < fraction < 1:
            raise ValueError("a mixed number whose fraction is not between 0 and 1")
        return value + fraction

    def variable(self, letter):
        if self.token == "_":
            start = self.position
            self.take()
            if self.take() == "{":
                while self.take() != "}":
                    pass
            letter = join([letter, *self.tokens[start : self.position]])
        if self.token == "'":
            raise ValueError("a derivative is equal to its own text alone")
        return sympy.Symbol(letter)

    def braces(self):
        self.take("{")
        value = self.nested(self.sum)
        self.take("}")
        return value

    def argument(self):
        """The argument of \\frac, \\sqrt or \\pmod: `{...}` or one sign (of `12`, one digit)."""
        if self.token == "{":
            return defined(self.braces())
        if self.token.isdigit():
            digit, rest = self.token[0], self.token[1:]
            self.tokens[self.position : self.position + 1] = [digit, rest] if rest else [digit]
            return number_of(self.take())
        return defined(self.nested(self.factor))

    def fraction(self):
        self.take("\\frac")
        above, below = self.argument(), self.argument()
        return defined(above * power(below, -1))

    def binomial(self):
        self.take("\\binom")
        return binomial(self.argument(), self.argument())

    def root(self):
        self.take("\\sqrt")
        degree = sympy.Integer(2)
        if self.token == "[":
            self.take()
            degree = defined(self.nested(self.sum))
            self.take("]")
        if self.token.isdigit() and len(self.token) > 1:
            raise ValueError("a root of one digit, or of all")
        return power(self.argument(), 1 / degree)

    def absolute(self):
        self.take("|")
        value = self.nested(self.sum, bars=1)
        self.take("|")
        return sympy.Abs(defined(value))

    def rounded(self):
        """`\\lfloor x \\rfloor` or `\\lceil x \\rceil`."""
        opening = self.take("\\lfloor", "\\lceil")
        value = defined(self.nested(self.sum))
        self.take(opening.replace("\\l", "\\r"))
        return sympy.floor(value) if opening == "\\lfloor" else sympy.ceiling(value)

    def number_set(self):
        """`\\mathbb{R}` is the interval of all numbers."""
        start = self.position
        self.take("\\mathbb")
        if self.take() == "{":
            self.take()
            self.take("}")
        name = join(self.tokens[start : self.position])
        return REALS if name in ("\\mathbb{R}", "\\mathbb R") else sympy.Symbol(name)

    def no_members(self):
        self.take("\\emptyset")
        return Collection("{}", ())

    def function(self):
        """`\\sin x`, `\\sin^2(x)`, `\\log_2 8`."""
        name = self.take()[1:]
        exponent = None
        base = None
        if self.token == "^":
            self.take()
            exponent = self.exponent()
        if self.token == "_" and name == "log":
            self.take()
            base = self.base()
        argument = defined(self.nested(self.function_argument, self.bars))
        argument = argument.xreplace({DEGREE: sympy.pi / 180})
        if name in BASES:
            value = logarithm(argument, BASES[name] if base is None else base)
        elif exponent == -1 and name in INVERSE:
            return applied(INVERSE[name], argument)
        else:
            value = applied(FUNCTIONS[name], argument)
        if exponent is None:
            return value
        if exponent.is_negative:
            raise ValueError("a negative power of a function has two meanings")
        return power(value, exponent)

    def base(self):
        """The base of `\\log_2 8`, `\\log_{10} 5`, `\\log_28`, `\\log_10 5`."""
        after = (self.tokens[self.position + 1 :] + [""])[0]
        is_whole = self.token.isdigit() and after not in NO_FACTOR
        return number_of(self.take()) if is_whole else self.argument()

    def function_argument(self):
        """Something in brackets, or all factors up to the next sign, bracket or function."""
        if self.token in ("(", "{", "|"):
            return self.factor()
        sign = -1 if self.token == "-" else 1
        if sign < 0:
            self.take()
        value = multiplied(sign, self.power())
        while self.token not in FUNCTION_COMMANDS and self.token != "(" and self.begins_factor():
            value = multiplied(value, self.power())
        is_sin_x_of = self.token == "(" and re.fullmatch("[a-zA-Z]", self.tokens[self.position - 1])
        if self.token in ("(", "/") and not is_sin_x_of:
            raise ValueError("what stands behind the argument of a function may belong to it")
        return value

    def matrix(self, environment):
        """The rest of `\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}`."""
        if environment not in MATRICES:
            raise ValueError(f"{environment} is no matrix")
        end = f"\\end{{{environment}}}"
        rows = [[]]
        while self.token != end:
            rows[-1].append(defined(self.nested(self.sum)))
            if self.token != end and self.take("&", "\\\\") == "\\\\" and self.token != end:
                rows.append([])
        self.take(end)
        if len({len(row) for row in rows}) != 1:
            raise ValueError("the rows of a matrix differ in length")
        return sympy.ImmutableMatrix(rows)

    def brackets(self):
        """`(1, 2)` or `[1, 2)`; `(x)` is x, and so are all brackets around a matrix."""
        opening = self.take("(", "[")
        # the \pm of (\pm 1, 2) belongs to all of it
        items = [self.nested(self.side)]
        while self.token == ",":
            self.take()
            items.append(self.nested(self.side))
        kind = opening + self.take(")", "]")
        is_matrix = isinstance(items[0], sympy.MatrixBase)
        if len(items) == 1 and (kind == "()" or (kind == "[]" and is_matrix)):
            return items[0]
        if kind in ("[)", "(]") and len(items) != 2:
            raise ValueError("an interval that has not two ends")
        has_infinity = any(is_expression(item) and item.has(INFINITY) for item in items)
        if has_infinity and len(items) == 2:
            return interval(kind, items)
        return Collection(kind, tuple(items))

    def set_or_interval(self):
        """`\\{1, 2\\}`, or `\\{x | x > 2\\}`, which is an interval."""
        self.take("\\{")
        described = re.match(r"([a-z])(\\in\\mathbb\{R\})?[|:]", join(self.tokens[self.position :]))
        if described:
            while self.take() not in ("|", ":"):
                pass
            statement = self.nested(self.statement)
            self.take("\\}")
            if statement.name != described[1] or statement.relation:
                raise ValueError("a set is described by something else than an inequality")
            return statement.values[0]
        items = [] if self.token == "\\}" else self.nested(lambda: self.separated(self.side))
        self.take("\\}")
        return Collection("{}", tuple(items))

    BY_FIRST_TOKEN = {
        "(": brackets,
        "[": brackets,
        "\\{": set_or_interval,
        "{": braces,
        "|": absolute,
        "\\frac": fraction,
        "\\binom": binomial,
        "\\sqrt": root,
        "\\lfloor": rounded,
        "\\lceil": rounded,
        "\\mathbb": number_set,
        "\\emptyset": no_members,
    }


def read(text, nouns=(), percent=sympy.Rational(1, 100)):
    """The statements that an answer makes, in the spelling of tasks/_grading.py.

    nouns: words that are units in this problem. percent: the value of `%`. Raises ValueError if the
    answer cannot be read.
    """
    if len(text) > LONGEST:
        raise ValueError(f"an answer of {len(text)} characters, at most {LONGEST} are read")
    statements = Reader(tokens_of(text, nouns), nouns, percent).answer()
    values = [value for statement in statements for value in statement.values]
    are_inequalities = any(is_interval(value) and value.kind != "()" for value in values)
    if len(values) > 1 and are_inequalities and AND.search(text):
        # A comma or "or" between inequalities unites them, "and" does not.
        raise ValueError("'and' between inequalities")
    return statements
