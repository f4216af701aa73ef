"""Clips that weigh a completion as a whole: GSPO's family, GMPO, VESPO. See `kit.objective.clip`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_range
from kit.objective.ratios import bounded_exp, sequence_mean
from kit.objective.surrogate import (
    ClipFunction,
    beyond,
    by_sign,
    check_bounds,
    clips,
    once_per_batch,
    over_tokens,
    pessimistic,
    with_fractions,
)


@clips.register(
    "gspo",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(s·A, clip(s, 1-{eps_low}, 1+{eps_high})·A),  s = exp(mean_t(logp - old))",
    source="GSPO, arXiv 2507.18071; TRL's importance_sampling_level sequence",
)
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> ClipFunction:
    """`ppo_clip` on s, the geometric mean ratio of a completion, which is weighed and clipped as a whole.

    0 <= eps_low < 1, eps_high >= 0. Source: GSPO, arXiv 2507.18071, with its bounds; TRL's
    `importance_sampling_level="sequence"`.
    """
    check_bounds("gspo", eps_low, eps_high)
    return _whole(eps_low, eps_high)


@clips.register(
    "luspo",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(s·A, clip(s, 1-{eps_low}, 1+{eps_high})·A) at every token; sum them",
    source="LUSPO, arXiv 2602.05261; TRL's loss_type luspo",
)
def luspo(eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> ClipFunction:
    """`gspo`'s surrogate, meant for the reduction `sequence_sum`, where a completion counts by its length.

    Under `sequence_mean` the gradient of a token shrinks with the length of its completion, which favours short ones.
    0 <= eps_low < 1, eps_high >= 0. Source: LUSPO, arXiv 2602.05261, with the bounds of its section 5.1; TRL's
    `loss_type="luspo"` with `importance_sampling_level="sequence"`.
    """
    check_bounds("luspo", eps_low, eps_high)
    return _whole(eps_low, eps_high)


@clips.register(
    "gspo_token",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(s_t·A, clip(s_t, 1-{eps_low}, 1+{eps_high})·A),  s_t = sg(s)·exp(logp - sg(logp))",
    source="GSPO-token, arXiv 2507.18071 section 4.3",
)
def gspo_token(eps_low: float = 3e-4, eps_high: float = 4e-4) -> ClipFunction:
    """`gspo` whose ratio has the value of s but the gradient of its own token, so that A may differ within a completion.

    s_t = sg(s)·exp(logp - sg(logp)). With one advantage for a completion and `sequence_mean`, loss and gradient are those
    of `gspo`. 0 <= eps_low < 1, eps_high >= 0. Source: GSPO-token, arXiv 2507.18071 section 4.3.
    """
    check_bounds("gspo_token", eps_low, eps_high)

    def function(batch: TokenBatch) -> Tensor:
        level = sequence_mean(batch.log_ratio.detach(), batch.mask)  # (B, 1)
        ratio = bounded_exp(level + (batch.logps - batch.logps.detach()))
        return pessimistic(ratio, ratio, batch.advantages, eps_low, eps_high)

    return with_fractions(function, "sequence", eps_low, eps_high)


@clips.register(
    "gmpo",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-A·exp(mean_t log r'),  log r' at most {eps_high} where A > 0, at least -{eps_low} where A < 0",
    source="GMPO, arXiv 2507.20673; TRL's experimental GMPOTrainer",
)
def gmpo(eps_low: float = 0.4, eps_high: float = 0.4) -> ClipFunction:
    """-A · geometric mean of the token ratios, each of them bounded first, at every token of the completion.

    eps_low, eps_high >= 0 are nats: where A > 0 a ratio counts at most exp(eps_high), where A < 0 at least
    exp(-eps_low). With advantages (B, T) their mean over the live tokens stands for A. Source: GMPO, arXiv 2507.20673,
    with its bounds.
    """
    check_range("gmpo", "eps_low", eps_low, 0.0)
    check_range("gmpo", "eps_high", eps_high, 0.0)

    def advantage(batch: TokenBatch) -> Tensor:
        each = batch.advantages
        return each if each.shape[-1] == 1 else sequence_mean(each, batch.mask)

    def function(batch: TokenBatch) -> Tensor:
        whole = advantage(batch)
        drift = batch.log_ratio
        bounded = torch.where(whole > 0, drift.clamp(max=eps_high), drift.clamp(min=-eps_low))
        return over_tokens(-whole * bounded_exp(sequence_mean(bounded, batch.mask)), batch)

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        return beyond(batch.log_ratio, advantage(batch), -eps_low, eps_high)

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


_LOG_W_LOW, _LOG_W_HIGH = math.log(1e-8), 20.0
_SMALLEST_LAMBDA = 1e-4


@clips.register(
    "vespo",
    row_separable=True,
    zero_at_zero_advantage=True,
    filled=True,
    formula="-sg(φ(w))·A·logp,  φ(w) = w^k·exp(λ(1-w)),  w = Π_t r;  k, λ = {k_pos}, {lambda_pos} where A >= 0, "
    "else {k_neg}, {lambda_neg}",
    source="VESPO, arXiv 2602.10693; TRL's loss_type vespo",
)
def vespo(
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    sampler_cap: float | None = None,
) -> ClipFunction:
    """-sg(φ(w))·A·logp with w the product of a completion's token ratios and φ(w) = w^k · exp(λ·(1-w)), so φ(1) = 1.

    φ falls off on both sides: a larger k dampens w < 1, a larger λ dampens w > 1. k, λ >= 0, without unit; λ counts as
    at least 1e-4. Token log ratios are bounded to ±20 nats, and log w to [log 1e-8, 20].

    With `sampler_cap` >= 1 the ratios of the old policy to the generation engine, each truncated at the cap, join w (a
    token whose engine log-probability is unknown counts as 1); this needs `sampler_logps`, and takes the place of a
    `sampler_correction` among the weights. It is TRL's `vllm_importance_sampling_mode="token_truncate"`.

    The mean of φ is logged as `vespo/phi`. Source: VESPO, arXiv 2602.10693; TRL's `vespo_k_pos`, ... with its defaults.
    """
    given = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
    for name, value in given.items():
        check_range("vespo", name, value, 0.0)
    if sampler_cap is not None:
        check_range("vespo", "sampler_cap", sampler_cap, 1.0)
    decay_pos, decay_neg = max(lambda_pos, _SMALLEST_LAMBDA), max(lambda_neg, _SMALLEST_LAMBDA)

    @once_per_batch
    def report(batch: TokenBatch) -> dict[str, Tensor]:
        log_w = batch.log_ratio.clamp(-20.0, 20.0).sum(-1, keepdim=True)  # (B, 1); padding adds 0
        if sampler_cap is not None:
            assert batch.sampler_logps is not None
            gap = torch.nan_to_num(batch.old_logps - batch.sampler_logps, nan=0.0)
            top = min(math.log(sampler_cap), _LOG_W_HIGH)
            log_w = log_w + gap.clamp(_LOG_W_LOW, top).sum(-1, keepdim=True)
        log_w = log_w.clamp(_LOG_W_LOW, _LOG_W_HIGH)
        good = batch.advantages >= 0
        power = by_sign(good, k_pos, k_neg, log_w)
        decay = by_sign(good, decay_pos, decay_neg, log_w)
        log_phi = decay + power * log_w - decay * log_w.exp()
        phi = log_phi.exp().nan_to_num(nan=0.0, posinf=0.0)  # (B, 1), or (B, T) as the advantages
        return {"vespo/phi": phi}

    def function(batch: TokenBatch) -> Tensor:
        return -report(batch)["vespo/phi"] * batch.advantages * batch.logps

    if sampler_cap is not None:
        function.needs = {"sampler_logps"}  # type: ignore[attr-defined]
    function.metrics = report  # type: ignore[attr-defined]
    return function


def _whole(eps_low: float, eps_high: float) -> ClipFunction:
    def function(batch: TokenBatch) -> Tensor:
        ratio = batch.sequence_ratio  # (B, 1)
        return over_tokens(pessimistic(ratio, ratio, batch.advantages, eps_low, eps_high), batch)

    return with_fractions(function, "sequence", eps_low, eps_high)
