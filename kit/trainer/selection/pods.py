"""Down-sampling of rollouts by variance (PODS, arXiv 2504.13818).

Of n rewards the m with the largest variance are always some of the highest and the rest of the lowest (the paper's lemma):
with the rewards sorted, m + 1 candidates are compared by prefix sums, O(n log n) in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def max_variance(rewards: Sequence[float], keep: int) -> list[int]:
    """Indices, ascending, of `keep` rewards with the largest population variance; NaN (no score) is taken last.

    Of subsets with equal variance the one with more of the low rewards; of equal rewards the first ones, so that what is
    kept of a flat group is its beginning. Raises `ValueError` unless 1 <= keep <= len(rewards).
    """
    if not 1 <= keep <= len(rewards):
        raise ValueError(f"{keep} of {len(rewards)} completions cannot be kept")
    scored = sorted((index for index in range(len(rewards)) if not math.isnan(rewards[index])), key=rewards.__getitem__)
    if len(scored) <= keep:
        rest = [index for index in range(len(rewards)) if math.isnan(rewards[index])]
        return sorted(scored + rest[: keep - len(scored)])
    # Shifted by the lowest: a constant added to all rewards changes no comparison.
    values = [rewards[index] - rewards[scored[0]] for index in scored]
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)
    best, best_low = -1.0, keep
    for low in range(keep, -1, -1):
        start = len(values) - (keep - low)
        total = sums[low] + sums[-1] - sums[start]
        variance = (squares[low] + squares[-1] - squares[start]) / keep - (total / keep) ** 2
        if variance > best + 1e-12 * max(1.0, best):
            best, best_low = variance, low
    # `scored` is in order of reward, then of place; from above, too, the first of equals are taken.
    rest = sorted(scored[best_low:], key=lambda index: (-rewards[index], index))
    return sorted([*scored[:best_low], *rest[: keep - best_low]])
