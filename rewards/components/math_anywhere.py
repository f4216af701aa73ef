"""An answer that does not stand where it was asked for, taken out of a text as Math-Verify does. For a worker."""

import re

__all__ = ["found_anywhere", "with_point"]

_DECIMAL_COMMA = re.compile(r"^(-?\d{1,30}),(\d{1,30})$")
_BROKEN_OFF = re.compile(r"(?<!\$)\$ *\n|\\\( *\n")  # mathematics within a line does not go on below it
_EITHER_BEFORE, _EITHER_AFTER = re.compile(r"\b(?:or|either|and)\W{0,4}$"), re.compile(r"\W{0,4}(?:or|and)\b")


def found_anywhere(text: str) -> str | None:
    """The answer that Math-Verify takes out of a text, unless it is one of two: `70 or 72`."""
    import math_verify

    found = [part for part in math_verify.parse(text, parsing_timeout=None) if isinstance(part, str)]
    if not found or _BROKEN_OFF.search(text):
        return None
    before, _, after = text.rpartition(found[0])
    return None if _EITHER_BEFORE.search(before[-20:]) or _EITHER_AFTER.match(after[:20]) else found[0]


def with_point(number: str) -> str:
    """A decimal comma as a point: `2,74` is `2.74`."""
    return _DECIMAL_COMMA.sub(r"\1.\2", number.strip("$ "))
