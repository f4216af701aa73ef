r"""Answers made from a question and its reference: near misses, other spellings, copies and constants.

>>> echoes(r"Compute $2 + 3 = x$ and \(\sqrt{16}\).")
['2 + 3 = x', '2 + 3', '\\sqrt{16}']
>>> near_misses("72")[:3], near_misses("(1, 2)")[:2]
(['73', '-72', '27'], ['(2, 1)', '(2, 2)'])
>>> spellings(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")[1]
'\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}'
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rewards.components.math_text import Pieces, bare, decimals, number, plain, split

MAX_ECHOES = 12
CONSTANTS = (
    "0", "1", "-1", "2", "3", "4", "10", "100", "0.5", "nan", "NaN", "inf", "None", "null", "True", "False", "true", "yes", "no",
    "x", "y", "n", "A", "B", "C", "D", "e", "i", r"\pi", r"\infty", r"-\infty", r"\pm 1", r"\emptyset", r"\{\}", r"\{0\}",
    "()", "[]", "{}", "?", "...", r"\ldots", ",", ".", "-", "=", "0=0", "1=1", "2-2=0", "x=x", "0=1", "x=0", "x=1", "y=x",
    r"\frac{0}{0}", "0/0", "1/0", r"\frac{1}{0}", "0^0", "0 x", "x^2", "x+1", "2x", "(0,0)", "(1,1)", "0,1", "1,2", "[0,1]",
    "(0,1)", r"(-\infty,\infty)", r"\mathbb{R}", "x<x+1", r"x \le x", r"\begin{pmatrix}\end{pmatrix}",
    r"\begin{pmatrix} 0 \\ 0 \end{pmatrix}", r"\text{all}", r"\text{any}", r"\text{none}", r"\text{answer}", "no solution",
    "all real numbers", "1 or 2", "the answer", "correct", "N/A", "nan+nani",
)  # fmt: skip
"""Answers that ask for nothing to be known. Screens say for how many references of others each is right."""

SLOW = (
    "5^{5^{5^{5^{5}}}}", r"\dfrac{5^{5^{5^{5^5}}-4}-5}{16}", "99999999!", "1e999999999", "9" * 1900,
    r"\int_0^1 \sin(x^{x^{x^x}}) \cdot e^{\cos(\tan x)} dx", r"\sum_{k=1}^{10^{12}} \frac{1}{k!}",
    r"\sqrt{" * 300 + "2" + "}" * 300,
    "((((((((((" * 90 + "1" + "))))))))))" * 90, "+".join(f"x_{{{at}}}^{{{at}}}" for at in range(120)), ",".join("1" * 900),
    r"\prod_{k=1}^{9999} (x+k)",
)  # fmt: skip
"""Answers that hang or fill a careless grader."""

_FORMULA = re.compile(
    r"\$\$([^$]{1,600})\$\$|\$([^$]{1,600})\$|\\\[((?:[^\\]|\\(?!\])){1,600})\\\]|\\\(((?:[^\\]|\\(?!\))){1,600})\\\)"
)
_ARITHMETIC = re.compile(r"(?<![\w.$\\])[(-]?\d[\d .,()]{0,60}[+*/^×÷-][\d .,()+*/^×÷-]{0,60}[\d)]")
_NAME_OR_NOTHING = re.compile(r"\s*(?:[A-Za-z]|(\d+)\s*-\s*\1)\s*")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_ROW = "\\\\"
_INTEGER = re.compile(r"(?<![\d.])[1-9]\d{0,8}(?![\d.])")


def echoes(prompt: str) -> list[str]:
    """Return what a prompt holds that may be boxed as it stands: formulas, their sides, and arithmetic in its text."""
    formulas: list[str] = []
    for match in _FORMULA.finditer(prompt):
        formula = next(group for group in match.groups() if group is not None).strip().strip(".,;?").strip()
        sides = formula.split("=")
        formulas += [formula, *(side.strip() for side in sides if len(sides) > 1 and len(side.strip()) > 1)]
    formulas += [match[0].strip(" .,") for match in _ARITHMETIC.finditer(_FORMULA.sub(" ", prompt))]
    return list(dict.fromkeys(text for text in formulas if text))[:MAX_ECHOES]


def same_answer(first: str, second: str) -> bool:
    """Return whether two answers are the same by spelling, as numbers, or as several numbers in any order;
    `x = 1` and `1 = 1` are 1, too."""
    *before, last = first.split("=")
    known = bool(before) and all(_NAME_OR_NOTHING.fullmatch(side) or same_answer(side, last) for side in before)
    if known and same_answer(last, second):
        return True
    left, right = _read(first), _read(second)
    if left.written == right.written:
        return True
    several = {left.kind, right.kind} <= {"list", "set"}
    if None in left.values or not (several or len(left.values) == len(right.values) == 1):
        return False
    return set(left.values) == set(right.values)


class _Read(NamedTuple):
    """Keys to compare answers by: spelling, kind and parts as numbers."""

    written: str
    kind: str
    values: tuple[Fraction | None, ...]


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> _Read:
    """Parse an answer; cached, since an audit compares each reference with a hundred answers."""
    written = plain(text)
    pieces = split(written)
    return _Read(bare(written).casefold(), pieces.kind, tuple(number(bare(part)) for part in pieces.parts))


def near_misses(reference: str) -> list[str]:
    """Return wrong answers that come near: another number, order, sign, entry, bracket. Empty if none is sure to be wrong."""
    text = plain(reference)
    pieces = split(text)
    if pieces.kind in ("matrix", "tuple", "interval", "list", "set"):
        answers = [_joined(text, pieces, parts) for parts in _other_parts(pieces)]
        if pieces.kind == "interval":
            answers.append(text[:-1] + ("]" if text.endswith(")") else ")"))
    elif (value := number(text)) is not None:
        if value.denominator == 1:
            turned = str(abs(value.numerator))[::-1].lstrip("0") or "0"
            answers = [str(value + 1), str(-value), turned, f"{value}0", str(value - 1)]
        else:
            above, below, places = value.numerator, value.denominator, decimals(text)
            answers = [f"{float(value + Fraction(1, 10**places)):.{places}f}"] if places else []
            answers += [f"\\frac{{{a}}}{{{b}}}" for a, b in ((above + below, below), (-above, below), (below, above))]
    elif "\\text" in text or text.isalpha():
        answers = [chr(ord(text) + 1)] if len(text) == 1 and text.isupper() and text != "Z" else [f"not {reference}"]
    else:
        answers = [text[: m.start()] + str(int(m[0]) + 1) + text[m.end() :] for m in list(_INTEGER.finditer(text))[:2]]
        answers += (
            [f"-({text})", f"{text}+1"] if "=" not in text and not set("<>") & set(text) and "\\le" not in text else []
        )
    return list(dict.fromkeys(answer for answer in answers if not same_answer(answer, reference)))


def _other_parts(pieces: Pieces) -> list[Sequence[str]]:
    """Return other entries: two exchanged if the order counts, one more or fewer, one more and one less, signs, one left out;
    and, of columns, all of their sum or product in one entry."""
    parts = list(pieces.parts)
    values = [number(part) for part in parts]
    variants: list[Sequence[str]] = []
    ordered = pieces.kind in ("matrix", "tuple")
    if ordered and len(parts) > 1 and not same_answer(parts[0], parts[1]):
        variants.append([parts[1], parts[0], *parts[2:]])
    numbers = [value for value in values if value is not None]
    if len(numbers) == len(parts) and pieces.kind != "interval":
        variants.append([str(numbers[0] + 1), *parts[1:]])
        if len(parts) > 1:
            variants.append([str(numbers[0] + 1), str(numbers[1] - 1), *parts[2:]])
            variants.append([*parts[:-1], str(-numbers[-1])])
        if pieces.kind == "matrix" and len(parts) > 1:
            product = numbers[0]
            for value in numbers[1:]:
                product *= value
            variants += [[str(sum(numbers)), *["0"] * (len(parts) - 1)], [str(product), *["1"] * (len(parts) - 1)]]
    if pieces.kind in ("list", "set", "tuple") and len(parts) > 1:
        variants.append(parts[:-1])
    return [other for other in variants if sorted(map(bare, other)) != sorted(map(bare, parts)) or ordered]


def _joined(text: str, pieces: Pieces, parts: Sequence[str]) -> str:
    if pieces.kind == "matrix":
        width = int(pieces.brackets.partition("x")[2])
        rows = [" & ".join(parts[at : at + width]) for at in range(0, len(parts), width)]
        return r"\begin{pmatrix} " + r" \\ ".join(rows) + r" \end{pmatrix}"
    opening, closing = {"set": ("\\{", "\\}"), "list": ("", "")}.get(
        pieces.kind, (pieces.brackets[:1], pieces.brackets[1:])
    )
    return f"{opening}{', '.join(parts)}{closing}"


def spellings(reference: str) -> list[str]:
    """Return other spellings of the reference; a grader that refuses them loses right answers."""
    text = reference.strip()
    if match := _MATRIX.fullmatch(text):
        rows = [row.strip() for row in match[2].split(_ROW) if row.strip()]
        columns = "c" * (rows[0].count("&") + 1)
        return [
            rf"\begin{{pmatrix}}{_ROW.join(rows)}\end{{pmatrix}}",
            rf"\begin{{bmatrix}} {f' {_ROW} '.join(rows)} \end{{bmatrix}}",
            "\\begin{pmatrix}\n" + f"{_ROW}\n".join(rows) + "\n\\end{pmatrix}",
            rf"\left(\begin{{array}}{{{columns}}} {f' {_ROW} '.join(rows)} \end{{array}}\right)",
        ]
    value = number(plain(text))
    texts = [f"${text}$", f" {text}. "]
    if value is not None and value.denominator == 1:
        texts += [f"{value}.0", f"{int(value):,}", f"x = {value}"]
    elif value is not None:
        texts += [f"\\dfrac{{{value.numerator}}}{{{value.denominator}}}", f"{value.numerator}/{value.denominator}"]
    return texts
