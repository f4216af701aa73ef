r"""Numbers as answers spell them: repeating decimals, scientific notation, mixed numbers, digits with a base.

>>> written_out(r"0.1\overline{6}"), number("1.5e3"), number("3 1/2"), numeral("1011_2")
('\\frac{1}{6}', Fraction(1500, 1), Fraction(7, 2), ('1011', '2'))
"""

import re
from fractions import Fraction

from rewards.numeric import MAX_NUMBER_CHARS, parse_number

__all__ = ["decimals", "number", "numeral", "same_number", "written_out"]

_RELATIVE, _ABSOLUTE = Fraction(1, 10_000), Fraction(5, 10_000_000)  # between a decimal and what it rounds
_CHARACTERS = frozenset("0123456789+-./\\frac{} eE^times*do")
# Runs are bounded, and each begins where no digit stands before: linear in the length of the text.
_BAR = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s?(?:\{(\d{1,20})\}|(\d))(?!\s?[\d.])")
_DOTS = re.compile(
    r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\dot\s?\{?(\d)\}?(?:(\d{0,20})\\dot\s?\{?(\d)\}?)?(?!\s?[\d.]|\\dot)"
)
_PARENTHESES = re.compile(r"(?<![\d.A-Za-z)}])(\d{1,20})\.()\((\d{1,20})\)(?!\s?[\d.(^])")
_SHORT = re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)")
_MIXED = re.compile(r"([+-]?)(\d{1,30})(?:\s?\\frac\{(\d{1,30})\}\{(\d{1,30})\}|\s(\d{1,30})/(\d{1,30}))")
_POWER = re.compile(
    r"(?:([+-]?(?:\d{1,60}\.?\d{0,60}|\.\d{1,60}))\s?(?:\\times|\\cdot|\*)\s?)?10\s?\^\s?(?:\{([+-]?\d{1,4})\}|(\d))"
)
_EXPONENT = re.compile(r"([+-]?(?:\d{1,60}\.?\d{0,60}|\.\d{1,60}))[eE]([+-]?\d{1,4})")
_DIFFERENCE = re.compile(r"[+-]?\d+e[+-]\d")  # 2e-1 may be twice Euler's number less one
_NUMERAL = re.compile(
    r"\(?(-?\d[0-9A-Fa-f]{0,99}(?:\.[0-9A-Fa-f]{1,99})?)\)?\s?_\s?(?:\{\s?(?:\\text\{)?([0-9a-z]{1,9})\}?\s?\}|(\d{1,2}))"
)
_DECIMAL = re.compile(r"-?\d{0,60}(?:\.(\d{0,60}))?")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip


def written_out(text: str) -> str:
    r"""`text` with each repeating decimal (`0.\overline{3}`, `\bar`, `\dot`, `0.(3)`) as the fraction that it is."""
    if "." not in text:
        return text
    for pattern in (_BAR, _DOTS, _PARENTHESES):
        text = pattern.sub(_fraction, text)
    return text


def _fraction(match: re.Match[str]) -> str:
    whole, before, *rest = match.groups()
    period = "".join(part for part in rest if part)
    first, both = int(f"{whole}{before}" or "0"), int(f"{whole}{before}{period}")
    value = Fraction(both - first, 10 ** len(before) * (10 ** len(period) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def number(text: str) -> Fraction | None:
    """The exact rational that `text` writes out, without units, percent or currency.

    Decimals, fractions, mixed numbers (`3 1/2`, `3\\frac12`), and powers of ten from -1000 to 1000 (`1.5e3`,
    `1.5\\times 10^3`); not `2e-1`, which may be a difference.
    """
    if len(text) > MAX_NUMBER_CHARS or not text or not set(text) <= _CHARACTERS or text.count("{") != text.count("}"):
        return None
    text = _SHORT.sub(r"\\frac{\1}{\2}", text)
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        if above >= below:
            return None
        return (-1 if match[1] == "-" else 1) * (int(match[2]) + Fraction(above, below))
    if match := _POWER.fullmatch(text) or (None if _DIFFERENCE.fullmatch(text) else _EXPONENT.fullmatch(text)):
        exponent = int(next(group for group in match.groups()[1:] if group))
        return Fraction(match[1] or 1) * Fraction(10) ** exponent if abs(exponent) <= 1000 else None
    return parse_number(text) if set(text) <= set("0123456789+-./\\frac{}") else None


def same_number(expected: str, given: str) -> bool | None:
    r"""Whether two plain numbers are equal, to six places and four digits where one is a decimal; None for anything else.

    >>> same_number("0.2", "2e-1"), same_number(r"\frac13", "0.333333"), same_number("1/3", "0.33"), same_number("4", "2+2")
    (True, True, False, None)
    """
    one, other = number(expected), number(given)
    if one is not None and other is None:
        other = _exponent_notation(given)
    if one is None or other is None:
        return None
    return one == other or (("." in expected or "." in given) and _rounds_to(one, other))


def _exponent_notation(text: str) -> Fraction | None:
    """`2e-1` as a number, for an answer that is compared with one."""
    match = _EXPONENT.fullmatch(text)
    return Fraction(match[1]) * Fraction(10) ** int(match[2]) if match and abs(int(match[2])) <= 1000 else None


def numeral(text: str) -> tuple[str, str] | None:
    r"""Digits and base of `1011_2`, `(70)_{8}` or `2A_{\text{sixteen}}`; the digits in lower case."""
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    base = match[2] or match[3]
    return match[1].lower(), _BASES.get(base, base)


def decimals(text: str) -> int | None:
    """How many digits stand behind the point of a plain decimal; None for anything else."""
    match = _DECIMAL.fullmatch(text)
    return len(match[1] or "") if match and any(c.isdigit() for c in text) else None


def _rounds_to(one: Fraction, other: Fraction) -> bool:
    """Equal to six places and four digits."""
    return abs(one - other) <= min(_ABSOLUTE, _RELATIVE * max(abs(one), abs(other)))
