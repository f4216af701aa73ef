"""Clips that single out the few tokens whose update costs the policy most of its entropy. See `kit.objective.clip`.

To first order, a step of policy gradient lowers the entropy by the covariance of log-probability and advantage. It is
taken over the live tokens of the micro-batch, as (A - mean A)·(logp - mean logp) of each token, without gradient. A
micro-batch of one completion with one advantage has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_range
from kit.objective.surrogate import ClipFunction, beyond, check_bounds, clips, once_per_batch, pessimistic


@clips.register(
    "clip_cov",
    zero_at_zero_advantage=True,
    formula="ppo_clip({eps_low}, {eps_high}), 0 at a random {share} of the tokens, of those with a covariance in "
    "({cov_low}, {cov_high})",
    source="Clip-Cov, arXiv 2505.22617; verl's policy_loss clip_cov",
)
def clip_cov(
    eps_low: float = 0.2, eps_high: float = 0.2, share: float = 2e-4, cov_low: float = 1.0, cov_high: float = 5.0
) -> ClipFunction:
    """`ppo_clip`, with the loss of a few tokens of high covariance cut to 0, and with it their gradient.

    Candidates are the live tokens that `ppo_clip` leaves alone and whose covariance (nats) lies within (cov_low,
    cov_high). Of these a random `share` of all live tokens is cut, at least one if there is a candidate; share 0 cuts
    none. The choice depends on `batch.step`, row and column alone: it is the same on every device and with any padding.
    The fraction is logged as `clip_fraction/covariance`.

    0 <= eps_low < 1, eps_high >= 0, 0 <= share < 1, cov_low < cov_high. Source: Clip-Cov, arXiv 2505.22617, with the
    values of its code.
    """
    check_bounds("clip_cov", eps_low, eps_high)
    check_range("clip_cov", "share", share, 0.0, 1.0)
    check_range("clip_cov", "cov_high", cov_high, cov_low, open_low=True)

    @once_per_batch
    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        where = beyond(batch.ratio, batch.advantages, 1.0 - eps_low, 1.0 + eps_high)
        covariance = _covariance(batch)
        free = where["low"] + where["high"] == 0
        candidates = (covariance > cov_low) & (covariance < cov_high) & batch.mask & free
        lots = torch.where(candidates, _lots(batch), -1)
        return {**where, "covariance": _top(lots, share, batch) & candidates}

    def function(batch: TokenBatch) -> Tensor:
        loss = pessimistic(batch.ratio, batch.ratio, batch.advantages, eps_low, eps_high)
        return loss.masked_fill(clipped(batch)["covariance"], 0.0)

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


@clips.register(
    "kl_cov",
    formula="-r·A, and {kl_coef}·|log r| on top at the {share} of the tokens with the highest covariance",
    source="KL-Cov, arXiv 2505.22617; verl's policy_loss kl_cov",
)
def kl_cov(share: float = 2e-3, kl_coef: float = 1.0) -> ClipFunction:
    """-r·A, and kl_coef·|logp - old| on top at the `share` of live tokens with the highest covariance, at least one.

    There is no bound on r. 0 <= share < 1, share 0 penalises none; kl_coef >= 0. Source: KL-Cov, arXiv 2505.22617, with
    its values for 7B models; it has a share of 2e-4 for 32B.
    """
    check_range("kl_cov", "share", share, 0.0, 1.0)
    check_range("kl_cov", "kl_coef", kl_coef, 0.0)

    def function(batch: TokenBatch) -> Tensor:
        covariance = _covariance(batch).masked_fill(~batch.mask, -torch.inf)
        held = _top(covariance, share, batch).to(batch.logps.dtype)
        return -batch.ratio * batch.advantages + kl_coef * held * batch.log_ratio.abs()

    return function


@torch.no_grad()
def _covariance(batch: TokenBatch) -> Tensor:
    """(B, T): each token's part in the covariance of advantage and logp over the live tokens; rubbish at padding."""
    live = batch.mask.to(batch.logps.dtype)
    tokens = live.sum().clamp(min=1.0)
    centred = batch.advantages - (batch.advantages * live).sum() / tokens
    return centred * (batch.logps - batch.logps.sum() / tokens)


@torch.no_grad()
def _top(scores: Tensor, share: float, batch: TokenBatch) -> Tensor:
    """(B, T) bool: the floor(share · live tokens) highest scores, at least one; none if share is 0.

    How many tokens live is known to the device only. It need not tell: the batch's size bounds the number from above.
    """
    if share == 0:
        return torch.zeros_like(batch.mask)
    flat = scores.flatten()
    most = min(max(int(share * flat.numel()), 1), flat.numel())
    wanted = (batch.mask.sum() * share).clamp(min=1.0)
    within = torch.arange(1, most + 1, device=flat.device) <= wanted
    return torch.zeros_like(flat, dtype=torch.bool).scatter(0, flat.topk(most).indices, within).view_as(scores)


_BITS = 0xFFFFFFFF


def _lots(batch: TokenBatch) -> Tensor:
    """(B, T) int64 in [0, 2^32): pseudo-random, from step, row and column."""
    rows, columns = batch.mask.shape
    row = torch.arange(rows, device=batch.mask.device)[:, None]
    column = torch.arange(columns, device=batch.mask.device)
    x = _mix(row + (batch.step * 0x9E3779B1 & _BITS)) ^ _mix(column + 0x7F4A7C15)
    return ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that leaves no pattern of its input (MurmurHash3's finaliser)."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _BITS
    return x ^ (x >> 16)
