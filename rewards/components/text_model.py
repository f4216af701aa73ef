"""What all model-backed components share: each distinct text once, in batches, and failures sorted by whose they are."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rewards.components.local_models import Loaded, LocalModel
from rewards.protocol import Context, Sample, Score, failure_reason

__all__ = ["Measured", "TextModelComponent", "reference_texts"]

K = TypeVar("K")


class Measured(NamedTuple):
    """What a model says about one text; `info` is merged into the score's."""

    value: float
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TextModelComponent(ABC, Generic[K]):
    """A component that asks a local model about texts.

    Equal questions within a batch, as in a group that has collapsed, are asked once. A model that cannot be loaded or
    fails on everything is `infra`; one that fails on some texts only makes those an `error`. Values are rounded to six
    decimals, so that they do not depend on which texts happened to share a batch.
    """

    name: str
    model: LocalModel
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"
    threshold: float = 0.5
    batch_size: int = 16
    max_windows: int = 8

    @abstractmethod
    def question(self, sample: Sample) -> K | Score:
        """What to ask the model, hashable; or a score, when there is nothing to ask."""

    @abstractmethod
    def measure(self, loaded: Loaded, questions: Sequence[K]) -> list[Measured]:
        """One measurement per question, in order."""

    @abstractmethod
    def verdict(self, sample: Sample, measured: Measured) -> Score:
        """From the measurement to a score."""

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        asked = [self._question(sample) for sample in samples]
        distinct = list(dict.fromkeys(question for question in asked if not isinstance(question, Score)))
        answers = dict(zip(distinct, self._answers(distinct), strict=True))
        return [
            question if isinstance(question, Score) else self._verdict(sample, answers[question])
            for sample, question in zip(samples, asked, strict=True)
        ]

    def _question(self, sample: Sample) -> K | Score:
        try:
            return self.question(sample)
        except Exception as failure:
            return Score(None, "error", {"reason": failure_reason(failure)})

    def _verdict(self, sample: Sample, answer: Measured | Score) -> Score:
        if isinstance(answer, Score):
            return answer
        return self.verdict(sample, answer._replace(value=round(answer.value, 6)))

    def _answers(self, questions: Sequence[K]) -> list[Measured | Score]:
        if not questions:
            return []
        try:
            loaded = self.model.loaded()
        except Exception as failure:
            return [Score(None, "infra", {"reason": failure_reason(failure)})] * len(questions)
        try:
            return [*self.measure(loaded, questions)]
        except Exception:
            return self._one_by_one(loaded, questions)

    def _one_by_one(self, loaded: Loaded, questions: Sequence[K]) -> list[Measured | Score]:
        results: list[Measured | str] = []
        for question in questions:
            try:
                results += self.measure(loaded, [question])
            except Exception as failure:
                results.append(failure_reason(failure))
        some_worked = any(isinstance(result, Measured) for result in results)
        return [
            Score(None, "error" if some_worked else "infra", {"reason": result}) if isinstance(result, str) else result
            for result in results
        ]


def reference_texts(value: Any) -> list[str] | None:
    """The accepted texts in a reference: a string, a number, or a list of those. None when there is no reference.

    Raises:
        ValueError: anything else, or nothing in it that can be read.
    """
    if value is None:
        return None
    items = list(value) if isinstance(value, list | tuple) else [value]
    texts = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ValueError(f"reference is not text: {item!r}"[:200])
        texts.append(str(item).strip())
    if not texts or not all(texts):
        raise ValueError(f"reference is blank: {value!r}"[:200])
    for text in texts:
        text.encode()  # lone surrogates: a UnicodeEncodeError, which is a ValueError
    return texts
