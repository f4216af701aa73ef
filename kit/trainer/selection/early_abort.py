"""Early abort of decided groups: how likely is it that the rest of a group has the reward of its beginning?

The chance q that a completion has that reward is taken to be Beta(a, b) distributed beforehand. With a prompt in memory, a and
b are its pass rate (or failure rate) times `WEIGHT`, plus 1/2 each; without, a = b = 1, the rule of succession. After k
completions that all have it,

    P(the other G - k have it, too) = prod_{i=k}^{G-1} (a + i) / (a + b + i)

What is aborted would have been flat with at least the probability asked for, and flat groups have no gradient: what is lost is
that of the others. For a reward of two values and advantages made of rewards alone, the expected gradient of a group with
s passes is c(s) times that of the pass rate, c(s) >= 0, so that aborting some makes the steps of some prompts shorter and turns
none around: a bias of the weights of prompts, towards those of middling difficulty. For other rewards there is no such
guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WEIGHT = 4.0
"""How many completions the memory of a prompt counts for."""


def probability_of_flat(begun: int, size: int, rate: float | None = None) -> float:
    """That all of `size` completions have the reward that the first `begun` have, all the same one.

    `rate`: how often completions of this prompt had that reward before, in [0, 1]; None: not known.
    """
    first, second = (1.0, 1.0) if rate is None else (WEIGHT * rate + 0.5, WEIGHT * (1.0 - rate) + 0.5)
    return math.prod((first + i) / (first + second + i) for i in range(begun, size))


def is_decided(rewards: Sequence[float], size: int, confidence: float, pass_rate: float | None, high: bool) -> bool:
    """Whether a group of `size` need not be finished, from the rewards of its beginning.

    `pass_rate`: in memory; `high`: whether the common reward is in the upper half of those seen. A completion without a score
    leaves it open.
    """
    if any(math.isnan(reward) for reward in rewards) or min(rewards) != max(rewards):
        return False
    rate = None if pass_rate is None else pass_rate if high else 1.0 - pass_rate
    return probability_of_flat(len(rewards), size, rate) >= confidence
