"""Presets as reward functions of other trainers, each called by that trainer's own convention.

TRL knows None; the others do not, so a completion that is excluded (`not_applicable`, `infra`) counts as 0 there.
"""

from rewards.adaptors.trl import BatchEvaluator, TrlReward, TrlRewards
from rewards.adaptors.verl import EasyR1Reward, VerlReward

__all__ = [
    "BatchEvaluator",
    "EasyR1Reward",
    "TrlReward",
    "TrlRewards",
    "VerlReward",
]
