r"""Normalize short mathematical answers as text and compare numbers, words and letters without computer algebra.

>>> plain("$12$ cm"), plain(r"1\,234"), plain("−½")
('12', '1234', '-\\frac{1}{2}')
>>> split(plain(r"[0, \infty)"))
Pieces(kind='interval', parts=('0', '\\infty'), brackets='[)')
>>> plain(r"0.1\overline{6}"), number("1.5e3"), number("3 1/2"), numeral("1011_2")
('\\frac{1}{6}', Fraction(1500, 1), Fraction(7, 2), ('1011', '2'))

A computer algebra system multiplies letters, so that `cat` equals `act`. This module compares text (`\text{Yes}`,
`no solution`) as text and ignores case. Letters have to be in the reference's order if an answer has only letters, at least
three or one in upper case, or if a run of letters in an expression has one in upper case. `xy` and `yx` are a product.

>>> same_order("cat", "act"), same_order("xy", "yx"), same_order("nRT", "TRn"), same_order("2abc", "2cab")
(False, None, False, None)
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

MAX_NUMBER_CHARS = 200
MAX_MATH_CHARS = 2_000
_MAX_LAYERS = 30  # redundant brackets removed from around an answer
# Largest differences of a decimal from the exact value.
_RELATIVE, _ABSOLUTE = Fraction(1, 10_000), Fraction(5, 10_000_000)
_NUMBER_CHARACTERS = frozenset("0123456789+-./\\frac{} eE^times*do")
# Matching takes linear time: runs are bounded, and each begins after a character that is not a digit.
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s?(?:\{(\d{1,20})\}|(\d))(?!\s?[\d.])")
_SHORT = re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)")
_DECIMAL = r"(?:\d{1,200}\.?\d{0,200}|\.\d{1,200})"
_SIMPLE = re.compile(
    rf"([+-]?)\s?(?:({_DECIMAL})(?:/({_DECIMAL}))?|\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}})", re.ASCII
)
_MIXED = re.compile(r"([+-]?)(\d{1,30})(?:\s?\\frac\{(\d{1,30})\}\{(\d{1,30})\}|\s(\d{1,30})/(\d{1,30}))")
_POWER_OF_TEN = re.compile(
    rf"(?:([+-]?{_DECIMAL})\s?(?:\\times|\\cdot|\*)\s?)?10\s?\^\s?(?:\{{([+-]?\d{{1,4}})\}}|(\d))", re.ASCII
)
_EXPONENT = re.compile(rf"([+-]?{_DECIMAL})[eE]([+-]?\d{{1,4}})", re.ASCII)
_DIFFERENCE = re.compile(r"[+-]?\d+e[+-]\d")  # 2e-1 may be a power of ten, or twice Euler's number minus one
_NUMERAL = re.compile(r"\(?(-?\d[0-9A-Fa-f]{0,99})\)?\s?_\s?\{?(\d{1,2})\}?")
_POINT = re.compile(r"-?\d{0,60}(?:\.(\d{0,60}))?")


def number(text: str, is_never_difference: bool = False) -> Fraction | None:
    """Return the exact rational number in `text`, which has no unit, percent sign or currency; None for anything else.

    Reads decimals, fractions, mixed numbers (`3 1/2`, `3\\frac12`) and powers of ten from -1000 to 1000 (`1.5e3`,
    `1.5\\times 10^3`). Reads `2e-1`, which may be a difference, only with `is_never_difference`.
    """
    if not 0 < len(text) <= MAX_NUMBER_CHARS or not set(text) <= _NUMBER_CHARACTERS:
        return None
    text = _SHORT.sub(r"\\frac{\1}{\2}", text)
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        return (-1 if match[1] == "-" else 1) * (int(match[2]) + Fraction(above, below)) if above < below else None
    if match := _POWER_OF_TEN.fullmatch(text) or (
        _EXPONENT.fullmatch(text) if is_never_difference or not _DIFFERENCE.fullmatch(text) else None
    ):
        exponent = int(next(group for group in match.groups()[1:] if group))
        return Fraction(match[1] or 1) * Fraction(10) ** exponent if abs(exponent) <= 1000 else None
    match = _SIMPLE.fullmatch(text)
    if match is None:
        return None
    value, divisor = Fraction(match[2] or match[4]), Fraction(match[3] or match[5] or 1)
    return (-1 if match[1] == "-" else 1) * value / divisor if divisor else None


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of `text` if it is a single number, or None.

    In addition to the forms of `number`, accepts grouping (`1,234`, `1 234`, `1\,234`), currency before the number, `%` and a
    unit of up to four words after it, a trailing period, and `$…$`, `\(…\)`, `\boxed{…}`, `\text{…}` and `**…**` around it.
    `12%` is 12: units are not converted. Returns None for equations, ranges, lists, alternatives (`7 or 8`), number words and
    texts of more than `MAX_NUMBER_CHARS` characters.

    >>> parse_number("$1,234.50"), parse_number("72.00 apples."), parse_number("8=7"), parse_number("1e999999999")
    (Fraction(2469, 2), Fraction(72, 1), None, None)
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    return number(text if _SIMPLE.fullmatch(text) else _plain_and_unit(text)[0].removesuffix("%").strip())


def is_bare_number(text: str) -> bool:
    """Whether `text` is a number without a unit word; an answer may then add a unit.

    >>> is_bare_number("$1,234.50"), is_bare_number("12%"), is_bare_number("4 PM"), is_bare_number("20th Century Fox")
    (True, True, False, False)
    """
    return parse_number(text) is not None and not _plain_and_unit(text)[1]


def parse_reference(reference: object) -> Fraction | None:
    """Return the number in a reference (a number, a string, or a solution that ends in `#### 72`), or None."""
    if isinstance(reference, bool) or reference is None:
        return None
    return parse_number(str(reference).rpartition("####")[2].strip())


def same_number(expected: str, answer: str) -> bool | None:
    r"""Whether two plain numbers are equal; to six places and four digits if one is a decimal. None for other texts.

    >>> same_number("0.2", "2e-1"), same_number(r"\frac13", "0.333333"), same_number("1/3", "0.33"), same_number("4", "2+2")
    (True, True, False, None)
    """
    reference = number(expected)
    value = None if reference is None else number(answer, is_never_difference=True)
    if reference is None or value is None:
        return None
    return reference == value or (
        ("." in expected or "." in answer)
        and (abs(reference - value) <= min(_ABSOLUTE, _RELATIVE * max(abs(reference), abs(value))))
    )


def numeral(text: str) -> tuple[str, str] | None:
    r"""Return digits (in lower case) and base of `1011_2`, `(70)_{8}` or `2A_{16}`; None for anything else."""
    match = _NUMERAL.fullmatch(text)
    return (match[1].lower(), match[2]) if match else None


def decimals(text: str) -> int | None:
    """Return the number of digits after the decimal point of a plain decimal; None for anything else."""
    match = _POINT.fullmatch(text)
    return len(match[1] or "") if match and any(c.isdigit() for c in text) else None


TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|sf|tt)|mbox|hbox|operatorname|rm)\s?\{([^{}]*)\}"
"""Pattern of a LaTeX command for text, with the text as its group."""
_TEXT = re.compile(TEXT)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’.-][^\W\d_]+)*\.?")
_SHORT_WORDS = frozenset(
    {"yes", "no", "odd", "even", "dne", "both", "none", "true", "false", "all", "one", "two", "six"}
)
_NO_LETTERS = re.compile(
    rf"{TEXT}|\\[A-Za-z]+|[_^]\s?(?:\{{[^{{}}]{{0,40}}\}}|.)"
    r"|(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm|sqrt|mod|pi)(?![A-Za-z])"
)
_RUN = re.compile(r"[A-Za-z](?: ?[A-Za-z])+")
_LETTERS = re.compile(r"[A-Za-z ]+")


def words(text: str) -> str | None:
    """Return the answer in lower case if it is text (`\\text{Monday}`, `no solution`), None if it may be mathematics.

    One to three letters without `\\text` may be variables, apart from `yes`, `no` and a few other words.
    """
    inner = _TEXT.fullmatch(text)
    bare = (inner[1] if inner else text).strip().strip("()").strip()
    if not _WORDS.fullmatch(bare):
        return None
    lowered = " ".join(bare.removesuffix(".").casefold().split())
    return lowered if inner or len(bare) > 3 or lowered in _SHORT_WORDS else None


def same_text(expected: str, answer: str) -> bool | None:
    """Whether two answers are the same text; None if both may be mathematics.

    If one is in `\\text`, both are compared as text, even single letters. Otherwise `ABCD` is not `abcd`.
    """
    inner = [_TEXT.sub(r"\1", text).strip("() .") for text in (expected, answer)]
    if _TEXT.fullmatch(expected) or _TEXT.fullmatch(answer):
        first, second = (words(f"\\text{{{text}}}") for text in inner)
        return None if first is None else first == second and (len(first) > 1 or inner[0] == inner[1])
    first = words(expected)
    if first is None:
        return None
    return first == words(answer) and (
        first in _SHORT_WORDS or len(first) > 5 or expected.isupper() == answer.isupper()
    )


def same_order(expected: str, answer: str) -> bool | None:
    """Whether runs of letters, which a product would reorder, have the same order; None if order does not decide."""
    if _LETTERS.fullmatch(expected) and _LETTERS.fullmatch(answer):
        letters = expected.replace(" ", ""), answer.replace(" ", "")
        is_product = len(letters[0]) <= 2 and letters[0].islower() and letters[1].islower()
        return None if is_product else letters[0] == letters[1]
    left, right = (
        {run.replace(" ", "") for run in _RUN.findall(_NO_LETTERS.sub("\n", text)) if not run.islower()}
        for text in (expected, answer)
    )
    same_letters = set(map("".join, map(sorted, left - right))) & set(map("".join, map(sorted, right - left)))
    return False if same_letters else None


_CHARACTERS = str.maketrans(
    {c: "-" for c in "−﹣\uff0d–\u2011\u2010"}
    | {c: " " for c in "\u00a0\u2009\u202f\t\n\r"}
    | {c: "" for c in "\x00\x1e\u200b\u200c\u200d\u2060\ufeff"}
    | {"×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "⋅": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le "}
    | {"≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "±": "\\pm "}
    | {"…": "\\ldots ", "⋯": "\\ldots ", "ℝ": "\\mathbb{R}", "∠": "\\angle ", "△": "\\triangle ", "′": "'", "’": "'"}
    | {"°": "^\\circ", "²": "^2", "³": "^3", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "≈": "\\approx "}
)  # fmt: skip
_ROOT = re.compile(r"√\s?(\d+|[A-Za-z])")
_ROW = "\x1e"  # replaces the row separator of matrices, a double backslash, while patterns match commands
_ESCAPED_TWICE = re.compile(rf"{_ROW}(?=[A-Za-z{{}}$%(\[)\]])")  # a command whose backslash is escaped
# These match answers of at most MAX_MATH_CHARS characters. Each is a fixed text or a run of one class of characters.
_WRAPPER = re.compile(r"(?:\\(?:boxed|fbox|mathbf|boldsymbol|bm|mathit|underline)\s?)?(?=\{)")
_WRAPPING = re.compile(r"^(?:\s|\*\*|`|\\[(\[])+|(?:\s|\*\*|`|\\[)\]]|(?<!\.)\.)+$")
_DIGIT_TEXT = re.compile(TEXT.replace("([^{}]*)", r"([^{}]*\d[^{}]*)"))
_GROUP = re.compile(r"(?<=\d)(?:,?\\!\s?|\\[,;: ]|\{,\}|~)(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots[bcmio]?)(?![A-Za-z])|\.\.\.+")
_DROPPED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])|\\!|\\\$|\$")
_SPACED = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;: ]|~")
_SPACE_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_AND = re.compile(
    rf",? {{0,9}}(?:{TEXT.replace('([^{}]*)', ' {0,9}(?:and|or) {0,9}')}"
    r"|(?<![A-Za-z\\])(?:and|or)(?= {0,9}(?:[^A-Za-z\s]|[A-Za-z](?:_\w|\([a-z]\))?\s?=)))\s*"
)
_VECTOR = re.compile(r"\\langle(?![A-Za-z])((?:[^<>|\\]|\\(?!langle|rangle))*+)\\rangle(?![A-Za-z])")
_DEGREES = re.compile(r"\^\{?\\circ\}?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_IN_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s?\^\{?\\circ\}?")
_NAME_IN = re.compile(r"^[A-Za-z]\s*\\in(?![a-z])\s*")
_SET_BUILDER = re.compile(
    r"\\\{\s?([A-Za-z])\s?(?:\\in\s?\\mathbb\s?\{R\}\s?)?(?:\||:|\\mid(?![A-Za-z]))([^|:,{}]*)\\\}"
)
_REALS = re.compile(r"\\mathbb\s?\{?R\}?|(?:\\text\{)?\s?[Aa]ll real(?:s| numbers)\s?\}?")
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s|\s(?![0-9A-Za-z])")
_NUMBER = re.compile(r"(?:[\d\s.,+\-*/^(){}\[\]%;]|\\(?:frac|sqrt|pi|times|cdot|div|pm|%)(?![A-Za-z]))*")
_MATRIX = re.compile(
    r"[(\[]?\s?\\begin\s?\{((?:small)?[pbB]?matrix\}|array\}\s?\{[clr\s]{1,40}\})([^\0]*)\\end\s?\{[a-zB]{5,11}\}\s?[)\]]?"
)


def plain(text: str, join_groups: bool = True, letters: bool = False) -> str:
    """Return `text` in ASCII LaTeX, without wrappers, currency, spacing commands, units and digit grouping.

    Repeating decimals become fractions. `join_groups` reads `1,234` as one number, unless it is in brackets.
    `letters` treats a letter after a number as its unit (`5m`). Set it if the reference `is_number`.
    """
    return _plain_and_unit(text, join_groups, letters)[0]


def _plain_and_unit(text: str, join_groups: bool = True, letters: bool = True) -> tuple[str, str]:
    """Return the plain answer and the words of the unit after it."""
    text = _AND.sub(",", _laid_out(_unwrapped(_ascii(text))))
    text = _VECTOR.sub(lambda vector: f"({vector[1]})" if "," in vector[1] else vector[0], text)
    text = _SPACE_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)
    if join_groups and not text.startswith(("(", "[", "\\{")):
        text = _COMMA_GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    if _TRIGONOMETRY.search(text):
        text = _IN_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _NAME_IN.sub("", _DEGREES.sub("", text).strip(" €£")).removeprefix("=").strip()
    text, unit = _without_unit(_REPEATING.sub(_as_fraction, text), letters)
    if (match := _SET_BUILDER.fullmatch(text)) and any(sign in match[2] for sign in ("<", ">", "\\le", "\\ge")):
        letter, condition = match.groups()
        if letter in condition:  # the set is compared as its inequality
            text = re.sub(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", "x", condition.strip())
    if _REALS.fullmatch(text):
        text = "(-\\infty,\\infty)"
    return "\\emptyset" if bare(text) in ("\\{\\}", "\\varnothing") else text.replace(_ROW, "\\\\"), unit


def without_layout(text: str) -> str:
    """Return `text` of any length in ASCII LaTeX, without `$`, spacing commands, bracket sizes and digit grouping."""
    return _laid_out(_ascii(text)).replace(_ROW, "\\\\")


def _ascii(text: str) -> str:
    """Return ASCII LaTeX with `_ROW` instead of each row separator; the twice escaped `\\\\frac` becomes the command."""
    text = text.translate(_CHARACTERS)
    if "\\\\begin" in text:
        text = text.replace("\\\\", "\\")
    text = text.replace("\\\\", _ROW)
    return _ROOT.sub(r"\\sqrt{\1}", text if "\\begin" in text else _ESCAPED_TWICE.sub(r"\\", text))


def _unwrapped(text: str) -> str:
    for _ in range(4):
        previous, text = text, _WRAPPING.sub("", text)
        if match := _DIGIT_TEXT.fullmatch(text):
            text = match[1].strip()
        for sign in ("$$", "$"):
            if text.startswith(sign) and text.endswith(sign) and sign not in text[len(sign) : -len(sign)]:
                text = text[len(sign) : -len(sign)]
        if (match := _WRAPPER.match(text)) and text.endswith("}") and _closes_at_end(text[match.end() :]):
            text = text[match.end() + 1 : -1]
        if text == previous:
            break
    return text


def _laid_out(text: str) -> str:
    text = _DOTS.sub(r"\\ldots ", _GROUP.sub("", _FRACTION.sub(r"\\frac", text)))
    text = _SPACED.sub(" ", _DROPPED.sub("", text).replace("{,}", ","))
    return text.replace("\\%", "%").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")


def _as_fraction(match: re.Match[str]) -> str:
    integer, fixed, period = match[1], match[2], match[3] or match[4]
    without_period, with_period = int(f"{integer}{fixed}" or "0"), int(f"{integer}{fixed}{period}")
    value = Fraction(with_period - without_period, 10 ** len(fixed) * (10 ** len(period) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def is_number(text: str) -> bool:
    """Whether a plain answer contains only numbers, such as `5`, `2\\sqrt3` or `(1, 2)`."""
    return _NUMBER.fullmatch(text) is not None


def bare(text: str) -> str:
    """Return the text without spaces, except between letters or digits: `7 2` is not 72."""
    return _SPACE.sub("", text)


# Units of measure by name, with the first name of each line as key: answers in different units differ.
_MEASURES = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "inch in inche",
        "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce", "ml milliliter",
        "l liter litre", "sec s second", "min minute", "h hr hour", "day", "week", "month", "year", "dollar", "cent ¢",
        "degree deg", "radian rad",
    )
    for name in names.split()
}  # fmt: skip
# Words after a number that change its value, or mean that the text is not a single number.
_NOT_UNITS = frozenset(re.findall(r"\S+", """
    or and to not if but vs versus either maybe perhaps possibly probably nor wrong between plus minus times over by
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million
    millions billion billions trillion dozen dozens half third quarter score mod squared cubed factorial
    k b bn x y z n i e pi π
    halves thirds quarters fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths lakh lakhs crore
    crores mil doubled tripled quadrupled halved negative below no none incorrect unknown
    am pm bc bce ad ce january february march april may june july august september october november december jan
    feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday sunday
    north south east west left right up down upward downward upwards downwards above below ahead behind before after
    increase decrease more less profit loss gain inside outside odd even
    noon midnight ago hence later earlier
"""))  # fmt: skip
_MAX_UNIT_WORDS = 4
_LETTER_UNITS = "mgshlLNJWVAKCF"  # any other letter after a number is a variable
_POWER = r"(?:\^\{?-?[1-4]\}?)?"
_SYMBOL = (
    rf"(?:(?:[cdkmn]m|[km]g|m[ls]|ft|in|yd|mi|lbs?|oz|mph|kph|hrs?|min|sec|deg|pct|Hz|Pa|kW)(?:/(?:hr?|s|min|m))?"
    rf"|(?:m|km|mi|ft|cm)/(?:s|h|hr|min)){_POWER}"
)
_LETTER_SYMBOL = rf"{_SYMBOL}|[{_LETTER_UNITS}](?:/(?:h|s))?{_POWER}"  # for numeric references
_UNIT_TEXTS = re.compile(rf" ?{TEXT}{_POWER}(?: ?(?:/|\\cdot|\\times) ?{TEXT}{_POWER}){{0,3}}$")
_UNIT_SYMBOLS = {False: re.compile(_SYMBOL), True: re.compile(_LETTER_SYMBOL)}
_UNIT_WORDS = {False: re.compile(rf"[A-Za-z]{{4,}}[A-Za-z/.]*|{_SYMBOL}"),
               True: re.compile(rf"[A-Za-z]{{3,}}[A-Za-z/.]*|{_LETTER_SYMBOL}")}  # fmt: skip


def _without_unit(text: str, letters: bool) -> tuple[str, str]:
    """Split `text` into the answer and the unit after it, which is empty if the words (`or`, `million`) are no unit.

    A unit outside `\\text` is recognized after a number only: `2x+3m` has no unit.
    """
    match = _UNIT_TEXTS.search(text)
    if match and match.start() and _is_unit(unit := _TEXT.sub(r" \1 ", match[0]).strip()):
        return text[: match.start()].rstrip(), unit
    head = _NUMBER.match(text)[0]  # type: ignore[index]  # always matches
    unit = text[len(head) :].strip("() ")
    is_separated = text[len(head) - 1 : len(head)] in (" ", "(") and bool(unit)
    is_word = is_separated and all(_UNIT_WORDS[letters].fullmatch(word) for word in unit.split())
    if not any(map(str.isdigit, head)) or not (is_word or _UNIT_SYMBOLS[letters].fullmatch(unit)) or not _is_unit(unit):
        return text, ""
    return head.rstrip(" (") + ("%" if unit in ("percent", "percentage", "pct") else ""), unit


def _is_unit(unit: str) -> bool:
    """Whether the words after a number are empty or a unit."""
    parts = re.split(r"[\s/.()·-]+", re.sub(r"\^\{?-?\d\}?|[%°€$]|\\cdot|\\times", " ", unit))
    names = [part for part in parts if part]
    if len(unit.split()) > _MAX_UNIT_WORDS or not all(
        name.isalpha() and name.lower() not in _NOT_UNITS for name in names
    ):
        return False
    return not names or len(names[0]) > 1 or names[0] in _LETTER_UNITS + "c" or (names[0] == "a" and len(names) > 1)


def units_differ(expected: str, answer: str) -> bool:
    """Whether both answers have units of measure, and different ones: `3 hours` is not `3 minutes`.

    Powers of units are ignored: square metres count as metres.
    """
    units = _measure(expected), _measure(answer)
    return None not in units and units[0] != units[1]


def _measure(text: str) -> str | None:
    """Return the number's unit of measure as a value of `_MEASURES`, or None."""
    text = text.strip(" .")
    if "\\$" in text or text.count("$") % 2:  # an odd `$` is a dollar sign, not a delimiter
        return "dollar"
    if text.strip("$").endswith(("°", "^\\circ", "^{\\circ}")):
        return "degree"
    name = re.sub(_POWER + "$", "", _plain_and_unit(text)[1]).strip(" .")
    name = name if len(name) == 1 else name.lower()
    return _MEASURES.get(name) or _MEASURES.get(name.removesuffix("s"))


class Pieces(NamedTuple):
    """The outermost structure of an answer: `kind` is one of scalar, tuple, interval, set, list, union, matrix.

    `brackets` holds the two characters around the parts. The parts of a matrix are its cells by rows, and `brackets` is its
    size, such as `2x3`.
    """

    kind: str
    parts: tuple[str, ...]
    brackets: str = ""


def split(text: str) -> Pieces:
    """Split a plain answer at its outermost structure."""
    for _ in range(_MAX_LAYERS):
        if text.startswith("((") and text.endswith("))") and _closes_at_end(text) and _closes_at_end(text[1:-1]):
            text = text[1:-1]
    union = _top_level(text, ("\\cup",))
    if len(union) > 1:
        return Pieces("union", tuple(union))
    if (matrix := _MATRIX.fullmatch(text)) and text.count("\\begin") == 1:
        rows = [row.split("&") if "&" in row else _top_level(row, (",",)) for row in matrix[2].split("\\\\")]
        rows = rows if len(rows) < 2 or "".join(rows[-1]).strip() else rows[:-1]  # a separator may follow the last row
        if len({len(row) for row in rows}) == 1:
            return Pieces("matrix", tuple(cell.strip() for row in rows for cell in row), f"{len(rows)}x{len(rows[0])}")
    if text.startswith("\\{") and text.endswith("\\}") and _closes_at_end(text):
        inner = text[2:-2].strip()
        if "|" in inner or ":" in inner or "\\mid" in inner:
            return Pieces("scalar", (text,))
        return Pieces("set", tuple(_top_level(inner, (",", ";"))) if inner else ())
    brackets = text[:1] + text[-1:]
    if brackets in ("()", "[]", "(]", "[)") and _closes_at_end(text):
        parts = tuple(_top_level(text[1:-1].strip(), (",", ";")))
        if len(parts) > 1:
            return Pieces("interval" if len(parts) == 2 and brackets != "()" else "tuple", parts, brackets)
        if brackets == "()" and not parts[0].startswith("-"):
            return split(parts[0])
    parts = tuple(_top_level(text, (",", ";")))
    if len(parts) == 1 and text.count("\\pm") == 1 and "\\begin" not in text:
        left, _, right = text.partition("\\pm")
        parts = (f"{left}+{right}".replace("=+", "=").removeprefix("+").strip(), f"{left}-{right}".strip())
    return Pieces("list" if len(parts) > 1 else "scalar", parts)


def match_form(text: str, letters: bool = False) -> str:
    """Return one spelling for similar answers: `plain` and `bare`, without `\\text` and `x =`, with uniform fractions."""
    text = re.sub(
        r"(?<=\d) (?=[A-Za-z])", "", bare(_TEXT.sub(r"\1", plain(text, letters=letters)).removesuffix("%").strip())
    )
    text = re.sub(r"^[A-Za-z]=(?!.*=)", "", text)
    text = re.sub(r"\\frac\{?(\d+)\}?\{(\d+)\}|\\frac\{?(\d)\}?(\d)", lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)
    return re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", re.sub(r"(?<!\d)\.(?=\d)", "0.", text))


def reference_text(reference: object) -> str | None:
    """Return the reference (a string, a number, or a list with one of them) as text, or None if it has no text.

    Of a worked solution, returns the final answer: the content of its box, or the text after `####`.
    """
    from rewards.extract import boxed_answer, has_text

    if isinstance(reference, list | tuple) and len(reference) == 1:
        reference = reference[0]
    if isinstance(reference, bool) or not isinstance(reference, str | int | float | Fraction):
        return None
    if isinstance(reference, float) and not math.isfinite(reference):
        return None
    try:
        text = reference if isinstance(reference, str) else str(reference)
    except ValueError:  # the integer has more digits than Python converts
        return None
    if "\\boxed{" in text or "\\fbox{" in text:
        text = boxed_answer(text).value or ""
    text = text.rpartition("####")[2].strip()
    return text if has_text(text) and len(text) <= MAX_MATH_CHARS else None


def _closes_at_end(text: str) -> bool:
    """Whether the last character of `text` closes its first bracket; kinds of brackets are not distinguished."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return position == len(text) - 1
    return False


def _top_level(text: str, marks: tuple[str, ...]) -> list[str]:
    """Split `text` at the `marks` outside all brackets, and strip the parts; a text with an environment is not split."""
    if not any(mark in text for mark in marks) or "\\begin" in text:
        return [text]
    parts, depth, begin, position = [], 0, 0, 0
    while position < len(text):
        mark = next((m for m in marks if depth == 0 and text.startswith(m, position)), None)
        if mark:
            parts.append(text[begin:position].strip())
            begin = position = position + len(mark)
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [part for part in [*parts, text[begin:].strip()] if part] or [text]
