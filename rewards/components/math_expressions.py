"""Are two single expressions equal? By math-verify, confirmed by their values, since it accepts too much."""

from fractions import Fraction
from itertools import product
from typing import Any

from rewards.components.math_form import worked_out
from rewards.components.math_numbers import decimals, number
from rewards.components.math_parser import is_complex, parsed

__all__ = ["Unevaluated", "approximates", "same_expression"]


class Unevaluated(Exception):
    """The answer is not worked out as far as the reference."""


def same_expression(expected: str, given: str, final: bool = False) -> bool:
    """Whether two single expressions are equal.

    Raises:
        Unevaluated: they are, but with `final` the answer would have to be worked out further.
    """
    complex_numbers = is_complex(expected) or is_complex(given)
    left, right = parsed(expected, complex_numbers), parsed(given, complex_numbers)
    same = _same(left, right)
    if same and final and not worked_out(left, right):
        raise Unevaluated
    return same


def _same(left: Any, right: Any) -> bool:
    import sympy
    from math_verify import verify

    if isinstance(right, sympy.Eq) and not isinstance(left, sympy.Eq):
        return False  # math-verify would take the last side alone
    computable = all(isinstance(side, sympy.Expr) and not side.has(*_slow_to_evaluate()) for side in (left, right))
    # Before SymPy simplifies their difference: it makes 2^123454321 of `123454321 log 2`, and takes minutes.
    if computable and not _confirmed(left, right):
        return False
    if not verify(left, right, timeout_seconds=None, allow_set_relation_comp=True):
        return _is_one_equation(left, right) or _same_constant(left, right) or _same_where_real(left, right)
    return computable or _confirmed(left, right)


def _slow_to_evaluate() -> tuple[Any, ...]:
    """What takes long to compute as a number, or has none."""
    import sympy

    return (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


def _same_constant(left: Any, right: Any) -> bool:
    """Closed forms of one number of ordinary size, by 50 of 60 digits: `e^{i\\pi}` and -1, not `100!` and `100! + 1`."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (left, right)):
        return False
    if any(side.has(sympy.Float, *_slow_to_evaluate()) for side in (left, right)):
        return False
    one, other = _value(left, 60), _value(right, 60)
    if one is None or other is None:
        return False
    size = max(abs(one), abs(other))
    return bool(1e-20 < size < 1e20 and abs(one - other) <= size * sympy.Float("1e-50", 60))


def _same_where_real(left: Any, right: Any) -> bool:
    """Logarithms and roots of products taken apart, where the answer (`right`) has the reference's value for all signs of the
    letters for which the reference has one: `\\ln(xy)` and `\\ln(x/y)` for `\\ln x+\\ln y` and `\\ln x-\\ln y`, but not the
    other way round, where values are lost; nor `\\sqrt{x^2}` for `x`."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.has(*_slow_to_evaluate()) for side in (left, right)):
        return False
    if not (_of_products(left) and _of_products(right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not 0 < len(symbols) <= 3:
        return False
    sizes = [sympy.Rational(7 + 4 * at, 5 + at) for at in range(len(symbols))]
    values = []
    for signs in product((1, -1), repeat=len(symbols)):
        point = {symbol: sign * size for symbol, sign, size in zip(symbols, signs, sizes, strict=True)}
        values.append((_value_where_real(left, point), _value_where_real(right, point)))
    compared = [(one, other) for one, other in values if one is not None]
    if not compared or any(other is None or not _near(one, other) for one, other in compared):
        return False
    positive = {symbol: sympy.Symbol(f"{symbol}_", positive=True) for symbol in symbols}
    difference = sympy.expand_log((left - right).subs(positive).doit())
    return bool(difference.expand() == 0)


def _value_where_real(side: Any, point: dict[Any, Any]) -> Any:
    """Its value; None where a logarithm or a root in it has no real one, also if imaginary parts cancel, as in
    `\\ln x-\\ln y` of two negative numbers."""
    inside = [_value(each.subs(point)) for each in _inside(side)]
    if any(each is None or not each.is_real or each <= 0 for each in inside):
        return None
    return _value(side.subs(point))


def _inside(side: Any) -> list[Any]:
    """What its logarithms and roots are of."""
    import sympy

    roots = [power.base for power in side.atoms(sympy.Pow) if power.free_symbols and not power.exp.is_Integer]
    return [log.args[0] for log in side.atoms(sympy.log)] + roots


def _of_products(side: Any) -> bool:
    """Whether it has logarithms or roots, all of them of products and powers: then signs decide where they are real."""
    import sympy

    inside = _inside(side)
    sums = {part for each in inside for part in each.atoms(sympy.Add, sympy.Function) if part.free_symbols}
    rational = all(power.exp.is_Rational for power in side.atoms(sympy.Pow) if power.free_symbols)
    return bool(inside) and not sums and rational


def _confirmed_equation(left: Any, right: Any) -> bool:
    """Equations without a real solution are not the same for that."""
    import sympy

    if _is_one_equation(left, right):
        return True
    return bool(sympy.solve(left, left.free_symbols)) and bool(sympy.solve(right, right.free_symbols))


def _is_one_equation(left: Any, right: Any) -> bool:
    """Whether the differences of both sides are the same but for a constant factor, at three points."""
    import sympy

    if not (isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq)):
        return False
    if not all(isinstance(side, sympy.Expr) for equation in (left, right) for side in equation.args):
        return False
    one, other = left.lhs - left.rhs, right.lhs - right.rhs
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    ratios = []
    for shift in range(3):
        point = {symbol: sympy.Rational(7 + 4 * at + 3 * shift, 5 + at) for at, symbol in enumerate(symbols)}
        top, bottom = _value(one.subs(point)), _value(other.subs(point))
        if not top or not bottom:
            return False
        ratios.append(top / bottom)
    return all(bool(abs(ratio - ratios[0]) <= abs(ratios[0]) * 1e-12) for ratio in ratios)


def _confirmed(left: Any, right: Any) -> bool:
    """Numerically equal too, at a point of their variables: differences are judged by the size of what differs."""
    import sympy

    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return all(_confirmed(one, other) for one, other in zip(left, right, strict=True))
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        return _confirmed_equation(left, right)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return True
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: sympy.Rational(7 + 4 * at, 5 + at) for at, symbol in enumerate(symbols)}
    one, other = _value(left.subs(point)), _value(right.subs(point))
    if one is None or other is None:
        return True
    if left.has(sympy.Float) or right.has(sympy.Float):
        return bool(abs(one - other) <= max(abs(one), abs(other)) / 1000)
    return _near(one, other)


def _near(one: Any, other: Any) -> bool:
    """Whether two values agree in 12 digits, or nothing is left of either, as of `\\sqrt2 \\sqrt2 - 2`."""
    import sympy

    size = max(abs(one), abs(other))
    return (_is_nought(one) and _is_nought(other)) or bool(abs(one - other) <= size * sympy.Float("1e-12"))


def _is_nought(value: Any) -> bool:
    """Zero, or a number of which no digit is certain: 1 / 2004! has 30 digits that are."""
    return all(part == 0 or (part.is_Float and part._prec < 10) for part in value.as_real_imag())


def _value(expression: Any, digits: int = 30) -> Any:
    """A complex number, or None."""
    import sympy

    try:
        value = sympy.N(expression, digits)
        if not all(part.is_Number for part in value.as_real_imag()):  # what N leaves alone, such as Mod
            value = sympy.N(expression.doit(), digits)
        plain_number = all(part.is_Number and part.is_finite for part in value.as_real_imag())
    except Exception:
        return None
    return value if plain_number else None


def approximates(expected: str, given: str, truncated: bool) -> bool:
    """Whether a decimal is the rounding of `expected` at the digits that it has."""
    digits, near = decimals(given), number(given)
    if digits is None or near is None:
        return False
    value = _value(parsed(expected, False))
    if value is None or not value.is_real:
        return False
    exact = Fraction(str(value))
    if not truncated and (len(given.replace(".", "").lstrip("-0")) < 3 or _is_rational(exact)):
        return False
    scaled, written = exact * 10**digits, near * 10**digits
    rounded = abs(scaled - written) <= Fraction(1, 2)
    return rounded or (truncated and digits > 0 and 0 <= abs(scaled) - abs(written) < 1 and scaled * written >= 0)


def _is_rational(value: Fraction) -> bool:
    """Whether 30 digits look like a fraction with a denominator of at most a million."""
    return abs(value - value.limit_denominator(10**6)) <= max(Fraction(1), abs(value)) / 10**22
