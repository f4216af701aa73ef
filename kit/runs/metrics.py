"""The numbers of a run: points of curves, and the steps of lines and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Point = tuple[float, float]
Metrics = Sequence[Mapping[str, Any]]
Evaluations = Mapping[str, Mapping[str, Any]]


def points(metrics: Metrics, *names: str, factor: float = 1.0) -> list[Point]:
    """(step, value) of the first of `names` that has any, by step; lines without it or with no finite value left out."""
    for name in names:
        values = {
            float(line.get("step", index)): factor * line[name]
            for index, line in enumerate(metrics, 1)
            if is_number(line.get(name))
        }
        if values:
            return sorted(values.items())
    return []


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def placed(evaluations: Evaluations) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, scores) of the evaluations that belong to a step, in order; those made anew later are none of them."""
    own = [scores for name, scores in evaluations.items() if name in ("before", "after") or name.startswith("step-")]
    return sorted(
        ((int(scores["step"]), scores) for scores in own if is_number(scores.get("step"))), key=lambda pair: pair[0]
    )


def result_of(evaluations: Evaluations) -> str | None:
    """The name of the evaluation of a run's result: `after` where there is one, else that of the latest step.

    None where nothing was scored after training began.
    """
    if evaluations.get("after"):
        return "after"
    steps = [
        (evaluations[name]["step"], name) for name in evaluations if name.startswith("step-") and evaluations[name]
    ]
    return max(steps)[1] if steps else None
