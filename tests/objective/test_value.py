from __future__ import annotations

import pytest
import torch

from kit.errors import ConfigError
from kit.objective.advantage import (
    ValueSettings,
    discounted_returns,
    explained_variance,
    generalized_advantages,
    value_loss,
)


def test_a_learning_rate_must_be_there_and_a_clip_need_not() -> None:
    assert ValueSettings(clip=None).clip is None
    with pytest.raises(ConfigError, match="learning_rate must be a finite number above 0, got None"):
        ValueSettings(learning_rate=None)  # type: ignore[arg-type]


def test_value_loss_golden_numbers() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0]])
    returns = torch.tensor([[3.0, 3.0, -1.0]])
    # 0.5·(1 - 3)², 0.5·(1 - 3)², 0.5·(1 + 1)²
    assert value_loss(values, values, returns, None).tolist() == [[2, 2, 2]]
    # from 0.7 the value may come to 0.9: 0.5·(0.9 - 3)² = 2.205 is more than 2; from 0.9 it is not clipped; from
    # 0.7 towards -1 the clipped error 0.5·(0.9 + 1)² = 1.805 is less than 2
    old = torch.tensor([[0.7, 0.9, 0.7]])
    assert value_loss(values, old, returns, 0.2)[0].tolist() == pytest.approx([2.205, 2, 2])


def test_the_clip_stops_the_pull_in_the_direction_already_taken() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0]], requires_grad=True)
    old = torch.tensor([[0.7, 0.9, 0.7]], requires_grad=True)
    returns = torch.tensor([[3.0, 3.0, -1.0]], requires_grad=True)
    value_loss(values, old, returns, 0.2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, -2, 2]]  # V - R where it is not clipped
    assert old.grad is None
    assert returns.grad is None


def test_explained_variance_golden_numbers() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    returns = torch.tensor([[1.0, 3.0, 99.0], [5.0, 7.0, torch.nan]])
    assert explained_variance(returns, returns, mask).item() == 1
    assert explained_variance(returns, returns + 5.0, mask).item() == 1  # a constant error is no variance
    assert explained_variance(returns, torch.zeros_like(returns), mask).item() == 0
    # errors 0, 0, 0, 4: mean 1, variance (3 + 9) / 4 = 3; returns: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    values = torch.tensor([[1.0, 3.0, 0.0], [5.0, 3.0, 0.0]])
    assert explained_variance(returns, values, mask).item() == pytest.approx(1 - 3 / 5)
    # values that point the wrong way are worse than none: errors 2R, variance 4·5
    assert explained_variance(returns, -returns, mask).item() == pytest.approx(-3)


@pytest.mark.parametrize("level", [0.0, 0.1, 1e8])
def test_where_there_is_nothing_to_explain_nothing_is(level: float) -> None:
    equal = torch.full((3, 7), level)
    assert explained_variance(equal, torch.randn(3, 7), torch.ones(3, 7, dtype=torch.bool)).item() == 0
    assert explained_variance(equal, equal, torch.zeros(3, 7, dtype=torch.bool)).item() == 0


def test_rubbish_at_masked_tokens_reaches_nothing() -> None:
    mask = torch.tensor([[True, False, True]])
    rewards = torch.tensor([[1.0, torch.nan, 2.0]])
    values = torch.tensor([[0.5, torch.inf, 0.25]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[2, 0, 2]]  # 1 + 2/2
    # 2 - 0.25; 1 + 0.25/2 - 0.5 + 1.75/2·0.5
    assert generalized_advantages(rewards, values, mask, 0.5, 0.5).tolist() == [[1.0625, 0, 1.75]]
