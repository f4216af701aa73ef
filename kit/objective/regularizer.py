"""Regularizers: `TokenBatch` -> per-token penalty (B, T), added to the loss with a coefficient `coef` >= 0.

`coef` is a number or a schedule. A term with `coef` 0 is computed and logged; remove it to save its cost. A scalar penalty
is divided by the accumulation and added after the reduction. A regularizer may define
`function.metrics(batch) -> {name: (B, T), (B, 1) or ()}`, logged as masked means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.objective.batch import Divergence, TokenBatch, bounded_exp
from kit.objective.hook import check_range
from kit.objective.registry import HookRegistry

regularizers = HookRegistry("regularizer", scaled=True)
RegularizerFunction = Callable[[TokenBatch], Tensor]

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {  # of log(ref / policy), nats
    "k1": lambda gap: -gap,
    "k2": lambda gap: 0.5 * gap**2,
    "k3": lambda gap: bounded_exp(gap) - gap - 1.0,
    "abs": torch.abs,
}


@regularizers.register(
    "kl",
    row_separable=True,
    filled=True,
    coef=0.04,
    formula="{coef} · {estimator}(policy || reference)",
    source="DeepSeekMath, arXiv 2402.03300; TRL's beta",
)
def kl(
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3",
    bias_corrected: bool = False,
    level: Literal["token", "sequence"] = "token",
) -> RegularizerFunction:
    """KL(policy || reference) in nats: exact over the vocabulary, or estimated from the sampled token's d = logp - ref.

    - `k1`: d. An unbiased estimate, but its gradient is zero on average. Use it for logging, not for training.
    - `k2`: d²/2. On-policy, its gradient is that of the KL.
    - `k3`: exp(-d) + d - 1, never negative; used by TRL and DeepSeekMath.
    - `abs`: |d|.
    - `full`: the divergence of the two distributions of the next token, `TokenBatch.full_kl`. It has no variance from
      sampling but needs the logits of both models.

    `bias_corrected` multiplies by the ratio of current to old policy of the token or (`level="sequence"`) of the
    completion, as TRL's `use_bias_correction_kl`. The term is also logged as `kl/<estimator>`.
    Sources: Schulman, "Approximating KL divergence" (2020); arXiv 2402.03300; the correction: arXiv 2512.02556.
    """

    def divergence(batch: TokenBatch) -> Tensor:
        if estimator == "full":
            assert batch.full_kl is not None
            return batch.full_kl
        assert batch.ref_logps is not None
        return _ESTIMATORS[estimator](batch.ref_logps - batch.logps)

    def function(batch: TokenBatch) -> Tensor:
        value = divergence(batch)
        if not bias_corrected:
            return value
        return value * (batch.ratio if level == "token" else batch.sequence_ratio)

    function.needs = {"full_kl" if estimator == "full" else "ref_logps"}  # type: ignore[attr-defined]
    function.label = f"kl/{estimator}"  # type: ignore[attr-defined]
    return function


@regularizers.register(
    "entropy_bonus",
    row_separable=True,
    filled=True,
    needs={"entropy"},
    coef=0.01,
    formula="-{coef} · entropy, average: {average}",
    source="A3C, arXiv 1602.01783; TRL's entropy_coef",
)
def entropy_bonus(average: Literal["objective", "tokens"] = "objective") -> RegularizerFunction:
    """-entropy of the policy at each token, in nats. The term keeps the policy from becoming deterministic.

    `average="objective"` averages by the objective's reduction, as for other terms. `"tokens"` gives a scalar, the mean over
    the live tokens of the micro-batch for any reduction, as TRL's `entropy_coef`. Source: A3C, arXiv
    1602.01783.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        return -batch.entropy if average == "objective" else -batch.entropy.sum() / batch.mask.sum().clamp(min=1)

    return function


@regularizers.register(
    "distill",
    row_separable=True,
    filled=True,
    coef=1.0,
    formula="{coef} · {divergence} divergence from the teacher, {tokens} tokens",
    source="on-policy distillation, arXiv 2306.13649 and 2601.20802; TRL's SDPO, distillation_mode",
)
def distill(
    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse",
    tokens: Literal["full", "top_k", "sampled"] = "full",
    k: int = 100,
) -> RegularizerFunction:
    """The divergence of the policy's next-token distribution from the teacher's, at the sampled tokens, in nats.

    Args:
        divergence: `reverse` is KL(policy || teacher), which is mode-seeking; `forward` is KL(teacher || policy), which is
            mode-covering; `jensen_shannon` is the mean of the KLs of both to their even mixture, at most ln 2.
        tokens: `full` compares the whole vocabulary; `top_k` the policy's `k` likeliest tokens, plus one bin for all others;
            `sampled` is sg(log p - log p_teacher)·ratio at the sampled token, an estimate for `reverse` only.
        k: number of tokens for `top_k`, >= 1.

    The teacher has no gradient. Completions without a teacher add 0. Raises `ConfigError` for `sampled` with another
    divergence. Sources: GKD, arXiv 2306.13649; SDPO, arXiv 2601.20802.
    """
    check_range("distill", "k", k, 1)
    if tokens == "sampled" and divergence != "reverse":
        raise ConfigError(
            f"distill: tokens: sampled estimates the reverse KL only, got divergence {divergence}. Set tokens: full or top_k."
        )

    def over_the_vocabulary(batch: TokenBatch) -> Tensor:
        assert batch.teacher_kl is not None
        return batch.teacher_kl

    def of_sampled_tokens(batch: TokenBatch) -> Tensor:
        assert batch.teacher_logps is not None
        gap = (batch.logps - batch.teacher_logps).detach().nan_to_num(nan=0.0)
        return gap * batch.ratio

    function = of_sampled_tokens if tokens == "sampled" else over_the_vocabulary
    function.needs = {"teacher_logps" if tokens == "sampled" else "teacher_kl"}  # type: ignore[attr-defined]
    function.divergence = Divergence(divergence, k if tokens == "top_k" else None)  # type: ignore[attr-defined]
    function.label = f"distill/{divergence}"  # type: ignore[attr-defined]
    return function


@regularizers.register(
    "nll_on_correct",
    row_separable=True,
    filled=True,
    needs={"rewards"},
    coef=0.1,
    formula="-{coef} · logp where the reward >= {threshold}",
    source="positive-example LM loss of VAPO, arXiv 2504.05118",
)
def nll_on_correct(threshold: float = 1.0) -> RegularizerFunction:
    """-logp at the tokens of completions whose reward reaches `threshold`, 0 at the others, in nats.

    A supervised term on the policy's own correct completions. A completion without a score is not correct. `threshold`
    is in units of the weighted sum of the rewards. The objective's reduction averages it over all tokens; the mean of the
    paper is over tokens of correct completions, so that rare correct completions weigh more. Source: VAPO, arXiv 2504.05118,
    with its coefficient 0.1.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.rewards is not None
        return torch.where(batch.rewards >= threshold, -batch.logps, torch.zeros_like(batch.logps))

    return function
