"""Overlap of a free text with a reference, by characters."""

import functools
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import AnswerComponent, reference_texts
from rewards.errors import PresetError
from rewards.protocol import Sample, Score

MAX_CHARS = 20_000  # of an answer; six sizes of n-grams are counted
_SLACK = 20  # characters that a very short text may have over the ratio


@dataclass(frozen=True, kw_only=True)
class TextOverlap(AnswerComponent):
    """chrF / 100 in [0, 1], the best over the references.

    `ok` from `correct_at` upwards. An answer of more than `max_ratio` times the characters of the longest reference
    scores 0: chrF favours recall, and would pay for several answers in one.
    """

    name: str = "overlap"
    answer_in: str = "text"
    correct_at: float = 0.5
    max_ratio: float = 1.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.correct_at <= 1.0 or self.max_ratio < 1.0:
            raise PresetError(
                f"correct_at is {self.correct_at} and max_ratio {self.max_ratio}. Give 0 < correct_at <= 1 <= max_ratio."
            )

    def expected(self, sample: Sample) -> list[str]:
        references = reference_texts(sample.reference) or []
        if not references or max(map(len, references)) > MAX_CHARS:
            reason = f"no reference text that can be compared: {sample.reference!r}"[:200]
            raise ValueError(f"{reason}; give text or a list of texts in `reference`")
        return references

    def judge(self, answer: str, expected: list[str], sample: Sample) -> Score:
        most = min(MAX_CHARS, self.max_ratio * max(map(len, expected)) + _SLACK)
        if len(answer) > most:
            return Score(None, "wrong", {"reason": f"{len(answer)} characters, over {most:g}"})
        value = min(1.0, float(_metric().sentence_score(answer, expected).score) / 100.0)
        return Score(value, "ok" if value >= self.correct_at else "wrong")


@functools.cache
def _metric() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()
