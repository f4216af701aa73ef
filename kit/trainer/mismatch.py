"""How far the engine that samples is from the trainer that scores, and what to do about it.

Both compute the same policy with other kernels and another precision, so that even a fresh rollout is a little off-policy.
The mean difference and quantiles of the raw ratio are logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from kit.objective.batch import TokenBatch
from kit.objective.metrics import Mean

SAMPLER_DIFFERENCE = "sampler/logp_difference"
LOGP_LIMIT = 0.01
"""Nats: mean difference of the log-probabilities of trainer and engine in a step, above which the run says so."""


@torch.no_grad()
def sampler_mismatch(batch: TokenBatch) -> tuple[dict[str, Mean], Tensor]:
    """The mean difference of a micro-batch in nats, and its raw log ratios (B T,) in nats, NaN where unknown."""
    assert batch.sampler_logps is not None
    gap = batch.old_logps - batch.sampler_logps
    known = batch.mask & ~torch.isnan(gap)
    gap = gap.masked_fill(~known, 0.0)
    mean = Mean(gap.abs().sum(), known.sum().to(gap.dtype))
    return {SAMPLER_DIFFERENCE: mean}, gap.masked_fill(~known, torch.nan).flatten()


class SamplerAlarm(TrainerCallback):  # type: ignore[misc]
    """Reports once that trainer and engine differ by more than `LOGP_LIMIT` nats on average, and what to set.

    corrected: the objective weighs tokens by the ratio of the two already.
    """

    def __init__(self, on_message: Callable[[str], None], *, corrected: bool = False) -> None:
        self.on_message, self.corrected, self.done = on_message, corrected, False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        difference = (logs or {}).get(SAMPLER_DIFFERENCE)
        if self.done or difference is None or difference <= LOGP_LIMIT:
            return
        self.done = True
        precision = "float16, for the engine too: it rounds eight times finer than bfloat16" if args.bf16 else (
            "what the engine computes in"
        )  # fmt: skip
        weigh = "" if self.corrected else " Add the weight sampler_correction to objective.weights."
        self.on_message(
            f"Step {state.global_step}: the engine's log-probabilities are {difference:.2g} nats off the trainer's on average "
            f"(more than {LOGP_LIMIT:g}). Rollouts are that far off-policy. Set model.dtype to {precision}.{weigh}"
        )
