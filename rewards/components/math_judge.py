r"""Compare two short answers by meaning. Meant for an isolated worker: `warm_up` loads SymPy, which takes seconds.

The text is taken apart first (lists, sets, tuples, intervals, unions, matrices, named values), so that
each comparison left for math-verify is between two single expressions; what it accepts is then confirmed numerically.
With `final`, an answer also has to be worked out as far as the reference, see `math_expressions.worked_out`.
"""

import gc
import logging
import re
from collections.abc import Sequence

from rewards.components.math_expressions import (
    Opaque,
    TooLarge,
    Unevaluated,
    Unreadable,
    approximates,
    parsed,
    same_expression,
)
from rewards.components.math_text import (
    Pieces,
    bare,
    decimals,
    is_number,
    number,
    numeral,
    plain,
    same_number,
    same_order,
    same_text,
    split,
    units_differ,
    words,
)

MAX_PARTS = 50
_SIGNS = re.compile(r"[()\[\]{}=]|\\(?:approx|simeq)(?![a-z])")
_NO_EQUATION = ("<", ">", "\\le", "\\ge", "\\ne", "!=", "\\equiv", "\\begin")
_SYMBOL = re.compile(
    r"(?:\\[A-Za-z]{2,10}|[A-Za-z])(?:_(?:\{[A-Za-z0-9, ]{1,10}\}|[A-Za-z0-9]))?'{0,3}"
    r"(?:\([a-z](?:,\s?[a-z]){0,3}\))?"
)
_DENIALS = re.compile(r"(?<![A-Za-z])(?:not|no|never|wrong|false|isn't)(?![A-Za-z])", re.IGNORECASE)
_LETTER = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z]|\\(?!frac|sqrt|log|ln|sin|cos|tan|sec|csc|cot|arc|pi|cdot|times|left|right)[a-z]"
)
_INEQUALITY = re.compile(r"[<>]|\\[lg]e")
_CONSTANTS = frozenset({"\\pi", "\\infty", "\\emptyset", "\\varnothing"})


def judge(answer: str, reference: str, final: bool = False) -> str:
    """`equal`, `different`, `unread` (the answer), `reference` (cannot be read itself) or `too_large` to evaluate.

    With `final`, `unevaluated` for an answer that is not worked out as far as the reference: one that is no plain number
    where the reference is one, or that equals the reference and is not `worked_out`.
    """
    expected = plain(reference)
    given = plain(answer, letters=is_number(expected))
    if units_differ(reference, answer):
        return "different"
    if bare(expected) == bare(given):
        return "equal"
    try:
        if _same(expected, given, final):
            return "equal"
        # `1,234` may be a list of two after all
        listed = plain(reference, join_groups=False)
        if listed != expected and split(listed).kind == "list":
            return "equal" if _same(listed, plain(answer, join_groups=False), final) else "different"
        return "different"
    except Unevaluated:
        return "unevaluated"
    except TooLarge:
        return "too_large"
    except (Unreadable, RecursionError) as failure:
        if not _readable(expected):
            return "reference"
        return "different" if isinstance(failure, Opaque) else "unread"


def warm_up() -> None:
    """Fills the parser's tables, which costs more than most comparisons."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text in (r"\frac{x^2+1}{2}", r"\sqrt{3}+\pi", r"\log_2 8", "2x=1", "x<1", r"\sin x", r"\frac{1}{2}i", "1.5"):
        parsed(text, False)
        judge(text, text + "+1")
    gc.collect()
    gc.freeze()  # what is loaded by now stays: no need to look through it at every collection


def _same(expected: str, answer: str, final: bool) -> bool:
    (name, expected), (other, answer) = _whole_by_name(expected), _whole_by_name(answer)
    if name and other and bare(name) != bare(other):
        return False
    left, right = _unfolded(expected), _unfolded(answer)
    kinds = {left.kind, right.kind}
    if kinds == {"matrix", "tuple"}:
        left, right = _as_tuple(left), _as_tuple(right)
        kinds = {left.kind, right.kind}
    if kinds == {"union", "list"}:
        listed = left if left.kind == "list" else right
        return all(map(_INEQUALITY.search, listed.parts)) and _matching(left.parts, right.parts, final)
    if kinds == {"scalar"}:
        return _same_scalar(left.parts[0], right.parts[0], final)
    if kinds == {"matrix"}:
        return left.brackets == right.brackets and _in_order(left.parts, right.parts, final)
    if kinds == {"union"} and _matching(left.parts, right.parts, final):
        return True
    if "union" in kinds or kinds == {"matrix", "scalar"} or _is_relation(left, right):
        return same_expression(expected, answer, final)
    if len(right.parts) > len(left.parts) and right.kind in ("list", "set"):  # an entry that is written twice
        right = right._replace(parts=tuple({bare(part): part for part in right.parts}.values()))
    if len(left.parts) != len(right.parts) or max(len(left.parts), len(right.parts)) > MAX_PARTS:
        return False
    if not kinds <= {"list", "set", "tuple"} and not (
        kinds <= {"tuple", "interval"} and left.brackets == right.brackets
    ):
        return False
    if "tuple" in kinds and "set" in kinds:
        return False
    named = _same_by_name(left.parts, right.parts, final)
    if named is not None:
        return named
    return (_matching if kinds <= {"list", "set"} else _in_order)(left.parts, right.parts, final)


def _whole_by_name(text: str) -> tuple[str, str]:
    """`v` and `(1, 2)` of `v = (1, 2)`: a name, and what is no single value; else no name, and the text."""
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not _is_name(name) or split(text).kind != "scalar" or split(name).kind != "scalar":
        return "", text
    return (name, value) if split(value).kind not in ("scalar", "list") else ("", text)


def _as_tuple(pieces: Pieces) -> Pieces:
    """A matrix of one column or row as the tuple of its entries."""
    one_line = pieces.kind == "matrix" and "1" in pieces.brackets.split("x")
    return Pieces("tuple", pieces.parts, "()") if one_line else pieces


def _unfolded(text: str) -> Pieces:
    """The outermost structure; `(x, y) = (1, 2)` as the list `x = 1, y = 2`."""
    pieces = split(text)
    names, equals, values = text.partition("=")
    if pieces.kind == "scalar" and equals and "=" not in values:
        left, right = split(names.strip()), split(values.strip())
        if (
            left.kind == right.kind == "tuple"
            and len(left.parts) == len(right.parts)
            and all(map(_is_name, left.parts))
        ):
            return Pieces("list", tuple(f"{a}={b}" for a, b in zip(left.parts, right.parts, strict=True)))
    return pieces


def _same_by_name(expected: Sequence[str], answer: Sequence[str], final: bool) -> bool | None:
    """Values of different names, `a = 1, b = 2`: by name, or in order where one side names nothing; else None."""
    values_by_name, answer_values = _names(expected), _names(answer)
    if values_by_name and answer_values:
        values = dict(answer_values)
        return values_by_name.keys() == values.keys() and all(
            _same(values_by_name[name], values[name], final) for name in values_by_name
        )
    if values_by_name:
        return _in_order(list(values_by_name.values()), answer, final)
    return (
        _in_order(expected, [answer_values[name] for name in sorted(answer_values)], final) if answer_values else None
    )


def _names(parts: Sequence[str]) -> dict[str, str]:
    """Value by name, of parts that are all named and differently, indices aside; else empty."""
    named = [part.partition("=") for part in parts]
    if len(parts) < 2 or not all(equals and value and _is_name(name.strip()) for name, equals, value in named):
        return {}
    stems = {name.partition("_")[0].strip() for name, _, _ in named}
    return {bare(name.strip()): value.strip() for name, _, value in named} if len(stems) == len(parts) else {}


def _in_order(expected: Sequence[str], answer: Sequence[str], final: bool) -> bool:
    return all(_same(part, answer_part, final) for part, answer_part in zip(expected, answer, strict=True))


def _is_relation(left: Pieces, right: Pieces) -> bool:
    """An inequality against an interval: math-verify compares those as sets."""
    pair = {left.kind: left, right.kind: right}
    if not {"scalar"} < set(pair) <= {"scalar", "interval", "tuple"}:
        return False
    return any(sign in pair["scalar"].parts[0] for sign in ("<", ">", "\\le", "\\ge"))


def _matching(expected: Sequence[str], answer: Sequence[str], final: bool) -> bool:
    """Whether the parts pair off, in any order."""
    if len(expected) != len(answer) or len(expected) > MAX_PARTS:
        return False
    if any("\\ldots" in part for part in expected):  # what it stands for depends on where it stands
        return _in_order(expected, answer, final)
    left = list(answer)
    for one in expected:
        position = next((at for at, answer_part in enumerate(left) if _same(one, answer_part, final)), None)
        if position is None:
            return False
        del left[position]
    return True


def _same_scalar(expected: str, answer: str, final: bool) -> bool:
    if bare(expected) == bare(answer):
        return True
    verdict = _same_named(expected, answer, final)
    for compare in (same_text, same_order, _same_numeral, same_number):
        verdict = compare(expected, answer) if verdict is None else verdict
    if verdict is None:
        verdict = _same_percentage(expected, answer, final)
    if verdict is not None:
        return verdict
    if final and number(expected) is not None:
        raise Unevaluated
    return same_expression(expected, answer, final)


def _same_numeral(expected: str, answer: str) -> bool | None:
    """Digits and base as text: a base may be left out, not added, and 56 is not 70 in base 8."""
    numeral_expected, numeral_given = numeral(expected), numeral(answer)
    if numeral_expected is None:
        return None if numeral_given is None else False
    return numeral_expected == numeral_given if numeral_given else numeral_expected[0] == answer.lower()


def _same_percentage(expected: str, answer: str, final: bool) -> bool | None:
    """`50%` is `50%`, `50` and `0.5`."""
    if not (expected.endswith("%") or answer.endswith("%")):
        return None
    number_expected, number_given = expected.removesuffix("%"), answer.removesuffix("%")
    if expected.endswith("%") == answer.endswith("%"):
        return _same(number_expected, number_given, final)
    hundredth = f"\\frac{{{number_expected if number_expected != expected else number_given}}}{{100}}"
    plainly = number_given if number_expected != expected else number_expected
    if final and number(plainly) is None:
        raise Unevaluated
    return _same(number_expected, number_given, False) or same_expression(hundredth, plainly)


def _same_named(expected: str, answer: str, final: bool) -> bool | None:
    """`x = 7` and `7 = x` for `7`, and chains: every side that is no bare name has to equal what is expected.

    So `8 = 7` is not 7. What stands behind an approximation sign is judged by `_same_values`.
    """
    expected_sides, sides = _sides(expected), _sides(answer)
    if len(expected_sides) == len(sides) == 1 and not (expected_sides[0][0] or sides[0][0]):
        return None
    if any(mark == "\\approx" for mark, _ in expected_sides):
        exact = [side for mark, side in expected_sides if mark != "\\approx"]
        if all(map(_is_name, exact)):  # there is nothing but the approximation
            exact = [side for _, side in expected_sides]
        return _same_scalar("=".join(exact), answer, final)
    if not all(side for _, side in (*expected_sides, *sides)):
        return False
    if len(expected_sides) == 2 and _is_name(expected_sides[1][1]) and not _is_name(expected_sides[0][1]):
        expected_sides.reverse()
    if len(expected_sides) == 1:
        return _same_values(expected, sides, final)
    # What an expression comes to: `\\log_2 8 = 3`
    if not any(_LETTER.search(side) for _, side in expected_sides):
        return _same_values(expected_sides[-1][1], sides, final)
    if len(expected_sides) == 2 and _is_name(expected_sides[0][1]):
        name, value = bare(expected_sides[0][1]), expected_sides[1][1]
        others = [(mark, side) for mark, side in sides if bare(side) != name]
        if len(sides) == 1 or 0 < len(others) < len(sides):
            return _same_values(value, others, final)
    return None


def _same_values(expected: str, sides: list[tuple[str, str]], final: bool) -> bool:
    """Whether all sides are names or `expected`, at least one the latter.

    An approximation behind an exact side has to be that value's rounding or truncation; alone, the rounding of an
    irrational number to three digits or more. A rational number has none.
    """
    named = not _is_symbol(expected)  # where a name is expected, others are values
    values = [
        (m, s)
        for at, (m, s) in enumerate(sides)
        if not ((at == 0 and _is_name(s) and len(sides) > 1) or (named and _is_symbol(s)))
    ]
    exact = [side for mark, side in values if mark != "\\approx"]
    near = [side for mark, side in values if mark == "\\approx"]
    if not values or not all(_same_scalar(expected, side, False) for side in exact):
        return False
    if not all(_same_scalar(expected, side, False) or approximates(expected, side, bool(exact)) for side in near):
        return False
    return not final or _one_worked_out(expected, [side for _, side in values])


def _one_worked_out(expected: str, sides: list[str]) -> bool:
    """`True` where one of these equal sides is worked out. Raises `Unevaluated` where none is."""
    for at, side in enumerate(sides):
        try:
            if _same_scalar(expected, side, True) or decimals(side) is not None:
                return True
        except Unevaluated:
            if at + 1 == len(sides):
                raise
    return False


def _sides(text: str) -> list[tuple[str, str]]:
    """(sign before it, side) of an equation or approximation; one entry where there is neither."""
    if any(sign in text for sign in _NO_EQUATION):
        return [("", text)]
    parts: list[tuple[str, str]] = []
    mark, begin, depth = "", 0, 0
    for match in _SIGNS.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0 and match[0][0] in "=\\":  # not within a sum's index
            parts.append((mark, text[begin : match.start()].strip()))
            mark, begin = "=" if match[0] == "=" else "\\approx", match.end()
    parts.append((mark, text[begin:].strip()))
    return parts[1:] if len(parts) > 1 and parts[0] == ("", "") and parts[1][0] == "\\approx" else parts


def _is_name(side: str) -> bool:
    """Letters, commands and subscripts only, as in `x`, `f(x)`, `\\angle ABC`, `x_1`, `\\text{Area}`."""
    name = side.partition("_")[0] if side.rpartition("_")[2].strip("{}").isalnum() else side
    letters = 0 < len(side) <= 40 and all(c.isalpha() or c in " \\(){}'," for c in name)
    return (
        letters
        and "\\frac" not in name
        and "\\sqrt" not in name
        and side not in _CONSTANTS
        and not _DENIALS.search(side)
    )


def _is_symbol(side: str) -> bool:
    """One letter or command, with index, primes and arguments, that is no constant."""
    return _SYMBOL.fullmatch(side) is not None and side not in _CONSTANTS | {"e", "i"}


def _readable(text: str) -> bool:
    try:
        pieces = split(text)
        for part in pieces.parts if pieces.kind != "scalar" else (text,):
            for _, side in _sides(part):
                if words(side) is None:
                    parsed(side.removesuffix("%"), False)
    except (Opaque, TooLarge):
        return True
    except (Unreadable, RecursionError):
        return False
    return True
