"""How many seeds or problems would tell a difference? From the variances of a comparison that was made.

With S seeds an arm and P problems the standard error would be (see `kit.studies.paired`)

    SE²(S, P) = σ²ₛ / S + σ²ₚ / P + σ²ₛₚ / (S·P)

and a difference δ is found in 80 % of repetitions, at a two-sided level α, when

    |δ| >= ( t[1-α/2; ν] + t[0.80; ν] ) · SE(S, P)

with Satterthwaite's ν at that S and P. The variances are estimates from few runs: take the answer as an order of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable

from kit.evaluation.student import t_quantile
from kit.studies.paired import Parts

POWER = 0.8
MOST_SEEDS, MOST_PROBLEMS = 1000, 1_000_000


def detectable(parts: Parts, alpha: float = 0.05) -> float:
    """The smallest difference that a comparison of this size finds in 80 % of repetitions."""
    factor = t_quantile(1 - alpha / 2, parts.df) + t_quantile(POWER, parts.df)
    return float(factor * parts.variance**0.5)


def needed_seeds(parts: Parts, difference: float, alpha: float = 0.05) -> int | None:
    """Seeds an arm, on as many problems as now; None if 1000 are too few, or with one seed, which has no spread."""
    if parts.seeds is None or not difference:
        return None
    return _smallest(lambda seeds: _finds(at_size(parts, seeds, parts.n_problems), difference, alpha), 2, MOST_SEEDS)


def needed_problems(parts: Parts, difference: float, alpha: float = 0.05) -> int | None:
    """Held-out problems, with as many seeds as now; None if a million are too few: then seeds are what is missing."""
    if not difference:
        return None
    return _smallest(lambda count: _finds(at_size(parts, parts.n_seeds, count), difference, alpha), 2, MOST_PROBLEMS)


def at_size(parts: Parts, seeds: float, problems: int) -> Parts:
    """The variances as they would be expected with so many seeds an arm and problems."""
    cell = parts.both * parts.n_seeds * parts.n_problems  # σ²ₛₚ
    of_problems = max(0.0, parts.problems - parts.both) * parts.n_problems  # σ²ₚ
    if parts.seeds is None:
        return Parts(of_problems / problems, problems - 1, n_problems=problems)
    of_seeds = max(0.0, parts.seeds - parts.both) * parts.n_seeds  # σ²ₛ
    both = cell / (seeds * problems)
    per_seed = parts.seeds_df / max(1e-9, parts.n_seeds - 1)  # 1 with paired seeds, up to 2 without
    seeds_df = per_seed * (seeds - 1)
    return Parts(
        of_problems / problems + both,
        problems - 1,
        of_seeds / seeds + both,
        seeds_df,
        both,
        seeds_df * (problems - 1),
        problems,
        seeds,
        seeds < 3,
    )


def _finds(parts: Parts, difference: float, alpha: float) -> bool:
    return parts.df > 0 and detectable(parts, alpha) <= abs(difference)


def _smallest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number in [low, high] that is enough, where more never hurts; None if none is."""
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
