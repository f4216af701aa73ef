"""Advantage estimators: `RewardBatch` -> (N,), or (N, T) for the estimators per token.

A completion without a score (NaN reward) gets advantage 0 and does not count in its group's statistics, as in TRL.
Groups are identified by id: they may differ in size and be in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.objective.batch import RewardBatch
from kit.objective.registry import HookRegistry

# --- rewards over time, and the maths of a value head -----------------------------------------------------------------
#
# Time is counted in live tokens: padding and holes in a mask (after tool calls) do not discount. All functions take and
# return (N, T) tensors.


@dataclass(frozen=True)
class ValueSettings:
    """Settings of a value head: `learning_rate` > 0, and `clip` > 0 (see `value_loss`) or None.

    Raises `ConfigError` for other values.
    """

    learning_rate: float = 1e-3
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("clip", self.clip)):
            if value is None and name == "clip":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"value head: {name} must be a finite number above 0, got {value!r}.")


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum over live u >= t of gamma^(live tokens from t to u) · r_u, (N, T); 0 where the mask is False.

    0 <= gamma <= 1.
    """
    order = _live_first(mask)
    packed = rewards.masked_fill(~mask, 0.0).gather(1, order)
    return _unpacked(_discounted_sum(packed, gamma), order, mask)


def generalized_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum_l (gamma·lam)^l · delta_{t+l} with delta_t = r_t + gamma·V_{t+1} - V_t, (N, T); 0 where masked.

    t+1 is the next live token; the value after the last one is 0. 0 <= gamma, lam <= 1. Source: arXiv 1506.02438.
    """
    order = _live_first(mask)
    reward, value = (x.masked_fill(~mask, 0.0).gather(1, order) for x in (rewards, values))
    delta = reward + gamma * _shifted(value, 1) - value
    return _unpacked(_discounted_sum(delta, gamma * lam), order, mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5·max((V - R)², (V_clipped - R)²) at each token, V_clipped = V within `clip` of the value at the rollout.

    All tensors are (B, T); only `values` carries gradient. `clip` None: 0.5·(V - R)². Source: the implementation of PPO,
    arXiv 1707.06347.
    """
    old_values, returns = old_values.detach(), returns.detach()
    loss = (values - returns) ** 2
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.max(loss, (near - returns) ** 2)
    return 0.5 * loss


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over live tokens, a detached scalar: 1 is perfect, 0 no better than a constant.

    Also 0 if all returns are equal or no token is live.
    """
    live, error = returns.detach()[mask], (returns - values).detach()[mask]
    if live.numel() == 0:
        return returns.new_zeros(())
    # Rounding of the mean could give equal numbers a variance above 0.
    variance = torch.where(live.max() > live.min(), live.var(correction=0), 0.0)
    unexplained = error.var(correction=0) / torch.where(variance > 0, variance, 1.0)
    return torch.where(variance > 0, 1.0 - unexplained, 0.0)


def _live_first(mask: Tensor) -> Tensor:
    """(N, T) int64: positions of each row in order, live ones first."""
    return torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)


def _unpacked(packed: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(packed).scatter(1, order, packed).masked_fill(~mask, 0.0)


def _discounted_sum(packed: Tensor, discount: float) -> Tensor:
    """sum_{u >= t} discount^(u-t) · x_u along the row, in log2(T) steps that each double the span of every sum."""
    span = 1
    while span < packed.shape[1]:
        packed = packed + discount**span * _shifted(packed, span)
        span *= 2
    return packed


def _shifted(packed: Tensor, by: int) -> Tensor:
    """The row shifted left and filled with 0."""
    return torch.nn.functional.pad(packed[:, by:], (0, by))


advantages = HookRegistry("advantage")
AdvantageFunction = Callable[[RewardBatch], Tensor]

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value."""


@advantages.register(
    "group_zscore",
    formula="A = (R - mean_group) / (std_group + 1e-4)",
    source="DeepSeekMath, arXiv 2402.03300; TRL's scale_rewards='group'",
)
def group_zscore() -> AdvantageFunction:
    """(R - mean) / (std + 1e-4) within each group, with the unbiased standard deviation.

    A group of one has std 0 and advantage 0. Source: DeepSeekMath, arXiv 2402.03300, as TRL computes it
    (`scale_rewards="group"`).
    """

    def function(batch: RewardBatch) -> Tensor:
        return _group_zscore(batch.rewards, batch.group)

    return function


@advantages.register(
    "group_mean", formula="A = R - mean_group", source="Dr. GRPO, arXiv 2503.20783; TRL's scale_rewards='none'"
)
def group_mean() -> AdvantageFunction:
    """R - mean within each group, not divided by the standard deviation. Source: Dr. GRPO, arXiv 2503.20783."""

    def function(batch: RewardBatch) -> Tensor:
        return centred_in_group(batch.rewards, batch.group)[0]

    return function


@advantages.register(
    "batch_zscore",
    formula="A = (R - mean_group) / (std_batch + 1e-4)",
    source="arXiv 2508.08221; TRL's scale_rewards='batch'",
)
def batch_zscore() -> AdvantageFunction:
    """(R - mean of the group) / (unbiased std of all rewards of the batch + 1e-4).

    Source: arXiv 2508.08221, as TRL computes it (`scale_rewards="batch"`).
    """

    def function(batch: RewardBatch) -> Tensor:
        scored = batch.rewards[batch.scorable]
        return centred_in_group(batch.rewards, batch.group)[0] / (_std(scored) + STD_EPSILON)

    return function


@advantages.register(
    "leave_one_out", formula="A = R - mean of the others of the group", source="RLOO, arXiv 2402.14740"
)
def leave_one_out() -> AdvantageFunction:
    """R - mean of the other completions of the group, which is G/(G-1) · (R - mean).

    A group of one has no others to compare with: its advantage is 0. Source: RLOO, arXiv 2402.14740.
    """

    def function(batch: RewardBatch) -> Tensor:
        centred, count, index = centred_in_group(batch.rewards, batch.group)
        return centred * (count / (count - 1).clamp(min=1.0))[index]

    return function


@advantages.register(
    "opo", needs={"lengths"}, formula="A = R - Σ length·R / Σ length over the group", source="OPO, arXiv 2505.23585"
)
def opo() -> AdvantageFunction:
    """R - the length-weighted mean of the group's rewards, the baseline of minimal gradient variance.

    It is minimal if the squared norm of a completion's gradient is proportional to its length in tokens. A group without
    tokens has advantage 0.
    Source: OPO, arXiv 2505.23585.
    """

    def function(batch: RewardBatch) -> Tensor:
        assert batch.lengths is not None
        # Rewards are centred first, so that a constant added to all rewards changes nothing, not even by rounding.
        centred, count, index = centred_in_group(batch.rewards, batch.group)
        lengths = batch.lengths.to(centred.dtype).masked_fill(~batch.scorable, 0.0)
        total = _group_sum(lengths, index, count.shape[0])
        baseline = _group_sum(lengths * centred, index, count.shape[0]) / total.clamp(min=1.0)
        return (centred - baseline[index]).masked_fill(~batch.scorable | (total == 0)[index], 0.0)

    return function


@advantages.register(
    "gdpo",
    needs={"components"},
    formula="A = z_batch(Σ weight·z_group(component))",
    source="GDPO, arXiv 2601.05242; TRL's multi_objective_aggregation='normalize_then_sum'",
)
def gdpo() -> AdvantageFunction:
    """Each component's z-score in its group, their weighted sum, and the z-score of that over the batch.

    z(x) = (x - mean) / (unbiased std + 1e-4) over completions with a score; a component without a score adds 0. Weights are
    `component_weights`, or 1. `rewards` only determine which completions have a score.
    Source: GDPO, arXiv 2601.05242, as TRL computes it (`multi_objective_aggregation="normalize_then_sum"`).
    """

    def function(batch: RewardBatch) -> Tensor:
        assert batch.components is not None
        components = batch.components.masked_fill(~batch.scorable[:, None], torch.nan)
        weights = batch.component_weights
        total = torch.zeros_like(components[:, 0])
        for column, component in enumerate(components.unbind(1)):
            score = _group_zscore(component, batch.group)
            total = total + (score if weights is None else weights[column].to(score) * score)
        scored = ~components.isnan().all(1)
        return whitened(total, scored)

    return function


def centred_in_group(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the group mean: (values (N,), number of NaN per group (groups,), index of the group (N,)).

    NaN values do not count in the mean and become 0.
    """
    ids, index = torch.unique(group, return_inverse=True)
    known = ~torch.isnan(values)
    filled = values.masked_fill(~known, 0.0)
    count = _group_sum(known.to(values.dtype), index, ids.shape[0])
    mean = _group_sum(filled, index, ids.shape[0]) / count.clamp(min=1.0)
    return (filled - mean[index]).masked_fill(~known, 0.0), count, index


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / (unbiased std + 1e-4) over the values in the mask; 0 elsewhere. Any shape."""
    inside = values[mask]
    if inside.numel() == 0:
        return torch.zeros_like(values)
    return ((values - inside.mean()) / (_std(inside) + STD_EPSILON)).masked_fill(~mask, 0.0)


def _group_zscore(values: Tensor, group: Tensor) -> Tensor:
    centred, count, index = centred_in_group(values, group)
    squares = _group_sum(centred**2, index, count.shape[0])
    std = torch.sqrt(squares / (count - 1).clamp(min=1.0))
    return centred / (std + STD_EPSILON)[index]


def _group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add_(0, index, values)


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())


@advantages.register(
    "token_returns", needs={"token_rewards"}, formula="A_t = Σ_(u >= t) {gamma}^(u-t)·r_u", source="Williams 1992"
)
def token_returns(gamma: float = 1.0) -> AdvantageFunction:
    """G_t = r_t + gamma·r_(t+1) + ...: the sum of rewards from each token on, neither centred nor whitened.

    Use it for process rewards, which are assigned to tokens. 0 <= gamma <= 1. Source: Williams 1992, doi 10.1007/BF00992696.
    """
    _check_share("token_returns", "gamma", gamma)

    def function(batch: RewardBatch) -> Tensor:
        assert batch.token_rewards is not None
        return discounted_returns(batch.token_rewards, _live(batch), gamma)

    return function


@advantages.register(
    "reinforce_pp",
    needs={"token_rewards"},
    formula="A_t = z_batch(G_t), G_t = Σ_(u >= t) {gamma}^(u-t)·r_u",
    source="REINFORCE++, arXiv 2501.03262",
)
def reinforce_pp(gamma: float = 1.0) -> AdvantageFunction:
    """(G - mean) / (unbiased std + 1e-4) with the returns G of `token_returns`, over all tokens of the batch.

    0 <= gamma <= 1. A KL term goes into `regularizers`, not into the rewards. Source: REINFORCE++, arXiv 2501.03262.
    """
    _check_share("reinforce_pp", "gamma", gamma)

    def function(batch: RewardBatch) -> Tensor:
        assert batch.token_rewards is not None
        live = _live(batch)
        return whitened(discounted_returns(batch.token_rewards, live, gamma), live)

    return function


@advantages.register(
    "reinforce_pp_baseline",
    needs={"token_rewards"},
    formula="A_t = z_batch(G_t), R - mean_group in place of R, G_t = Σ_(u >= t) {gamma}^(u-t)·r_u",
    source="REINFORCE++-baseline, arXiv 2501.03262",
)
def reinforce_pp_baseline(gamma: float = 1.0) -> AdvantageFunction:
    """`reinforce_pp`, where the group mean is subtracted from the reward of each completion at its last token.

    Process rewards at other tokens do not change. 0 <= gamma <= 1. Source: arXiv 2501.03262.
    """
    _check_share("reinforce_pp_baseline", "gamma", gamma)

    def function(batch: RewardBatch) -> Tensor:
        assert batch.token_rewards is not None
        live = _live(batch)
        mean = batch.rewards - centred_in_group(batch.rewards, batch.group)[0]
        last = live & (live.cumsum(1) == live.sum(1, keepdim=True))
        rewards = torch.where(last, batch.token_rewards - mean[:, None], batch.token_rewards)
        return whitened(discounted_returns(rewards, live, gamma), live)

    return function


@advantages.register(
    "gae",
    needs={"token_rewards", "values"},
    formula="A_t = Σ_(u >= t) ({gamma}·{lam})^(u-t)·δ_u, δ_t = r_t + {gamma}·V_(t+1) - V_t",
    source="arXiv 1506.02438; value head as in PPO, arXiv 1707.06347",
)
def gae(
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    value_learning_rate: float = 1e-3,
    value_clip: float | None = 0.2,
) -> AdvantageFunction:
    """Generalized advantage estimation with a value head V, which is trained along with the policy.

    The value after a completion's last token is 0. lam 1 gives returns minus values, lam 0 the one-step error δ.

    Args:
        gamma, lam: discount per token, and weight of longer estimates, both in [0, 1].
        whiten: whether to subtract the mean and divide by the unbiased std + 1e-4 over all tokens of the batch.
        value_learning_rate: learning rate of the head, > 0, constant.
        value_clip: maximal useful change of a value since the rollout, > 0 (see `value_loss`); None: no limit. Constant.

    `function.returns(batch)` (N, T) are the targets of the head, A + V before whitening; `function.value` its settings.
    Sources: arXiv 1506.02438; PPO, arXiv 1707.06347.
    """
    _check_share("gae", "gamma", gamma)
    _check_share("gae", "lam", lam)
    settings = ValueSettings(value_learning_rate, value_clip)

    def plain(batch: RewardBatch) -> Tensor:
        assert batch.token_rewards is not None
        assert batch.values is not None
        return generalized_advantages(batch.token_rewards, batch.values, _live(batch), gamma, lam)

    def function(batch: RewardBatch) -> Tensor:
        return whitened(plain(batch), _live(batch)) if whiten else plain(batch)

    def returns(batch: RewardBatch) -> Tensor:
        assert batch.values is not None
        return plain(batch) + batch.values

    function.returns = returns  # type: ignore[attr-defined]
    function.value = settings  # type: ignore[attr-defined]
    return function


# --- with a teacher ---------------------------------------------------------------------------------------------------
#
# A teacher assigns a log-probability to every token of a completion. It is another model, or the policy with a longer prompt
# (`kit.trainer.teacher`). The gap log p_teacher - log p_old is positive at tokens that the teacher prefers. It is 0 for a
# completion without a teacher and for a token of unknown log-probability.


@advantages.register("none", formula="A = 0", source="for losses made of regularizers alone, e.g. distillation")
def none() -> AdvantageFunction:
    """0 for every completion: the clip has no gradient, and the loss consists of the regularizers."""
    return lambda batch: torch.zeros_like(batch.rewards)


@advantages.register(
    "sdpo",
    needs={"old_logps", "teacher_logps"},
    formula="A_t = {mix}·A + (1 - {mix})·(log p_teacher - log p_old),  A of {base}",
    source="SDPO, arXiv 2601.20802, on sampled tokens; on-policy distillation where mix is 0",
)
def sdpo(mix: float = 0.0, base: Literal["group_zscore", "group_mean"] = "group_zscore") -> AdvantageFunction:
    """mix·A_group + (1 - mix)·(log p_teacher - log p_old) at each token, in nats; (N, T).

    With `mix` 0 the gradient is that of the reverse KL to the teacher, estimated from the sampled tokens. With `mix` 1 the
    result equals `base` exactly. 0 <= mix <= 1; it may follow a schedule. A completion without a teacher has the advantage
    mix·A. Source: SDPO, arXiv 2601.20802, with its mix with GRPO's advantage.
    """
    _check_share("sdpo", "mix", mix)
    estimate = _BASES[base]

    def function(batch: RewardBatch) -> Tensor:
        assert batch.teacher_logps is not None
        assert batch.old_logps is not None
        assert batch.mask is not None, "RewardBatch has one whenever it has teacher_logps"
        gap = (batch.teacher_logps - batch.old_logps).nan_to_num(nan=0.0).masked_fill(~batch.mask, 0.0)
        return mix * estimate(batch)[:, None] + (1.0 - mix) * gap

    return function


_BASES: dict[str, AdvantageFunction] = {"group_zscore": group_zscore.build(), "group_mean": group_mean.build()}


def _live(batch: RewardBatch) -> Tensor:
    """(N, T) bool: tokens that train, of completions with a score."""
    assert batch.mask is not None, "RewardBatch has one whenever it has token_rewards"
    return batch.mask & batch.scorable[:, None]


def _check_share(owner: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{owner}: {name} must satisfy 0 <= {name} <= 1, got {value!r}.")
