"""The numbers of a run: points of curves, and the steps of lines and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Point = tuple[float, float]
Metrics = Sequence[Mapping[str, Any]]
Evaluations = Mapping[str, Mapping[str, Any]]
ENDS = ("low", "value", "high")
"""Of an estimate with its 95 % interval."""


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


def step_of(name: str, last: int) -> int | None:
    """The optimiser step of an evaluation by its name: `before`, `step-00050`, `after`; None for any other."""
    number = name.removeprefix("step-")
    return {"before": 0, "after": last}.get(name, int(number) if number.isdigit() else None)


def placed(metrics: Metrics, evaluations: Evaluations) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, scores) of the evaluations that belong to a step, in order; those made anew later are none of them."""
    last = last_step(metrics)
    steps = {name: step_of(name, last) for name in evaluations}
    # What an evaluation says of itself counts more than its name.
    known = {
        name: int(scores["step"]) if is_number(scores.get("step")) else steps[name]
        for name, scores in evaluations.items()
        if steps[name] is not None
    }
    chosen = [(step, evaluations[name]) for name, step in known.items() if step is not None]
    return sorted(chosen, key=lambda pair: pair[0])


def result_of(evaluations: Evaluations, last: int = 0) -> str | None:
    """The name of the evaluation of a run's result: `after` where there is one, else that of the latest step.

    After a rollback `after` is of an earlier step than others, whose weights were thrown away. `last` is the run's last
    step. None where nothing was scored after training began.
    """
    if evaluations.get("after"):
        return "after"
    steps = {name: step_of(name, last) for name, scores in evaluations.items() if name != "before" and scores}
    known = [
        (own_step if is_number(own_step := evaluations[name].get("step")) else step, name)
        for name, step in steps.items()
        if step is not None
    ]
    return max(known)[1] if known else None


def last_step(metrics: Metrics) -> int:
    """The last optimiser step on record; 0 without one."""
    return max((int(line.get("step") or 0) for line in metrics), default=0)
