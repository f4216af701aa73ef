r"""Finding the final answer in a completion: linear scanners over model output, never backtracking patterns.

All of them look behind the last `</think>` (or `</reasoning>`) only, take the last candidate, and never fall back to an
earlier one: a model that opens another tag or box and does not close it has not answered. Text longer than `MAX_CHARS`
characters and answers longer than `MAX_ANSWER_CHARS` are refused rather than scanned.

>>> tagged_answer("<think>6 x 12</think> <answer> 72 </answer>")
Extracted(value='72', reason=None)
>>> tagged_answer("<answer>7</answer><answer>8</answer>").reason
'duplicated_tag'
>>> boxed_answer(r"so \boxed{\frac{1}{2}}.").value
'\\frac{1}{2}'
>>> hash_answer("6 x 12 = 72\n#### 72").value
'72'
>>> line_answer("6 x 12 = 72, so\nFinal answer: **72**").value
'72'
"""

import collections
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

MAX_CHARS = 400_000  # about 100k tokens of English
MAX_ANSWER_CHARS = 10_000
MAX_ANSWER_LINES = 100  # the same `Answer:` line, over and over

Reason: TypeAlias = Literal[
    "missing",
    "duplicated_tag",
    "duplicated_box",
    "duplicated_line",
    "unterminated",
    "unterminated_think",
    "blank",
    "text_after_answer",
    "too_long",
    "several_answers",
]

THINKING = ("think", "reasoning")

# Single character classes: nothing to backtrack over.
_BRACE = re.compile(r"[{}\\]")
_BOXES = ("\\boxed{", "\\fbox{")
MAX_BOXES = 20  # that are one list
_GLUE_CHARS = 80
# Between two boxes of one list: separators, and what may stand beside them (mathematics mode, `x =`).
_SEPARATOR = re.compile(
    r"\\(?:text|mathrm|mbox)\s?\{[^{}]{0,50}(?:\b(?:and|or)\b|,)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\\\|[;,&]",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"\\q?quad(?![A-Za-z])|(?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w{1,3}\}?)?\s?=|[\s$().*\[\]\\]")
_NAMED = re.compile(r"[\s$]*[A-Za-z]{2,20}\s+(?:and|or)[\s$]*")  # or the thing that was counted: `papers and`
# At most 16 characters of indentation or emphasis, then a fixed phrase: bounded work at each line.
_ANSWER_LINE = re.compile(
    r"(?im)^[ \t>*_#-]{0,16}(?:(?:so|thus|hence|therefore),? )?(?:the )?"
    r"(?:(?:final|correct|right|best) )?answer[*_]{0,3}(?: ?:| is\b:?)"
)
_ANSWER_WORD = re.compile("answer", re.IGNORECASE)
_ANSWER_PREFIX = 64  # more characters than the pattern takes before the word
_VISIBLE = re.compile(r"[^\s\x00\u200b-\u200d\u2060\ufeff]")
_INVISIBLE = "\x00\u200b\u200c\u200d\u2060\ufeff"
_NOT_BLANK = re.compile(r"[\s*_]*")
_WRAPPING = re.compile(r"\\[()\[\]]|[$*\s]")
_WORDS = re.compile(r"(?![A-Za-z]$)(?:\\(?:text|mathrm|mbox)\{|[A-Za-z%°/.}^²³])*")
_HASHES = re.compile(r"[^\S\n]{0,16}####(?!#)")


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
    if strict and has_text(text, closed + len("</answer>")):
        return Extracted(None, "text_after_answer")
    return _answer(text, opened + len("<answer>"), closed)


def boxed_answer(text: str, strict: bool = False, max_chars: int = MAX_CHARS) -> Extracted:
    r"""The content of the last `\boxed{…}` (or `\fbox{…}`) after the last `</think>`.

    Boxes with nothing but a comma, `and` or `or` between them are one list: `\boxed{1} and \boxed{-2}` is `1, -2`. Braces
    are balanced, escaped ones skipped. `strict` refuses an earlier box that holds anything else, and a box within a box.
    """
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    opened, begin = _last_box(text, start, len(text))
    if opened < 0:
        return Extracted(None, "missing")
    end = _box_end(text, begin)
    if end < 0:
        return Extracted(None, "too_long" if len(text) > begin + MAX_ANSWER_CHARS + 1 else "unterminated")
    last = _answer(text, begin, end)
    contents = [text[begin : end + 1]]
    while last.value is not None and len(contents) < MAX_BOXES:
        before, begin = _last_box(text, max(start, opened - MAX_ANSWER_CHARS), opened)
        end = _box_end(text, begin) if before >= 0 else -1
        if not 0 <= end < opened or not has_text(text, begin, end) or not _is_glue(text[end + 1 : opened]):
            break
        contents.append(text[begin : end + 1])
        opened = before
    if strict and _differing_box(text, start, opened, contents):
        return Extracted(None, "duplicated_box")
    if len(contents) == 1:
        return last
    return Extracted(", ".join(dict.fromkeys(content[:-1].strip() for content in reversed(contents))))


def line_answer(text: str, strict: bool = True, max_chars: int = MAX_CHARS) -> Extracted:
    """What follows `Answer:` (`Final answer:`, `The answer is`), after the last `</think>`: on its line, or on the next.

    The phrase counts at the beginning of a line, the last one wins; Markdown emphasis and a final period are taken off.
    `strict` refuses a second such line with another answer (`So the answer is 6 cm.` and `Answer: 6` agree), over a
    hundred of them, and anything but white space after the answer.
    """
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    lines = list(itertools.islice(_answer_lines(text, start), MAX_ANSWER_LINES + 1))
    if not lines:
        return Extracted(None, "missing")
    if strict and len(lines) > MAX_ANSWER_LINES:
        return Extracted(None, "duplicated_line")
    if not strict:  # only the last one counts, wherever it is
        lines = list(collections.deque(_answer_lines(text, start), 1))
    begin, end = lines[-1]
    if strict and has_text(text, end):
        return Extracted(None, "text_after_answer")
    last = _answer(text, begin, end)
    if last.value is None:
        return last
    value = last.value.strip("*_ ").removesuffix(".").strip("*_ ")
    if strict and not all(_agree(text[slice(*span)], value) for span in lines[:-1]):
        return Extracted(None, "duplicated_line")
    return Extracted(value) if has_text(value, 0) else Extracted(None, "blank")


def any_answer(text: str, strict: bool = True, max_chars: int = MAX_CHARS) -> Extracted:
    """The answer wherever it stands: box, `<answer>` tag, `####` line or `Answer:` line, the last of its kind.

    A box within the tag or the line is that answer. Kinds that disagree are `several_answers`; a tag or box that is
    opened and not closed is no answer, whatever stands elsewhere. Not `strict`, the first of these kinds counts, and text
    may follow.
    """
    kinds = (boxed_answer, tagged_answer, hash_answer, line_answer)
    results = [kind(text, strict, max_chars) for kind in kinds]
    complete = any(result.value is not None for result in results)
    answers: list[str] = []
    for kind, result in zip(kinds, results, strict=True):
        if result.reason == "text_after_answer" and complete:  # the other kind may be what stands behind it
            result = kind(text, False, max_chars)
        if result.value is None and result.reason != "missing":
            return result
        if result.value is not None:
            answers.append(boxed_answer(result.value).value or result.value)
    if strict and not all(_agree(answer, answers[0]) for answer in answers):
        return Extracted(None, "several_answers")
    return Extracted(answers[0]) if answers else results[0]


def hash_answer(text: str, strict: bool = True, max_chars: int = MAX_CHARS) -> Extracted:
    """What follows `####` on the last line that begins with exactly four hashes, after the last `</think>`.

    `strict` refuses a second such line, and anything but white space after it.
    """
    start = _after_thinking(text, max_chars)
    if not isinstance(start, int):
        return Extracted(None, start)
    begin, line = _last_hash_line(text, start, len(text))
    if begin < 0:
        return Extracted(None, "missing")
    if strict and _last_hash_line(text, start, line)[0] >= 0:
        return Extracted(None, "duplicated_tag")
    end = _line_end(text, begin)
    if strict and has_text(text, end):
        return Extracted(None, "text_after_answer")
    return _answer(text, begin, end)


def think_answer_problem(text: str, opened: bool = False, max_chars: int = MAX_CHARS) -> str | None:
    """What keeps `text` from being `<think>…</think><answer>…</answer>`, or None; see `tags_problem`."""
    return tags_problem(text, "think", "answer", opened, max_chars)


def tags_problem(text: str, first: str, second: str, opened: bool = False, max_chars: int = MAX_CHARS) -> str | None:
    """What keeps `text` from being `<first>…</first><second>…</second>`, or None.

    Each tag once, in this order, both blocks not blank, only white space around and between them. `opened` says that
    the prompt already ends with `<first>`, so that the completion begins inside the block.
    """
    if len(text) > max_chars:
        return "too_long"
    tags = (f"<{first}>", f"</{first}>", f"<{second}>", f"</{second}>")
    if opened and not text.count(tags[0]):
        text = tags[0] + text
    position = []
    for tag in tags:
        at = text.find(tag)
        if at < 0 or text.find(tag, at + 1) >= 0:
            return f"{tag} appears {text.count(tag)} times"
        position.append(at)
    if not position[0] < position[1] < position[2] < position[3]:
        return "tags out of order"
    ends = [at + len(tag) for at, tag in zip(position, tags, strict=True)]
    if has_text(text, 0, position[0]) or has_text(text, ends[1], position[2]) or has_text(text, ends[3]):
        return "text outside the tags"
    if not has_text(text, ends[0], position[1]):
        return f"blank <{first}>"
    if not has_text(text, ends[2], position[3]):
        return f"blank <{second}>"
    return None


def has_text(text: str, begin: int = 0, end: int = sys.maxsize) -> bool:
    """Whether anything visible stands between `begin` and `end`."""
    return begin < end and _VISIBLE.search(text, begin, end) is not None


def _after_thinking(text: str, max_chars: int) -> int | Reason:
    """Position at which the text after the last thinking block begins."""
    if len(text) > max_chars:
        return "too_long"
    start = 0
    if "<" not in text:
        return start
    for name in THINKING:
        closed = text.rfind(f"</{name}>")
        if text.rfind(f"<{name}>") > closed:
            return "unterminated_think"
        start = max(start, 0 if closed < 0 else closed + len(name) + 3)
    return start


def _last_box(text: str, start: int, end: int) -> tuple[int, int]:
    """Positions at which the last box between `start` and `end` is opened and its content begins; -1 for none."""
    opened, opening = max((text.rfind(box, start, end), box) for box in _BOXES)
    return opened, opened + len(opening)


def _box_end(text: str, begin: int) -> int:
    """Position of the brace that closes the one whose content begins at `begin`, or -1."""
    limit = begin + MAX_ANSWER_CHARS + 1
    depth, position = 1, begin
    while match := _BRACE.search(text, position, limit):
        position = match.end() + (match[0] == "\\")  # a backslash takes the next character with it
        depth += {"{": 1, "}": -1, "\\": 0}[match[0]]
        if depth == 0:
            return match.start()
    return -1


def _is_glue(between: str) -> bool:
    """Whether what stands between two boxes makes them one list."""
    if len(between) > _GLUE_CHARS:
        return False
    if _NAMED.fullmatch(between):
        return True
    rest, separators = _SEPARATOR.subn(" ", between)
    return not between or (separators > 0 and not _BESIDE.sub("", rest))


def _differing_box(text: str, start: int, end: int, contents: Sequence[str]) -> bool:
    """Whether a box before `end` holds anything but one of `contents`, each with its closing brace."""
    same = tuple(contents)
    for box in _BOXES:
        at = text.find(box, start, end)
        while at >= 0:
            if not text.startswith(same, at + len(box)):
                return True
            at = text.find(box, at + len(box), end)
    return False


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _answer(text: str, begin: int, end: int) -> Extracted:
    if end - begin > MAX_ANSWER_CHARS:
        return Extracted(None, "too_long")
    if not has_text(text, begin, end):
        return Extracted(None, "blank")
    return Extracted(text[begin:end].strip().strip(_INVISIBLE).strip())


def _answer_lines(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where each answer behind `Answer:` begins and ends, looked for where the word stands: far faster than at every
    line of a long text. An answer that is such a line itself (`Answer:`, and below it `The answer is 6`) counts once."""
    waiting: tuple[int, int] | None = None
    while word := _ANSWER_WORD.search(text, start):
        window = max(start, word.start() - _ANSWER_PREFIX)
        line = text.rfind("\n", window, word.start()) + 1 or window  # the window's begin need not be a line's
        start = _line_end(text, word.end())  # a line has one beginning, and it has been looked at
        if match := _ANSWER_LINE.match(text, line):
            if waiting is not None and waiting[1] <= line:
                yield waiting
            waiting = _given_behind(text, match.end())
    if waiting is not None:
        yield waiting


def _given_behind(text: str, begin: int) -> tuple[int, int]:
    """The rest of the line; where that is blank, the next line that is not. Display mathematics is taken whole."""
    end = _line_end(text, begin)
    if not text[begin:end].strip("*_ \t\r"):
        begin = _NOT_BLANK.match(text, end).end()  # type: ignore[union-attr]  # it matches everywhere
        end = _line_end(text, begin)
    opened = text[begin:end].strip()
    if opened in ("$$", "\\["):
        closed = text.find("$$" if opened == "$$" else "\\]", end, end + MAX_ANSWER_CHARS)
        end = _line_end(text, closed) if closed >= 0 else end
    return begin, end


def _agree(first: str, second: str) -> bool:
    """Whether two answers are the same but for wrapping and for words behind: `**6**`, `$6$`, `6 apples.`"""
    short, long = sorted((_core(first), _core(second)), key=len)
    return short == long or (bool(short) and long.startswith(short) and _WORDS.fullmatch(long, len(short)) is not None)


def _core(answer: str) -> str:
    answer = boxed_answer(answer).value or answer
    return _WRAPPING.sub("", answer).strip("._")


def _last_hash_line(text: str, start: int, end: int) -> tuple[int, int]:
    """Where the last line before `end` begins that starts with exactly four hashes, and the position behind these
    first; -1 for both where there is none. `start` need not be where a line begins."""
    while (at := text.rfind("####", start, end)) >= 0:
        line = text.rfind("\n", start, at) + 1 or start
        if match := _HASHES.match(text, line):
            return match.end(), line
        end = line  # a line has one beginning, and it has been looked at
    return -1, -1
