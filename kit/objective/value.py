"""The maths of a value head: returns, advantages over time, the head's loss and how much of the returns it explains.

Time is counted in live tokens: holes in a mask, which tool calls leave, and padding do not discount. Every function
takes and returns (N, T) tensors and knows nothing of hooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kit.errors import ConfigError


@dataclass(frozen=True)
class ValueSettings:
    """How a value head is trained: `learning_rate` > 0, and `clip` > 0 as in `value_loss`, or None.

    Raises `ConfigError` with what was seen.
    """

    learning_rate: float = 1e-3
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("clip", self.clip)):
            if value is None and name == "clip":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"value head: {name} must be a finite number above 0, got {value!r}.")


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum over live u >= t of gamma^(live tokens from t to u) · r_u, (N, T); 0 where the mask is False.

    0 <= gamma <= 1.
    """
    order = _live_first(mask)
    packed = rewards.masked_fill(~mask, 0.0).gather(1, order)
    return _unpacked(_discounted_sum(packed, gamma), order, mask)


def generalized_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum_l (gamma·lam)^l · delta_{t+l} with delta_t = r_t + gamma·V_{t+1} - V_t, (N, T); 0 where masked.

    t+1 is the next live token; the value after the last one is 0. 0 <= gamma, lam <= 1. Source: arXiv 1506.02438.
    """
    order = _live_first(mask)
    reward, value = (x.masked_fill(~mask, 0.0).gather(1, order) for x in (rewards, values))
    delta = reward + gamma * _shifted(value, 1) - value
    return _unpacked(_discounted_sum(delta, gamma * lam), order, mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5·max((V - R)², (V_clipped - R)²) at each token, V_clipped = V within `clip` of the value at the rollout.

    (B, T) all; gradient through `values` alone. `clip` None: 0.5·(V - R)². Source: the implementation behind PPO,
    arXiv 1707.06347.
    """
    old_values, returns = old_values.detach(), returns.detach()
    loss = (values - returns) ** 2
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.max(loss, (near - returns) ** 2)
    return 0.5 * loss


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over live tokens, a detached scalar: 1 is perfect, 0 no better than a constant.

    0 also where there is nothing to explain: returns that are all equal, or no live token.
    """
    seen, error = returns.detach()[mask], (returns - values).detach()[mask]
    if seen.numel() == 0:
        return returns.new_zeros(())
    # The mean of equal numbers may be off by rounding, which would make their variance more than 0.
    variance = torch.where(seen.max() > seen.min(), seen.var(correction=0), 0.0)
    unexplained = error.var(correction=0) / torch.where(variance > 0, variance, 1.0)
    return torch.where(variance > 0, 1.0 - unexplained, 0.0)


def _live_first(mask: Tensor) -> Tensor:
    """(N, T) int64: positions of each row, live ones before the others, each kind in order."""
    return torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)


def _unpacked(packed: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(packed).scatter(1, order, packed).masked_fill(~mask, 0.0)


def _discounted_sum(packed: Tensor, discount: float) -> Tensor:
    """sum_{u >= t} discount^(u-t) · x_u along the row, in log2(T) steps that each double the span of every sum."""
    span = 1
    while span < packed.shape[1]:
        packed = packed + discount**span * _shifted(packed, span)
        span *= 2
    return packed


def _shifted(packed: Tensor, by: int) -> Tensor:
    """The row moved left, 0 coming in from the right."""
    return torch.nn.functional.pad(packed[:, by:], (0, by))
