"""Regularizers: `TokenBatch` -> per-token penalty (B, T) in nats, added to the loss with a coefficient `coef` >= 0.

`coef` is a number or a schedule. A term with `coef` 0 is still computed and logged: leave it out to save its cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hyperparameters import check_choice
from kit.objective.ratios import bounded_exp
from kit.objective.registry import HookRegistry

regularizers = HookRegistry("regularizer", scaled=True)
RegularizerFunction = Callable[[TokenBatch], Tensor]

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {  # of log(ref / policy), nats
    "k1": lambda gap: -gap,
    "k2": lambda gap: 0.5 * gap**2,
    "k3": lambda gap: bounded_exp(gap) - gap - 1.0,
    "abs": torch.abs,
}


@regularizers.register("kl", needs={"ref_logps"}, coef=0.04, formula="{coef} · {estimator}(policy || reference)")
def kl(
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3",
    bias_corrected: bool = False,
    level: Literal["token", "sequence"] = "token",
) -> RegularizerFunction:
    """Estimate of KL(policy || reference) from the sampled token, in nats. With d = logp - ref:

    - `k1`: d. Unbiased as a number, but as a loss its gradient is zero on average: log it, do not train on it.
    - `k2`: d²/2. On-policy, its gradient is that of the KL.
    - `k3`: exp(-d) + d - 1, never negative; TRL's and DeepSeekMath's.
    - `abs`: |d|.

    `bias_corrected` multiplies by the ratio of current to old policy, of the token or (`level="sequence"`) of the
    completion; TRL's `use_bias_correction_kl`. Logged also as `kl/<estimator>`.
    Sources: Schulman, "Approximating KL divergence" (2020); arXiv 2402.03300; the correction: arXiv 2512.02556.
    """
    check_choice("kl", "estimator", estimator, tuple(_ESTIMATORS))
    check_choice("kl", "level", level, ("token", "sequence"))
    estimate = _ESTIMATORS[estimator]

    def function(batch: TokenBatch) -> Tensor:
        assert batch.ref_logps is not None
        value = estimate(batch.ref_logps - batch.logps)
        if not bias_corrected:
            return value
        return value * (batch.ratio if level == "token" else batch.sequence_ratio)

    function.label = f"kl/{estimator}"  # type: ignore[attr-defined]
    return function


@regularizers.register("entropy_bonus", needs={"entropy"}, coef=0.01, formula="-{coef} · entropy")
def entropy_bonus() -> RegularizerFunction:
    """-entropy of the policy at each token, in nats: minimising it keeps the policy from collapsing.

    It is averaged like the other terms, by the objective's reduction. Source: A3C, arXiv 1602.01783.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        return -batch.entropy

    return function
