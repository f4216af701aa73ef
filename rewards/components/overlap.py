"""Overlap with a reference text: ROUGE-L by words, chrF by characters, and a band of lengths."""

import functools
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import AnswerComponent, reference_texts
from rewards.errors import PresetError
from rewards.protocol import Sample, Score

MAX_WORDS = 600  # the longest common subsequence takes time in proportion to the product of both lengths

# Words of letters and digits; characters of scripts without spaces (Thai, kana, Han, Hangul) stand alone.
_WORD = re.compile(
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]++"
)


@dataclass(frozen=True, kw_only=True)
class _Overlap(AnswerComponent):
    """Overlap in [0, 1], the best over the references; `ok` from `correct_at` upwards.

    An answer of more than `max_ratio` times the length of the longest reference scores 0: it could hold several answers.
    """

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
        if not references or not all(self.is_usable(reference) for reference in references):
            reason = f"no reference text that can be compared: {sample.reference!r}"[:200]
            raise ValueError(f"{reason}; give text or a list of texts in `reference`")
        return references

    @abstractmethod
    def is_usable(self, reference: str) -> bool:
        """Whether a reference has a length that can be compared."""


@dataclass(frozen=True, kw_only=True)
class RougeL(_Overlap):
    """F1 of the longest common subsequence of words, in [0, 1], the best over the references.

    `ok` from `correct_at` upwards. An answer of more than `max_ratio` times the words of the longest reference scores 0:
    it could hold several answers. `stem` strips English endings. References must have at most `MAX_WORDS` words.
    """

    name: str = "rouge"
    correct_at: float = 0.4
    stem: bool = True

    def is_usable(self, reference: str) -> bool:
        return 0 < len(split_words(reference)) <= MAX_WORDS

    def judge(self, answer: str, expected: list[str], sample: Sample) -> Score:
        references, words = [split_words(text) for text in expected], split_words(answer)
        most = self.max_ratio * max(map(len, references))
        if len(words) > most:
            return Score(None, "wrong", {"reason": f"{len(words)} words, over {most:g}"})
        scorer = _scorer(self.stem)
        value = max(float(scorer.score(" ".join(r), " ".join(words))["rougeL"].fmeasure) for r in references)
        return Score(value, "ok" if value >= self.correct_at else "wrong", {"words": len(words)})


@dataclass(frozen=True, kw_only=True)
class LengthBand(AnswerComponent):
    """1 when the answer has between `low_ratio` and `high_ratio` times the words of the reference, else less.

    Outside, the value falls in proportion: half of the least, or twice the most allowed, is 0.5. `min_words` and
    `max_words` replace the ratios, and need no reference.
    """

    name: str = "length"
    answer_in: str = "text"
    low_ratio: float = 0.6
    high_ratio: float = 1.3
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 if self.min_words is None else self.min_words
        most = least if self.max_words is None else self.max_words
        if not 0.0 < self.low_ratio <= self.high_ratio or least < 1 or most < least:
            raise PresetError("The length band is empty. Give 0 < low_ratio <= high_ratio and min_words <= max_words.")

    def expected(self, sample: Sample) -> tuple[float, float]:
        if self.min_words is not None and self.max_words is not None:
            return self.min_words, self.max_words
        lengths = [len(split_words(text)) for text in reference_texts(sample.reference) or []]
        if not any(lengths):
            raise ValueError("no reference text to take the length from; set min_words, max_words")
        least = self.min_words if self.min_words is not None else self.low_ratio * min(filter(None, lengths))
        return least, self.max_words if self.max_words is not None else self.high_ratio * max(lengths)

    def judge(self, answer: str, expected: tuple[float, float], sample: Sample) -> Score:
        (least, most), count = expected, len(split_words(answer))
        if least <= count <= most:
            return Score(self.high, "ok", {"words": count})
        return Score(count / least if count < least else most / count, "wrong", {"words": count})


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
class Chrf(_Overlap):
    """chrF / 100 in [0, 1], the best over the references; chrF++ with `word_order=2`.

    `ok` from `correct_at` upwards. An answer of more than `max_ratio` times the characters of the longest reference
    scores 0: chrF favours recall, and would pay for several translations in one.
    """

    name: str = "chrf"
    word_order: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.word_order not in (0, 1, 2):
            raise PresetError(f"word_order is {self.word_order}. Give 0, 1 or 2.")

    def is_usable(self, reference: str) -> bool:
        return len(reference) <= MAX_CHARS

    def judge(self, answer: str, expected: list[str], sample: Sample) -> Score:
        most = min(MAX_CHARS, self.max_ratio * max(map(len, expected)) + _SLACK)
        if len(answer) > most:
            return Score(None, "wrong", {"reason": f"{len(answer)} characters, over {most:g}"})
        value = float(_metric(self.word_order).sentence_score(answer, expected).score) / 100.0
        return Score(min(1.0, value), "ok" if value >= self.correct_at else "wrong")


@functools.cache
def _metric(word_order: int) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)
