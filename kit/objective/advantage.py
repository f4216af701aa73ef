"""Advantage estimators: `RewardBatch` -> (N,), or (N, T) for token-level ones.

A completion without a score (NaN reward) gets advantage 0 and does not count in its group's statistics, as in TRL.
Groups are told by id: they may differ in size and come in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kit.objective.batch import RewardBatch
from kit.objective.registry import HookRegistry

_NO_TIME = (
    "it compares whole completions, one reward each, so there is no time course for γ or λ to act on. "
    "Estimators over tokens that have them: token_returns, reinforce_pp, reinforce_pp_baseline, gae."
)
advantages = HookRegistry("advantage", hints=dict.fromkeys(("gamma", "lam", "lambda"), _NO_TIME))
AdvantageFunction = Callable[[RewardBatch], Tensor]

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value."""


@advantages.register("group_zscore", formula="A = (R - mean_group) / (std_group + 1e-4)")
def group_zscore() -> AdvantageFunction:
    """(R - mean) / (std + 1e-4) within each group, with the unbiased standard deviation.

    A group of one has std 0 and advantage 0. Source: DeepSeekMath, arXiv 2402.03300, as TRL computes it
    (`scale_rewards="group"`).
    """

    def function(batch: RewardBatch) -> Tensor:
        centred, count, index = _centred(batch)
        squares = _group_sum(centred**2, index, count.shape[0])
        std = torch.sqrt(squares / (count - 1).clamp(min=1.0))
        return centred / (std + STD_EPSILON)[index]

    return function


@advantages.register("group_mean", formula="A = R - mean_group")
def group_mean() -> AdvantageFunction:
    """R - mean within each group, not divided by the spread. Source: Dr. GRPO, arXiv 2503.20783."""

    def function(batch: RewardBatch) -> Tensor:
        return _centred(batch)[0]

    return function


@advantages.register("batch_zscore", formula="A = (R - mean_group) / (std_batch + 1e-4)")
def batch_zscore() -> AdvantageFunction:
    """(R - mean of the group) / (unbiased std of all rewards of the batch + 1e-4).

    Source: arXiv 2508.08221, as TRL computes it (`scale_rewards="batch"`).
    """

    def function(batch: RewardBatch) -> Tensor:
        scored = batch.rewards[batch.scorable]
        std = scored.std() if scored.numel() > 1 else scored.new_zeros(())
        return _centred(batch)[0] / (std + STD_EPSILON)

    return function


@advantages.register("leave_one_out", formula="A = R - mean of the others of the group")
def leave_one_out() -> AdvantageFunction:
    """R - mean of the other completions of the group, which is G/(G-1) · (R - mean).

    A group of one has no others to compare with: its advantage is 0. Source: RLOO, arXiv 2402.14740.
    """

    def function(batch: RewardBatch) -> Tensor:
        centred, count, index = _centred(batch)
        return centred * (count / (count - 1).clamp(min=1.0))[index]

    return function


def _centred(batch: RewardBatch) -> tuple[Tensor, Tensor, Tensor]:
    """R - group mean (N,), 0 where unscorable; scorable completions of each group (groups,); group index (N,)."""
    ids, index = torch.unique(batch.group, return_inverse=True)
    groups = ids.shape[0]
    rewards = batch.rewards.masked_fill(~batch.scorable, 0.0)
    count = _group_sum(batch.scorable.to(rewards.dtype), index, groups)
    mean = _group_sum(rewards, index, groups) / count.clamp(min=1.0)
    return (rewards - mean[index]).masked_fill(~batch.scorable, 0.0), count, index


def _group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add_(0, index, values)
