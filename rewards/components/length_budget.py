"""Right, and within a number of tokens that each row may set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewards.components.length import length_in_tokens
from rewards.components.verdicts import is_right
from rewards.errors import PresetError
from rewards.evaluation import run_component
from rewards.protocol import Component, Context, Sample, Score, shown

__all__ = ["LengthBudget"]


@dataclass(frozen=True, kw_only=True)
class LengthBudget:
    """The verdict of `checker` c (1 or 0), with n tokens against a budget of N.

    `max`: c · clip(slope (N − n) + offset, 0, 1), so a right answer within the budget earns at least `offset` and one
    far over it nothing. `exact`: c − min(1, slope |N − n|).
    N is the row's column `column` where there is one, else `budget`; n as in `length_in_tokens`. `ok` says that the
    checker found the answer right. A row without a usable budget is an `error`.

    Source: L1, 2503.04697, equations 1 (exact, there not clipped) and 2 (max); slope 0.0003, offset 0.5.
    """

    checker: Component
    mode: str = "max"
    budget: int | None = None
    column: str = "budget"
    slope: float = 0.0003
    offset: float = 0.5
    name: str = "budget"
    high: float = 1.0
    version: str = "1"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "exact"):
            raise PresetError(f"mode is {self.mode!r}. Use one of: exact, max.")
        if self.slope <= 0 or not 0 < self.offset <= 1:
            raise PresetError(f"Needs slope > 0 and 0 < offset <= 1, got slope {self.slope}, offset {self.offset}.")
        if self.budget is not None and self.budget <= 0:
            raise PresetError(f"budget is {self.budget}. Give a number of tokens, or None to take it from each row.")

    @property
    def low(self) -> float:
        return 0.0 if self.mode == "max" else -1.0

    @property
    def floor(self) -> float:
        return self.low

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        verdicts = run_component(self.checker, samples, ctx)
        return [self._score(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]

    def _score(self, sample: Sample, verdict: Score) -> Score:
        right = is_right(verdict)
        if right is None:
            return verdict
        budget = _budget(sample.columns.get(self.column), self.budget)
        if budget is None:
            reason = f"no budget: column {self.column!r} holds {shown(sample.columns.get(self.column), 100)}"
            return Score(None, "error", {"reason": f"{reason}; give a positive number there, or budget="})
        length, unit = length_in_tokens(sample)
        if self.mode == "exact":
            value = right - min(1.0, self.slope * abs(budget - length))
        else:
            value = right * min(1.0, max(0.0, self.slope * (budget - length) + self.offset))
        info = {**verdict.info, "length": length, "counted": unit, "budget": budget}
        return Score(value, verdict.status, info, verdict.seconds)


def _budget(given: object, otherwise: int | None) -> float | None:
    if given is None:
        return otherwise
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        budget = float(given)
    except (ValueError, OverflowError):
        return None
    return budget if math.isfinite(budget) and budget > 0 else None
