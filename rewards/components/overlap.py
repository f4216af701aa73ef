"""Similarity of a text to a reference, by characters."""

import functools
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import AnswerComponent, reference_texts
from rewards.errors import PresetError
from rewards.protocol import Sample, Score

MAX_CHARS = 20_000  # of an answer; n-grams of six sizes are counted
_SLACK = 20  # characters by which a text may exceed the ratio, for very short references


@dataclass(frozen=True, kw_only=True)
class TextOverlap(AnswerComponent):
    """chrF / 100 in [0, 1], the best over the references.

    The status is `ok` for a value of at least `correct_at`. An answer of more than `max_ratio` times the characters of the
    longest reference scores 0, because chrF favours recall and would reward several answers in one text.
    """

    name: str = "overlap"
    answer_in: str = "text"
    correct_at: float = 0.5
    max_ratio: float = 1.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.correct_at <= 1.0 or self.max_ratio < 1.0:
            raise PresetError(
                f"correct_at is {self.correct_at} and max_ratio {self.max_ratio}. Pass 0 < correct_at <= 1 <= max_ratio."
            )

    def expected(self, sample: Sample) -> list[str]:
        references = reference_texts(sample.reference) or []
        if not references or max(map(len, references)) > MAX_CHARS:
            reason = f"no usable reference text: {sample.reference!r}"[:200]
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
