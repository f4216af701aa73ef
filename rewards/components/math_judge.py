r"""Do two short answers mean the same? Meant for an isolated worker: `warm_up` loads SymPy, which takes seconds.

The text is taken apart first (lists, sets, tuples, intervals, unions, named values, times of day), so that each
comparison left for math-verify is between two single expressions; what it accepts is then confirmed numerically.
"""

import gc
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rewards.components.math_text import Pieces, clock, number, plain, split, words

__all__ = ["judge", "warm_up"]

MAX_PARTS = 50
MAX_DEPTH = 30
MAX_BITS = 200_000  # of a number that gets evaluated: 60,000 decimal digits
_RELATIVE, _ABSOLUTE = Fraction(1, 10_000), Fraction(5, 10_000_000)  # between a decimal and what it rounds
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s|\s(?![0-9A-Za-z])")
_SIDES = ("\\approx", "=")


class TooLarge(ValueError):
    """The number would not fit in `MAX_BITS` bits."""


class Unreadable(ValueError):
    """The text is no mathematics that the parser knows."""


def judge(answer: str, reference: str) -> str:
    """`equal`, `different`, `unread` (the answer), `reference` (cannot be read itself) or `too_large` to evaluate."""
    expected, given = plain(reference), plain(answer)
    if _bare(expected) == _bare(given):
        return "equal"
    try:
        if _same(expected, given):
            return "equal"
        # `1,234` may be a list of two after all
        listed = plain(reference, join_groups=False)
        if listed != expected and split(listed).kind == "list" and _same(listed, plain(answer, join_groups=False)):
            return "equal"
        return "different"
    except TooLarge:
        return "too_large"
    except (Unreadable, RecursionError):
        return "unread" if _readable(expected) else "reference"


def warm_up() -> None:
    """Fills the parser's tables, which costs more than most comparisons."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text in (r"\frac{x^2+1}{2}", r"\sqrt{3}+\pi", r"\log_2 8", "2x=1", "x<1", r"\sin x", r"\frac{1}{2}i", "1.5"):
        _parsed(text, False)
        judge(text, text + "+1")
    gc.collect()
    gc.freeze()  # what is loaded by now stays: no need to look through it at every collection


def _same(expected: str, given: str) -> bool:
    left, right = split(expected), split(given)
    if left.kind == right.kind == "scalar":
        return _same_scalar(left.parts[0], right.parts[0])
    if left.kind == right.kind == "union" and _matching(left.parts, right.parts):
        return True
    if "union" in (left.kind, right.kind) or _is_relation(left, right):
        return _same_expression(expected, given)
    if len(left.parts) != len(right.parts) or max(len(left.parts), len(right.parts)) > MAX_PARTS:
        return False
    kinds = {left.kind, right.kind}
    if kinds <= {"list", "set"}:
        return _matching(left.parts, right.parts)
    if kinds <= {"tuple", "list"} or (kinds <= {"tuple", "interval"} and left.brackets == right.brackets):
        return all(_same(one, other) for one, other in zip(left.parts, right.parts, strict=True))
    return False


def _is_relation(left: Pieces, right: Pieces) -> bool:
    """An inequality against an interval: math-verify compares those as sets."""
    pair = {left.kind: left, right.kind: right}
    if not {"scalar"} < set(pair) <= {"scalar", "interval", "tuple"}:
        return False
    return any(sign in pair["scalar"].parts[0] for sign in ("<", ">", "\\le", "\\ge"))


def _matching(expected: Sequence[str], given: Sequence[str]) -> bool:
    """Whether the parts pair off, in any order."""
    if len(expected) != len(given) or len(expected) > MAX_PARTS:
        return False
    left = list(given)
    for one in expected:
        found = next((at for at, other in enumerate(left) if _same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_scalar(expected: str, given: str) -> bool:
    if _bare(expected) == _bare(given):
        return True
    for known in (_same_time, _same_words, _same_number, _same_percentage, _same_named):
        verdict = known(expected, given)
        if verdict is not None:
            return verdict
    return _same_expression(expected, given)


def _same_time(expected: str, given: str) -> bool | None:
    time = clock(expected)
    if time is None:
        return None
    other = clock(given)
    if other is None:
        return False
    if time.marker and other.marker:
        return time == other
    if time.marker or other.marker:  # `22:30` is `10:30 p.m.`, and `10:30` without more may be either
        marked, bare = (time, other) if time.marker else (other, time)
        afternoon = marked.seconds % 43_200 + 43_200 * (marked.marker == "p")
        return bare.seconds == afternoon or (other.marker != "" and bare.seconds == marked.seconds)
    return time.seconds == other.seconds


def _same_words(expected: str, given: str) -> bool | None:
    text = words(expected)
    return None if text is None else text == words(given)


def _same_number(expected: str, given: str) -> bool | None:
    one, other = number(expected), number(given)
    if one is None or other is None:
        return None
    return one == other or (("." in expected or "." in given) and _rounds_to(one, other))


def _same_percentage(expected: str, given: str) -> bool | None:
    """`50%` is `50%`, `50` and `0.5`."""
    if not (expected.endswith("%") or given.endswith("%")):
        return None
    one, other = expected.removesuffix("%"), given.removesuffix("%")
    if expected.endswith("%") == given.endswith("%"):
        return _same(one, other)
    hundredth = f"\\frac{{{one if one != expected else other}}}{{100}}"
    plainly = other if one != expected else one
    return _same(one, other) or _same_expression(hundredth, plainly)


def _same_named(expected: str, given: str) -> bool | None:
    """`x = 7` for `7`, and chains: every side that is no bare name has to equal what is expected.

    So `8 = 7` is not 7. Sides after an approximation sign need only be near.
    """
    wanted, sides = _sides(expected), _sides(given)
    if len(wanted) == len(sides) == 1:
        return None
    if len(wanted) == 1:
        values = [(mark, side) for at, (mark, side) in enumerate(sides) if at or not _is_name(side)]
        if len(sides) == len(values) == 1:
            return None
        return all(_same_scalar(expected, s) if mark != "\\approx" else _near(expected, s) for mark, s in values)
    if len(wanted) == 2 and _is_name(wanted[0][1]):
        if len(sides) == 1:
            return _same_scalar(wanted[1][1], given)
        if _bare(wanted[0][1]) == _bare(sides[0][1]):
            return _same_scalar(wanted[1][1], "=".join(side for _, side in sides[1:]))
    return None


def _sides(text: str) -> list[tuple[str, str]]:
    """(sign before it, side) of an equation or approximation; one entry where there is neither."""
    if any(sign in text for sign in ("<", ">", "\\le", "\\ge", "\\ne", "!=", "\\equiv", "\\begin")):
        return [("", text)]
    parts = [("", text)]
    for sign in _SIDES:
        parts = [
            (mark if at == 0 else sign, piece.strip())
            for mark, side in parts
            for at, piece in enumerate(side.split(sign))
        ]
    return parts


def _is_name(side: str) -> bool:
    """Letters, commands and subscripts only, as in `x`, `f(x)`, `\\angle ABC`, `x_1`, `\\text{Area}`."""
    name = side.partition("_")[0] if side.rpartition("_")[2].strip("{}").isalnum() else side
    return 0 < len(side) <= 40 and all(c.isalpha() or c in " \\(){}'," for c in name) and "\\frac" not in name


def _near(expected: str, given: str) -> bool:
    one, other = _value(_parsed(expected, False)), _value(_parsed(given, False))
    return one is not None and other is not None and bool(abs(one - other) <= abs(one) / 100)


def _same_expression(expected: str, given: str) -> bool:
    import sympy
    from math_verify import verify
    from math_verify.grader import should_treat_as_complex

    complex_numbers = should_treat_as_complex(expected) or should_treat_as_complex(given)
    left, right = _parsed(expected, complex_numbers), _parsed(given, complex_numbers)
    if isinstance(right, sympy.Eq) and not isinstance(left, sympy.Eq):
        return False  # math-verify would take the last side alone
    if not verify(left, right, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _confirmed(left, right)


@lru_cache(maxsize=512)
def _parsed(text: str, complex_numbers: bool) -> Any:
    """The unevaluated expression.

    Raises:
        Unreadable: it has none.
        TooLarge: evaluating it would take too long.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex

    if not _is_nested_well(text):
        raise Unreadable
    try:
        spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
        spelled = normalize_latex(text, spelling)
        expression = latex2sympy(spelled, is_real=not complex_numbers, convert_degrees=False, normalization_config=None)
    except Exception as failure:
        raise Unreadable from failure
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        raise Unreadable
    if isinstance(expression, sympy.Basic) and _bits(expression) > MAX_BITS:
        raise TooLarge
    return expression


def _is_nested_well(text: str) -> bool:
    """Whether braces pair and no bracket lies deeper than `MAX_DEPTH`: the parser takes seconds to find that out."""
    depth = braces = 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([{") - (character in ")]}")
        if braces < 0 or depth > MAX_DEPTH:
            return False
    return braces == 0


def _readable(text: str) -> bool:
    try:
        pieces = split(text)
        for part in pieces.parts if pieces.kind != "scalar" else (text,):
            for _, side in _sides(part):
                if words(side) is None and clock(side) is None:
                    _parsed(side.removesuffix("%"), False)
    except (Unreadable, RecursionError):
        return False
    except TooLarge:
        return True
    return True


def _bits(expression: Any) -> float:
    """An upper bound, far from tight, of the bits of every number that evaluating `expression` makes."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length()))
    inner = [_bits(part) for part in expression.args if isinstance(part, sympy.Basic)]
    largest = max(inner, default=0.0)
    if isinstance(expression, sympy.Pow) and not expression.exp.free_symbols:
        return float(max(inner[0], 1.0) * 2.0 ** min(inner[1], 1000.0)) if inner[1] > 1 else largest
    if isinstance(expression, sympy.factorial):
        return float(largest * 2.0 ** min(largest, 1000.0))
    return largest if len(inner) < 2 else float(sum(inner))


def _confirmed(left: Any, right: Any) -> bool:
    """Numerically equal too, at a point of their variables: differences are judged by the size of what differs."""
    import sympy

    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return all(_confirmed(one, other) for one, other in zip(left, right, strict=True))
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return True
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: sympy.Rational(7 + 4 * at, 5 + at) for at, symbol in enumerate(symbols)}
    one, other = _value(left.subs(point)), _value(right.subs(point))
    if one is None or other is None:
        return True
    size = max(abs(one), abs(other))
    if left.has(sympy.Float) or right.has(sympy.Float):
        return bool(abs(one - other) <= size / 1000)
    return bool(size < sympy.Float("1e-100") or abs(one - other) <= size * sympy.Float("1e-12"))


def _value(expression: Any) -> Any:
    """A complex number of 30 digits, or None."""
    import sympy

    try:
        value = sympy.N(expression, 30)
    except Exception:
        return None
    return value if value.is_number and value.is_finite else None


def _rounds_to(one: Fraction, other: Fraction) -> bool:
    return abs(one - other) <= min(_ABSOLUTE, _RELATIVE * max(abs(one), abs(other)))


def _bare(text: str) -> str:
    """Without spaces, those between letters or digits aside: `7 2` is not 72."""
    return _SPACE.sub("", text)
