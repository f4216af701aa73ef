"""Student's t distribution with any degrees of freedom, so that comparing runs needs nothing beyond numpy."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

NODES = 200


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) for Student's t with `df` > 0 degrees of freedom, within 1e-6.

    With t = √df·tan θ the density becomes cos^(df-1) θ, which Gauss-Legendre quadrature integrates from 0 to θ.
    """
    nodes, weights = _gauss_legendre()
    angle = math.atan(abs(t) / math.sqrt(df))
    inner = angle / 2 * float(np.sum(weights * np.cos(angle / 2 * (nodes + 1)) ** (df - 1)))
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    half = min(0.5, inner / whole)
    return 0.5 + half if t >= 0 else 0.5 - half


def t_quantile(probability: float, df: float) -> float:
    """The t that P(T <= t) equals `probability`, in (0, 1); by bisection."""
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
    """Probability of a |t| at least this large without any difference. 1 for no difference, 0 for one without error."""
    if difference == 0:
        return 1.0
    return 0.0 if standard_error == 0 else 2 * (1 - t_cdf(abs(difference) / standard_error, df))


@cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return nodes, weights
