"""How far the engine that samples is from the trainer that scores, and what to do about it.

Both compute the same policy with other kernels and another precision, so that even a fresh rollout is a little off-policy. Logged
beside the mean difference: quantiles of the raw ratio, the share of completions that count after weighing (the effective sample),
and the share of tokens beyond the bounds of `sampler_correction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from kit.objective.batch import TokenBatch, bounded_exp
from kit.objective.metrics import Mean

SAMPLER_DIFFERENCE = "sampler/logp_difference"
CLIPPED, EFFECTIVE = "sampler/clipped", "sampler/effective_sample"
WEIGHT, SQUARE = "sampler/weight", "sampler/weight_squared"
LOGP_LIMIT = 0.01
"""Nats: mean difference of the log-probabilities of trainer and engine in a step, above which the run says so."""


@torch.no_grad()
def sampler_mismatch(batch: TokenBatch, clipped: Sequence[Tensor]) -> tuple[dict[str, Mean], Tensor]:
    """Means of a micro-batch, and (B T,) raw log ratios in nats, NaN where unknown. clipped: (B, T) bool a correction."""
    assert batch.sampler_logps is not None
    gap = batch.old_logps - batch.sampler_logps
    known = batch.mask & ~torch.isnan(gap)
    gap = gap.masked_fill(~known, 0.0)

    def mean(values: Tensor, over: Tensor) -> Mean:
        return Mean((values * over).sum(), over.sum().to(gap.dtype))

    off = torch.stack(list(clipped)).any(0).to(gap.dtype) if clipped else None
    means = {SAMPLER_DIFFERENCE: mean(gap.abs(), known)}
    means |= {} if off is None else {CLIPPED: mean(off, known)}
    there, weight = known.any(-1), bounded_exp(gap.sum(-1))
    means |= {WEIGHT: mean(weight, there), SQUARE: mean(weight.square(), there)}
    return means, gap.masked_fill(~known, torch.nan).flatten()


def effective_shares(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """(sum w)^2 / (N sum w^2) over completions, from the means that were just appended; 1 where all weigh the same."""
    if not metrics.get(WEIGHT) or not metrics.get(SQUARE):
        return {}
    return {EFFECTIVE: metrics[WEIGHT][-1] ** 2 / max(metrics[SQUARE][-1], 1e-30)}


class SamplerAlarm(TrainerCallback):  # type: ignore[misc]
    """Says once that trainer and engine disagree by more than `LOGP_LIMIT` nats on average, and what to set."""

    def __init__(self, on_message: Callable[[str], None]) -> None:
        self.on_message, self.done = on_message, False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        difference = (logs or {}).get(SAMPLER_DIFFERENCE)
        if self.done or difference is None or difference <= LOGP_LIMIT:
            return
        self.done = True
        precision = "float16, for the engine too: it rounds eight times finer than bfloat16" if args.bf16 else (
            "what the engine computes in"
        )  # fmt: skip
        weigh = " Add the weight sampler_correction to objective.weights." if CLIPPED not in (logs or {}) else ""
        self.on_message(
            f"Step {state.global_step}: the engine's log-probabilities are {difference:.2g} nats off the trainer's on average "
            f"(more than {LOGP_LIMIT:g}). Rollouts are that far off-policy. Set model.dtype to {precision}.{weigh}"
        )
