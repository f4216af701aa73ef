"""Advantage estimators over tokens: `RewardBatch` -> (N, T), exactly 0 at tokens that do not train.

Time is counted in live tokens, so that what a tool returned does not discount. A completion without a score (NaN
reward) is 0 throughout and counts in no mean or standard deviation. They are filed in `kit.objective.advantage`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.objective.advantage import AdvantageFunction, advantages, centred_in_group, whitened
from kit.objective.batch import RewardBatch
from kit.objective.value import ValueSettings, discounted_returns, generalized_advantages


@advantages.register(
    "token_returns", needs={"token_rewards"}, formula="A_t = Σ_(u >= t) {gamma}^(u-t)·r_u", source="Williams 1992"
)
def token_returns(gamma: float = 1.0) -> AdvantageFunction:
    """G_t = r_t + gamma·r_(t+1) + ...: the rewards from each token on, neither centred nor whitened.

    For process rewards, which are given at tokens. 0 <= gamma <= 1. Source: Williams 1992, doi 10.1007/BF00992696.
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
    """The returns of `token_returns`, less their mean, over their unbiased std + 1e-4; both over the batch's tokens.

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
    """`reinforce_pp` with each completion's own reward, at its last token, less the mean of its group.

    Process rewards at other tokens stay as they are. 0 <= gamma <= 1. Source: arXiv 2501.03262.
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

    The value after a completion's last token is 0. `whiten`: less the mean, over the unbiased std + 1e-4, of all tokens
    of the batch. 0 <= gamma, lam <= 1; lam 1 is returns less values, lam 0 the one-step error δ.
    `value_learning_rate` > 0 and `value_clip` > 0 (how far a value may move from the one at the rollout before its loss
    stops to pull; None: any) are the head's own and follow no schedule.

    `function.returns(batch)` (N, T) are the head's targets, A + V before whitening; `function.value` its settings.
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


def _live(batch: RewardBatch) -> Tensor:
    """(N, T) bool: tokens that train, of completions with a score."""
    assert batch.mask is not None, "RewardBatch has one whenever it has token_rewards"
    return batch.mask & batch.scorable[:, None]


def _check_share(owner: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{owner}: {name} must satisfy 0 <= {name} <= 1, got {value!r}.")
