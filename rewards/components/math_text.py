r"""Short mathematical answers as text, before anything is computed: one spelling for what means the same, numbers, and letters.

>>> plain("$12$ cm"), plain(r"1\,234"), plain("−½")
('12', '1234', '-\\frac{1}{2}')
>>> split(plain(r"[0, \infty)"))
Pieces(kind='interval', parts=('0', '\\infty'), brackets='[)')
>>> written_out(r"0.1\overline{6}"), number("1.5e3"), number("3 1/2"), numeral("1011_2")
('\\frac{1}{6}', Fraction(1500, 1), Fraction(7, 2), ('1011', '2'))

A computer algebra system multiplies letters, so that `cat` is `act`. Here text (`\text{Yes}`, `no solution`) is compared as
text, upper and lower case alike. An answer of nothing but letters, three or more or with one in upper case, has to have the
reference's order; so have runs of letters with one in upper case within an expression. `xy` and `yx` are a product.

>>> same_order("cat", "act"), same_order("xy", "yx"), same_order("nRT", "TRn"), same_order("2abc", "2cab")
(False, None, False, None)
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

MAX_NUMBER_CHARS = 200
_RELATIVE, _ABSOLUTE = Fraction(1, 10_000), Fraction(5, 10_000_000)  # between a decimal and what it rounds
_NUMBER_CHARACTERS = frozenset("0123456789+-./\\frac{} eE^times*do")
# Runs are bounded, and each begins where no digit stands before: linear in the length of the text.
_BAR = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s?(?:\{(\d{1,20})\}|(\d))(?!\s?[\d.])")
_PARENTHESES = re.compile(r"(?<![\d.A-Za-z)}])(\d{1,20})\.()\((\d{1,20})\)(?!\s?[\d.(^])")
_SHORT = re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)")
_POSITIVE = r"(?:\d{1,200}\.?\d{0,200}|\.\d{1,200})"
_SIMPLE = re.compile(
    rf"([+-]?)\s?(?:({_POSITIVE})(?:/({_POSITIVE}))?|\\frac\{{([+-]?{_POSITIVE})\}}\{{([+-]?{_POSITIVE})\}})", re.ASCII
)
_MIXED = re.compile(r"([+-]?)(\d{1,30})(?:\s?\\frac\{(\d{1,30})\}\{(\d{1,30})\}|\s(\d{1,30})/(\d{1,30}))")
_POWER_OF_TEN = re.compile(
    r"(?:([+-]?(?:\d{1,60}\.?\d{0,60}|\.\d{1,60}))\s?(?:\\times|\\cdot|\*)\s?)?10\s?\^\s?(?:\{([+-]?\d{1,4})\}|(\d))"
)
_EXPONENT = re.compile(r"([+-]?(?:\d{1,60}\.?\d{0,60}|\.\d{1,60}))[eE]([+-]?\d{1,4})")
_DIFFERENCE = re.compile(r"[+-]?\d+e[+-]\d")  # 2e-1 may be twice Euler's number less one
_NUMERAL = re.compile(
    r"\(?(-?\d[0-9A-Fa-f]{0,99}(?:\.[0-9A-Fa-f]{1,99})?)\)?\s?_\s?(?:\{\s?(?:\\text\{)?([0-9a-z]{1,9})\}?\s?\}|(\d{1,2}))"
)
_NO_WORD = re.compile(r"\\(?:[dt]?frac|text|mathrm|boxed)|US(?=\$)|USD|EUR|GBP|(?<=\d)[eE](?=[+-]?\d)")
_DECIMAL = re.compile(r"-?\d{0,60}(?:\.(\d{0,60}))?")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip


def written_out(text: str) -> str:
    r"""`text` with each repeating decimal (`0.\overline{3}`, `\bar`, `0.(3)`) as the fraction that it is."""
    if "." not in text:
        return text
    for pattern in (_BAR, _PARENTHESES):
        text = pattern.sub(_as_fraction, text)
    return text


def _as_fraction(match: re.Match[str]) -> str:
    integer, before, *rest = match.groups()
    period = "".join(part for part in rest if part)
    first, both = int(f"{integer}{before}" or "0"), int(f"{integer}{before}{period}")
    value = Fraction(both - first, 10 ** len(before) * (10 ** len(period) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def number(text: str, is_never_difference: bool = False) -> Fraction | None:
    """The exact rational that `text` writes out, without units, percent or currency.

    Decimals, fractions, mixed numbers (`3 1/2`, `3\\frac12`), and powers of ten from -1000 to 1000 (`1.5e3`,
    `1.5\\times 10^3`); `2e-1`, which may be a difference, only with `is_never_difference`.
    """
    if (
        len(text) > MAX_NUMBER_CHARS
        or not text
        or not set(text) <= _NUMBER_CHARACTERS
        or text.count("{") != text.count("}")
    ):
        return None
    text = _SHORT.sub(r"\\frac{\1}{\2}", text)
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        if above >= below:
            return None
        return (-1 if match[1] == "-" else 1) * (int(match[2]) + Fraction(above, below))
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
    r"""The one number that `text` consists of, exactly, or None.

    Understood beside what `number` does: grouping (`1,234`, `1 234`, `1\,234`), currency in front, `%` and up to four words
    of unit behind, a trailing period, `$…$`, `\(…\)`, `\boxed{…}`, `\text{…}` and `**…**` around. `12%` is 12: units are not
    converted. Refused: equations, ranges, lists, hedges (`7 or 8`), number words, anything over `MAX_NUMBER_CHARS` characters.

    >>> parse_number("$1,234.50"), parse_number("72.00 apples."), parse_number("8=7"), parse_number("1e999999999")
    (Fraction(2469, 2), Fraction(72, 1), None, None)
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _SIMPLE.fullmatch(text):
        return number(text)
    return number(plain(text, letters=True).removesuffix("%").strip())


def is_bare_number(text: str) -> bool:
    """Whether `text` is a number and says nothing else: no unit word, so that one in an answer is the answer's own.

    >>> is_bare_number("$1,234.50"), is_bare_number("12%"), is_bare_number("4 PM"), is_bare_number("20th Century Fox")
    (True, True, False, False)
    """
    return parse_number(text) is not None and not any(map(str.isalpha, _NO_WORD.sub("", text)))


def parse_reference(reference: object) -> Fraction | None:
    """The number in a reference: a number, a string with one, or a worked solution that ends in `#### 72`."""
    if isinstance(reference, bool) or reference is None:
        return None
    return parse_number(str(reference).rpartition("####")[2].strip())


def same_number(expected: str, answer: str) -> bool | None:
    r"""Whether two plain numbers are equal, to six places and four digits where one is a decimal; None for anything else.

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
    r"""Digits and base of `1011_2`, `(70)_{8}` or `2A_{\text{sixteen}}`; the digits in lower case."""
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    base = match[2] or match[3]
    return match[1].lower(), _BASES.get(base, base)


def decimals(text: str) -> int | None:
    """Number of digits behind the point of a plain decimal; None for anything else."""
    match = _DECIMAL.fullmatch(text)
    return len(match[1] or "") if match and any(c.isdigit() for c in text) else None


TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|sf|tt)|mbox|hbox|operatorname|rm)\s?\{([^{}]*)\}"
"""A command that sets text, and its content."""
_TEXT_COMMAND = re.compile(TEXT)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’.-][^\W\d_]+)*\.?")
_SHORT_WORDS = frozenset(
    {"yes", "no", "odd", "even", "dne", "both", "none", "true", "false", "all", "one", "two", "six"}
)
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+|[_^]\s?(?:\{[^{}]{0,40}\}|.)")
_FUNCTION_NAMES = re.compile(
    r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm|sqrt|mod|pi)(?![A-Za-z])"
)
_RUN = re.compile(r"[A-Za-z](?: ?[A-Za-z])+")
_LETTERS = re.compile(r"[A-Za-z ]+")


def words(text: str) -> str | None:
    """The answer in lower case when it is text (`\\text{Monday}`, `no solution`), None when it may be mathematics.

    One bare letter and two or three of them without `\\text` may be variables, `yes`, `no` and a few others aside.
    """
    inner = _TEXT_COMMAND.fullmatch(text)
    bare = (inner[1] if inner else text).strip().strip("()").strip()
    if not _WORDS.fullmatch(bare):
        return None
    lowered = " ".join(bare.removesuffix(".").casefold().split())
    return lowered if inner or len(bare) > 3 or lowered in _SHORT_WORDS else None


def same_text(expected: str, answer: str) -> bool | None:
    """Whether two words are the same; None where both may be mathematics.

    Where one stands in `\\text`, so may the other, even of one letter. Without, `ABCD` is not `abcd`.
    """
    wrapped = _TEXT_COMMAND.fullmatch(expected), _TEXT_COMMAND.fullmatch(answer)
    if any(wrapped):
        expected_words, answer_words = (
            words(f"\\text{{{match[1] if match else text}}}")
            for match, text in zip(wrapped, (expected, answer), strict=True)
        )
        return (
            None
            if expected_words is None
            else expected_words == answer_words and (len(expected_words) > 1 or _letter(expected) == _letter(answer))
        )
    text = words(expected)
    if text is None:
        return None
    return text == words(answer) and (text in _SHORT_WORDS or len(text) > 5 or expected.isupper() == answer.isupper())


def _letter(text: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", text).strip("() .")


def same_order(expected: str, answer: str) -> bool | None:
    """Whether runs of letters that a product would mix up have one order: True or False where that settles it."""
    if _LETTERS.fullmatch(expected) and _LETTERS.fullmatch(answer):
        expected_letters, answer_letters = expected.replace(" ", ""), answer.replace(" ", "")
        return (
            expected_letters == answer_letters
            if len(expected_letters) > 2 or not expected_letters.islower() or not answer_letters.islower()
            else None
        )
    left, right = _runs(expected), _runs(answer)
    extra = {"".join(sorted(run)) for run in left - right} & {"".join(sorted(run)) for run in right - left}
    return False if extra else None


def _runs(text: str) -> set[str]:
    """Runs of two letters and more, one of them in upper case, spaces left out."""
    text = _FUNCTION_NAMES.sub("\n", _LATEX_COMMAND.sub("\n", _TEXT_COMMAND.sub(r"\n\1\n", text)))
    runs = {run.replace(" ", "") for run in _RUN.findall(text)}
    return {run for run in runs if not run.islower()}


MAX_MATH_CHARS = 2_000

_CHARACTERS = str.maketrans(
    {c: "-" for c in "−﹣\uff0d–\u2011\u2010"}
    | {c: " " for c in "\u00a0\u2009\u202f\t\n\r"}
    | {c: "" for c in "\x00\x1e\u200b\u200c\u200d\u2060\ufeff"}
    | {"×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "⋅": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le "}
    | {"≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "±": "\\pm "}
    | {"…": "\\ldots ", "⋯": "\\ldots ", "ℝ": "\\mathbb{R}", "∠": "\\angle ", "△": "\\triangle ", "′": "'", "’": "'"}
    | {"°": "^\\circ", "²": "^2", "³": "^3", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "≈": "\\approx "}
)  # fmt: skip
_WRAPPERS = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ("\\boxed{", "}"), ("\\fbox{", "}"),
    ("\\underline{", "}"), ("\\mathbf{", "}"), ("\\boldsymbol{", "}"), ("\\bm{", "}"), ("\\mathit{", "}"), ("{", "}"),
)  # fmt: skip
_COLOR = re.compile(
    r"\\(?:textcolor|colorbox)\s?\{[A-Za-z]{1,20}\}(?=\s?\{)|\\color\s?\{[A-Za-z]{1,20}\}|\\bf(?:series)?(?![A-Za-z])"
)
_DOTS = re.compile(r"\\(?:ldots|cdots|dots[bcmio]?)(?![A-Za-z])|\.\.\.+")
_PRIME = re.compile(r"\^\s?(?:\{\s?((?:\\prime\s?){1,4})\}|(\\prime)(?![A-Za-z]))")
_REALS = re.compile(
    r"\\(?:mathbb|Bbb)\s?(?:\{R\}|R)|\\R|\\text\s?\{\s*[Aa]ll real(?:s| numbers)\s*\}|[Aa]ll real(?:s| numbers)"
)
_DIGIT_TEXT = re.compile(TEXT.replace("([^{}]*)", r"([^{}]*\d[^{}]*)"))
# On answers of at most MAX_MATH_CHARS characters; each is a fixed text or a run of one class of characters.
_DROPPED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])|\\!|\\\$|\$")
_SPACED = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;: ]|~")
_ROW = "\x1e"  # the row separator of matrices, a double backslash, while patterns for commands look at the text
_ROW_SKIP = re.compile(rf"{_ROW}\s?\[\s?-?[\d.]{{1,9}}\s?(?:pt|em|ex|mm|cm|in)\s?\]")
_TWICE = re.compile(rf"{_ROW}(?=[A-Za-z{{}}$%(\[)\]])")  # a command whose backslash was escaped
_GROUP = re.compile(r"(?<=\d)(?:,?\\!\s?|\\[,;: ]|\{,\}|~)(?=\d{3}(?!\d))")
_SPACE_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_AND = re.compile(
    rf",?\s*{TEXT.replace('([^{}]*)', ' {0,9}(?:and|or) {0,9}')}"
    r"|,?(?:(?<![A-Za-z\\])\s+|(?<=[)\]}\d]))(?:and|or)\s*(?=[^A-Za-z\s]|[A-Za-z](?:_\w|\([a-z]\))?\s?=)"
)
_ROOT = re.compile(r"√\s?(\d+|[A-Za-z])")
_TEXT = re.compile(TEXT)
_POWER = r"(?:\^\{?[23]\}?)?"
_UNIT = (
    rf"(?:[cdkmn]m|[km]g|m[ls]|ft|in|yd|mi|lbs?|oz|mph|kph|hrs?|min|sec|deg|pct|Hz|Pa|kW)(?:/(?:hr?|s|min|m))?{_POWER}"
)
_RATE = rf"(?:m|km|mi|ft|cm)/(?:s|h|hr|min){_POWER}"
_LETTER = rf"[mgshlLNJWVAKCF](?:/(?:h|s))?{_POWER}"  # a unit where the reference is a number, else a variable
_UNIT_TEXT = re.compile(rf"\s*{TEXT}{_POWER}$")
_PER_UNIT = re.compile(rf"\s?(?:/|\\cdot|\\times)\s?{TEXT}(?:\^\s?\{{?-?[1-4]\}}?)?$")  # `/ s^2` of `m / s^2`
_UNIT_GLUED = (
    re.compile(rf"(?<=[\d}}]) ?(?:{_UNIT}|{_RATE})$"),
    re.compile(rf"(?<=[\d}}]) ?(?:{_UNIT}|{_RATE}|{_LETTER})$"),
)
_UNIT_WORD = (
    re.compile(rf"[A-Za-z]{{4,}}[A-Za-z/.]*|{_UNIT}"),
    re.compile(rf"[A-Za-z]{{3,}}[A-Za-z/.]*|{_UNIT}|{_LETTER}"),
)
_MATRIX = re.compile(
    r"[(\[]?\s?\\begin\s?\{((?:small)?[pbB]?matrix\}|array\}\s?\{[clr\s]{1,40}\})([^\0]*)\\end\s?\{[a-zB]{5,11}\}\s?[)\]]?"
)
_NUMBER = re.compile(r"(?:[\d\s.,+\-*/^(){}\[\]%;]|\\(?:frac|sqrt|pi|times|cdot|div|pm|%)(?![A-Za-z]))*")
_DEGREES = re.compile(r"\^\{?\\circ\}?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_IN_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s?\^\{?\\circ\}?")
_NAME_IN = re.compile(r"^[A-Za-z]\s*\\in(?![a-z])\s*")
_MULTIPLIED = re.compile(r"(?<=\d) (?=[A-Za-z])")
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s|\s(?![0-9A-Za-z])")
_VECTOR = re.compile(r"\\langle(?![A-Za-z])((?:[^<>|\\]|\\(?!langle|rangle))*+)\\rangle(?![A-Za-z])")
_VECTOR_IN_SIGNS = re.compile(r"<([^<>=]*,[^<>=]*)>")
_NATURAL = re.compile(r"\\log\s?_\s?(?:\{\s?e\s?\}|e)(?![A-Za-z])\s?")
_BUILT = re.compile(
    r"\\\{\s?([A-Za-z])\s?(?:\\in\s?\\mathbb\s?\{R\}\s?)?(?:\||:|\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))([^|:,{}]*)\\\}"
)
_INEQUALITY = re.compile(r"[<>]|\\[lg]e")
# Words behind a number that make it another number, or no single answer at all.
_MEASURE = re.compile(r"(?<![A-Za-z])([A-Za-z]+|¢)\.?(?:\s?\^?\s?\{?[23]\}?)?$")
# Names of units of measure that exclude one another: an answer in another one is another answer.
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
    north south east west left right up down upward downward upwards downwards above below ahead behind before after
    increase decrease more less profit loss gain inside outside odd even
    noon midnight ago hence later earlier
"""))  # fmt: skip
_UNIT_WORDS = 4
_LETTER_UNITS = frozenset("mgshlLNJWVAKCFc")  # any other letter behind a number is a variable


class Pieces(NamedTuple):
    """`kind` is one of scalar, tuple, interval, set, list, union, matrix.

    `brackets` are the two characters around the parts; of a matrix, whose parts are its cells by rows, its size: `2x3`.
    """

    kind: str
    parts: tuple[str, ...]
    brackets: str = ""


def plain(text: str, join_groups: bool = True, letters: bool = False) -> str:
    """`text` without wrappers, currency, spacing commands, units, and digit grouping, in ASCII LaTeX.

    Repeating decimals become fractions. `join_groups` reads `1,234` as one number, unless it stands within brackets.
    `letters` takes a letter behind a number for its unit (`5m`): right for an answer whose reference `is_number`.
    """
    text = _NATURAL.sub(r"\\ln ", _AND.sub(",", _laid_out(_unwrapped(_ascii(text)))))
    text = (
        _VECTOR_IN_SIGNS.sub(r"(\1)", text)
        if _VECTOR_IN_SIGNS.fullmatch(text)
        else _VECTOR.sub(lambda vector: f"({vector[1]})" if "," in vector[1] else vector[0], text)
    )
    text = _SPACE_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)
    if join_groups and not text.startswith(("(", "[", "\\{")):
        text = _COMMA_GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    if _TRIGONOMETRY.search(text):
        text = _IN_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _NAME_IN.sub("", _DEGREES.sub("", text).strip().strip("€£").strip())
    return _whole(_without_unit(written_out(text), letters)).replace(_ROW, "\\\\")


def units_differ(expected: str, answer: str) -> bool:
    """Whether both answers have units of which one excludes the other: `3 hours` is not `3 minutes`.

    Squares and cubes are not told from lengths, and what only one of them says counts for nothing.
    """
    units = _measure(expected), _measure(answer)
    return None not in units and units[0] != units[1]


def _measure(text: str) -> str | None:
    """The unit behind the only number of a text, by its shortest name, or None."""
    # The currency's sign, which `\\$` writes, stays as `$`; the signs around mathematics are taken off.
    text = _ascii(text).replace("\\mathrm", "\\text").replace("\\$", "\0").replace("$", "")
    text = _TEXT.sub(r" \1 ", _laid_out(text).replace("\0", "$")).strip().removesuffix(".").strip()
    if "$" in text or text.endswith(("^\\circ", "^{\\circ}")):
        return "dollar" if "$" in text else "degree"
    match = _MEASURE.search(text)
    amount = text[: match.start()].strip() if match else ""
    if match is None or not is_number(amount) or not any(character.isdigit() for character in amount):
        return None
    name = match[1] if len(match[1]) == 1 else match[1].lower()
    return _MEASURES.get(name) or _MEASURES.get(name.removesuffix("s"))


def without_layout(text: str) -> str:
    """`text` of any length in ASCII LaTeX, without `$`, spacing commands and sizes of brackets, digit groups joined."""
    return _laid_out(_ascii(text)).replace(_ROW, "\\\\")


def _ascii(text: str) -> str:
    return _ROOT.sub(r"\\sqrt{\1}", _rows_marked(text.translate(_CHARACTERS)))


def _laid_out(text: str) -> str:
    text = _GROUP.sub("", _FRACTION.sub(r"\\frac", text))
    text = _SPACED.sub(" ", _DROPPED.sub("", text).replace("{,}", ","))
    return text.replace("\\%", "%").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")


def is_number(text: str) -> bool:
    """Whether a plain answer is made of numbers alone, such as `5`, `2\\sqrt3` or `(1, 2)`."""
    return _NUMBER.fullmatch(text) is not None


def _rows_marked(text: str) -> str:
    """A mark in the place of each row separator; `\\\\frac` as a string within a string writes it is the command."""
    if "\\\\" not in text:
        return text
    if "\\\\begin" in text:
        text = text.replace("\\\\", "\\")
    text = _ROW_SKIP.sub(_ROW, text.replace("\\\\", _ROW))
    return text if "\\begin" in text else _TWICE.sub(r"\\", text)


def bare(text: str) -> str:
    """The text without spaces, those between letters or digits aside: `7 2` is not 72."""
    return _SPACE.sub("", text)


def _whole(text: str) -> str:
    """One spelling for answers that are one symbol or begin with a sign of equality."""
    text = text.removeprefix("=").strip() if text[:2] != "==" else text
    built = _BUILT.fullmatch(text)
    if built and _INEQUALITY.search(built[2]):
        letter = re.compile(rf"(?<![A-Za-z\\]){built[1]}(?![A-Za-z])")
        return letter.sub("x", built[2].strip()) if letter.search(built[2]) else text
    if _REALS.fullmatch(text):
        return "(-\\infty,\\infty)"
    return "\\emptyset" if bare(text) in ("\\{\\}", "\\varnothing") else text


def split(text: str) -> Pieces:
    """The outermost structure of a plain answer."""
    union = _top_level(text, ("\\cup",))
    if len(union) > 1:
        return Pieces("union", tuple(union))
    if (matrix := _MATRIX.fullmatch(text)) and text.count("\\begin") == 1:
        rows = [row.split("&") if "&" in row else _top_level(row, (",",)) for row in matrix[2].split("\\\\")]
        rows = rows if len(rows) < 2 or "".join(rows[-1]).strip() else rows[:-1]  # a separator behind the last row
        if len({len(row) for row in rows}) == 1:
            return Pieces("matrix", tuple(cell.strip() for row in rows for cell in row), f"{len(rows)}x{len(rows[0])}")
    opening, closing = text[:1], text[-1:]
    if text.startswith("\\{") and text.endswith("\\}") and _closes_at_end(text):
        inner = text[2:-2].strip()
        if "|" in inner or ":" in inner or "\\mid" in inner:
            return Pieces("scalar", (text,))
        return Pieces("set", tuple(_top_level(inner, (",", ";"))) if inner else ())
    if (spare := _layers(text) - 1) > 0:  # all but one at once: one by one a thousand take a million steps
        text = text[spare:-spare]
    if opening and opening in "([" and closing and closing in ")]" and _closes_at_end(text):
        parts = tuple(_top_level(text[1:-1].strip(), (",", ";")))
        if len(parts) > 1:
            return Pieces(
                "interval" if len(parts) == 2 and opening + closing != "()" else "tuple", parts, opening + closing
            )
        if opening + closing == "()" and not parts[0].startswith("-"):
            return split(parts[0])
    parts = tuple(_top_level(text, (",", ";")))
    if len(parts) == 1 and text.count("\\pm") == 1 and "\\begin" not in text:
        before, _, after = text.partition("\\pm")
        parts = (f"{before}+{after}".replace("=+", "=").removeprefix("+").strip(), f"{before}-{after}".strip())
    return Pieces("list" if len(parts) > 1 else "scalar", parts)


def match_form(text: str, letters: bool = False) -> str:
    """The spelling by which `math-match` compares: `plain`, `bare`, `\\text` taken off, fractions in one form."""
    text = _MULTIPLIED.sub("", bare(_TEXT.sub(r"\1", plain(text, letters=letters)).removesuffix("%").strip()))
    name, equals, value = text.partition("=")
    if equals and len(name) == 1 and name.isalpha() and "=" not in value:
        text = value
    text = re.sub(r"\\(frac|sqrt)(\d)", r"\\\1{\2}", text)
    text = re.sub(r"\\frac\{(\d)\}(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", r"\1\2/\3", text)
    return re.sub(r"(?<!\d)\.(?=\d)", "0.", text)


def reference_text(reference: object) -> str | None:
    """What a reference says, as text: a string or number, or a list of one; from a worked solution, its final answer.

    A string with a box gives the box, one with `####` what follows it. None when there is nothing to compare with.
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
    except ValueError:  # an integer of more digits than Python writes out
        return None
    if "\\boxed{" in text or "\\fbox{" in text:
        text = boxed_answer(text).value or ""
    text = text.rpartition("####")[2].strip()
    return text if has_text(text) and len(text) <= MAX_MATH_CHARS else None


def _unwrapped(text: str) -> str:
    text = _PRIME.sub(lambda match: "'" * match[0].count("prime"), _DOTS.sub(r"\\ldots ", _COLOR.sub("", text)))
    for _ in range(4):
        before = text
        text = text.strip()
        if match := _DIGIT_TEXT.fullmatch(text):
            text = match[1].strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
                if closing == "}" and not _closes_at_end(text[len(opening) - 1 :]):
                    continue
                text = inner if opening[0] not in inner or closing == "}" else text
        if text == before:
            break
    return text


def _without_unit(text: str, letters: bool) -> str:
    """`text` without one trailing unit; what is no unit (`or`, number words) stays.

    Only a number has a unit that does not stand in `\\text`: `2x+3m` has none.
    """
    original = text
    for _ in range(3):
        if (part := _PER_UNIT.search(text)) and part.start() and _is_unit(part[1]):
            text = text[: part.start()]
    if text != original and not ((match := _UNIT_TEXT.search(text)) and match.start() and _is_unit(match[1])):
        text = original  # `3 / \\text{s}` has no unit in front of the stroke
    match = _UNIT_TEXT.search(text)
    if match and match.start() and _is_unit(match[1]):
        return text[: match.start()].rstrip()
    match = _UNIT_GLUED[letters].search(text)
    if match and is_number(text[: match.start()]):
        return text[: match.start()]
    head, *tail = text.split(" ")
    if not tail or not head or not (head[-1].isdigit() or head[-1] in "})%"):
        return text
    for at in range(len(tail)):
        rest = [word.strip("()") for word in tail[at:]]
        number = " ".join([head, *tail[:at]])
        if rest[0] and all(_UNIT_WORD[letters].fullmatch(word) for word in rest) and _is_unit(" ".join(rest)):
            percent = "%" if rest in (["percent"], ["percentage"], ["pct"]) else ""
            return number + percent if is_number(number) else text
    return text


def _is_unit(text: str) -> bool:
    """Whether what stands behind a number is at most a unit and a period."""
    for wrapper in ("\\text{", "\\mathrm{", "\\textbf{"):
        text = text.replace(wrapper, " ")
    text = text.replace("}", "").strip().removesuffix(".").rstrip()
    text = text.removeprefix("%").removeprefix("°").removesuffix("€").removesuffix("$").strip()
    unit_words = text.split()
    if len(unit_words) > _UNIT_WORDS or not all(_is_unit_word(word) for word in unit_words):
        return False
    first = unit_words[0].strip("()°").rstrip(".^{}²³23") if unit_words else ""
    return len(first) != 1 or first in _LETTER_UNITS or (first == "a" and len(unit_words) > 1)


def _is_unit_word(word: str) -> bool:
    word = word.strip("()°").removesuffix(".")
    for power in ("^2", "^3", "^{2", "^{3", "²", "³"):
        word = word.removesuffix(power) if len(word) > len(power) else word
    parts = word.replace("-", "/").replace("·", "/").split("/")
    return all(part.isalpha() and part.lower() not in _NOT_UNITS for part in parts if part) and any(parts)


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens `text` is closed by its last character; kinds of brackets are not told apart."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return position == len(text) - 1
    return False


def _layers(text: str) -> int:
    """Number of pairs of round brackets around all of `text`: 2 for `((1+2))`, 1 for `((1)+(2))`."""
    opened, closed = len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")"))
    depth = lowest = opened
    for character in text[opened : len(text) - closed]:
        depth += (character in "([{") - (character in ")]}")
        lowest = min(lowest, depth)
    return min(lowest, closed) if depth == closed else 0


def _top_level(text: str, marks: tuple[str, ...]) -> list[str]:
    """`text` cut at `marks` that stand outside all brackets and environments, parts stripped."""
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
