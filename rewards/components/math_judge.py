r"""Compare two short answers by meaning, in an isolated worker; `warm_up` loads SymPy, which takes seconds.

`judge` splits both texts (lists, sets, tuples, intervals, unions, matrices, named values) and compares single expressions
with math-verify; a numerical comparison confirms each match. With `final`, an answer must also be worked out as far as the
reference, see `math_expressions.worked_out`.
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
_APPROXIMATELY = "\\approx"
_SIGNS = re.compile(r"[()\[\]{}=]|\\(?:approx|simeq)(?![a-z])")
_NO_EQUATION = ("<", ">", "\\le", "\\ge", "\\ne", "!=", "\\equiv", "\\begin")
_INEQUALITY = re.compile(r"[<>]|\\[lg]e")
_SYMBOL = re.compile(
    r"(?:\\[A-Za-z]{2,10}|[A-Za-z])(?:_(?:\{[A-Za-z0-9, ]{1,10}\}|[A-Za-z0-9]))?'{0,3}"
    r"(?:\([a-z](?:,\s?[a-z]){0,3}\))?"
)
_NO_NAME = re.compile(r"(?<![A-Za-z])(?:not|no|never|wrong|false|isn't)(?![A-Za-z])|\\(?:frac|sqrt)", re.IGNORECASE)
_LETTER = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z]|\\(?!frac|sqrt|log|ln|sin|cos|tan|sec|csc|cot|arc|pi|cdot|times|left|right)[a-z]"
)
_CONSTANTS = frozenset({"\\pi", "\\infty", "\\emptyset", "\\varnothing"})


def judge(answer: str, reference: str, final: bool = False) -> str:
    """Return `equal`, `different`, `unread` (unreadable answer), `reference` (unreadable reference) or `too_large`.

    With `final`, returns `unevaluated` if the answer is not worked out as far as the reference: the reference is a plain
    number and the answer is not, or both are equal and the answer is not `worked_out`.
    """
    expected = plain(reference)
    plain_answer = plain(answer, letters=is_number(expected))
    if units_differ(reference, answer):
        return "different"
    if bare(expected) == bare(plain_answer):
        return "equal"
    try:
        if _same(expected, plain_answer, final):
            return "equal"
        # `1,234` may be a list of two numbers
        ungrouped = plain(reference, join_groups=False)
        is_list = ungrouped != expected and split(ungrouped).kind == "list"
        return "equal" if is_list and _same(ungrouped, plain(answer, join_groups=False), final) else "different"
    except Unevaluated:
        return "unevaluated"
    except TooLarge:
        return "too_large"
    except (Unreadable, RecursionError) as failure:
        if not _readable(expected):
            return "reference"
        return "different" if isinstance(failure, Opaque) else "unread"


def warm_up() -> None:
    """Fill the parser's tables, which takes longer than most comparisons."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text in (r"\frac{x^2+1}{2}", r"\sqrt{3}+\pi", r"\log_2 8", "2x=1", "x<1", r"\sin x", r"\frac{1}{2}i", "1.5"):
        parsed(text, False)
        judge(text, text + "+1")
    gc.collect()
    gc.freeze()  # exempts the loaded modules from later collections


def _same(expected: str, answer: str, final: bool) -> bool:
    (names, left), (answer_names, right) = _named_parts(expected), _named_parts(answer)
    if names and answer_names and sorted(map(bare, names)) != sorted(map(bare, answer_names)):
        return False
    kinds = {left.kind, right.kind}
    if kinds == {"matrix", "tuple"}:  # a matrix of one row or column is compared as a tuple
        left, right = (
            Pieces("tuple", pieces.parts, "()") if "1" in pieces.brackets.split("x") else pieces
            for pieces in (left, right)
        )
        kinds = {left.kind, right.kind}
    if kinds == {"union", "list"}:
        inequalities = left if left.kind == "list" else right
        return all(map(_INEQUALITY.search, inequalities.parts)) and _matching(left.parts, right.parts, final)
    if kinds == {"scalar"}:
        return _same_scalar(left.parts[0], right.parts[0], final)
    if kinds == {"matrix"}:
        return left.brackets == right.brackets and _in_order(left.parts, right.parts, final)
    if kinds == {"union"} and _matching(left.parts, right.parts, final):
        return True
    is_relation = any(_INEQUALITY.search(pieces.parts[0]) for pieces in (left, right) if pieces.kind == "scalar")
    if "union" in kinds or kinds == {"matrix", "scalar"} or (is_relation and kinds & {"interval", "tuple"}):
        return same_expression(expected, answer, final)  # compares inequalities and intervals as sets
    if len(right.parts) > len(left.parts) and right.kind in ("list", "set"):  # remove repeated entries
        right = right._replace(parts=tuple({bare(part): part for part in right.parts}.values()))
    if not len(left.parts) == len(right.parts) <= MAX_PARTS or kinds == {"tuple", "set"}:
        return False
    if len(names) > 1 or len(answer_names) > 1:
        order = sorted(range(len(answer_names)), key=lambda at: bare(answer_names[at]))
        in_order = (
            sorted(range(len(names)), key=lambda at: bare(names[at]))
            if names and answer_names
            else range(len(left.parts))
        )
        return _in_order(
            [left.parts[at] for at in in_order], [right.parts[at] for at in order] if order else right.parts, final
        )
    if kinds <= {"list", "set"}:
        return _matching(left.parts, right.parts, final)
    is_ordered = kinds <= {"list", "set", "tuple"} or (
        kinds <= {"tuple", "interval"} and left.brackets == right.brackets
    )
    return is_ordered and _in_order(left.parts, right.parts, final)


def _named_parts(text: str) -> tuple[tuple[str, ...], Pieces]:
    """Return the names and values of `v = (1, 2)`, `(x, y) = (1, 2)` or `a = 1, b = 2`; no names for other texts."""
    pieces = split(text)
    if pieces.kind == "list":
        names, equals, values = zip(*(part.partition("=") for part in pieces.parts), strict=True)
        names = tuple(name.strip() for name in names)
        stems = {name.partition("_")[0] for name in names}
        if all(equals) and all(values) and all(map(_is_name, names)) and len(stems) == len(names):
            return names, pieces._replace(parts=tuple(value.strip() for value in values))
    name, _, value = text.partition("=")
    left, right = split(name.strip()), split(value.strip())
    if pieces.kind == "scalar" and "=" not in value and right.kind not in ("scalar", "list"):
        is_tuple = left.kind == right.kind == "tuple" and len(left.parts) == len(right.parts)
        if is_tuple and all(map(_is_name, left.parts)):
            return left.parts, Pieces("list", right.parts)
        if left.kind == "scalar" and _is_name(name.strip()):
            return (name.strip(),), right
    return (), pieces


def _in_order(expected: Sequence[str], answer: Sequence[str], final: bool) -> bool:
    return all(_same(part, answer_part, final) for part, answer_part in zip(expected, answer, strict=True))


def _matching(expected: Sequence[str], answer: Sequence[str], final: bool) -> bool:
    """Whether the parts are equal in some order."""
    if len(expected) != len(answer) or len(expected) > MAX_PARTS:
        return False
    if any("\\ldots" in part for part in expected):  # the meaning of an ellipsis depends on its position
        return _in_order(expected, answer, final)
    remaining = list(answer)
    for part in expected:
        position = next((at for at, answer_part in enumerate(remaining) if _same(part, answer_part, final)), None)
        if position is None:
            return False
        del remaining[position]
    return True


def _same_scalar(expected: str, answer: str, final: bool) -> bool:
    if bare(expected) == bare(answer):
        return True
    verdict = _same_sides(expected, answer, final)
    for compare in (same_text, same_order, _same_numeral, same_number):
        verdict = compare(expected, answer) if verdict is None else verdict
    if verdict is not None:
        return verdict
    if expected.endswith("%") or answer.endswith("%"):
        return _same_percentage(expected, answer, final)
    if final and number(expected) is not None:
        raise Unevaluated
    return same_expression(expected, answer, final)


def _same_numeral(expected: str, answer: str) -> bool | None:
    """Whether digits and base are equal as text: an answer may omit the base, but not add it; 56 is not 70 in base 8."""
    expected_numeral, answer_numeral = numeral(expected), numeral(answer)
    if expected_numeral is None:
        return None if answer_numeral is None else False
    return expected_numeral == answer_numeral if answer_numeral else expected_numeral[0] == answer.lower()


def _same_percentage(expected: str, answer: str, final: bool) -> bool:
    """Whether two answers with `%` are equal: `50%` equals `50%`, `50` and `0.5`."""
    value, answer_value = expected.removesuffix("%"), answer.removesuffix("%")
    if expected.endswith("%") == answer.endswith("%"):
        return _same(value, answer_value, final)
    percentage, other = (value, answer) if expected.endswith("%") else (answer_value, expected)
    if final and number(other) is None:
        raise Unevaluated
    return _same(value, answer_value, False) or same_expression(f"\\frac{{{percentage}}}{{100}}", other)


def _same_sides(expected: str, answer: str, final: bool) -> bool | None:
    """Whether every side of an equation or chain that is not a name equals the expected value.

    `x = 7` and `7 = x` are accepted for `7`, `8 = 7` is not. None if neither text is a chain, or both are equations.
    """
    expected_sides, sides = _sides(expected), _sides(answer)
    if len(expected_sides) == len(sides) == 1 and not expected_sides[0][0] and not sides[0][0]:
        return None
    if not all(side for _, side in (*expected_sides, *sides)):
        return False
    exact = [side for mark, side in expected_sides if mark != _APPROXIMATELY]
    if all(map(_is_name, exact)):  # the reference has only an approximate value
        exact = [side for _, side in expected_sides]
    if len(exact) == 1 or not any(map(_LETTER.search, exact)):
        return _same_values(exact[-1], sides, final)  # the last side is the value: `\\log_2 8 = 3`
    name, value = (exact[0], exact[1]) if _is_name(exact[0]) else (exact[1], exact[0])
    others = [(mark, side) for mark, side in sides if bare(side) != bare(name)]
    if len(exact) == 2 and _is_name(name) and (len(sides) == 1 or 0 < len(others) < len(sides)):
        return _same_values(value, others, final)
    return None


def _same_values(expected: str, sides: list[tuple[str, str]], final: bool) -> bool:
    """Whether all sides are names or equal `expected`, and at least one equals it.

    An approximation after an exact side has to be its rounding or truncation. With `final`, raises `Unevaluated` if no side
    is worked out.
    """
    is_symbol = _is_symbol(expected)  # if a symbol is expected, symbols of the answer are values
    values = [
        (mark, side)
        for at, (mark, side) in enumerate(sides)
        if not ((at == 0 and _is_name(side) and len(sides) > 1) or (not is_symbol and _is_symbol(side)))
    ]
    has_exact = any(mark != _APPROXIMATELY for mark, _ in values)
    is_worked_out = False
    for mark, side in values:
        if not _same_scalar(expected, side, False) and not (
            has_exact and mark == _APPROXIMATELY and approximates(expected, side)
        ):
            return False
        try:
            is_worked_out = is_worked_out or not final or _same_scalar(expected, side, True)
        except Unevaluated:
            continue
    if values and not is_worked_out:
        raise Unevaluated
    return bool(values)


def _sides(text: str) -> list[tuple[str, str]]:
    """Return (sign before the side, side) for each side of an equation or approximation; one entry for other texts."""
    if any(sign in text for sign in _NO_EQUATION):
        return [("", text)]
    parts: list[tuple[str, str]] = []
    mark, begin, depth = "", 0, 0
    for match in _SIGNS.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0 and match[0][0] in "=\\":  # an `=` in brackets may be the index of a sum
            parts.append((mark, text[begin : match.start()].strip()))
            mark, begin = "=" if match[0] == "=" else _APPROXIMATELY, match.end()
    parts.append((mark, text[begin:].strip()))
    return parts[1:] if len(parts) > 1 and parts[0] == ("", "") and parts[1][0] == _APPROXIMATELY else parts


def _is_name(side: str) -> bool:
    """Whether a side is a name of letters, commands and subscripts: `x`, `f(x)`, `\\angle ABC`, `x_1`, `\\text{Area}`."""
    name = side.partition("_")[0] if side.rpartition("_")[2].strip("{}").isalnum() else side
    has_letters_only = 0 < len(side) <= 40 and all(c.isalpha() or c in " \\(){}'," for c in name)
    return has_letters_only and side not in _CONSTANTS and not _NO_NAME.search(side)


def _is_symbol(side: str) -> bool:
    """Whether a side is one letter or command, with optional index, primes and arguments, and no constant."""
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
