"""Clips: `TokenBatch` -> per-token surrogate loss (B, T), to be minimised.

With r = exp(logp - old) the token ratio, s its geometric mean over a completion, and A the advantage:

    single tokens          ppo_clip, two_sided, dual_clip, cispo, sapo, reinforce
    whole completions      gspo, gmpo, vespo

A clip may define `function.clipped(batch) -> {"low": bool, "high": bool, ...}`, each (B, T), or (B, 1) when whole
completions are clipped. The objective logs the fractions as `clip_fraction/low`, `/high`, ..., and their union as
`/region`. It may also define `function.metrics(batch) -> {name: (B, T), (B, 1) or ()}`, logged as masked means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch, bounded_exp, sequence_mean
from kit.objective.hook import check_range
from kit.objective.registry import HookRegistry

clips = HookRegistry("clip")
ClipFunction = Callable[[TokenBatch], Tensor]
Level = Literal["token", "sequence"]


def ratio_at(batch: TokenBatch, level: Level) -> Tensor:
    """The ratio of each token (B, T), or of each completion (B, 1): the geometric mean of its tokens' ratios."""
    return batch.ratio if level == "token" else batch.sequence_ratio


def over_tokens(values: Tensor, batch: TokenBatch) -> Tensor:
    """Values (B, 1) or (B, T), expanded to (B, T)."""
    return values.expand(batch.logps.shape)


def pessimistic(bounded: Tensor, ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """PPO's surrogate -min(bounded·A, clip(ratio, 1-eps_low, 1+eps_high)·A), (B, T) or (B, 1)."""
    return -torch.min(bounded * advantages, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)


def beyond(values: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """1 where a bound is active, else 0: `values` below `low` with A < 0, or above `high` with A > 0.

    All inputs must be finite, also at padding. Numbers are twice as fast as booleans on a CPU.
    """
    return {"low": above(-values, -advantages, -low), "high": above(values, advantages, high)}


def above(values: Tensor, advantages: Tensor, high: float) -> Tensor:
    """1 where `values` exceed `high` with A > 0, else 0."""
    return _step(values.detach() - high) * _step(advantages.detach().clone())


def _step(gap: Tensor) -> Tensor:
    """1 where positive, else 0; in place."""
    return gap.clamp_(min=0.0).sign_()


def with_fractions(function: ClipFunction, level: Level, eps_low: float, eps_high: float) -> ClipFunction:
    """Add a `clipped` report: where the ratio is outside [1-eps_low, 1+eps_high] in the direction of the advantage."""

    def clipped(batch: TokenBatch) -> dict[str, Tensor]:
        return beyond(ratio_at(batch, level), batch.advantages, 1.0 - eps_low, 1.0 + eps_high)

    function.clipped = clipped  # type: ignore[attr-defined]
    return function


def by_sign(positive: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` where `positive`, else `no`, in the dtype of `like` and without waiting for the device."""
    return torch.where(positive, like.new_full((), yes), like.new_full((), no))


def check_bounds(owner: str, eps_low: float, eps_high: float) -> None:
    """Raises `ConfigError` unless 0 <= eps_low < 1 and eps_high >= 0."""
    check_range(owner, "eps_low", eps_low, 0.0, 1.0)
    check_range(owner, "eps_high", eps_high, 0.0)


# --- clips of single tokens: PPO, its variants and soft gates -----------------------------------------------------------


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
    """`ppo_clip` with r bounded by delta before the min, which bounds the gradient of completions with A < 0.

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
    """-sigmoid(τ·(r-1))·4/τ·A: a soft gate, which reduces the gradient smoothly instead of setting it to 0.

    τ is tau_pos where A > 0, else tau_neg; both > 0, without unit. On policy the slope in r is 1 for any τ. A larger τ
    makes the gate narrower. `level="sequence"` puts s in place of r. Source: SAPO, arXiv 2511.20347, with its values;
    TRL's `sapo_temperature_pos` and `sapo_temperature_neg`.
    """
    check_range("sapo", "tau_pos", tau_pos, 0.0, open_low=True)
    check_range("sapo", "tau_neg", tau_neg, 0.0, open_low=True)

    def function(batch: TokenBatch) -> Tensor:
        tau = by_sign(batch.advantages > 0, tau_pos, tau_neg, batch.logps)
        gate = torch.sigmoid(tau * (ratio_at(batch, level) - 1.0))
        return over_tokens(gate * (-4.0 * batch.advantages / tau), batch)

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
    """-A·logp. It has no ratio, so batches must be on-policy. Source: Williams 1992, doi 10.1007/BF00992696."""

    def function(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    return function


# --- clips of whole completions: GSPO, LUSPO, GMPO, VESPO ---------------------------------------------------------------


@clips.register(
    "gspo",
    row_separable=True,
    zero_at_zero_advantage=True,
    formula="-min(s·A, clip(s, 1-{eps_low}, 1+{eps_high})·A),  s = exp(mean_t(logp - old))",
    source="GSPO, arXiv 2507.18071; TRL's importance_sampling_level sequence",
)
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> ClipFunction:
    """`ppo_clip` on s, the geometric mean ratio of a completion, so that a completion is clipped as a whole.

    With the reduction `sequence_sum` it is LUSPO's loss, arXiv 2602.05261. With `sequence_mean` the gradient of a token is
    divided by the length of its completion, which favours short completions.

    0 <= eps_low < 1, eps_high >= 0. Source: GSPO, arXiv 2507.18071, with its bounds; TRL's
    `importance_sampling_level="sequence"`.
    """
    check_bounds("gspo", eps_low, eps_high)

    def function(batch: TokenBatch) -> Tensor:
        ratio = batch.sequence_ratio  # (B, 1)
        return over_tokens(pessimistic(ratio, ratio, batch.advantages, eps_low, eps_high), batch)

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
    exp(-eps_low). A is the mean over live tokens if advantages are (B, T). Source: GMPO, arXiv 2507.20673, with its
    bounds.
    """
    check_range("gmpo", "eps_low", eps_low, 0.0)
    check_range("gmpo", "eps_high", eps_high, 0.0)

    def advantage(batch: TokenBatch) -> Tensor:
        advantages = batch.advantages
        return advantages if advantages.shape[-1] == 1 else sequence_mean(advantages, batch.mask)

    def function(batch: TokenBatch) -> Tensor:
        mean_advantage = advantage(batch)
        drift = batch.log_ratio
        bounded = torch.where(mean_advantage > 0, drift.clamp(max=eps_high), drift.clamp(min=-eps_low))
        return over_tokens(-mean_advantage * bounded_exp(sequence_mean(bounded, batch.mask)), batch)

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

    φ decreases on both sides of 1: a larger k reduces it for w < 1, a larger λ for w > 1. k, λ >= 0, without unit; the
    minimum of λ is 1e-4. Token log ratios are bounded to ±20 nats, and log w to [log 1e-8, 20].

    With `sampler_cap` >= 1, w also includes the ratios of the old policy to the generation engine, each truncated at the cap
    (1 for a token of unknown engine log-probability). This needs `sampler_logps` and replaces a `sampler_correction` among
    the weights. It is TRL's `vllm_importance_sampling_mode="token_truncate"`.

    The mean of φ is logged as `vespo/phi`. Source: VESPO, arXiv 2602.10693; TRL's `vespo_k_pos`, ... with its defaults.
    """
    for name, value in {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}.items():
        check_range("vespo", name, value, 0.0)
    if sampler_cap is not None:
        check_range("vespo", "sampler_cap", sampler_cap, 1.0)
    decay_pos, decay_neg = max(lambda_pos, _SMALLEST_LAMBDA), max(lambda_neg, _SMALLEST_LAMBDA)
    # The loss and the metrics share one.
    reports: WeakKeyDictionary[TokenBatch, dict[str, Tensor]] = WeakKeyDictionary()

    @torch.no_grad()
    def report(batch: TokenBatch) -> dict[str, Tensor]:
        if batch in reports:
            return reports[batch]
        log_w = batch.log_ratio.clamp(-20.0, 20.0).sum(-1, keepdim=True)  # (B, 1); padding adds 0
        if sampler_cap is not None:
            assert batch.sampler_logps is not None
            gap = torch.nan_to_num(batch.old_logps - batch.sampler_logps, nan=0.0)
            log_w = log_w + gap.clamp(_LOG_W_LOW, min(math.log(sampler_cap), _LOG_W_HIGH)).sum(-1, keepdim=True)
        log_w = log_w.clamp(_LOG_W_LOW, _LOG_W_HIGH)
        good = batch.advantages >= 0
        power = by_sign(good, k_pos, k_neg, log_w)
        decay = by_sign(good, decay_pos, decay_neg, log_w)
        phi = (decay + power * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)
        reports[batch] = {"vespo/phi": phi}  # (B, 1), or (B, T) as the advantages
        return reports[batch]

    def function(batch: TokenBatch) -> Tensor:
        return -report(batch)["vespo/phi"] * batch.advantages * batch.logps

    if sampler_cap is not None:
        function.needs = {"sampler_logps"}  # type: ignore[attr-defined]
    function.metrics = report  # type: ignore[attr-defined]
    return function
