"""Weights that change over training: any `f(step, total_steps) -> float`, or one of these records.

A record is a line through points (fraction of the run, weight), level outside them. Only such a course can be checked
when a preset is built; other callables need `allow_shaping_above_correctness=True` beside a checker.

>>> fading = Linear(start=0.5, end=0.1, until=0.5)
>>> [round(fading(step, 100), 3) for step in (0, 25, 50, 100)]
[0.5, 0.3, 0.1, 0.1]
>>> Piecewise(points=((0.0, 0.0), (0.2, 1.0), (1.0, 0.5)))(60, 100)
0.75
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from rewards.errors import PresetError

Schedule: TypeAlias = Callable[[int, int], float]
Weight: TypeAlias = float | Schedule

_POINTS_NEEDED = "Give points (fraction, weight) with finite weights and fractions that rise within 0 to 1"


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Straight lines between points (fraction of the run, weight). Where the run's length is not known, the start.

    Raises:
        PresetError: no points, or fractions that do not rise within 0 to 1.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        fractions = [fraction for fraction, _ in self.points]
        rising = all(left < right for left, right in pairwise(fractions))
        finite = all(math.isfinite(weight) for _, weight in self.points)
        if not (fractions and rising and finite and fractions[0] >= 0.0 and fractions[-1] <= 1.0):
            raise PresetError(f"A schedule has points {self.points}. {_POINTS_NEEDED}.")

    def __call__(self, step: int, total_steps: int) -> float:
        return self.at(min(1.0, max(0.0, step / total_steps)) if total_steps > 0 else 0.0)

    def at(self, fraction: float) -> float:
        """The weight at this fraction of the run."""
        if fraction <= self.points[0][0]:
            return self.points[0][1]
        for (left, low), (right, high) in pairwise(self.points):
            if fraction <= right:
                return low + (high - low) * (fraction - left) / (right - left)
        return self.points[-1][1]


class Linear(Piecewise):
    """A line from `start` to `end` between the fractions `since` and `until` of the run, level before and after.

    Raises:
        PresetError: `since` and `until` do not rise within 0 to 1.
    """

    def __init__(self, *, start: float, end: float, since: float = 0.0, until: float = 1.0) -> None:
        super().__init__(points=((since, start), (until, end)))


def weight_at(weight: Weight, step: int, total_steps: int) -> float:
    """The weight at a step.

    Raises:
        PresetError: a schedule gives something that is no finite number.
    """
    value = weight(step, total_steps) if callable(weight) else weight
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PresetError(f"A weight is {value!r} at step {step} of {total_steps}. Give a finite number.")
    return float(value)


def corners(weight: Weight) -> list[float] | None:
    """Fractions of the run between which a weight is a straight line; None where nothing is known of its course."""
    if not callable(weight):
        return []
    return [fraction for fraction, _ in weight.points] if isinstance(weight, Piecewise) else None
