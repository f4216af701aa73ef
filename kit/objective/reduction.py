"""Reductions: (per-token loss (B, T), mask (B, T) bool, scale) -> scalar.

The gradients of the micro-batches of an accumulation window are added; each docstring defines the sum. The per-token loss is
0 at padding. A micro-batch without live tokens gives a differentiable 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective.hook import check_range
from kit.objective.registry import HookRegistry

reductions = HookRegistry("reduction", ("per_token", "mask", "scale"))


_NO_TOKENS = 1e-6
"""The denominator of a window without tokens, whose loss is 0."""


@dataclass(frozen=True)
class LossScale:
    """The inputs of a reduction beyond its micro-batch. The trainer sets them."""

    accumulation: float = 1.0  # micro-batches whose gradients add up to one optimiser step; 1 in evaluation
    window_tokens: Tensor | float | None = None  # live tokens of the whole accumulation window, per process
    max_completion_length: int | None = None  # tokens

    def __post_init__(self) -> None:
        if not self.accumulation > 0:
            raise ObjectiveError(f"LossScale.accumulation must be positive, got {self.accumulation!r}.")


ReductionFunction = Callable[[Tensor, Tensor, LossScale], Tensor]


@reductions.register(
    "sequence_mean",
    row_separable=True,
    formula="mean over completions of the mean over their tokens",
    source="DeepSeekMath, arXiv 2402.03300; TRL's loss_type grpo",
)
def sequence_mean() -> ReductionFunction:
    """Mean over completions of the mean over their live tokens, divided by the accumulation; TRL's `grpo`.

    Micro-batches of equal size add up to the whole batch. Source: DeepSeekMath, arXiv 2402.03300.
    """

    def function(per_token: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
        each = per_token.sum(-1) / mask.sum(-1).clamp(min=1)
        return each.sum() / (max(each.shape[0], 1) * scale.accumulation)

    return function


@reductions.register(
    "token_mean", row_separable=True, formula="mean over the tokens of the micro-batch", source="TRL's loss_type bnpo"
)
def token_mean() -> ReductionFunction:
    """Mean over the live tokens of the micro-batch, divided by the accumulation; TRL's `bnpo`.

    A token in a micro-batch with few tokens weighs more; `global_token_mean` does not have this dependence.
    """

    def function(per_token: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
        return per_token.sum() / mask.sum().clamp(min=1) / scale.accumulation

    return function


@reductions.register(
    "global_token_mean",
    row_separable=True,
    formula="sum over tokens / tokens of the accumulation window",
    source="DAPO, arXiv 2503.14476; TRL's loss_type dapo",
)
def global_token_mean() -> ReductionFunction:
    """Sum over live tokens, divided by the live tokens of the whole accumulation window; TRL's `dapo`.

    The sum does not depend on how the window is split into micro-batches. Raises `ObjectiveError` without
    `scale.window_tokens`. Source: DAPO, arXiv 2503.14476.
    """

    def function(per_token: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
        if scale.window_tokens is None:
            raise ObjectiveError(
                "global_token_mean needs LossScale.window_tokens, the tokens of an accumulation window."
            )
        tokens = scale.window_tokens
        if isinstance(tokens, Tensor):
            return per_token.sum() / tokens.to(per_token).clamp(min=_NO_TOKENS)
        return per_token.sum() / max(tokens, _NO_TOKENS)

    return function


@reductions.register(
    "fixed_length",
    row_separable=True,
    formula="sum over tokens / (completions · maximal length)",
    source="Dr. GRPO, arXiv 2503.20783; TRL's loss_type dr_grpo",
)
def fixed_length(length: int | None = None) -> ReductionFunction:
    """Sum over live tokens, divided by completions · `length` tokens and by the accumulation; TRL's `dr_grpo`.

    `length` None: the run's maximal completion length. Raises `ObjectiveError` if neither is known.
    Source: Dr. GRPO, arXiv 2503.20783.
    """
    if length is not None:
        check_range("fixed_length", "length", length, 1)

    def function(per_token: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
        tokens = scale.max_completion_length if length is None else length
        if tokens is None:
            raise ObjectiveError("fixed_length needs a length: set it, or LossScale.max_completion_length.")
        return per_token.sum() / (max(per_token.shape[0], 1) * tokens * scale.accumulation)

    return function


@reductions.register(
    "sequence_sum",
    row_separable=True,
    formula="mean over completions of the sum over their tokens",
    source="LUSPO, arXiv 2602.05261; TRL's loss_type luspo",
)
def sequence_sum() -> ReductionFunction:
    """Mean over completions of the sum over their live tokens, divided by the accumulation; TRL's `luspo`.

    Source: LUSPO, arXiv 2602.05261.
    """

    def function(per_token: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
        return per_token.sum() / (max(per_token.shape[0], 1) * scale.accumulation)

    return function
