"""Regularizers: `TokenBatch` -> per-token penalty (B, T), added to the loss with a coefficient `coef` >= 0.

`coef` is a number or a schedule. A term with `coef` 0 is still computed and logged: leave it out to save its cost. A
scalar penalty is added after the reduction, divided by the accumulation. A regularizer may carry
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

    - `k1`: d. Unbiased as a number, but as a loss its gradient is zero on average: log it, do not train on it.
    - `k2`: d²/2. On-policy, its gradient is that of the KL.
    - `k3`: exp(-d) + d - 1, never negative; TRL's and DeepSeekMath's.
    - `abs`: |d|.
    - `full`: the divergence of the two distributions of the next token, `TokenBatch.full_kl`; no variance from
      sampling, at the cost of both models' logits.

    `bias_corrected` multiplies by the ratio of current to old policy, of the token or (`level="sequence"`) of the
    completion; TRL's `use_bias_correction_kl`. Logged also as `kl/<estimator>`.
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
    formula="-{coef} · entropy, averaged by the {average}",
    source="A3C, arXiv 1602.01783; TRL's entropy_coef",
)
def entropy_bonus(average: Literal["objective", "tokens"] = "objective") -> RegularizerFunction:
    """-entropy of the policy at each token, in nats: minimising it keeps the policy from collapsing.

    `average="objective"`: averaged like the other terms, by the objective's reduction. `"tokens"`: a scalar, the mean
    over the live tokens of the micro-batch whatever the reduction, as TRL's `entropy_coef`. Source: A3C, arXiv
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
    """The divergence of the policy's next-token distribution from the teacher's, at the tokens that the policy wrote, in nats.

    - `reverse`: KL(policy || teacher), which seeks one of the teacher's ways; `forward`: KL(teacher || policy), which covers
      them all; `jensen_shannon`: the mean of the KLs of both to their even mixture, at most ln 2.
    - tokens `full`: over the whole vocabulary. `top_k`: over the `k` >= 1 tokens that the policy finds likeliest, and one for
      all others together. `sampled`: sg(log p - log p_teacher)·ratio at the token that was sampled, whose gradient is that of
      the reverse KL in expectation, and only of that.

    The teacher is a constant. Completions without a teacher add 0. Raises `ConfigError` for `sampled` with another divergence.
    Sources: GKD, arXiv 2306.13649; SDPO, arXiv 2601.20802.
    """
    check_range("distill", "k", k, 1)
    if tokens == "sampled" and divergence != "reverse":
        raise ConfigError(
            f"distill: the sampled tokens estimate the reverse KL only, got divergence {divergence}. Set tokens: full or top_k."
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
    is in units of the weighted sum of the rewards. The objective's reduction averages it over all tokens; the paper takes
    the mean over those of correct completions, which weighs more where these are rare. Source: VAPO, arXiv 2504.05118,
    with its coefficient 0.1.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.rewards is not None
        return torch.where(batch.rewards >= threshold, -batch.logps, torch.zeros_like(batch.logps))

    return function
