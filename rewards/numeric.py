r"""Reading one number out of a short answer, exactly: rationals, never floats.

>>> parse_number("$1,234.50") == parse_number("1234.5")
True
>>> parse_number("72.00 apples.")
Fraction(72, 1)
>>> parse_number("8=7"), parse_number("7 or 8"), parse_number("1e999999999")
(None, None, None)
"""

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200
MAX_EXPONENT = 1_000  # 1e1000 is exact in microseconds; 1e999999999 would take all the memory there is

_DIGITS = frozenset("0123456789")
_MINUS = str.maketrans({"−": "-", "﹣": "-", "\uff0d": "-", "–": "-", "\u2011": "-", "\u2010": "-"})
_SPACES = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\t": " ", "\n": " ", "\r": " "})
_LATEX = (
    ("\\left", ""), ("\\right", ""), ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", " "), ("\\!", ""),
    ("\\;", " "), ("\\:", " "), ("\\ ", " "), ("~", " "), ("^{\\circ}", "°"), ("^\\circ", "°"),
    ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"),
)  # fmt: skip
_CURRENCIES = ("US$", "$", "€", "£", "¥", "₹", "USD", "EUR", "GBP")
# Words behind a number that make it another number, or no single answer at all.
_NOT_UNITS = frozenset(re.findall(r"\S+", """
    or and to not if but vs versus either maybe perhaps possibly probably nor wrong between plus minus times over by
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million
    millions billion billions trillion dozen dozens half third quarter score mod squared cubed factorial
    k b bn x y z n i e pi π
    halves thirds quarters fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths lakh lakhs crore
    crores mil doubled tripled quadrupled halved negative below no none incorrect unknown
    am pm a.m p.m bc bce ad ce january february march april may june july august september october november december jan
    feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday sunday
"""))  # fmt: skip
_UNIT_WORDS = 4
_LETTER_UNITS = frozenset("mgshlLNJWVAKCFc")  # any other letter behind a number is a variable


def parse_number(text: str) -> Fraction | None:
    r"""The one number that `text` consists of, or None.

    Understood: signs (`+5`, `−5`), grouping (`1,234`, `1 234`, `1\,234`), decimals (`72.00`, `.5`), exponents up to
    `MAX_EXPONENT`, fractions (`3/4`, `\frac{3}{4}`), currency in front, `%` and up to four words of unit behind, a
    trailing period, `$…$`, `\(…\)`, `\boxed{…}`, `\text{…}` and `**…**` around. `12%` is 12: units are not converted.
    Refused: equations, ranges, lists, hedges (`7 or 8`), number words, anything over `MAX_NUMBER_CHARS` characters.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    rest = _plain(text)
    sign, rest = _sign(rest)
    currency = next((mark for mark in _CURRENCIES if rest.startswith(mark)), "")
    rest = rest[len(currency) :].lstrip()
    if currency and sign > 0:
        sign, rest = _sign(rest)
    value, rest = _ratio(rest)
    return sign * value if value is not None and is_unit(rest) else None


def is_bare_number(text: str) -> bool:
    """Whether `text` is a number and says nothing else: no unit word, so that one in an answer is the answer's own.

    >>> is_bare_number("$1,234.50"), is_bare_number("12%"), is_bare_number("4 PM"), is_bare_number("20th Century Fox")
    (True, True, False, False)
    """
    return parse_number(text) is not None and not any(
        part.isalpha() for part in re.split(r"[\W\d_]+", _bare(text)) if part
    )


def parse_reference(reference: object) -> Fraction | None:
    """The number in a reference: a number, a string with one, or a worked solution that ends in `#### 72`."""
    if isinstance(reference, bool) or reference is None:
        return None
    return parse_number(str(reference).rpartition("####")[2])


def _plain(text: str) -> str:
    """LaTeX and Markdown wrapping taken off."""
    text = text.translate(_MINUS).translate(_SPACES).strip()
    for opening, closing in (("**", "**"), ("\\boxed{", "}"), ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    for written, meant in _LATEX:
        text = text.replace(written, meant)
    if text.count("$") == 2 and text.startswith("$"):  # `$12$ cm`
        text = text.replace("$", "")
    return text.strip()


def _bare(text: str) -> str:
    """Without what LaTeX, currencies and exponents are written with."""
    text = _plain(text)
    for written in ("\\frac", "\\text", "\\mathrm", *_CURRENCIES):
        text = text.replace(written, " ")
    return re.sub(r"(?<=\d)[eE](?=[+-]?\d)", " ", text)


def _sign(text: str) -> tuple[int, str]:
    if text[:1] in ("+", "-"):
        return (-1 if text[0] == "-" else 1), text[1:].lstrip()
    return 1, text


def _ratio(text: str) -> tuple[Fraction | None, str]:
    r"""A leading decimal, `a/b` or `\frac{a}{b}`, and what is left."""
    if text.startswith("\\frac{"):
        above, _, rest = text[len("\\frac{") :].partition("}{")
        below, closed, rest = rest.partition("}")
        return (_divide(_whole(above), _whole(below)) if closed else None), rest
    value, rest = _decimal(text)
    if value is not None and rest.startswith("/") and rest[1:2] in _DIGITS:
        below_value, rest = _decimal(rest[1:])
        return _divide(value, below_value), rest
    return value, rest


def _whole(text: str) -> Fraction | None:
    sign, rest = _sign(text.strip())
    value, rest = _decimal(rest)
    return sign * value if value is not None and not rest.strip() else None


def _divide(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return above / below if above is not None and below else None


def _decimal(text: str) -> tuple[Fraction | None, str]:
    """A leading unsigned decimal with optional grouping and exponent, and what is left."""
    whole, rest = _grouped(text)
    decimals = ""
    if rest.startswith(".") and (whole or rest[1:2] in _DIGITS):
        decimals, rest = _digits(rest[1:])
    if whole is None or not whole + decimals:
        return None, text
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    if rest[:1] in ("e", "E"):
        sign, behind = (-1 if rest[1:2] == "-" else 1), rest[2 if rest[1:2] in ("+", "-") else 1 :]
        exponent, behind = _digits(behind)
        if exponent:
            power = int(exponent)
            return (value * Fraction(10) ** (sign * power) if power <= MAX_EXPONENT else None), behind
    return value, rest


def _digits(text: str) -> tuple[str, str]:
    end = 0
    while end < len(text) and text[end] in _DIGITS:
        end += 1
    return text[:end], text[end:]


def _grouped(text: str) -> tuple[str | None, str]:
    """Leading digits with `,` or space grouping removed; None when the grouping is not one (`1,23`, `1,2345`)."""
    first, rest = _digits(text)
    groups = [first]
    mark = rest[:1]
    while first and mark in (",", " ") and rest[:1] == mark and rest[1:2] in _DIGITS:
        group, rest = _digits(rest[1:])
        groups.append(group)
    if len(groups) == 1:
        return first, rest
    inner = {len(group) for group in groups[1:-1]}
    western = 1 <= len(first) <= 3 and inner <= {3}
    indian = mark == "," and 1 <= len(first) <= 2 and inner == {2}
    return ("".join(groups) if len(groups[-1]) == 3 and (western or indian) else None), rest


def is_unit(text: str) -> bool:
    """Whether what stands behind a number is at most a unit and a period."""
    for wrapper in ("\\text{", "\\mathrm{", "\\textbf{"):
        text = text.replace(wrapper, " ")
    text = text.replace("}", "").strip().removesuffix(".").rstrip()
    text = text.removeprefix("%").removeprefix("°").removesuffix("€").removesuffix("$").strip()
    words = text.split()
    if len(words) > _UNIT_WORDS or not all(_is_unit_word(word) for word in words):
        return False
    first = words[0].strip("()°").rstrip(".^{}²³23") if words else ""
    return len(first) != 1 or first in _LETTER_UNITS or (first == "a" and len(words) > 1)


def _is_unit_word(word: str) -> bool:
    word = word.strip("()°").removesuffix(".")
    for power in ("^2", "^3", "^{2", "^{3", "²", "³"):
        word = word.removesuffix(power) if len(word) > len(power) else word
    parts = word.replace("-", "/").replace("·", "/").split("/")
    return all(part.isalpha() and part.lower() not in _NOT_UNITS for part in parts if part) and any(parts)
