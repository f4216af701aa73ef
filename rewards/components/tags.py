"""Does the completion keep the asked layout?"""

from dataclasses import dataclass

from rewards.extract import MAX_CHARS, hash_answer, think_answer_problem
from rewards.protocol import Context, ItemComponent, Sample, Score, opens_thinking

__all__ = ["HashFormat", "TagCount", "ThinkAnswerFormat", "opens_thinking"]

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

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if len(sample.text) > MAX_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        text = sample.whole
        once = [text.count(tag) for tag in _TAGS].count(1)
        if once == len(_TAGS):
            return Score(self.high)
        return Score(once / len(_TAGS), "format", {"reason": f"{once} of 4 tags appear once"})


@dataclass(frozen=True, kw_only=True)
class HashFormat(ItemComponent):
    """1 when the completion ends with one `#### answer` line, else 0."""

    name: str = "format"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found = sample.once(hash_answer, True)
        return Score(self.high) if found.value is not None else Score(None, "format", {"reason": found.reason})
