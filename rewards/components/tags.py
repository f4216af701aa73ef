"""Check the format of a completion: tags, boxes, hashes, the XML of well-known notebooks."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import AnswerComponent, verdict
from rewards.extract import MAX_CHARS, tags_problem
from rewards.protocol import Context, ItemComponent, Sample, Score

_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)", re.ASCII)


def _tags(first: str) -> tuple[str, ...]:
    return f"<{first}>", f"</{first}>", "<answer>", "</answer>"


@dataclass(frozen=True, kw_only=True)
class TagsFormat(ItemComponent):
    """1 for `<think>…</think><answer>…</answer>`, each tag once and both blocks filled, else 0; `first` replaces `think`.

    Only white space may stand around and between the blocks. If the prompt ends with `<think>`, the completion may begin
    inside the block. `lines` also requires each tag on a separate line; the completion need not end with a newline.
    """

    name: str = "format"
    first: str = "think"
    lines: bool = False

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        problem = sample.once(tags_problem, self.first)
        if problem is None and self.lines:
            lines = set(map(str.strip, sample.full_text.split("\n")))
            problem = next((f"{tag} shares its line" for tag in _tags(self.first) if tag not in lines), None)
        return Score(self.high) if problem is None else Score(None, "format", {"reason": problem})


@dataclass(frozen=True, kw_only=True)
class TagCount(ItemComponent):
    """0.25 for each of the four think and answer tags that occurs exactly once; `first` replaces `think`."""

    name: str = "tags"
    first: str = "think"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if len(sample.text) > MAX_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        once = [sample.full_text.count(tag) for tag in _tags(self.first)].count(1)
        return Score(self.high) if once == 4 else Score(once / 4, "format", {"reason": f"{once} of 4 tags appear once"})


@dataclass(frozen=True, kw_only=True)
class IntegerAnswer(AnswerComponent):
    """1 if the content of `<answer>` is a whole number, with or without sign and thousands separators, else 0."""

    name: str = "integer"

    def judge(self, answer: str, expected: None, sample: Sample) -> Score:
        return verdict(_INTEGER.fullmatch(answer) is not None, answer)


@dataclass(frozen=True, kw_only=True)
class Format(ItemComponent):
    """1 if `scan` finds an answer in the completion, else 0 with the scanner's reason.

    Args:
        scan: called as `scan(text, strict)`, for example `rewards.extract.boxed_answer`. Its result has a `reason`, which is
            None if there is an answer.
        strict: argument of `scan`; strict scanners reject several answers, and text after the answer.
    """

    name: str = "format"
    scan: Callable[..., Any]
    strict: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        reason = sample.once(self.scan, self.strict).reason
        return Score(self.high) if reason is None else Score(None, "format", {"reason": reason})
