"""Weights: `TokenBatch` -> per-token multiplier (B, T) of the surrogate loss.

Weights of one objective multiply each other. The objective detaches them, so they carry no gradient of their own, and
they leave the regularizers alone. The mean of each is logged as `weight/<name>`, the share of tokens that it sets to 0
as `masked/<name>`. A token with weight 0 still counts in the denominator of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.objective.batch import TokenBatch, bounded_exp, sequence_mean
from kit.objective.hook import check_range
from kit.objective.registry import HookRegistry

weights = HookRegistry("weight")
WeightFunction = Callable[[TokenBatch], Tensor]


@weights.register(
    "sampler_correction",
    row_separable=True,
    needs={"sampler_logps"},
    formula="old / sampler by {mode} within [{min}, {max}]",
    source="TIS and MIS, fengyao.notion.site/off-policy-rl; TRL's vllm_importance_sampling_mode",
)
def sampler_correction(
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"] = "sequence_mask",
    min: float | None = None,
    max: float | None = 3.0,
) -> WeightFunction:
    """Ratio of the old policy, as the trainer computes it, to the generation engine's: exp(old - sampler), bounded.

    The engine's kernels and precision differ from the trainer's, so that even a fresh rollout is off-policy.

    - `token_truncate`: each token's ratio, moved into [min, max].
    - `token_mask`: each token's ratio, 0 outside of [min, max].
    - `sequence_truncate`, `sequence_mask`: the same for the product of the live tokens' ratios of a completion.
    - `geometric`: the geometric mean of the live tokens' ratios, 0 outside of [min, max]; unlike the product it does
      not grow with length, so bounds close to 1 such as 0.99 and 1.01 make sense.

    A token whose engine log-probability is unknown (NaN) counts as ratio 1. 0 <= min < max, None for no bound; a mode
    that masks needs one of them. Raises `ConfigError` otherwise.
    Source: truncated and masked importance sampling; the first four equal TRL's `vllm_importance_sampling_mode`, with
    `min` and `max` its `vllm_importance_sampling_clip_min` and `_max`, and these defaults.
    """
    if min is not None:
        check_range("sampler_correction", "min", min, 0.0)
    if max is not None:
        check_range("sampler_correction", "max", max, 0.0 if min is None else min, open_low=True)
    truncates = mode.endswith("truncate")
    if min is None and max is None and not truncates:
        raise ConfigError(f"sampler_correction: mode {mode} masks what lies outside of [min, max]; set one of them.")

    def ratio_of(batch: TokenBatch) -> Tensor:
        assert batch.sampler_logps is not None
        gap = torch.nan_to_num(batch.old_logps - batch.sampler_logps, nan=0.0)  # 0 at padding
        if mode == "geometric":
            gap = sequence_mean(gap, batch.mask)
        elif mode.startswith("sequence"):
            gap = gap.sum(-1, keepdim=True)
        return bounded_exp(gap)

    def function(batch: TokenBatch) -> Tensor:
        ratio = ratio_of(batch)
        if truncates:
            ratio = ratio if min is None and max is None else ratio.clamp(min, max)
        else:
            if min is not None:
                ratio = ratio.masked_fill(ratio < min, 0.0)
            if max is not None:
                ratio = ratio.masked_fill(ratio > max, 0.0)
        return ratio.expand(batch.logps.shape)

    return function


@weights.register(
    "high_entropy_only",
    needs={"entropy"},
    formula="1 where entropy >= its quantile {quantile}, else 0",
    source="80/20 rule, arXiv 2506.01939; TRL's top_entropy_quantile = 1 - quantile",
)
def high_entropy_only(quantile: float = 0.8) -> WeightFunction:
    """1 at live tokens whose entropy reaches the `quantile` of those of the micro-batch, else 0.

    Train on the tokens at which the policy has a choice. 0 <= quantile < 1; 0 keeps every token, 0.8 the top fifth. The
    quantile is that of this micro-batch on this process. Source: arXiv 2506.01939; TRL's `top_entropy_quantile=0.2` (on
    several processes TRL takes the quantile over all of them).
    """
    check_range("high_entropy_only", "quantile", quantile, 0.0, 1.0)

    def function(batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        entropy = batch.entropy.detach().clamp(min=0.0)
        # Floats that are not negative sort like their bits, and integers sort several times faster. Padding goes last.
        bits = entropy.masked_fill(~batch.mask, torch.inf).contiguous()
        bits = bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int64)
        # At or above the interpolated quantile are exactly those at or above the next higher entropy. A rank that float32
        # rounds to just above a whole number is meant to be that number.
        rank = ((batch.mask.sum() - 1) * (quantile * (1.0 - 1e-6))).ceil().long().clamp(min=0)
        threshold = bits.flatten().sort().values.gather(0, rank.view(1))
        return ((bits >= threshold) & batch.mask).to(batch.logps.dtype)

    return function


@weights.register(
    "off_policy_mask",
    row_separable=True,
    formula="0 where A < 0 and mean_t(log sampler/policy) > {delta} nats, else 1",
    source="DeepSeek-V3.2, arXiv 2512.02556 equation 9; TRL's off_policy_mask_threshold",
)
def off_policy_mask(delta: float = 0.5) -> WeightFunction:
    """0 for completions with A < 0 that the policy has moved away from, else 1.

    Moved away means that the mean over live tokens of (rollout logp - logp) exceeds delta >= 0, in nats a token. The
    rollout logp is the generation engine's where the batch carries it (a token without one counts as 0), the old
    policy's otherwise. A bad completion that the policy hardly makes any more teaches little and pushes hard; good ones
    are kept. The paper gives no value; 0.5, where a token has lost 40 % of its probability on average, is what TRL
    suggests to start from. Source: DeepSeek-V3.2, arXiv 2512.02556, equation 9.
    """
    check_range("off_policy_mask", "delta", delta, 0.0)

    def function(batch: TokenBatch) -> Tensor:
        rollout = batch.old_logps if batch.sampler_logps is None else batch.sampler_logps
        gap = torch.nan_to_num(rollout - batch.logps.detach(), nan=0.0)
        keep = (batch.advantages >= 0) | (sequence_mean(gap, batch.mask) <= delta)
        return keep.to(batch.logps.dtype).expand(batch.logps.shape)

    return function


@weights.register(
    "drop_truncated",
    row_separable=True,
    needs={"truncated"},
    formula="0 where the completion was cut, else 1",
    source="overlong filtering of DAPO, arXiv 2503.14476; TRL's mask_truncated_completions",
)
def drop_truncated() -> WeightFunction:
    """0 for completions that were cut at the length limit, else 1.

    Their reward says that they were too long, not that they were wrong. Their tokens still count in the denominator of
    the reduction, where TRL's `mask_truncated_completions`, which takes them out of the mask, leaves them out of
    token-level denominators too. Source: DAPO, arXiv 2503.14476 section 3.4.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.truncated is not None
        return (~batch.truncated).to(batch.logps.dtype).expand(batch.logps.shape)

    return function
