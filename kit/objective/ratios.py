"""Arithmetic on log-probability ratios that neither overflows nor loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats. Up to here `bounded_exp` is `exp`. Squares of e^20 = 4.9e8 still add up in float32: finite gradient norms."""


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)` up to `LOG_RATIO_LIMIT`, and its tangent line from there on: finite, increasing, convex, smooth.

    A clamp would be finite too, but its gradient is zero: a token far above the limit would never be pulled back.
    """
    return torch.exp(x.clamp(max=LOG_RATIO_LIMIT)) * (1.0 + (x - LOG_RATIO_LIMIT).clamp(min=0.0))


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the live tokens of each row: (B, T), (B, T) bool -> (B, 1). A row without live tokens gives 0."""
    live = mask.to(values.dtype)
    return (values * live).sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1.0)
