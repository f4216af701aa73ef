"""Estimators and intervals for held-out scores. Standard library, numpy and mpmath only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
RESAMPLES = 2000
FLIPS = 10_000
TREND_POINTS, TREND_MINIMUM = 200, 8


class Estimate(NamedTuple):
    """A value with its 95 % interval, all in [0, 1]."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of `k` draws without replacement from `samples` is among the `correct` ones.

    Computes the unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al., arXiv 2107.03374, section 2.1, as a product, which
    does not overflow. Raises `ValueError` unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples; seen {correct=}, {samples=}, {k=}"
        )
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def wilson(correct: int, samples: int) -> Estimate:
    """Return a share with its Wilson score interval (Wilson 1927), which has width at 0 and 1, unlike a bootstrap."""
    if samples == 0:
        return Estimate(math.nan, 0.0, 1.0)
    share, z2 = correct / samples, Z_95**2
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z_95 / (1 + z2 / samples) * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2))
    # Rounding may push a bound past the share itself when it is 0 or 1.
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def bootstrap_mean(values: Sequence[float], seed: int = 0, *, shares: bool = False) -> Estimate:
    """Return the mean over problems with the percentile bootstrap interval (Efron 1979): 2,000 resamples of problems.

    With `shares`, the values are probabilities. If all are 0 or all are 1, every resample is the same, so the interval is
    Wilson's over the problems.
    """
    if not values:
        return Estimate(math.nan, 0.0, 1.0)
    data = np.asarray(values, dtype=np.float64)
    if shares and (not data.any() or np.all(data == 1.0)):
        return wilson(int(data.sum()), len(data))
    draws = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    low, high = np.percentile(data[draws].mean(axis=1), [2.5, 97.5])
    return Estimate(float(data.mean()), float(low), float(high))


def drop_p(before: Sequence[float], after: Sequence[float], seed: int = 0) -> float:
    """Return the one-sided p-value of "the mean over problems fell", from one score per problem before and after.

    Fisher's randomisation test of paired differences: without an effect, both signs of a difference are equally likely.
    Exact if all non-zero differences have the same size (right and wrong answers: McNemar's exact test), else from
    10,000 random signs. 1.0 if nothing differs.
    """
    falls = np.asarray(before, dtype=np.float64) - np.asarray(after, dtype=np.float64)
    falls = falls[falls != 0.0]
    if not len(falls):
        return 1.0
    sizes = np.abs(falls)
    if np.all(sizes == sizes[0]):
        down = int((falls > 0).sum())
        return math.fsum(math.comb(len(falls), count) / 2 ** len(falls) for count in range(down, len(falls) + 1))
    rng, above, block = np.random.default_rng(seed), 0, 1000
    for _ in range(FLIPS // block):
        signs = rng.integers(0, 2, size=(block, len(falls))) * 2.0 - 1.0
        above += int((signs @ sizes >= falls.sum() - 1e-12 * sizes.sum()).sum())
    return (1 + above) / (1 + FLIPS)


def rise_p(values: Sequence[float]) -> float:
    """Return the one-sided p-value of "the values rise over time": Mann-Kendall (Mann 1945), ties and continuity corrected.

    More than 200 values are first averaged in 200 segments. 1.0 below 8 values, where the normal approximation of
    Kendall's statistic is not accurate.
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) > TREND_POINTS:
        data = np.asarray([part.mean() for part in np.array_split(data, TREND_POINTS)])
    n = len(data)
    if n < TREND_MINIMUM:
        return 1.0
    score = float(np.triu(np.sign(data[None, :] - data[:, None])).sum())
    _, ties = np.unique(data, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if score <= 0 or variance <= 0:
        return 1.0
    return 0.5 * math.erfc((score - 1) / math.sqrt(2 * variance))


# --- Student's t ------------------------------------------------------------------------------------------------------


def t_cdf(t: float, df: float) -> float:
    """Return P(T <= t) for Student's t with `df` > 0 degrees of freedom, by the regularised incomplete beta function."""
    from mpmath import betainc

    tail = 0.5 * float(betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))
    return 1.0 - tail if t >= 0 else tail


@lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
    """Return the t at which P(T <= t) equals `probability`, in (0, 1), by bisection."""
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def two_sided_p(difference: float, standard_error: float, df: float) -> float:
    """Return the probability of a |t| this large without an effect: 1 if `difference` is 0, else 0 without an error."""
    if difference == 0:
        return 1.0
    return 0.0 if standard_error == 0 else 2 * (1 - t_cdf(abs(difference) / standard_error, df))
