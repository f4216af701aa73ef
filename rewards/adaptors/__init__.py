"""Presets as reward functions in the calling convention of each trainer.

TRL accepts None; the others do not, so an excluded completion (`not_applicable`, `infra`) counts as 0 there.
"""

from rewards.adaptors.trl import BatchEvaluator, TrlReward, TrlRewards
from rewards.adaptors.verl import EasyR1Reward, VerlReward

__all__ = ["BatchEvaluator", "EasyR1Reward", "TrlReward", "TrlRewards", "VerlReward"]
