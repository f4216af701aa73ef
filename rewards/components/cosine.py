"""Correctness scaled by length along a cosine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewards.components.length import length_in_tokens
from rewards.components.verdicts import is_right
from rewards.errors import PresetError
from rewards.evaluation import run_component
from rewards.protocol import Component, Context, Sample, Score

__all__ = ["CosineLength", "cosine_between"]


def cosine_between(length: float, max_length: float, at_zero: float, at_max: float) -> float:
    """From `at_zero` at length 0 to `at_max` at `max_length`, along half a cosine; `at_max` for anything longer.

    >>> [cosine_between(n, 100, 1.0, 0.5) for n in (0, 50, 100, 200)]
    [1.0, 0.75, 0.5, 0.5]
    """
    share = min(max(length / max_length, 0.0), 1.0)
    return at_max + 0.5 * (at_zero - at_max) * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True, kw_only=True)
class CosineLength:
    """The verdict of `checker`, scaled: right answers fall with length, wrong ones rise.

    right: η = correct_short at length 0, correct_long at max_length; wrong: wrong_short, wrong_long;
    η(n) = η_long + ½(η_short − η_long)(1 + cos(π n / max_length)), n clamped to [0, max_length], in tokens
    (see `length_in_tokens`). Beyond max_length the value is `exceeded` when that is given, whatever the answer.
    `ok` says that the checker found the answer right.

    Source: the cosine reward of 2502.03373, which gives `exceeded` for a completion that reaches the maximum. Without
    the clamp the cosine turns back beyond it, and twice the maximum earns what nothing at all does.
    """

    checker: Component
    max_length: int
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    exceeded: float | None = None
    name: str = "cosine"
    version: str = "1"

    def __post_init__(self) -> None:
        if self.max_length <= 0:
            raise PresetError(f"max_length is {self.max_length}. Give the number of tokens a completion may have.")
        if min(self.correct_short, self.correct_long) <= max(self.wrong_short, self.wrong_long):
            raise PresetError(
                "A wrong answer could earn as much as a right one: "
                f"correct {self.correct_short} to {self.correct_long}, wrong {self.wrong_short} to {self.wrong_long}. "
                "Set both correct values above both wrong ones."
            )

    @property
    def low(self) -> float:
        return min(self.wrong_short, self.wrong_long, *([] if self.exceeded is None else [self.exceeded]))

    @property
    def high(self) -> float:
        return max(self.correct_short, self.correct_long)

    @property
    def floor(self) -> float:
        return self.low

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        verdicts = run_component(self.checker, samples, ctx)
        return [self._scaled(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]

    def _scaled(self, sample: Sample, verdict: Score) -> Score:
        right = is_right(verdict)
        if right is None:
            return verdict
        length, unit = length_in_tokens(sample)
        info = {**verdict.info, "length": length, "counted": unit}
        ends = (self.correct_short, self.correct_long) if right else (self.wrong_short, self.wrong_long)
        value = cosine_between(length, self.max_length, *ends)
        if self.exceeded is not None and length > self.max_length:
            value = self.exceeded
        return Score(value, verdict.status, info, verdict.seconds)
