"""Overlap with a reference text: ROUGE-L by words, chrF by characters, and a band of lengths."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import check_style, find_answer
from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

MAX_WORDS = 600  # the longest common subsequence takes time in proportion to the product of both lengths

# Words of letters and digits; characters of scripts without spaces (Thai, kana, Han, Hangul) stand alone.
_WORD = re.compile(
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]++"
)


@dataclass(frozen=True, kw_only=True)
class RougeL(ItemComponent):
    """F1 of the longest common subsequence of words, in [0, 1], the best over the references.

    `ok` from `correct_at` upwards. An answer of more than `max_ratio` times the words of the longest reference scores 0:
    it could hold several answers. `stem` strips English endings. References must have at most `MAX_WORDS` words.
    """

    name: str = "rouge"
    style: str = "text"
    correct_at: float = 0.4
    max_ratio: float = 1.6
    stem: bool = True

    def __post_init__(self) -> None:
        check_style(self.style)
        if not 0.0 < self.correct_at <= 1.0 or self.max_ratio < 1.0:
            raise PresetError(
                f"correct_at is {self.correct_at} and max_ratio {self.max_ratio}. Give 0 < correct_at <= 1 <= max_ratio."
            )

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        references = [split_words(text) for text in reference_texts(sample.reference)]
        if not references or not all(0 < len(words) <= MAX_WORDS for words in references):
            reason = f"no reference text of 1 to {MAX_WORDS} words: {sample.reference!r}"[:200]
            return Score(None, "error", {"reason": f"{reason}; give text or a list of texts in `reference`"})
        answer = find_answer(sample, self.style)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        words = split_words(answer.value)
        most = self.max_ratio * max(map(len, references))
        if len(words) > most:
            return Score(None, "wrong", {"reason": f"{len(words)} words, over {most:g}"})
        scorer = _scorer(self.stem)
        value = max(float(scorer.score(" ".join(r), " ".join(words))["rougeL"].fmeasure) for r in references)
        return Score(value, "ok" if value >= self.correct_at else "wrong", {"words": len(words)})


@dataclass(frozen=True, kw_only=True)
class LengthBand(ItemComponent):
    """1 when the answer has between `low_ratio` and `high_ratio` times the words of the reference, else less.

    Outside, the value falls in proportion: half of the least, or twice the most allowed, is 0.5. `min_words` and
    `max_words` replace the ratios, and need no reference.
    """

    name: str = "length"
    style: str = "text"
    low_ratio: float = 0.6
    high_ratio: float = 1.3
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        check_style(self.style)
        least = 1 if self.min_words is None else self.min_words
        if (
            not 0.0 < self.low_ratio <= self.high_ratio
            or least < 1
            or (self.max_words is not None and self.max_words < least)
        ):
            raise PresetError("The length band is empty. Give 0 < low_ratio <= high_ratio and min_words <= max_words.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        lengths = [len(split_words(text)) for text in reference_texts(sample.reference)]
        if (self.min_words is None or self.max_words is None) and not any(lengths):
            return Score(
                None, "error", {"reason": "no reference text to take the length from; set min_words, max_words"}
            )
        least = self.min_words if self.min_words is not None else self.low_ratio * min(filter(None, lengths))
        most = self.max_words if self.max_words is not None else self.high_ratio * max(lengths)
        answer = find_answer(sample, self.style)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        count = len(split_words(answer.value))
        if least <= count <= most:
            return Score(self.high, "ok", {"words": count})
        return Score(count / least if count < least else most / count, "wrong", {"words": count})


def reference_texts(reference: Any) -> list[str]:
    """One text or a list of them; anything else is dropped."""
    texts = reference if isinstance(reference, list | tuple) else [reference]
    return [text for text in texts if isinstance(text, str) and text.strip()]


def split_words(text: str) -> list[str]:
    """Lower-case words, digits included; one character each in scripts that do not put spaces between words."""
    return _WORD.findall(text.lower())


class _Words:
    """rouge-score's own tokenizer knows only a to z and 0 to 9: every other text would be empty to it."""

    def __init__(self, stem: bool) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stem = PorterStemmer().stem if stem else None

    def tokenize(self, text: str) -> Sequence[str]:
        words = text.split()
        if self._stem is None:
            return words
        return [self._stem(word) if len(word) > 3 and word.isascii() else word for word in words]


@functools.cache
def _scorer(stem: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], tokenizer=_Words(stem))


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
        answer = find_answer(sample, self.style)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        most = min(MAX_CHARS, self.max_ratio * max(map(len, references)) + _SLACK)
        if len(answer.value) > most:
            return Score(None, "wrong", {"reason": f"{len(answer.value)} characters, over {most:g}"})
        value = float(_metric(self.word_order).sentence_score(answer.value, references).score) / 100.0
        return Score(min(1.0, value), "ok" if value >= self.correct_at else "wrong")


@functools.cache
def _metric(word_order: int) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)
