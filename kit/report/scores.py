"""Held-out scores before and after training, and the significance of their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from kit.evaluation.results import problem_scores
from kit.evaluation.statistics import bootstrap_mean
from kit.runs.metrics import Evaluations, is_number, result_of

Scores = Mapping[str, Any]
CERTAIN = 0.05
"""Significance level."""
FEWEST = 6
"""Minimum number of changed problems: 5 changes in one direction have a two-sided p of 2 / 2^5 > 0.05."""


@dataclass(frozen=True)
class Difference:
    """After minus before, with a 95 % interval; `paired`: by problem, on the same problems."""

    value: float
    low: float
    high: float
    paired: bool
    problems: int
    better: int = 0
    worse: int = 0
    """Number of problems with a higher and a lower score afterwards, if paired."""
    chance: float | None = None
    """p-value of McNemar's exact test (1947) on the problems that changed."""

    @property
    def verdict(self) -> str:
        """better, worse, or not distinguishable."""
        certain = self.low > 0 or self.high < 0
        if self.paired:
            certain = certain and self.better + self.worse >= FEWEST
        if self.chance is not None:
            certain = certain and self.chance < CERTAIN
        if not certain:
            return "not distinguishable"
        return "better" if self.value > 0 else "worse"


def estimates(scores: Scores) -> list[str]:
    """Keys of scores with a value and an interval, in order."""
    return [key for key, value in scores.items() if isinstance(value, Mapping) and is_number(value.get("value"))]


def difference(key: str, before: Scores, after: Scores) -> Difference | None:
    """The change of the score `key`; None if one side does not have it."""
    old, new = problem_scores(before, key), problem_scores(after, key)
    same = identities(before) is not None and identities(before) == identities(after)
    if same and old is not None and new is not None and len(old) == len(new):
        pairs = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
        if pairs:
            changes = [b - a for a, b in pairs]
            better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
            chance = sign_test(better, worse) if key == "greedy_accuracy" else None
            return Difference(*bootstrap_mean(changes), True, len(pairs), better, worse, chance)
    first, last = before.get(key), after.get(key)
    if not (_whole(first) and _whole(last)):
        return None
    # The interval is computed from the two intervals (Newcombe's method, 1998).
    change = last["value"] - first["value"]
    below = math.hypot(last["value"] - last["low"], first["high"] - first["value"])
    above = math.hypot(last["high"] - last["value"], first["value"] - first["low"])
    return Difference(change, change - below, change + above, False, int(after.get("problems") or 0))


TITLES = {"better": "Better", "worse": "Worse", "not distinguishable": "No clear difference"}


def sentence(key: str, before: Scores, after: Scores, change: Difference) -> str:
    """The result of a run in a sentence.

    For example `Better: 0 % to 88 % of 100 held-out problems; 88 became right, 0 became wrong.`
    """
    title = TITLES[change.verdict]
    first, last = (percent(key, side[key]["value"]) for side in (before, after))
    if key == "greedy_accuracy":
        text = f"{title}: {first} to {last} of {change.problems} held-out problems"
        return f"{text}; {change.better} became right, {change.worse} became wrong." if change.paired else f"{text}."
    text = f"{title}: held-out reward {first} to {last} on {change.problems} problems"
    return f"{text}; {change.better} improved, {change.worse} got worse." if change.paired else f"{text}."


def percent(key: str, value: float, *, signed: bool = False) -> str:
    """`88 %` for an accuracy, `0.88` for a reward."""
    sign = "+" if signed and value >= 0 else ""
    text = f"{sign}{100 * value:.0f} %" if key == "greedy_accuracy" else f"{sign}{value:.2f}"
    return text.replace("-", "−")


def identities(scores: Scores) -> list[str] | None:
    """Content hashes of the problems; evaluations can be paired only if these are equal."""
    ids = (scores.get("per_problem") or {}).get("id")
    return list(ids) if ids else None


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact binomial test of `better` against `worse` with probability 1/2; 1 if nothing changed."""
    changed, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(changed, count) for count in range(fewer + 1))
    chance: float = 2 * tail / 2**changed
    return min(1.0, chance)


def _whole(estimate: Any) -> TypeGuard[Mapping[str, float]]:
    return isinstance(estimate, Mapping) and all(is_number(estimate.get(end)) for end in ("low", "value", "high"))


def ends(evaluations: Evaluations) -> tuple[Scores | None, Scores | None, str]:
    """The evaluation before training, that of the run's result, and the name of the latter."""
    first, name = evaluations.get("before"), result_of(evaluations)
    if name is None:
        return first, None, "after"
    last = evaluations[name]
    return first, last, name if name == "after" else f"after step {last['step']}"


def signed(value: float, low: float, high: float) -> str:
    """`+0.845 [+0.790, +0.895]`."""
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")
