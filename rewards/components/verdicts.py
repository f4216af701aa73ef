"""One verdict on each completion, shared by every component of a preset that asks for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rewards.evaluation import run_component
from rewards.protocol import Component, Context, Sample, Score

__all__ = ["Shared", "is_right"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A component whose scores are kept with the samples, so that shaping may ask again at no cost.

    For checkers whose verdict does not depend on the context or on the other samples.
    """

    component: Component

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def itemwise(self) -> bool:
        return bool(getattr(self.component, "itemwise", False))

    @property
    def floor(self) -> float:
        return self.component.floor

    @property
    def low(self) -> float:
        return self.component.low

    @property
    def high(self) -> float:
        return self.component.high

    @property
    def version(self) -> str:
        return self.component.version

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        key = ("verdict", self.component)
        missing = [sample for sample in samples if key not in sample._memo]
        for sample, score in zip(missing, run_component(self.component, missing, ctx), strict=True):
            sample._memo[key] = score
        return [sample._memo[key] for sample in samples]


def is_right(score: Score) -> bool | None:
    """True for `ok`, False for `wrong` and `format`, None where the checker itself failed or was not applicable."""
    return {"ok": True, "wrong": False, "format": False}.get(score.status)
