"""The registry of the clips, and what several of them share.

The clips themselves are in `token_clip`, `sequence_clip` and `covariance_clip`; `kit.objective.clip` files them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_range
from kit.objective.registry import HookRegistry

clips = HookRegistry("clip")
ClipFunction = Callable[[TokenBatch], Tensor]
Report = Callable[[TokenBatch], dict[str, Tensor]]
Level = Literal["token", "sequence"]


def ratio_at(batch: TokenBatch, level: Level) -> Tensor:
    """The ratio of each token (B, T), or of each completion (B, 1): the geometric mean of its tokens' ratios."""
    return batch.ratio if level == "token" else batch.sequence_ratio


def over_tokens(values: Tensor, batch: TokenBatch) -> Tensor:
    """A value for each completion (B, 1) laid out over its tokens (B, T); one of shape (B, T) as it is."""
    return values.expand(batch.logps.shape)


def pessimistic(bounded: Tensor, ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """PPO's surrogate -min(bounded·A, clip(ratio, 1-eps_low, 1+eps_high)·A), (B, T) or (B, 1)."""
    return -torch.min(bounded * advantages, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)


def beyond(values: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Where a bound was active, 1, else 0: `values` below `low` with A < 0, or above `high` with A > 0.

    Finite numbers only, at padding too. In numbers rather than booleans: on a CPU that is twice as fast.
    """
    return {"low": above(-values, -advantages, -low), "high": above(values, advantages, high)}


def above(values: Tensor, advantages: Tensor, high: float) -> Tensor:
    """1 where `values` exceed `high` with A > 0, else 0."""
    return _step(values.detach() - high) * _step(advantages.detach().clone())


def _step(gap: Tensor) -> Tensor:
    """1 where positive, else 0; in place."""
    return gap.clamp_(min=0.0).sign_()


def with_fractions(function: ClipFunction, level: Level, eps_low: float, eps_high: float) -> ClipFunction:
    """Give a clip the report of where the ratio left [1-eps_low, 1+eps_high] in the direction of the advantage."""

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        return beyond(ratio_at(batch, level), batch.advantages, 1.0 - eps_low, 1.0 + eps_high)

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


def once_per_batch(report: Report) -> Report:
    """A report that the loss and the log both ask for, computed once, without gradient, and kept as long as the batch."""
    kept: WeakKeyDictionary[TokenBatch, dict[str, Tensor]] = WeakKeyDictionary()

    @functools.wraps(report)
    def remembered(batch: TokenBatch) -> dict[str, Tensor]:
        if batch not in kept:
            with torch.no_grad():
                kept[batch] = report(batch)
        return kept[batch]

    return remembered


def by_sign(positive: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` where `positive`, else `no`, in the dtype of `like` and without waiting for the device."""
    return torch.where(positive, like.new_full((), yes), like.new_full((), no))


def check_bounds(owner: str, eps_low: float, eps_high: float) -> None:
    """Raises `ConfigError` unless 0 <= eps_low < 1 and eps_high >= 0."""
    check_range(owner, "eps_low", eps_low, 0.0, 1.0)
    check_range(owner, "eps_high", eps_high, 0.0)
