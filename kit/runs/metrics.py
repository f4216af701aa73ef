"""Metrics of a run: points of curves, and evaluations by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Point = tuple[float, float]
Metrics = Sequence[Mapping[str, Any]]
Evaluations = Mapping[str, Mapping[str, Any]]


def points(metrics: Metrics, *names: str, factor: float = 1.0) -> list[Point]:
    """(step, value) of the first of `names` that has finite values, sorted by step. Lines without one are left out."""
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
    """Whether a value is a finite number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def placed(evaluations: Evaluations) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, scores) of the run's evaluations, sorted by step, without those of `grpo-kit eval`."""
    names = [name for name in evaluations if name in ("before", "after") or name.startswith("step-")]
    results = [evaluations[name] for name in names if is_number(evaluations[name].get("step"))]
    return sorted(((int(scores["step"]), scores) for scores in results), key=lambda pair: pair[0])


def result_of(evaluations: Evaluations) -> str | None:
    """The name of the evaluation of a run's result: `after` if there is one, else that of the latest step.

    None if there is no evaluation after the start of training.
    """
    if evaluations.get("after"):
        return "after"
    steps = [
        (evaluations[name]["step"], name) for name in evaluations if name.startswith("step-") and evaluations[name]
    ]
    return max(steps)[1] if steps else None
