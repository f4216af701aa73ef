"""Weights: `TokenBatch` -> per-token multiplier (B, T) of the surrogate loss.

The weights of an objective are multiplied with each other. They are detached and do not apply to regularizers. The mean of
each is logged as `weight/<name>`, and the share of tokens with weight 0 as `masked/<name>`. A token with weight 0 counts in
the denominator of the reduction.
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

    The engine's kernels and precision differ from the trainer's, so that even a new rollout is off-policy.

    - `token_truncate`: each token's ratio, clamped to [min, max].
    - `token_mask`: each token's ratio, 0 outside of [min, max].
    - `sequence_truncate`, `sequence_mask`: the same for the product of the live tokens' ratios of a completion.
    - `geometric`: the geometric mean of the live tokens' ratios, 0 outside of [min, max]. Unlike the product it does not
      grow with length, so bounds close to 1 are useful, e.g. 0.99 and 1.01.

    A token of unknown engine log-probability (NaN) has ratio 1. 0 <= min < max, None for no bound; a mode that masks needs
    one of them. Raises `ConfigError` otherwise.
    Source: truncated and masked importance sampling. The first four modes and the defaults equal TRL's
    `vllm_importance_sampling_mode`, `vllm_importance_sampling_clip_min` and `_max`.
    """
    if min is not None:
        check_range("sampler_correction", "min", min, 0.0)
    if max is not None:
        check_range("sampler_correction", "max", max, 0.0 if min is None else min, open_low=True)
    truncates = mode.endswith("truncate")
    if min is None and max is None and not truncates:
        raise ConfigError(f"sampler_correction: mode {mode} needs min or max. Set one of them.")

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
    """1 at live tokens whose entropy is at least the `quantile` of the micro-batch, else 0.

    Only tokens at which the policy is uncertain are trained. 0 <= quantile < 1; 0 selects every token, 0.8 the top fifth.
    The quantile is over the micro-batch of this process. Source: arXiv 2506.01939; TRL's `top_entropy_quantile=0.2` (on
    several processes TRL takes the quantile over all of them).
    """
    check_range("high_entropy_only", "quantile", quantile, 0.0, 1.0)

    def function(batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        entropy = batch.entropy.detach().clamp(min=0.0)
        # Non-negative floats have the order of their bits, and integers sort several times faster. Padding is last.
        bits = entropy.masked_fill(~batch.mask, torch.inf).contiguous()
        bits = bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int64)
        # An entropy is at or above the interpolated quantile if it is at or above the next higher entropy. The tolerance
        # covers ranks that float32 rounds to just above an integer.
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

    The policy has moved away if the mean over live tokens of (rollout logp - logp) exceeds delta >= 0, in nats a token. The
    rollout logp is the engine's if the batch contains it (a token without one counts as 0), otherwise that of the old
    policy. Such completions have large gradients although the policy hardly generates them any more. The paper gives no
    value; 0.5 (a token has lost 40 % of its probability on average) is the initial value that TRL suggests.
    Source: DeepSeek-V3.2, arXiv 2512.02556, equation 9.
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

    A truncated completion has a low reward because of its length, even if its reasoning is correct. Its tokens count in the
    denominator of the reduction. TRL's `mask_truncated_completions` removes them from the mask, and therefore also from
    token-level denominators. Source: DAPO, arXiv 2503.14476 section 3.4.
    """

    def function(batch: TokenBatch) -> Tensor:
        assert batch.truncated is not None
        return (~batch.truncated).to(batch.logps.dtype).expand(batch.logps.shape)

    return function
