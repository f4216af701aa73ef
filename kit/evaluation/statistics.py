"""Estimators and intervals for held-out scores. Standard library and numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value with its 95 % interval, all in [0, 1]."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` draws without replacement from `samples` is among the `correct` ones.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al., arXiv 2107.03374, section 2.1, as a product, which does not
    overflow. Raises `ValueError` unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples; seen {correct=}, {samples=}, {k=}"
        )
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def wilson(correct: int, samples: int) -> Estimate:
    """A share with its Wilson score interval (Wilson 1927): honest near 0 and 1, where a bootstrap has no width."""
    if samples == 0:
        return Estimate(math.nan, 0.0, 1.0)
    share, z2 = correct / samples, Z_95**2
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z_95 / (1 + z2 / samples) * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2))
    # Rounding may push a bound past the share itself when it is 0 or 1.
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def bootstrap_mean(values: Sequence[float], seed: int = 0, *, shares: bool = False) -> Estimate:
    """Mean over problems with the percentile bootstrap interval (Efron 1979): 2,000 resamples of problems.

    With `shares` the values are probabilities. If all are 0 or all are 1, every resample is the same and the interval
    would have no width; it is Wilson's over the problems then.
    """
    if not values:
        return Estimate(math.nan, 0.0, 1.0)
    data = np.asarray(values, dtype=np.float64)
    if shares and (not data.any() or np.all(data == 1.0)):
        return wilson(int(data.sum()), len(data))
    draws = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    low, high = np.percentile(data[draws].mean(axis=1), [2.5, 97.5])
    return Estimate(float(data.mean()), float(low), float(high))
