"""Tests whether one arm is better than another: paired differences over problems and seeds with their standard errors.

Scores x (S, P): S runs (seeds) of one arm on the same P held-out problems. The difference D of two arms varies for three
reasons: other seeds would give other weights (σ²ₛ), other problems would be easier for one arm (σ²ₚ), and their interaction
(σ²ₛₚ, which includes the randomness of single answers):

    Var(D) = σ²ₛ / S + σ²ₚ / P + σ²ₛₚ / (S·P)

Resampling seeds alone has the variance Vs = σ²ₛ/S + σ²ₛₚ/(SP), problems alone Vp = σ²ₚ/P + σ²ₛₚ/(SP), both cell by cell
Vsp = σ²ₛₚ/(SP); so Var(D) = Vs + Vp - Vsp (two-way clustering: Cameron, Gelbach & Miller, J. Bus. Econ. Stat. 2011). These
bootstrap variances of a mean have a closed form, used here with the factor n/(n-1) that resampling few seeds lacks. The
interval uses Student's t with Satterthwaite's degrees of freedom, because three seeds are too few for percentiles. With two
seeds per arm, t has the degrees of freedom of the seeds' variance (1 if paired): that variance is often near 0 by chance, so
that Satterthwaite's would be those of the problems.

A difference δ is found in 80 % of repetitions, at a two-sided level α, when |δ| >= ( t[1-α/2; ν] + t[0.80; ν] ) · SE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kit.evaluation.statistics import t_quantile, two_sided_p

Floats = NDArray[np.float64]
LEVEL = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Parts:
    """Variances of a difference by their source, with degrees of freedom. `seeds` is None for one seed."""

    problems: float
    problems_df: float
    seeds: float | None = None
    seeds_df: float = 0.0
    both: float = 0.0
    both_df: float = 0.0
    n_problems: int = 0
    n_seeds: float = 1.0
    """Seeds per arm; the harmonic mean if the numbers differ."""
    few_seeds: bool = False
    """Whether an arm has two seeds. Their variance is often near 0 by chance, so its degrees of freedom are used."""

    @property
    def variance(self) -> float:
        """Variance of the difference, at least that of each source, because the estimates are noisy."""
        if self.seeds is None:
            return self.problems
        return max(self.seeds + self.problems - self.both, self.seeds, self.problems)

    @property
    def df(self) -> float:
        """Satterthwaite's degrees of freedom (Biometrics Bull. 1946) of `variance`; with two seeds, those of the seeds."""
        if self.seeds is None:
            return self.problems_df
        if self.few_seeds:
            return self.seeds_df
        terms = [(self.seeds, self.seeds_df), (self.problems, self.problems_df), (self.both, self.both_df)]
        spread = sum(variance**2 / df for variance, df in terms)
        return max(self.variance**2 / spread, self.seeds_df) if spread else self.seeds_df


@dataclass(frozen=True)
class Difference:
    """Arm minus baseline with its 95 % interval and two-sided p."""

    value: float
    low: float
    high: float
    p: float
    parts: Parts

    @property
    def standard_error(self) -> float:
        """Standard error of `value`, in its unit."""
        return float(np.sqrt(self.parts.variance))

    @property
    def of_the_method(self) -> bool:
        """Whether the error includes the variance between seeds. Otherwise the difference only holds for these weights."""
        return self.parts.seeds is not None


def difference(baseline: Floats, arm: Floats, *, paired_seeds: bool) -> Difference:
    """The difference arm - baseline of scores (S, P) and (S', P) on the same problems in the same order.

    With `paired_seeds`, row s of both has the same seed, and S = S'. If an arm has one row, only problems are resampled, and
    the result holds for these weights. Raises `ValueError` for wrong shapes or fewer than 2 problems.
    """
    value, parts, p = weigh(baseline, arm, paired_seeds=paired_seeds)
    error = float(np.sqrt(parts.variance))
    half = t_quantile(0.5 + LEVEL / 2, parts.df) * error if error else 0.0
    return Difference(value, value - half, value + half, p, parts)


def weigh(baseline: Floats, arm: Floats, *, paired_seeds: bool) -> tuple[float, Parts, float]:
    """The difference, its variances, and its two-sided p-value; see `difference`."""
    baseline, arm = np.asarray(baseline, float), np.asarray(arm, float)
    if baseline.ndim != 2 or arm.ndim != 2 or baseline.shape[1] != arm.shape[1] or arm.shape[1] < 2:
        raise ValueError(f"scores must be (seeds, problems) on the same >= 2 problems: {baseline.shape}, {arm.shape}")
    if paired_seeds and len(baseline) != len(arm):
        raise ValueError(f"paired seeds, but {len(baseline)} and {len(arm)} runs")
    value, parts = float(arm.mean() - baseline.mean()), _parts(baseline, arm, paired_seeds)
    error = float(np.sqrt(parts.variance))
    # All problems differ by the same amount, so there is no variance. Use a sign test.
    p = two_sided_p(value, error, parts.df) if error or not value else min(1.0, 2 * 0.5 ** arm.shape[1])
    return value, parts, p


def scalar_difference(baseline: Sequence[float], arm: Sequence[float], *, paired: bool) -> tuple[float, float, float]:
    """Difference of means over runs with its 95 % t interval (Welch's if not paired). Needs 2 runs per arm."""
    first, second = np.asarray(baseline, float), np.asarray(arm, float)
    value = float(second.mean() - first.mean())
    variance, df = _between([second - first] if paired else [first, second])
    half = t_quantile(0.5 + LEVEL / 2, df) * float(np.sqrt(variance)) if variance else 0.0
    return value, value - half, value + half


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm, Scand. J. Stat. 1979): the smallest times m, the next times m-1, ..."""
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = most
    return corrected


def _parts(baseline: Floats, arm: Floats, paired_seeds: bool) -> Parts:
    problems = arm.shape[1]
    of_problems = float(np.var(arm.mean(axis=0) - baseline.mean(axis=0), ddof=1)) / problems
    fewest = min(len(baseline), len(arm))
    if fewest < 2:
        return Parts(of_problems, problems - 1, n_problems=problems)
    samples = [arm - baseline] if paired_seeds else [baseline, arm]
    seeds, seeds_df = _between([scores.mean(axis=1) for scores in samples])
    both, both_df = _combined([_interaction(scores) for scores in samples])
    count = len(arm) if paired_seeds else 2 / (1 / len(baseline) + 1 / len(arm))
    return Parts(of_problems, problems - 1, seeds, seeds_df, both, both_df, problems, count, fewest == 2)


def _between(samples: Sequence[Floats]) -> tuple[float, float]:
    """Variance of the mean (or of the difference of two means), and its degrees of freedom."""
    return _combined([(float(np.var(values, ddof=1)) / len(values), len(values) - 1.0) for values in samples])


def _interaction(scores: Floats) -> tuple[float, float]:
    """σ²ₛₚ / (S·P) of scores (S, P): the residual variance without the means of runs and problems."""
    seeds, problems = scores.shape
    rest = scores - scores.mean(axis=1, keepdims=True) - scores.mean(axis=0, keepdims=True) + scores.mean()
    df = float((seeds - 1) * (problems - 1))
    return float(np.sum(rest**2)) / df / (seeds * problems), df


def _combined(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sum of independent variances with Satterthwaite's degrees of freedom; if all are 0, the smallest."""
    total = sum(variance for variance, _ in terms)
    if not total:
        return 0.0, min(df for _, df in terms)
    return total, total**2 / sum(variance**2 / df for variance, df in terms)


def detectable(parts: Parts, alpha: float = 0.05) -> float:
    """The smallest difference that is significant in 80 % of comparisons of this size."""
    factor = t_quantile(1 - alpha / 2, parts.df) + t_quantile(POWER, parts.df)
    return float(factor * parts.variance**0.5)
