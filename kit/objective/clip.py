"""Clips: `TokenBatch` -> per-token surrogate loss (B, T), to be minimised.

With r = exp(logp - old) the token ratio, s its geometric mean over a completion, and A the advantage. A clip may carry
`function.clipped(batch) -> {"low": bool, "high": bool}`, each (B, T), or (B, 1) when whole completions are clipped;
the objective logs the fractions as `clip_fraction/low`, `/high` and `/region`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_range
from kit.objective.registry import HookRegistry

clips = HookRegistry("clip")
ClipFunction = Callable[[TokenBatch], Tensor]


@clips.register("ppo_clip", formula="-min(r·A, clip(r, 1-{eps_low}, 1+{eps_high})·A)")
def ppo_clip(eps_low: float = 0.2, eps_high: float = 0.2) -> ClipFunction:
    """-min(r·A, clip(r, 1-eps_low, 1+eps_high)·A).

    0 <= eps_low < 1, eps_high >= 0. Source: PPO, arXiv 1707.06347; a higher upper bound: DAPO, arXiv 2503.14476.
    """
    _check_bounds("ppo_clip", eps_low, eps_high)

    def function(batch: TokenBatch) -> Tensor:
        return _pessimistic(batch.ratio, batch.ratio, batch.advantages, eps_low, eps_high)

    return _with_fractions(function, lambda batch: batch.ratio, eps_low, eps_high)


@clips.register("two_sided", formula="-min(min(r, {delta})·A, clip(r, 1-{eps_low}, 1+{eps_high})·A)")
def two_sided(eps_low: float = 0.2, eps_high: float = 0.2, delta: float = 4.0) -> ClipFunction:
    """`ppo_clip` with r bounded by delta before the min, so that a bad completion cannot push without limit.

    delta > 1 + eps_high. Source: INTELLECT-2, arXiv 2505.07291; TRL's `delta`.
    """
    _check_bounds("two_sided", eps_low, eps_high)
    check_range("two_sided", "delta", delta, 1.0 + eps_high, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        return _pessimistic(batch.ratio.clamp(max=delta), batch.ratio, batch.advantages, eps_low, eps_high)

    return _with_fractions(function, lambda batch: batch.ratio, eps_low, eps_high)


@clips.register("dual_clip", formula="ppo_clip({eps_low}, {eps_high}), and at most -{c}·A where A < 0")
def dual_clip(eps_low: float = 0.2, eps_high: float = 0.2, c: float = 3.0) -> ClipFunction:
    """`ppo_clip`, and where A < 0 the per-token loss is also capped at -c·A. c > 1. Source: arXiv 1912.09729."""
    _check_bounds("dual_clip", eps_low, eps_high)
    check_range("dual_clip", "c", c, 1.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        loss = _pessimistic(batch.ratio, batch.ratio, batch.advantages, eps_low, eps_high)
        return torch.where(batch.advantages < 0, torch.min(loss, -c * batch.advantages), loss)

    return _with_fractions(function, lambda batch: batch.ratio, eps_low, eps_high)


@clips.register("cispo", formula="-sg(min(r, {eps_high}))·A·logp")
def cispo(eps_high: float = 5.0) -> ClipFunction:
    """-sg(min(r, eps_high))·A·logp: the weight is clipped, never the gradient of a token.

    eps_high > 0 bounds r itself, not r - 1 (TRL's convention). Source: MiniMax-M1, arXiv 2506.13585; the value 5 is
    that of ScaleRL, arXiv 2510.13786.
    """
    check_range("cispo", "eps_high", eps_high, 0.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        return -batch.ratio.detach().clamp(max=eps_high) * batch.advantages * batch.logps

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        return {"high": (batch.ratio > eps_high) & (batch.advantages > 0)}

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


@clips.register("gspo", formula="-min(s·A, clip(s, 1-{eps_low}, 1+{eps_high})·A),  s = exp(mean_t(logp - old))")
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> ClipFunction:
    """`ppo_clip` on s, the geometric mean ratio of a completion, which is weighed and clipped as a whole.

    Source: GSPO, arXiv 2507.18071, with its bounds; TRL's `importance_sampling_level="sequence"`.
    """
    _check_bounds("gspo", eps_low, eps_high)

    def function(batch: TokenBatch) -> Tensor:
        ratio = batch.sequence_ratio  # (B, 1)
        return _pessimistic(ratio, ratio, batch.advantages, eps_low, eps_high).expand(batch.logps.shape)

    return _with_fractions(function, lambda batch: batch.sequence_ratio, eps_low, eps_high)


@clips.register("reinforce", formula="-A·logp")
def reinforce() -> ClipFunction:
    """-A·logp: no ratio, hence only for on-policy batches. Source: Williams 1992, doi 10.1007/BF00992696."""

    def function(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    return function


def _pessimistic(bounded: Tensor, ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    return -torch.min(bounded * advantages, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)


def _with_fractions(
    function: ClipFunction, ratio: Callable[[TokenBatch], Tensor], eps_low: float, eps_high: float
) -> ClipFunction:
    """Give a clip the report of where the bound was active: ratio too low with A < 0, or too high with A > 0."""

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        low = (ratio(batch) < 1.0 - eps_low) & (batch.advantages < 0)
        high = (ratio(batch) > 1.0 + eps_high) & (batch.advantages > 0)
        return {"low": low, "high": high}

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


def _check_bounds(owner: str, eps_low: float, eps_high: float) -> None:
    check_range(owner, "eps_low", eps_low, 0.0, 1.0)
    check_range(owner, "eps_high", eps_high, 0.0)
