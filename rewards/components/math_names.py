r"""Letters in answers: words, dates and phrases, figures of geometry, and runs of letters whose order counts.

A computer algebra system multiplies letters, so that `cat` is `act`. Here:

- text (`\text{Yes}`, `no solution`, `Team 1`) is compared as text, upper and lower case alike;
- figures as mathematicians name them: `\overline{AB}`, lines and arcs either way round, `\triangle` in any order,
  `\angle ABC` and `\angle CBA`; rays, vectors and other figures in order;
- an answer of nothing but letters, three or more or with one in upper case, has to have the reference's order; so have
  runs of letters with one in upper case within an expression. `xy` and `yx` are a product.

>>> same_order("cat", "act"), same_order("xy", "yx"), same_order("nRT", "TRn"), same_order("2abc", "2cab")
(False, None, False, None)
>>> same_figure(r"\angle ABC", r"\angle CBA"), same_figure(r"\angle ABC", r"\angle ACB")
(True, False)
"""

import re
from typing import NamedTuple

__all__ = ["TEXT", "Figure", "calendar_word", "figure", "phrase", "same_figure", "same_order", "same_text", "words"]

MAX_WORDS = 60
TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|sf|tt)|mbox|hbox|operatorname|rm)\s?\{([^{}]*)\}"
"""A command that sets text, and its content."""
_TEXT = re.compile(TEXT)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’.-][^\W\d_]+)*\.?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.'’:-]*")
_SHORT_WORDS = frozenset(
    {"yes", "no", "odd", "even", "dne", "both", "none", "true", "false", "all", "one", "two", "six"}
)
_CALENDAR = frozenset(re.findall(r"\S+", """
    am pm a.m p.m january february march april may june july august september october november december jan feb mar apr
    jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thurs
    fri sat sun
"""))  # fmt: skip
_FIGURE = re.compile(
    r"(?:\\(angle|measuredangle|triangle|square|odot|parallelogram|Delta)(?![a-z])\s?"
    r"|\\(overline|overleftrightarrow|overrightarrow|vec|widehat|overarc|wideparen)\s?)?"
    r"\{?((?:\s?[A-Z](?:_\{?\d\}?)?'{0,3}){1,12})\}?"
)
_CORNER = re.compile(r"[A-Z](?:_\{?\d\}?)?'{0,3}")
_COMMAND = re.compile(r"\\[A-Za-z]+|[_^]\s?(?:\{[^{}]{0,40}\}|.)")
_NAMES = re.compile(
    r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm|sqrt|mod|pi)(?![A-Za-z])"
)
_RUN = re.compile(r"[A-Za-z](?: ?[A-Za-z])+")
_LETTERS = re.compile(r"[A-Za-z ]+")


class Figure(NamedTuple):
    """`kind` is the command, or nothing for bare letters; `corners` its letters in order, with primes and indices."""

    kind: str
    corners: tuple[str, ...]


def words(text: str) -> str | None:
    """The answer in lower case when it is text (`\\text{Monday}`, `no solution`), None when it may be mathematics.

    One bare letter and two or three of them without `\\text` may be variables, `yes`, `no` and a few others aside.
    """
    inner = _TEXT.fullmatch(text)
    bare = (inner[1] if inner else text).strip().strip("()").strip()
    if not _WORDS.fullmatch(bare):
        return None
    lowered = " ".join(bare.removesuffix(".").casefold().split())
    return lowered if inner or len(bare) > 3 or lowered in _SHORT_WORDS else None


def same_text(expected: str, given: str) -> bool | None:
    """Whether two words are the same; None where both may be mathematics.

    Where one stands in `\\text`, so may the other, even of one letter. Without, `ABCD` is not `abcd`.
    """
    wrapped = _TEXT.fullmatch(expected), _TEXT.fullmatch(given)
    if any(wrapped):
        one, other = (
            words(f"\\text{{{match[1] if match else text}}}")
            for match, text in zip(wrapped, (expected, given), strict=True)
        )
        return None if one is None else one == other and (len(one) > 1 or _letter(expected) == _letter(given))
    text = words(expected)
    if text is None:
        return None
    return text == words(given) and (text in _SHORT_WORDS or len(text) > 5 or expected.isupper() == given.isupper())


def _letter(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip("() .")


def phrase(text: str) -> tuple[str, ...] | None:
    """The words and numbers of `Team 1`, `June 5` or `5 \\text{ June}`, dates in one order; None for anything else."""
    spelled = _TEXT.sub(r" \1 ", text).replace(",", " ").replace("~", " ").split()
    if not 2 <= len(spelled) <= MAX_WORDS or not all(_WORD.fullmatch(word) for word in spelled):
        return None
    if not any(len(word) >= 3 and word.isalpha() and not _NAMES.fullmatch(word) for word in spelled):
        return None
    found = [word.casefold().rstrip(".") for word in spelled]
    return tuple(sorted(found) if len(found) == 2 and any(map(calendar_word, found)) else found)


def calendar_word(word: str) -> bool:
    """Whether `word` is a month, a weekday, am or pm: no unit, a number with it is a date or time."""
    return word.casefold().strip(".,()") in _CALENDAR


def figure(text: str) -> Figure | None:
    """A figure of geometry, or a run of upper-case letters that may be one."""
    match = _FIGURE.fullmatch(text.strip())
    if match is None or text.count("{") != text.count("}"):
        return None
    return Figure(match[1] or match[2] or "", tuple(_CORNER.findall(match[3].replace(" ", ""))))


def same_figure(expected: str, given: str) -> bool | None:
    """Whether two figures are the same one; None unless at least one has its sign and the other its letters."""
    one, other = figure(expected), figure(given)
    if one is None or other is None or not (one.kind or other.kind):
        return None
    if max(len(one.corners), len(other.corners)) < 2 and not (one.kind == other.kind == "angle"):
        return None  # a conjugate, a mean, a vector: not the letter without its sign
    ordered = {"overrightarrow", "vec", "widehat"}
    if one.kind != other.kind and ("" not in (one.kind, other.kind) or {one.kind, other.kind} & ordered):
        return False
    kind = one.kind or other.kind
    if kind in ("triangle", "Delta"):
        return sorted(one.corners) == sorted(other.corners)
    turned = kind in ("angle", "measuredangle") or (len(one.corners) == 2 and kind not in ordered)
    return one.corners == other.corners or (turned and one.corners == other.corners[::-1])


def same_order(expected: str, given: str) -> bool | None:
    """Whether runs of letters that a product would mix up have one order: True or False where that settles it."""
    if _LETTERS.fullmatch(expected) and _LETTERS.fullmatch(given):
        one, other = expected.replace(" ", ""), given.replace(" ", "")
        return one == other if len(one) > 2 or not one.islower() or not other.islower() else None
    left, right = _runs(expected), _runs(given)
    extra = {"".join(sorted(run)) for run in left - right} & {"".join(sorted(run)) for run in right - left}
    return False if extra else None


def _runs(text: str) -> set[str]:
    """Runs of two letters and more, one of them in upper case, spaces left out."""
    text = _NAMES.sub("\n", _COMMAND.sub("\n", _TEXT.sub(r"\n\1\n", text)))
    runs = {run.replace(" ", "") for run in _RUN.findall(text)}
    return {run for run in runs if not run.islower()}
