r"""Extract the final answer from a completion, in linear time and without patterns that backtrack.

All extractors search after the last `</think>` (or `</reasoning>`), take the last candidate, and never fall back to an
earlier one: a completion that opens another tag or box without closing it has no answer. Texts longer than `MAX_CHARS`
characters and answers longer than `MAX_ANSWER_CHARS` are rejected.

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
>>> final_text("<think>hm</think> Paris. ").value
'Paris.'
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_CHARS = 400_000  # about 100k tokens of English
MAX_ANSWER_CHARS = 10_000
MAX_ANSWER_LINES = 100  # repetitions of the same `Answer:` line
MAX_BOXES = 20  # consecutive boxes that form one list
THINKING = ("think", "reasoning")

# Single character classes, which cannot backtrack.
_BRACE = re.compile(r"[{}\\]")
_BOXES = ("\\boxed{", "\\fbox{")
_GLUE_CHARS = 80
# Text between two boxes of one list: separators, and text that may surround them (mathematics mode, `x =`).
_SEPARATOR = re.compile(
    r"\\(?:text|mathrm|mbox)\s?\{[^{}]{0,50}(?:\b(?:and|or)\b|,)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\\\|[;,&]",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"\\q?quad(?![A-Za-z])|(?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w{1,3}\}?)?\s?=|[\s$().*\[\]\\]")
_NAMED = re.compile(r"[\s$]*[A-Za-z]{2,20}\s+(?:and|or)[\s$]*")  # a counted noun: `papers and`
# At most 16 characters of indentation or emphasis, then a fixed phrase: bounded time per line.
_ANSWER_LINE = re.compile(
    r"(?im)^[ \t>*_#-]{0,16}(?:(?:so|thus|hence|therefore),? )?(?:the )?"
    r"(?:(?:final|correct|right|best) )?answer[*_]{0,3}(?: ?:| is\b:?)"
)
_HASHES = re.compile(r"(?m)^[^\S\n]{0,16}####(?!#)")
_INVISIBLE = "\x00\u200b\u200c\u200d\u2060\ufeff"
_VISIBLE = re.compile(rf"[^\s{_INVISIBLE}]")
_NOT_BLANK = re.compile(r"[\s*_]*")
_WRAPPING = re.compile(r"\\[()\[\]]|[$*\s]")
_WORDS = re.compile(r"(?![A-Za-z]$)(?:\\(?:text|mathrm|mbox)\{|[A-Za-z%°/.}^²³])*")


class Extracted(NamedTuple):
    """The answer as stripped, non-blank text; or None and the reason why there is no answer."""

    value: str | None
    reason: str | None = None


def tagged_answer(text: str, strict: bool = True) -> Extracted:
    """Return the content of the last `<answer>…</answer>` after the last `</think>`.

    `strict` rejects a second answer tag, and anything but white space after `</answer>`.
    """
    rest, reason = _after_thinking(text)
    before, opening, inside = rest.rpartition("<answer>")
    answer, closing, after = inside.partition("</answer>")
    if reason or not opening or not closing:
        return Extracted(None, reason or ("unterminated" if opening else "missing"))
    if strict and ("<answer>" in before or "</answer>" in before or "</answer>" in after):
        return Extracted(None, "duplicated_tag")
    return Extracted(None, "text_after_answer") if strict and has_text(after) else _stripped(answer)


def boxed_answer(text: str, strict: bool = False) -> Extracted:
    r"""Return the content of the last `\boxed{…}` (or `\fbox{…}`) after the last `</think>`.

    Boxes that are separated only by a comma, `and` or `or` form a list: `\boxed{1} and \boxed{-2}` is `1, -2`. Braces are
    matched; escaped braces are skipped. `strict` rejects an earlier box with another content, and a box within a box.
    """
    rest, reason = _after_thinking(text)
    opened, begin = _last_box(rest, 0, len(rest))
    if reason or opened < 0:
        return Extracted(None, reason or "missing")
    end = _box_end(rest, begin)
    if end < 0:
        return Extracted(None, "too_long" if len(rest) > begin + MAX_ANSWER_CHARS + 1 else "unterminated")
    last = _stripped(rest[begin:end])
    contents = [rest[begin : end + 1]]
    while last.value is not None and len(contents) < MAX_BOXES:
        before, begin = _last_box(rest, max(0, opened - MAX_ANSWER_CHARS), opened)
        end = _box_end(rest, begin) if before >= 0 else -1
        if not 0 <= end < opened or not has_text(rest[begin:end]) or not _is_glue(rest[end + 1 : opened]):
            break
        contents.append(rest[begin : end + 1])
        opened = before
    if strict and _differing_box(rest[:opened], contents):
        return Extracted(None, "duplicated_box")
    if len(contents) == 1:
        return last
    return Extracted(", ".join(dict.fromkeys(content[:-1].strip() for content in reversed(contents))))


def line_answer(text: str, strict: bool = True) -> Extracted:
    """Return the text after the last `Answer:` (`Final answer:`, `The answer is`) after the last `</think>`.

    The phrase must begin a line. The answer is the rest of the line, or the next line if the rest is blank, without Markdown
    emphasis and final period. `strict` rejects a second such line with another answer (`So the answer is 6 cm.` and
    `Answer: 6` agree), more than `MAX_ANSWER_LINES` lines, and anything but white space after the answer.
    """
    rest, reason = _after_thinking(text)
    spans: list[tuple[int, int]] = []
    for match in _ANSWER_LINE.finditer(rest):
        if spans and spans[-1][1] > match.start():  # the next line, which is the answer, has the phrase as well
            spans.pop()
        spans.append(_answer_span(rest, match.end()))
    last = _last_answer(rest, reason, spans, strict)
    if last.value is None:
        return last
    value = last.value.strip("*_ ").removesuffix(".").strip("*_ ")
    if strict and (
        len(spans) > MAX_ANSWER_LINES or not all(_agree(rest[begin:end], value) for begin, end in spans[:-1])
    ):
        return Extracted(None, "duplicated_line")
    return _stripped(value)


def hash_answer(text: str, strict: bool = True) -> Extracted:
    """Return the text after `####` on the last line that begins with exactly four hashes, after the last `</think>`.

    `strict` rejects a second such line, and anything but white space after the line.
    """
    rest, reason = _after_thinking(text)
    spans = [(match.end(), _line_end(rest, match.end())) for match in _HASHES.finditer(rest)]
    if strict and len(spans) > 1:
        return Extracted(None, "duplicated_tag")
    return _last_answer(rest, reason, spans, strict)


def any_answer(text: str, strict: bool = True) -> Extracted:
    """Return the answer from any place: a box, an `<answer>` tag, a `####` line or an `Answer:` line, the last of its kind.

    A box inside a tag or line is the answer of that tag or line. Places with different answers give `several_answers`. A tag
    or box that is not closed gives no answer, whatever the other places contain. Without `strict`, the first of these places
    with an answer counts, and text may follow the answer.
    """
    kinds = (boxed_answer, tagged_answer, hash_answer, line_answer)
    results = [kind(text, strict) for kind in kinds]
    complete = any(result.value is not None for result in results)
    answers: list[str] = []
    for kind, result in zip(kinds, results, strict=True):
        if result.reason == "text_after_answer" and complete:  # the text may be an answer of another kind
            result = kind(text, False)
        if result.value is None and result.reason != "missing":
            return result
        if result.value is not None:
            answers.append(boxed_answer(result.value).value or result.value)
    if strict and not all(_agree(answer, answers[0]) for answer in answers):
        return Extracted(None, "several_answers")
    return Extracted(answers[0]) if answers else results[0]


def final_text(text: str) -> Extracted:
    """Return the stripped text after the last `</think>`; blank text and an open thinking block give no answer."""
    rest, reason = _after_thinking(text, ("think",))
    rest = rest.strip().strip(_INVISIBLE).strip()
    return Extracted(rest or None, reason or (None if rest else "blank"))


def plain_answer(text: str, strict: bool = True) -> Extracted:
    """Return `final_text`; a think or answer tag in it gives no answer, for prompts that do not ask for tags."""
    final = final_text(text)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return Extracted(None, "stray_tag") if any(tag in (final.value or "") for tag in tags) else final


def tags_problem(text: str, first: str = "think", second: str = "answer") -> str | None:
    """Return why `text` does not match `<first>…</first><second>…</second>`, or None if it does.

    Each tag occurs once, in this order; both blocks are not blank; only white space stands around and between them.
    """
    if len(text) > MAX_CHARS:
        return "too_long"
    tags = (f"<{first}>", f"</{first}>", f"<{second}>", f"</{second}>")
    for tag in tags:
        if text.count(tag) != 1:
            return f"{tag} appears {text.count(tag)} times"
    position = [text.find(tag) for tag in tags]
    if position != sorted(position):
        return "tags out of order"
    before, first_block, between, second_block, after = re.split("|".join(tags), text)
    if has_text(before) or has_text(between) or has_text(after):
        return "text outside the tags"
    if not has_text(first_block):
        return f"blank <{first}>"
    return None if has_text(second_block) else f"blank <{second}>"


def has_text(text: str) -> bool:
    """Return whether `text` contains a visible character."""
    return _VISIBLE.search(text) is not None


def _after_thinking(text: str, names: Sequence[str] = THINKING) -> tuple[str, str | None]:
    """Return the text after the last thinking block and None; or an empty text and the reason."""
    if len(text) > MAX_CHARS:
        return "", "too_long"
    start = 0
    for name in names:
        closed = text.rfind(f"</{name}>")
        if text.rfind(f"<{name}>") > closed:
            return "", "unterminated_think"
        start = max(start, 0 if closed < 0 else closed + len(name) + 3)
    return text[start:], None


def _last_answer(text: str, reason: str | None, spans: Sequence[tuple[int, int]], strict: bool) -> Extracted:
    """Return the answer at the last of `spans` (begin, end); `strict` rejects text after it."""
    if reason or not spans:
        return Extracted(None, reason or "missing")
    begin, end = spans[-1]
    return Extracted(None, "text_after_answer") if strict and has_text(text[end:]) else _stripped(text[begin:end])


def _stripped(answer: str) -> Extracted:
    if len(answer) > MAX_ANSWER_CHARS:
        return Extracted(None, "too_long")
    return Extracted(answer.strip().strip(_INVISIBLE).strip()) if has_text(answer) else Extracted(None, "blank")


def _last_box(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the positions of the last box between `start` and `end` and of its content; the first is -1 without a box."""
    opened, opening = max((text.rfind(box, start, end), box) for box in _BOXES)
    return opened, opened + len(opening)


def _box_end(text: str, begin: int) -> int:
    """Return the position of the brace that closes the box whose content starts at `begin`, or -1."""
    limit = begin + MAX_ANSWER_CHARS + 1
    depth, position = 1, begin
    while match := _BRACE.search(text, position, limit):
        position = match.end() + (match[0] == "\\")  # skip the character after a backslash
        depth += {"{": 1, "}": -1, "\\": 0}[match[0]]
        if depth == 0:
            return match.start()
    return -1


def _is_glue(between: str) -> bool:
    """Return whether the text between two boxes makes them one list."""
    if len(between) > _GLUE_CHARS:
        return False
    if _NAMED.fullmatch(between):
        return True
    rest, separators = _SEPARATOR.subn(" ", between)
    return not between or (separators > 0 and not _BESIDE.sub("", rest))


def _differing_box(text: str, contents: Sequence[str]) -> bool:
    """Return whether a box in `text` has another content than `contents`, which include the closing brace."""
    for box in _BOXES:
        position = text.find(box)
        while position >= 0:
            if not text.startswith(tuple(contents), position + len(box)):
                return True
            position = text.find(box, position + len(box))
    return False


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _answer_span(text: str, begin: int) -> tuple[int, int]:
    """Return the span of the rest of the line, or of the next line that is not blank; or of a complete display formula."""
    end = _line_end(text, begin)
    if not text[begin:end].strip("*_ \t\r"):
        begin = _NOT_BLANK.match(text, end).end()  # type: ignore[union-attr]  # always matches
        end = _line_end(text, begin)
    delimiter = text[begin:end].strip()
    if delimiter in ("$$", "\\["):
        closed = text.find("$$" if delimiter == "$$" else "\\]", end, end + MAX_ANSWER_CHARS)
        end = _line_end(text, closed) if closed >= 0 else end
    return begin, end


def _agree(first: str, second: str) -> bool:
    """Return whether two answers are equal without wrapping and trailing words, such as `**6**`, `$6$` and `6 apples.`."""
    short, long = sorted(
        (_WRAPPING.sub("", boxed_answer(answer).value or answer).strip("._") for answer in (first, second)), key=len
    )
    return short == long or (bool(short) and long.startswith(short) and _WORDS.fullmatch(long, len(short)) is not None)
