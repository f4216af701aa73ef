from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective import Objective, RewardBatch
from kit.objective.advantage import ValueSettings

NAMES = ["gae", "reinforce_pp", "reinforce_pp_baseline", "token_returns"]


def compute(advantage: str | dict[str, Any], batch: RewardBatch) -> Tensor:
    return Objective(advantage=advantage).compute_advantages(batch)


def small(
    mask: list[list[int]], token_rewards: list[list[float]], values: list[list[float]] | None = None, **fields: Any
) -> RewardBatch:
    """One group whose rewards, by default, are the sums over tokens."""
    laid = torch.tensor(token_rewards, dtype=torch.float64)
    size = laid.shape[0]
    rewards = {"rewards": laid.sum(1), "group": torch.zeros(size, dtype=torch.int64)} | fields
    live = torch.tensor(mask, dtype=torch.bool)
    baseline = None if values is None else torch.tensor(values, dtype=torch.float64)
    return RewardBatch(**rewards, mask=live, token_rewards=laid, values=baseline)


def outcomes(seed: int = 0, dtype: torch.dtype = torch.float64, process: float = 0.0) -> RewardBatch:
    """Six completions of up to 9 tokens in two interleaved groups, with masked tokens, an empty completion and a NaN reward."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(9) < torch.tensor([9, 4, 6, 9, 1, 0])[:, None]
    mask[0, 3:5] = mask[2, 0] = mask[3, 8] = False
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    rewards[1] = torch.nan
    token_rewards = process * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    for row in range(5):
        token_rewards[row, mask[row].nonzero()[-1, 0]] += rewards[row].nan_to_num(0.0)
    values = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    group = torch.tensor([3, 3, 8, 3, 8, 8])
    return RewardBatch(
        rewards.to(dtype), group, mask=mask, token_rewards=token_rewards.to(dtype), values=values.to(dtype)
    )


def live(batch: RewardBatch) -> Tensor:
    assert batch.mask is not None
    return batch.mask & batch.scorable[:, None]


def slow_advantages(batch: RewardBatch, gamma: float, lam: float, use_values: bool = True) -> Tensor:
    """Generalized advantages, token by token from the end; with zero values and lam 1 they are the returns."""
    assert batch.token_rewards is not None
    assert batch.values is not None
    out = torch.zeros_like(batch.token_rewards)
    for row in range(out.shape[0]):
        following, value_after = 0.0, 0.0
        for t in reversed(live(batch)[row].nonzero()[:, 0].tolist()):
            value = batch.values[row, t].item() if use_values else 0.0
            delta = batch.token_rewards[row, t].item() + gamma * value_after - value
            following = delta + gamma * lam * following
            out[row, t], value_after = following, value
    return out


def test_token_returns_golden_numbers() -> None:
    # from the end: 4; 1 + 4/2; 2 + 3/2. In the second row the hole is no time: 6; 0 + 6/2
    batch = small([[1, 1, 1], [1, 0, 1]], [[2.0, 1.0, 4.0], [0.0, 50.0, 6.0]])
    actual = compute({"name": "token_returns", "gamma": 0.5}, batch)
    torch.testing.assert_close(actual, torch.tensor([[3.5, 3.0, 4.0], [3.0, 0.0, 6.0]], dtype=torch.float64))


def test_reinforce_pp_golden_numbers() -> None:
    # returns 1 and 2 in the first row, 6 in the second: mean 3, variance (4 + 1 + 9) / 2 = 7
    actual = compute({"name": "reinforce_pp", "gamma": 0.5}, small([[1, 1], [1, 0]], [[0.0, 2.0], [6.0, 0.0]]))
    expected = torch.tensor([[-2.0, -1.0], [3.0, 0.0]], dtype=torch.float64) / (math.sqrt(7) + 1e-4)
    torch.testing.assert_close(actual, expected)


def test_reinforce_pp_baseline_golden_numbers() -> None:
    # the group's mean is 4, so the last tokens hold -2 and 2; returns -1, -2 and 2: mean -1/3
    # variance (4/9 + 25/9 + 49/9) / 2 = 13/3
    batch = small([[1, 1], [1, 0]], [[0.0, 2.0], [6.0, 0.0]])
    actual = compute({"name": "reinforce_pp_baseline", "gamma": 0.5}, batch)
    expected = torch.tensor([[-2 / 3, -5 / 3], [7 / 3, 0]], dtype=torch.float64) / (math.sqrt(13 / 3) + 1e-4)
    torch.testing.assert_close(actual, expected)


def test_the_baseline_leaves_process_rewards_alone() -> None:
    # rewards 2 and 6, of which the group's mean is 4; a process reward of 10 on the first token, 1 on the last
    batch = small([[1, 1], [1, 0]], [[10.0, 3.0], [6.0, 0.0]], rewards=torch.tensor([2.0, 6.0], dtype=torch.float64))
    # last tokens 3 - 4 and 6 - 4; returns 9, -1 and 2: mean 10/3, squares (289 + 169 + 16) / 9, variance 79/3
    expected = torch.tensor([[17 / 3, -13 / 3], [-4 / 3, 0]], dtype=torch.float64) / (math.sqrt(79 / 3) + 1e-4)
    torch.testing.assert_close(compute("reinforce_pp_baseline", batch), expected)


def test_gae_golden_numbers() -> None:
    # gamma 1/2, lam 1/2. delta: 8 - 3 = 5; 0 + 3/2 - 2 = -1/2; 1 + 2/2 - 4 = -2. A: 5; -1/2 + 5/4 = 3/4; -2 + 3/16
    batch = small([[1, 1, 0, 1]], [[1.0, 0.0, 70.0, 8.0]], [[4.0, 2.0, 60.0, 3.0]])
    expected = torch.tensor([[-29 / 16, 0.75, 0.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(compute({"name": "gae", "gamma": 0.5, "lam": 0.5, "whiten": False}, batch), expected)
    live = expected[0, [0, 1, 3]]
    white = torch.zeros_like(expected)
    white[0, [0, 1, 3]] = (live - live.mean()) / (live.std() + 1e-4)
    torch.testing.assert_close(compute({"name": "gae", "gamma": 0.5, "lam": 0.5}, batch), white)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_recursion(seed: int, gamma: float, lam: float) -> None:
    batch = outcomes(seed, process=1.0)
    actual = compute({"name": "gae", "gamma": gamma, "lam": lam, "whiten": False}, batch)
    torch.testing.assert_close(actual, slow_advantages(batch, gamma, lam))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_token_returns_equal_the_recursion(gamma: float) -> None:
    batch = outcomes(process=1.0)
    actual = compute({"name": "token_returns", "gamma": gamma}, batch)
    torch.testing.assert_close(actual, slow_advantages(batch, gamma, 1.0, use_values=False))


@pytest.mark.parametrize("name", NAMES)
def test_holes_are_no_time(name: str) -> None:
    batch = small([[1, 0, 1, 0, 0, 1, 0]], [[1.0, 9.0, 2.0, 9.0, 9.0, 3.0, 9.0]], [[0.1, 7.0, 0.2, 7.0, 7.0, 0.3, 7.0]])
    dense = small([[1, 1, 1]], [[1.0, 2.0, 3.0]], [[0.1, 0.2, 0.3]], rewards=batch.rewards)
    setting = {"name": name, "gamma": 0.6}
    torch.testing.assert_close(compute(setting, batch)[:, [0, 2, 5]], compute(setting, dense))


def test_a_long_discount_stays_accurate_in_float32() -> None:
    size = 3000
    batch = RewardBatch(
        torch.ones(1), torch.zeros(1, dtype=torch.int64), mask=torch.ones(1, size, dtype=torch.bool),
        token_rewards=torch.ones(1, size),
    )  # fmt: skip
    expected = (1 - 0.999 ** torch.arange(size, 0, -1, dtype=torch.float64)) / (1 - 0.999)  # a geometric series
    actual = compute({"name": "token_returns", "gamma": 0.999}, batch)
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [-0.1, 1.01])
@pytest.mark.parametrize(("name", "key"), [*((name, "gamma") for name in NAMES), ("gae", "lam")])
def test_discounts_are_shares(name: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {key} must satisfy 0 <= {key} <= 1, got {value}"):
        Objective(advantage={"name": name, key: value})
    with pytest.raises(ConfigError, match=f"{key} must satisfy"):
        Objective(advantage={"name": name, key: f"linear(0.5, {value}, 9)"})


def test_only_an_estimator_with_values_has_a_value_head() -> None:
    assert Objective().value_settings is None
    assert Objective(advantage="token_returns").value_settings is None
    assert Objective.from_spec("ppo").value_settings == ValueSettings(1e-3, 0.2)
    set_up = {"name": "gae", "value_learning_rate": 1, "value_clip": None}
    assert Objective(advantage=set_up).value_settings == ValueSettings(1.0, None)


def test_targets_of_the_value_head_are_unwhitened_advantages_plus_values() -> None:
    batch = outcomes(process=0.5)
    assert batch.values is not None
    assert batch.mask is not None
    batch.values.requires_grad_()
    targets = Objective(advantage={"name": "gae", "gamma": 0.9, "lam": 0.8}).value_targets(batch)
    expected = (slow_advantages(batch, 0.9, 0.8) + batch.values.detach()).masked_fill(~live(batch), 0.0)
    torch.testing.assert_close(targets.masked_fill(~live(batch), 0.0), expected)
    assert torch.equal(targets[1], batch.values[1].detach())  # without a score: nothing to learn
    assert (targets[~batch.mask] == 0).all()
    assert not targets.requires_grad


def own(batch: RewardBatch) -> Tensor:
    assert batch.values is not None
    return batch.rewards[:, None].nan_to_num(0.0) - batch.values


own.needs = {"values"}  # type: ignore[attr-defined]


def test_a_custom_estimator_may_use_the_value_head() -> None:
    batch = outcomes(process=0.5)
    assert batch.values is not None
    objective = Objective(advantage=own)
    assert objective.value_settings == ValueSettings()
    expected = torch.where(live(batch), compute("token_returns", batch), batch.values)
    torch.testing.assert_close(objective.value_targets(batch), expected)
    with pytest.raises(ObjectiveError, match=r"targets of the value head need token_rewards, but .* not laid out"):
        objective.value_targets(replace(batch, token_rewards=None))
    with pytest.raises(ObjectiveError, match="own needs values, but there is no value head"):
        objective.value_targets(replace(batch, values=None))


def test_a_custom_estimators_targets_and_settings_are_used_and_checked() -> None:
    def build(result: float = 2.0):  # type: ignore[no-untyped-def]
        def function(batch: RewardBatch) -> Tensor:
            return own(batch)

        function.needs = {"values"}  # type: ignore[attr-defined]
        function.value = ValueSettings(0.5, None)  # type: ignore[attr-defined]
        function.returns = lambda batch: torch.full_like(batch.values, result)  # type: ignore[attr-defined]
        return function

    batch = replace(outcomes(), token_rewards=None)
    objective = Objective(advantage=build)
    assert objective.value_settings == ValueSettings(0.5, None)
    assert (objective.value_targets(batch)[live(batch)] == 2).all()
    with pytest.raises(ObjectiveError, match="NaN or infinity"):
        Objective(advantage={"name": build, "result": math.inf}).value_targets(batch)
