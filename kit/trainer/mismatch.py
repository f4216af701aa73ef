"""How far the engine that samples is from the trainer that scores, and what to do about it.

Both compute the same policy with other kernels and another precision, so that even a fresh rollout is a little off-policy. Logged
beside the mean difference: quantiles of the raw ratio, the share of completions that count after weighing (the effective sample),
the share of tokens beyond the bounds of `sampler_correction`, and both by quarters of a completion, as errors grow along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch, bounded_exp
from kit.objective.metrics import Mean

SAMPLER_DIFFERENCE = "sampler/logp_difference"
CLIPPED, EFFECTIVE = "sampler/clipped", "sampler/effective_sample"
WEIGHT, SQUARE = "sampler/weight", "sampler/weight_squared"
QUARTERS = 4
FEW = 0.5
"""Effective sample from which on most completions hardly count."""
MANY_CLIPPED = 0.1
"""Share of clipped tokens from which on the correction throws away what it should weigh."""


@torch.no_grad()
def sampler_mismatch(batch: TokenBatch, clipped: Sequence[Tensor]) -> tuple[dict[str, Mean], Tensor]:
    """Means of a micro-batch, and (B T,) raw log ratios in nats, NaN where unknown. clipped: (B, T) bool a correction."""
    assert batch.sampler_logps is not None
    gap = batch.old_logps - batch.sampler_logps
    known = batch.mask & ~torch.isnan(gap)
    gap = gap.masked_fill(~known, 0.0)
    place = (batch.mask.cumsum(-1) - 1) * QUARTERS // batch.mask.sum(-1, keepdim=True).clamp(min=1)

    def mean(values: Tensor, over: Tensor) -> Mean:
        return Mean((values * over).sum(), over.sum().to(gap.dtype))

    off = torch.stack(list(clipped)).any(0).to(gap.dtype) if clipped else None
    found = {SAMPLER_DIFFERENCE: mean(gap.abs(), known)}
    found |= {} if off is None else {CLIPPED: mean(off, known)}
    for quarter in range(QUARTERS):
        inside = known & (place == quarter)
        found[f"{SAMPLER_DIFFERENCE}/q{quarter + 1}"] = mean(gap.abs(), inside)
        found |= {} if off is None else {f"{CLIPPED}/q{quarter + 1}": mean(off, inside)}
    there, weight = known.any(-1), bounded_exp(gap.sum(-1))
    found |= {WEIGHT: mean(weight, there), SQUARE: mean(weight.square(), there)}
    return found, gap.masked_fill(~known, torch.nan).flatten()


def effective_shares(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """(sum w)^2 / (N sum w^2) over completions, from the means that were just appended; 1 where all weigh the same."""
    if not metrics.get(WEIGHT) or not metrics.get(SQUARE):
        return {}
    return {EFFECTIVE: metrics[WEIGHT][-1] ** 2 / max(metrics[SQUARE][-1], 1e-30)}


def advice(logs: Mapping[str, Any], limit: float, *, half: str) -> str:
    """What to do about what a step logged; empty where nothing is to be done. half: what the trainer computes in."""
    difference, clipped, effective = (logs.get(name) for name in (SAMPLER_DIFFERENCE, CLIPPED, EFFECTIVE))
    said = []
    if difference is not None and difference > limit:
        if half == "bfloat16":
            said.append("Set model.dtype: float16, for the engine too: it rounds eight times finer than bfloat16.")
        else:
            said.append("Set model.dtype to what the engine computes in.")
        if clipped is None:
            said.append("Add the weight sampler_correction to objective.weights.")
    if clipped is not None and clipped > MANY_CLIPPED:
        said.append(
            f"sampler_correction clips {clipped:.0%} of tokens: take mode: geometric, which does not grow with length, or "
            "mode: token_truncate with a max (the TIS cap) of 2."
        )
    elif clipped is not None and effective is not None and effective < FEW:
        said.append(
            f"The weights leave {effective:.0%} of the completions as an effective sample: take mode: sequence_mask or a "
            "smaller max, so that few completions do not weigh for all."
        )
    return " ".join(said)
