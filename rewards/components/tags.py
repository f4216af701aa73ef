"""Check a completion's layout: tags, boxes, hashes, the XML of well-known notebooks."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rewards.extract import MAX_CHARS, tagged_answer, tags_problem, think_answer_problem
from rewards.protocol import Context, ItemComponent, Sample, Score

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, kw_only=True)
class ThinkAnswerFormat(ItemComponent):
    """1 for `<think>…</think><answer>…</answer>`, each tag once and both blocks filled, else 0.

    Only white space may stand around and between the blocks. When the prompt already ends with `<think>`, the
    completion may begin inside the block.
    """

    name: str = "format"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        problem = sample.once(think_answer_problem)
        return Score(self.high) if problem is None else Score(None, "format", {"reason": problem})


@dataclass(frozen=True, kw_only=True)
class TagCount(ItemComponent):
    """A quarter for each of the four think and answer tags that appears exactly once."""

    name: str = "tags"
    tags: ClassVar[tuple[str, ...]] = _TAGS

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if len(sample.text) > MAX_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        text = sample.full_text
        once = [text.count(tag) for tag in self.tags].count(1)
        if once == len(self.tags):
            return Score(self.high)
        return Score(once / len(self.tags), "format", {"reason": f"{once} of 4 tags appear once"})


_XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class XmlFormat(ItemComponent):
    """1 for `<reasoning>…</reasoning><answer>…</answer>`, each tag once and both blocks filled, else 0.

    Only white space may stand around and between the blocks. `lines` also asks for each tag on a line of its own; a
    newline at the very end is not asked for.
    """

    name: str = "format"
    lines: bool = False

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        problem = sample.once(tags_problem, "reasoning", "answer")
        if problem is None and self.lines:
            problem = next((f"{tag} shares its line" for tag in _XML_TAGS if not _alone(sample.text, tag)), None)
        return Score(self.high) if problem is None else Score(None, "format", {"reason": problem})


@dataclass(frozen=True, kw_only=True)
class XmlTagCount(TagCount):
    """A quarter for each of the four reasoning and answer tags that appears exactly once."""

    tags: ClassVar[tuple[str, ...]] = _XML_TAGS


@dataclass(frozen=True, kw_only=True)
class IntegerAnswer(ItemComponent):
    """1 when the content of `<answer>` is a whole number, with or without sign and thousands separators, else 0."""

    name: str = "integer"
    strict: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        answer = sample.once(tagged_answer, self.strict)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        is_integer = _INTEGER.fullmatch(answer.value)
        return Score(self.high) if is_integer else Score(None, "wrong", {"extracted": answer.value})


@dataclass(frozen=True, kw_only=True)
class Format(ItemComponent):
    """1 when the completion holds what `scan` looks for, else 0 with the scanner's reason.

    Args:
        scan: called as `scan(text, strict)`, for instance `rewards.extract.boxed_answer`; its result has a `reason`, None where
            it has found something.
        strict: passed on; scanners then refuse several answers, and text behind the answer.
    """

    name: str = "format"
    scan: Callable[..., Any]
    strict: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        reason = sample.once(self.scan, self.strict).reason
        return Score(self.high) if reason is None else Score(None, "format", {"reason": reason})


def _alone(text: str, tag: str) -> bool:
    """Whether only spaces share the line with the first `tag`; looks at no more than a few characters."""
    at = text.find(tag)
    before = text[max(0, at - 16) : at].rpartition("\n")[2]
    after = text[at + len(tag) : at + len(tag) + 16]
    newline_before = "\n" in text[max(0, at - 16) : at] or at <= 16
    return not before.strip() and newline_before and (not after.strip() or not after.partition("\n")[0].strip())
