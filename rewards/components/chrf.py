"""How close is the translation to a reference, in characters?"""

import functools
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import check_style, find_answer
from rewards.components.rouge import reference_texts
from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["Chrf"]

MAX_CHARS = 20_000  # of an answer; six sizes of n-grams are counted
_SLACK = 20  # characters that a translation of a very short text may have over the ratio


@dataclass(frozen=True, kw_only=True)
class Chrf(ItemComponent):
    """chrF / 100 in [0, 1], the best over the references; chrF++ with `word_order=2`.

    `ok` from `correct_at` upwards. An answer of more than `max_ratio` times the characters of the longest reference
    scores 0: chrF favours recall, and would pay for several translations in one.
    """

    name: str = "chrf"
    style: str = "text"
    word_order: int = 0
    correct_at: float = 0.5
    max_ratio: float = 1.6

    def __post_init__(self) -> None:
        check_style(self.style)
        if not 0.0 < self.correct_at <= 1.0 or self.max_ratio < 1.0 or self.word_order not in (0, 1, 2):
            raise PresetError(
                f"correct_at is {self.correct_at}, max_ratio {self.max_ratio} and word_order {self.word_order}. "
                "Give 0 < correct_at <= 1 <= max_ratio, and word_order 0, 1 or 2."
            )

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        references = reference_texts(sample.reference)
        if not references or max(map(len, references)) > MAX_CHARS:
            reason = f"no reference text of at most {MAX_CHARS} characters: {sample.reference!r}"[:200]
            return Score(None, "error", {"reason": f"{reason}; give text or a list of texts in `reference`"})
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        most = min(MAX_CHARS, self.max_ratio * max(map(len, references)) + _SLACK)
        if len(found.value) > most:
            return Score(None, "wrong", {"reason": f"{len(found.value)} characters, over {most:g}"})
        value = float(_metric(self.word_order).sentence_score(found.value, references).score) / 100.0
        return Score(min(1.0, value), "ok" if value >= self.correct_at else "wrong")


@functools.cache
def _metric(word_order: int) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)
