"""Running one component safely, and the record of a whole preset's verdict."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewards.protocol import FAILURES, STATUSES, Component, Context, Sample, Score, Status, failure_reason

__all__ = ["Evaluation", "percentile", "run_component", "settle"]


@dataclass(frozen=True)
class Evaluation:
    """All components' verdicts on one batch of B completions; every list has length B, in the order of the samples.

    `values` are native (unweighted), `totals` the weighted sums over the components that are not None, and None where
    all of them are. `latencies` are seconds per item.
    """

    weights: Mapping[str, float]
    values: Mapping[str, list[float | None]]
    statuses: Mapping[str, list[Status]]
    infos: Mapping[str, list[Mapping[str, Any]]]
    latencies: Mapping[str, list[float]]
    totals: list[float | None]

    @property
    def failure_shares(self) -> dict[str, float]:
        """Per component: the share of completions with status error, timeout or infra."""
        return {name: _share([s in FAILURES for s in statuses]) for name, statuses in self.statuses.items()}

    @property
    def failure_share(self) -> float:
        """The share of completions that at least one component failed to score (error, timeout or infra)."""
        return _share([any(s in FAILURES for s in row) for row in zip(*self.statuses.values(), strict=True)])

    def status_shares(self, name: str) -> dict[Status, float]:
        """Share of each status for one component; all statuses are present, so that ranks log the same keys."""
        statuses = self.statuses[name]
        return {status: _share([s == status for s in statuses]) for status in STATUSES}

    def latency_ms(self, name: str, quantile: float) -> float:
        """Milliseconds per item at `quantile` (0 to 1) for one component."""
        return 1000.0 * percentile(self.latencies[name], quantile)


def run_component(component: Component, samples: Sequence[Sample], ctx: Context) -> list[Score]:
    """Scores in order, settled by policy. Never raises: a component that does scores every item as `error`."""
    if not samples:
        return []
    start = time.perf_counter()
    try:
        scores = list(component.score(samples, ctx))
        if len(scores) != len(samples):
            raise ValueError(f"{component.name!r} returned {len(scores)} scores for {len(samples)} completions")
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
        scores = [Score(None, "error", {"reason": failure_reason(failure)})] * len(samples)
    per_item = (time.perf_counter() - start) / len(samples)
    return [settle(component, score, per_item) for score in scores]


def settle(component: Component, score: Score, seconds: float = 0.0) -> Score:
    """Applies the value policy of `Score`; NaN, infinities, unknown statuses and non-scores become `error`."""
    if not isinstance(score, Score) or score.status not in STATUSES:
        return Score(component.floor, "error", {"reason": f"not a valid score: {score!r}"[:300]}, seconds)
    seconds = seconds if score.seconds is None else score.seconds
    if score.status in ("not_applicable", "infra"):
        return replace(score, value=None, seconds=seconds)
    if score.status in ("timeout", "error"):
        return replace(score, value=component.floor, seconds=seconds)
    if score.value is None and score.status != "ok":
        return replace(score, value=component.floor, seconds=seconds)
    try:
        value = float(score.value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        reason = f"value is not a finite number: {score.value!r}"[:300]
        return Score(component.floor, "error", {**score.info, "reason": reason}, seconds)
    return replace(score, value=value, seconds=seconds)


def percentile(values: Sequence[float], quantile: float) -> float:
    """Nearest-rank percentile; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
