r"""Finding the final answer in a completion: linear scanners over model output, never backtracking patterns.

All of them look behind the last `</think>` only, take the last candidate, and never fall back to an earlier one: a
model that opens another tag or box and does not close it has not answered. Text longer than `MAX_CHARS` characters and
answers longer than `MAX_ANSWER_CHARS` are refused rather than scanned.

>>> tagged_answer("<think>6 x 12</think> <answer> 72 </answer>")
Extracted(value='72', reason=None)
>>> tagged_answer("<answer>7</answer><answer>8</answer>").reason
'duplicated_tag'
>>> boxed_answer(r"so \boxed{\frac{1}{2}}.").value
'\\frac{1}{2}'
>>> hash_answer("6 x 12 = 72\n#### 72").value
'72'
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "MAX_ANSWER_CHARS",
    "MAX_CHARS",
    "Extracted",
    "Reason",
    "boxed_answer",
    "hash_answer",
    "tagged_answer",
    "think_answer_problem",
]

MAX_CHARS = 400_000  # about 100k tokens of English
MAX_ANSWER_CHARS = 10_000

Reason: TypeAlias = Literal[
    "missing", "duplicated_tag", "unterminated", "unterminated_think", "blank", "text_after_answer", "too_long"
]

# Single character classes: nothing to backtrack over.
_BRACE = re.compile(r"[{}\\]")
_VISIBLE = re.compile(r"[^\s\x00\u200b-\u200d\u2060\ufeff]")
_INVISIBLE = "\x00\u200b\u200c\u200d\u2060\ufeff"
_INDENT = 16


@dataclass(frozen=True)
class Extracted:
    """The answer, stripped and not blank, or None with the reason why there is none."""

    value: str | None
    reason: Reason | None = None


def tagged_answer(text: str, strict: bool = True, max_chars: int = MAX_CHARS) -> Extracted:
    """The content of the last `<answer>…</answer>` after the last `</think>`.

    `strict` refuses a second answer tag, and anything but white space after `</answer>`.
    """
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    opened = text.rfind("<answer>", start)
    if opened < 0:
        return Extracted(None, "missing")
    closed = text.find("</answer>", opened)
    if closed < 0:
        return Extracted(None, "unterminated")
    if strict and (text.find("<answer>", start) != opened or text.count("</answer>", start) != 1):
        return Extracted(None, "duplicated_tag")
    if strict and _has_text(text, closed + len("</answer>")):
        return Extracted(None, "text_after_answer")
    return _answer(text, opened + len("<answer>"), closed)


def boxed_answer(text: str, max_chars: int = MAX_CHARS) -> Extracted:
    r"""The content of the last `\boxed{…}` after the last `</think>`, braces balanced, escaped braces skipped."""
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    opened = text.rfind("\\boxed{", start)
    if opened < 0:
        return Extracted(None, "missing")
    begin = opened + len("\\boxed{")
    limit = begin + MAX_ANSWER_CHARS + 1
    depth, position = 1, begin
    while match := _BRACE.search(text, position, limit):
        position = match.end() + (match[0] == "\\")  # a backslash takes the next character with it
        depth += {"{": 1, "}": -1, "\\": 0}[match[0]]
        if depth == 0:
            return _answer(text, begin, match.start())
    return Extracted(None, "too_long" if len(text) > limit else "unterminated")


def hash_answer(text: str, strict: bool = True, max_chars: int = MAX_CHARS) -> Extracted:
    """What follows `####` on the last line that begins with exactly four hashes, after the last `</think>`.

    `strict` refuses a second such line, and anything but white space after it.
    """
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    lines = list(_hash_lines(text, start))
    if not lines:
        return Extracted(None, "missing")
    if strict and len(lines) > 1:
        return Extracted(None, "duplicated_tag")
    begin = lines[-1]
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    if strict and _has_text(text, end):
        return Extracted(None, "text_after_answer")
    return _answer(text, begin, end)


def think_answer_problem(text: str, opened: bool = False, max_chars: int = MAX_CHARS) -> str | None:
    """What keeps `text` from being `<think>…</think><answer>…</answer>`, or None.

    Each tag once, in this order, both blocks not blank, only white space around and between them. `opened` says that
    the prompt already ends with `<think>`, so that the completion begins inside the block.
    """
    if len(text) > max_chars:
        return "too_long"
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if opened and not text.count(tags[0]):
        text = tags[0] + text
    for tag in tags:
        count = text.count(tag)
        if count != 1:
            return f"{tag} appears {count} times"
    position = [text.find(tag) for tag in tags]
    if position != sorted(position):
        return "tags out of order"
    ends = [at + len(tag) for at, tag in zip(position, tags, strict=True)]
    if _has_text(text, 0, position[0]) or _has_text(text, ends[1], position[2]) or _has_text(text, ends[3]):
        return "text outside the tags"
    if not _has_text(text, ends[0], position[1]):
        return "blank <think>"
    if not _has_text(text, ends[2], position[3]):
        return "blank <answer>"
    return None


def _after_thinking(text: str, max_chars: int) -> int | Reason:
    """Where the text after the last thinking block begins."""
    if len(text) > max_chars:
        return "too_long"
    closed = text.rfind("</think>")
    if text.rfind("<think>") > closed:
        return "unterminated_think"
    return 0 if closed < 0 else closed + len("</think>")


def _answer(text: str, begin: int, end: int) -> Extracted:
    if end - begin > MAX_ANSWER_CHARS:
        return Extracted(None, "too_long")
    if not _has_text(text, begin, end):
        return Extracted(None, "blank")
    return Extracted(text[begin:end].strip().strip(_INVISIBLE).strip())


def _hash_lines(text: str, start: int) -> Iterator[int]:
    """Positions right behind `####` for every line that begins with exactly four hashes."""
    at = text.find("####", start)
    while at >= 0:
        end = at
        while end < len(text) and text[end] == "#":
            end += 1
        if end - at == 4 and _begins_line(text, start, at):
            yield end
        at = text.find("####", end)


def _begins_line(text: str, start: int, at: int) -> bool:
    """Whether only indentation stands before `at` on its line; looks back at most `_INDENT` characters."""
    before = text[max(start, at - _INDENT) : at]
    _, newline, indent = before.rpartition("\n")
    return not indent.strip() and (bool(newline) or at - start < _INDENT)


def _has_text(text: str, begin: int, end: int = sys.maxsize) -> bool:
    return _VISIBLE.search(text, begin, end) is not None
