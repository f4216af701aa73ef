"""Clips that weigh each token by itself: PPO's family, soft gates, trust regions. See `kit.objective.clip`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_range
from kit.objective.surrogate import (
    ClipFunction,
    Level,
    above,
    by_sign,
    check_bounds,
    clips,
    once_per_batch,
    over_tokens,
    pessimistic,
    ratio_at,
    with_fractions,
)


@clips.register(
    "ppo_clip",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(r·A, clip(r, 1-{eps_low}, 1+{eps_high})·A)",
    source="PPO, arXiv 1707.06347; TRL's epsilon and epsilon_high",
)
def ppo_clip(eps_low: float = 0.2, eps_high: float = 0.2) -> ClipFunction:
    """-min(r·A, clip(r, 1-eps_low, 1+eps_high)·A).

    0 <= eps_low < 1, eps_high >= 0. Source: PPO, arXiv 1707.06347; a higher upper bound: DAPO, arXiv 2503.14476.
    """
    check_bounds("ppo_clip", eps_low, eps_high)

    def function(batch: TokenBatch) -> Tensor:
        return pessimistic(batch.ratio, batch.ratio, batch.advantages, eps_low, eps_high)

    return with_fractions(function, "token", eps_low, eps_high)


@clips.register(
    "two_sided",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(min(r, {delta})·A, clip(r, 1-{eps_low}, 1+{eps_high})·A),  r of the {level}",
    source="INTELLECT-2, arXiv 2505.07291; TRL's delta",
)
def two_sided(eps_low: float = 0.2, eps_high: float = 0.2, delta: float = 4.0, level: Level = "token") -> ClipFunction:
    """`ppo_clip` with r bounded by delta before the min, so that a bad completion cannot push without limit.

    delta > 1 + eps_high. `level="sequence"` puts s in place of r, as TRL's `importance_sampling_level`.
    Source: INTELLECT-2, arXiv 2505.07291; TRL's `delta`.
    """
    check_bounds("two_sided", eps_low, eps_high)
    check_range("two_sided", "delta", delta, 1.0 + eps_high, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        ratio = ratio_at(batch, level)
        return over_tokens(pessimistic(ratio.clamp(max=delta), ratio, batch.advantages, eps_low, eps_high), batch)

    return with_fractions(function, level, eps_low, eps_high)


@clips.register(
    "dual_clip",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="ppo_clip({eps_low}, {eps_high}), and at most -{c}·A where A < 0",
    source="Dual-clip PPO, arXiv 1912.09729",
)
def dual_clip(eps_low: float = 0.2, eps_high: float = 0.2, c: float = 3.0) -> ClipFunction:
    """`ppo_clip`, and where A < 0 the per-token loss is also capped at -c·A. c > 1. Source: arXiv 1912.09729."""
    check_bounds("dual_clip", eps_low, eps_high)
    check_range("dual_clip", "c", c, 1.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        loss = pessimistic(batch.ratio, batch.ratio, batch.advantages, eps_low, eps_high)
        return torch.where(batch.advantages < 0, torch.min(loss, -c * batch.advantages), loss)

    return with_fractions(function, "token", eps_low, eps_high)


@clips.register(
    "cispo",
    row_separable=True,
    zero_at_zero_advantage=True,
    filled=True,
    formula="-sg(min(r, {eps_high}))·A·logp,  r of the {level}",
    source="MiniMax-M1, arXiv 2506.13585; TRL's loss_type cispo",
)
def cispo(eps_high: float = 5.0, level: Level = "token") -> ClipFunction:
    """-sg(min(r, eps_high))·A·logp: the weight is clipped, never the gradient of a token.

    eps_high > 0 bounds r itself, not r - 1 (TRL's convention). `level="sequence"` puts s in place of r, as TRL's
    `importance_sampling_level`. Source: MiniMax-M1, arXiv 2506.13585; the value 5 is that of ScaleRL, arXiv 2510.13786.
    """
    check_range("cispo", "eps_high", eps_high, 0.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        return ratio_at(batch, level).detach().clamp(max=eps_high) * -batch.advantages * batch.logps

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        return {"high": above(ratio_at(batch, level), batch.advantages, eps_high)}

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


@clips.register(
    "sapo",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-σ(τ·(r-1))·4/τ·A,  τ = {tau_pos} where A > 0, else {tau_neg},  r of the {level}",
    source="SAPO, arXiv 2511.20347; TRL's loss_type sapo",
)
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05, level: Level = "token") -> ClipFunction:
    """-sigmoid(τ·(r-1))·4/τ·A: a gate that fades the gradient out smoothly instead of cutting it off.

    τ is tau_pos where A > 0, else tau_neg; both > 0, without unit. On policy the slope in r is 1, whatever τ. A larger
    τ closes the gate faster. `level="sequence"` puts s in place of r. Source: SAPO, arXiv 2511.20347, with its values;
    TRL's `sapo_temperature_pos` and `sapo_temperature_neg`.
    """
    check_range("sapo", "tau_pos", tau_pos, 0.0, open_low=True)
    check_range("sapo", "tau_neg", tau_neg, 0.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        tau = by_sign(batch.advantages > 0, tau_pos, tau_neg, batch.logps)
        gate = torch.sigmoid(tau * (ratio_at(batch, level) - 1.0))
        return over_tokens(gate * (-4.0 * batch.advantages / tau), batch)

    return function


_DPPO_DELTA = {"tv": 0.15, "kl": 0.05}
_ALMOST_ONE = 1.0 - 1e-7


@clips.register(
    "dppo",
    row_separable=True,
    zero_at_zero_advantage=True,
    filled=True,
    formula="-sg(min(r, {cap}))·A·logp, 0 where r moves on away from 1 and {divergence} > delta",
    source="DPPO, arXiv 2602.04879; TRL's experimental DPPOTrainer (binary_tv, binary_kl)",
)
def dppo(
    divergence: Literal["tv", "kl"] = "tv",
    delta_low: float | None = None,
    delta_high: float | None = None,
    cap: float = 20.0,
) -> ClipFunction:
    """-sg(min(r, cap))·A·logp, without the tokens that have left the trust region and would move further away.

    The region is in probability rather than ratio: a rare token may change by a large factor, a likely one may not.
    With p the current and μ the old probability of the sampled token, the divergence is `tv` |p - μ|, or `kl`
    μ·log(μ/p) + (1-μ)·log((1-μ)/(1-p)) in nats: that of two coins, the token against all others. A token gets no
    gradient if A > 0, r > 1 and the divergence exceeds delta_high, or if A < 0, r < 1 and it exceeds delta_low.

    delta_low, delta_high >= 0; None stands for the paper's value, 0.15 for `tv` and 0.05 for `kl`. cap > 0 bounds r.
    Source: Divergence PPO, arXiv 2602.04879.
    """
    low = _DPPO_DELTA[divergence] if delta_low is None else delta_low
    high = _DPPO_DELTA[divergence] if delta_high is None else delta_high
    check_range("dppo", "delta_low", low, 0.0)
    check_range("dppo", "delta_high", high, 0.0)
    check_range("dppo", "cap", cap, 0.0, open_low=True)

    @once_per_batch
    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        current, old = batch.logps.detach().clamp(max=0.0), batch.old_logps.clamp(max=0.0)
        p, mu = current.exp(), old.exp()
        if divergence == "tv":
            distance = (p - mu).abs()
        else:
            rest = torch.log1p(-mu.clamp(max=_ALMOST_ONE)) - torch.log1p(-p.clamp(max=_ALMOST_ONE))
            distance = mu * (old - current) + (1.0 - mu) * rest
        drift = batch.log_ratio.detach()
        return {
            "low": (distance > low) & (drift < 0) & (batch.advantages < 0),
            "high": (distance > high) & (drift > 0) & (batch.advantages > 0),
        }

    def function(batch: TokenBatch) -> Tensor:
        outside = clipped(batch)
        weight = batch.ratio.detach().clamp(max=cap).masked_fill(outside["low"] | outside["high"], 0.0)
        return -weight * batch.advantages * batch.logps

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


@clips.register(
    "reinforce",
    filled=True,
    on_policy=True,
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-A·logp",
    source="Williams 1992, doi 10.1007/BF00992696",
)
def reinforce() -> ClipFunction:
    """-A·logp: no ratio, hence only for on-policy batches. Source: Williams 1992, doi 10.1007/BF00992696."""

    def function(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    return function
