r"""Is an answer worked out as far as the reference? Or a copy of what the prompt says?

Boxing the question is no answer, though it has the right value.

>>> from rewards.components.math_parser import parsed
>>> def told(reference, answer):
...     return worked_out(parsed(reference), parsed(answer))
>>> told(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), told(r"\frac{\sqrt{2}}{2}", r"\cos(\frac{\pi}{4})")
(True, False)
>>> told("4t", "3t+4-6t+7t-4"), told("2x+2", "2(x+1)")
(False, True)
>>> is_copied(r"2^{10}", "1024", "What is $2^{10}$?"), is_copied("1024", "1024", "Is 1024 a power of two?")
(True, False)
"""

import re
from functools import lru_cache
from typing import Any

from rewards.components.math_names import same_text
from rewards.components.math_numbers import decimals, same_number
from rewards.components.math_text import MAX_MATH_CHARS, bare, match_form, plain, split, without_layout

__all__ = ["is_copied", "worked_out"]

_LONGER = 1.5
"""How many times as many numbers, letters and functions as the reference an answer may hold."""


def worked_out(reference: Any, answer: Any) -> bool:
    """Whether `answer`, which equals `reference`, leaves nothing to compute that the reference does not leave.

    Both are SymPy objects that were not evaluated. A constant may not hold functions or whole powers of numbers that the
    reference is without, and roots of no larger numbers. Nothing may have like terms or factors that go together by
    themselves, or be much longer than the reference. In the place of a set or interval, an inequality has to be solved for
    its letter.
    """
    import sympy

    if (
        isinstance(reference, sympy.Set)
        and isinstance(answer, sympy.Basic)
        and answer.has(sympy.core.relational.Relational)
    ):
        return all(map(_is_solved, answer.atoms(sympy.core.relational.Relational)))
    letters = _letters(reference)
    if _size(answer) > _LONGER * _size(reference) + bool(letters) or (letters and _letters(answer) > 2 * letters):
        return False
    if _under_roots(answer) > _under_roots(reference):
        return False
    if not _letters(answer) and not _operations(answer) <= _operations(reference):
        return False
    return _together(answer)


def _is_solved(relation: Any) -> bool:
    """`x < 3`, `-1 <= x`: a letter on one side, a number on the other."""
    sides = sorted(relation.args, key=lambda side: bool(side.free_symbols))
    return not sides[0].free_symbols and bool(sides[1].is_Symbol)


def _letters(expression: Any) -> int:
    """How often letters stand in it."""
    return sum(part.is_Symbol for part in _parts(expression))


def _parts(expression: Any) -> list[Any]:
    """All of its subexpressions; of a matrix, those of its cells."""
    import sympy

    if isinstance(expression, sympy.MatrixBase):
        return [part for cell in expression for part in _parts(cell)]
    return [part for part in sympy.preorder_traversal(expression) if isinstance(part, sympy.Basic)]


def _size(expression: Any) -> int:
    """How many numbers, constants, letters and functions it holds, 1 and -1 aside; a fraction is two numbers."""
    size = 0
    for part in _parts(expression):
        if part.is_Rational:
            size += (abs(part.p) != 1) + (part.q != 1)
        elif not part.is_Boolean or part.args:  # whether an end of an interval belongs to it is nothing to compute
            size += not part.args or _name(part) is not None
    return size


def _name(part: Any) -> str | None:
    """What is computed at this place, sums, products and roots aside."""
    import sympy

    if isinstance(part, sympy.Pow):
        base, exponent = part.args
        return (
            "power" if exponent.is_Integer and abs(exponent) != 1 and base.is_number and base is not sympy.E else None
        )
    plain = isinstance(part, sympy.Add | sympy.Mul | sympy.Tuple | sympy.Set | sympy.core.relational.Relational)
    return None if plain or not part.args else type(part).__name__


def _operations(expression: Any) -> set[str]:
    return {name for part in _parts(expression) if (name := _name(part)) is not None}


def _under_roots(expression: Any) -> int:
    """The largest number under a root, numerator times denominator; 0 for none."""
    import sympy

    roots = [part.base for part in _parts(expression) if isinstance(part, sympy.Pow) and not part.exp.is_Integer]
    return max((abs(base.p * base.q) for base in roots if base.is_Rational), default=0)


def _together(answer: Any) -> bool:
    """Whether nothing becomes shorter when SymPy evaluates as it does by itself: like terms, products of numbers.

    Factors in front of brackets stay there: `2(x + 1)` is as good as `2x + 2`.
    """
    import sympy
    from sympy.core.parameters import distribute

    if not isinstance(answer, sympy.Expr):
        return True
    try:
        evaluated = answer.doit()
        with distribute(False):
            collected = answer.doit()
    except Exception:
        return True
    return _letters(evaluated) >= _letters(answer) and _size(collected) >= _size(answer)


_BEFORE, _AFTER = re.compile(r"[A-Za-z0-9\\_.^]$"), re.compile(r"[A-Za-z0-9_^]|\.\d")


def is_copied(answer: str, reference: str, prompt: str) -> bool:
    """Whether `answer` stands in `prompt` and is written otherwise than `reference`.

    Spaces, layout, units, names (`x =`), the order within lists and trailing zeros make no other writing; a fraction in
    the place of a decimal does.
    """
    if not prompt or len(answer) > MAX_MATH_CHARS or _same_writing(plain(reference), plain(answer, letters=True)):
        return False
    return any(_stands_in(text, _squeezed(prompt)) for text in {_squeezed(answer), bare(plain(answer))} if text)


def _same_writing(expected: str, given: str) -> bool:
    one, other = split(expected).parts, split(given).parts
    if sorted(map(match_form, one)) == sorted(map(match_form, other)) or same_text(expected, given):
        return True
    return len(one) == len(other) == 1 and bool(
        same_number(expected, given) and decimals(expected) is not None and decimals(given) is not None
    )


@lru_cache(maxsize=256)
def _squeezed(text: str) -> str:
    return bare(without_layout(text))


def _stands_in(needle: str, text: str) -> bool:
    """As a whole: not `1+2` within `11+2` or `1+23`."""
    at = text.find(needle)
    while at >= 0:
        before, after = text[max(0, at - 1) : at], text[at + len(needle) :][:2]
        if not (needle[0].isalnum() and _BEFORE.match(before)) and not (needle[-1].isalnum() and _AFTER.match(after)):
            return True
        at = text.find(needle, at + 1)
    return False
