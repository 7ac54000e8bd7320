"""Computes and compares numbers and expressions of sympy's, as far as their size allows.

Rational numbers are compared exactly. Other numbers count as equal if they agree to more digits
than two different numbers with parts of their size could (`height`). Expressions with variables are
compared at points. Nothing is rounded, and nothing is simplified, because that might take for ever.
Numbers that are too large raise ValueError.

This is not a task: its name starts with `_`.
"""

import math
import random

import mpmath
import sympy

# the most digits of a number before or after its point
MOST_DIGITS = 40000
# the most digits of all parts of two numbers together that are compared numerically
MOST_COMPARED_DIGITS = 12000
# Of rational numbers with more digits sympy may not factor a root, which would take long.
MOST_FACTORED_DIGITS = 100
# For a root of a larger degree sympy may not look for a simpler form, which would take long.
LARGEST_DEGREE = 1000
# the largest n of n! and of a binomial coefficient
LARGEST_FACTORIAL = 9999
# the number of points at which expressions must agree
ENOUGH_POINTS = 8
# the number of points that are tried, as some are outside of an expression's domain
MOST_POINTS = 60
# variables that stand for integers; n is positive
INTEGER_NAMES = ("k", "m", "n")
# the errors for numbers that cannot be computed, from the functions below and from sympy
UNCLEAR = (ValueError, ArithmeticError, RecursionError)


# ---- numbers


def is_expression(value):
    """Is it one number or expression of sympy's? A matrix is not, though sympy says so."""
    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixBase)


def defined(value):
    """value, if it is one number or expression that is defined. Raises ValueError if not."""
    value = sympy.sympify(value) if isinstance(value, int) else value
    if not is_expression(value):
        raise ValueError("a tuple, a set or a matrix stands where a number must stand")
    if value.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo):
        raise ValueError("a number is not defined")
    return value


def sign(number):
    """1, -1, or 0 if it is not clear. sympy itself first looks whether large integers are prime."""
    value = number.evalf(5)
    return int(value.is_positive is True) - int(value.is_negative is True)


def applied(function, *arguments):
    """function(*arguments) of a function of sympy's. Raises ValueError if sympy cannot decide."""
    try:
        return defined(function(*arguments))
    # sympy raises them for a relation whose truth it does not know
    except (TypeError, AttributeError) as e:
        raise ValueError(f"{function.__name__} cannot be computed: {e}") from None


def power(base, exponent):
    """base ** exponent, an odd root of a negative number being real.

    Raises ValueError for a number of more than MOST_DIGITS digits.
    """
    base, exponent = defined(base), defined(exponent)
    if base.is_number and exponent.is_number and base != 0 and exponent != 0:
        if log10(exponent) > 10 or abs(log10(base)) * 10 ** log10(exponent) > MOST_DIGITS:
            raise ValueError("a power has too many digits")
        if exponent.is_Rational and exponent.q > 1:
            return root(base, exponent)
    elif exponent.is_Rational and max(abs(exponent.p), exponent.q) > MOST_DIGITS:
        raise ValueError("a power of a variable with a very large exponent")
    return defined(base**exponent)


class LargeRoot(sympy.Function):
    """base ** exponent of a positive rational base, which stays as it is until it is evaluated."""

    def _eval_evalf(self, prec):
        digits = sympy.core.evalf.prec_to_dps(prec) + 10
        base, exponent = (argument.evalf(digits) for argument in self.args)
        return base**exponent


def root(base, exponent):
    """power(base, exponent) of a number with a fraction as exponent."""
    if sign(base) < 0 and exponent.q % 2 == 1:
        return (-1) ** exponent.p * root(-base, exponent)
    is_low = exponent.q <= LARGEST_DEGREE
    if not base.is_Rational or (is_low and digits_of(base) < MOST_FACTORED_DIGITS):
        return defined(base**exponent)
    if sign(base) < 0:
        return defined(sympy.I ** (2 * exponent)) * root(-base, exponent)
    above, is_above_exact = sympy.integer_nthroot(base.p, exponent.q)
    below, is_below_exact = sympy.integer_nthroot(base.q, exponent.q)
    if is_above_exact and is_below_exact:
        return sympy.Rational(above, below) ** exponent.p
    return LargeRoot(base, exponent)


def digits_of(number):
    """The number of digits of a rational number's numerator and denominator, about."""
    return math.log10(abs(number.p) or 1) + math.log10(number.q)


def logarithm(value, base):
    """The logarithm of an expression. Raises ValueError for a rational number of many digits."""
    value = defined(value)
    if value.is_Rational and digits_of(value) > 10 * MOST_FACTORED_DIGITS:
        raise ValueError("a logarithm of a number of many digits")
    return defined(sympy.log(value, base))


def factorial(value):
    """value! of an expression, or of an integer from 0 to LARGEST_FACTORIAL; else ValueError."""
    value = defined(value)
    if value.is_number and not (value.is_Integer and 0 <= value <= LARGEST_FACTORIAL):
        raise ValueError(f"a factorial of something else than an integer, 0 to {LARGEST_FACTORIAL}")
    return sympy.factorial(value)


def binomial(above, below):
    """A binomial coefficient. Raises ValueError for numbers above LARGEST_FACTORIAL."""
    above, below = defined(above), defined(below)
    for value in (above, below):
        if value.is_number and not (value.is_real and abs(value) <= LARGEST_FACTORIAL):
            raise ValueError(f"a binomial coefficient of numbers above {LARGEST_FACTORIAL}")
    is_few = below.is_number and abs(below) <= 100
    if above.is_number and not above.is_Integer and not is_few:
        raise ValueError("a binomial coefficient that is a product of many factors")
    return defined(sympy.binomial(above, below))


def log10(number):
    """The logarithm of the absolute value of a number that is not 0, as a float."""
    if number.is_Rational:
        return math.log10(abs(number.p)) - math.log10(number.q)
    size = abs(number.evalf(5))
    if not size.is_Float:
        raise ValueError("a number without a value")
    return float(mpmath.log10(mpmath.mpmathify(size))) if size else 0.0


def height(number):
    """The number of digits of all parts of a number, before or after the point: 7 + e^-20 -> 11.

    It stops counting beyond MOST_COMPARED_DIGITS, because larger parts take longer to count.
    """
    parts = list(sympy.preorder_traversal(number))
    rationals = [part for part in parts if part.is_Rational and part != 0]
    digits = sum(math.log10(abs(part.p)) + math.log10(part.q) for part in rationals)
    for part in parts:
        if digits > MOST_COMPARED_DIGITS:
            break
        if part.args and not part.is_Add and not part.is_Mul:
            digits += abs(log10(part))
    return math.ceil(digits)


def is_same_number(a, b):
    """Is a - b = 0? Raises ValueError if that would take too many digits."""
    difference = defined(a - b)
    if difference.is_Rational:
        return difference == 0
    digits = height(a) + height(b)
    if digits > MOST_COMPARED_DIGITS:
        raise ValueError("numbers of too many digits to compare")
    # Different numbers of this height differ by more than 10 ** -digits; 40 digits are a margin.
    value = defined(difference.evalf(10, maxn=2 * digits + 80))
    if not value.is_number or value.atoms(sympy.Function):
        raise ValueError("a number without a value")
    return bool(abs(value) < sympy.Float(10) ** -(digits + 40))


# ---- expressions


def is_same_expression(a, b):
    """Are a and b equal wherever both have a value? Raises ValueError if that is hardly anywhere.

    Expressions without i have real values: ln(x^2) is 2 ln(x), because 2 ln(x) implies x > 0. But
    if one of them contains |...|, both must have a value at the same points: ln|x| is not ln(x).
    """
    both = sympy.Tuple(a, b)
    if not both.free_symbols:
        return is_same_number(a, b)
    for is_real in (False,) if both.has(sympy.I) else (True, False):
        agreed = 0
        for values in values_at_points(both, is_real):
            if None not in values:
                if not is_same_number(*values):
                    return False
                agreed += 1
            elif is_real and both.has(sympy.Abs) and values != [None, None]:
                return False
            if agreed == ENOUGH_POINTS:
                return True
    raise ValueError("expressions that have too few values to compare")


def is_multiple(a, b, is_positive):
    """Is b = c a, for a number c other than 0, and above 0 if is_positive?"""
    for a_value, b_value in values_at_points(sympy.Tuple(a, b), is_real=False):
        if None in (a_value, b_value) or is_same_number(a_value, sympy.Integer(0)):
            continue
        factor = b_value / a_value
        if is_same_number(factor, sympy.Integer(0)) or (is_positive and sign(factor) <= 0):
            return False
        return is_same_expression(factor * a, b)
    raise ValueError("a relation that has too few values to compare")


def values_at_points(expressions, is_real):
    """Yields [value of each expression, or None] at MOST_POINTS points, always the same ones."""
    rng = random.Random(0)
    symbols = sorted(expressions.free_symbols, key=str)
    for i in range(MOST_POINTS):
        scale = (1, 10, 100, 10000, 10**12)[i % 5]
        point = {}
        for symbol in symbols:
            fraction = sympy.Rational(rng.randint(-99, 99) * scale + 1, 370)
            integer = sympy.Integer(rng.randint(1, 30))
            if symbol.name != "n" and i % 2:
                integer = -integer
            point[symbol] = integer if symbol.name in INTEGER_NAMES else fraction
        values = [value_at(expression, point, is_real) for expression in expressions]
        yield [value if is_comparable(value) else None for value in values]


def is_comparable(value):
    """Is it a number that can be compared with another one like it?"""
    try:
        return value is not None and (
            value.is_Rational or height(value) <= MOST_COMPARED_DIGITS / 2
        )
    except UNCLEAR:
        return False


def value_at(expression, point, is_real):
    """The value at a point. None: there is none, it is too large, or it is not real but must be."""
    if expression in point:
        return point[expression]
    arguments = [value_at(argument, point, is_real) for argument in expression.args]
    if None in arguments:
        return None
    try:
        value = computed(expression, arguments)
    except UNCLEAR:
        return None
    return None if is_real and value.is_real is False else value


def computed(expression, arguments):
    """An expression with other arguments, computed by the functions above, which limit its size."""
    if not arguments:
        return expression
    if expression.is_Pow:
        return power(*arguments)
    if isinstance(expression, sympy.exp):
        return power(sympy.E, *arguments)
    if isinstance(expression, sympy.factorial):
        return factorial(*arguments)
    if isinstance(expression, sympy.binomial):
        return binomial(*arguments)
    return applied(expression.func, *arguments)
