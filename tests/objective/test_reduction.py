from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective import LossScale, Objective, reductions

from .sampling import Sample, sample

PER_TOKEN = torch.tensor([[1.0, 2.0, 3.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence_mean", 3.5),  # (6 / 3 + 5 / 1) / 2
        ("token_mean", 2.75),  # 11 / 4
        ("global_token_mean", 1.1),  # 11 / 10
        ("fixed_length", 1.375),  # 11 / (2 · 4)
        ("sequence_sum", 5.5),  # 11 / 2
    ],
)
def test_golden_numbers(name: str, expected: float) -> None:
    scale = LossScale(window_tokens=10.0, max_completion_length=4)
    assert reductions.build(name)(PER_TOKEN, MASK, scale).item() == pytest.approx(expected)
    scale = LossScale(accumulation=5, window_tokens=10.0, max_completion_length=4)
    divided = expected if name == "global_token_mean" else expected / 5  # the window is already in its tokens
    assert reductions.build(name)(PER_TOKEN, MASK, scale).item() == pytest.approx(divided)


def test_fixed_length_prefers_its_own_length() -> None:
    scale = LossScale(max_completion_length=4)
    assert reductions.fixed_length(length=11)(PER_TOKEN, MASK, scale).item() == pytest.approx(0.5)  # 11 / (2 · 11)


def window(drawn: Sample, objective: Objective, splits: list[slice], accumulation: float) -> Tensor:
    """The gradient after a window of micro-batches."""
    drawn.logps.grad = None
    scale = LossScale(accumulation, drawn.mask.sum(), drawn.mask.shape[1])
    for rows in splits:
        objective.loss(drawn.batch(rows), scale).loss.backward()
    assert drawn.logps.grad is not None
    return drawn.logps.grad


EQUAL, UNEQUAL = [slice(0, 2), slice(2, 4), slice(4, 6)], [slice(0, 1), slice(1, 6)]
TERMS: dict[str, Any] = {"clip": "ppo_clip", "regularizers": ["kl"]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sequence_mean", "fixed_length", "global_token_mean", "sequence_sum"])
def test_equal_micro_batches_add_up_to_the_whole(name: str, seed: int) -> None:
    drawn, objective = sample(seed, (6, 9)), Objective(**TERMS, reduction=name)
    full = window(drawn, objective, [slice(0, 6)], 1).clone()
    torch.testing.assert_close(window(drawn, objective, EQUAL, len(EQUAL)), full)


def test_unequal_micro_batches_add_up_only_under_global_token_mean() -> None:
    drawn = sample(1, (6, 9))
    objective = Objective(**TERMS, reduction="global_token_mean")
    full = window(drawn, objective, [slice(0, 6)], 1).clone()
    torch.testing.assert_close(window(drawn, objective, UNEQUAL, len(UNEQUAL)), full)
    other = Objective(**TERMS, reduction="token_mean")
    full = window(drawn, other, [slice(0, 6)], 1).clone()
    assert not torch.allclose(window(drawn, other, UNEQUAL, len(UNEQUAL)), full)


@pytest.mark.parametrize("name", list(reductions))
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_without_live_tokens_the_loss_is_a_differentiable_zero(name: str, shape: tuple[int, int]) -> None:
    logps = torch.zeros(shape, requires_grad=True)
    scale = LossScale(window_tokens=0, max_completion_length=4)
    loss = reductions.build(name)(logps * 1.0, torch.zeros(shape, dtype=torch.bool), scale)
    assert loss.item() == 0
    loss.backward()
    assert logps.grad is not None
    assert torch.isfinite(logps.grad).all()


def test_a_missing_window_is_an_error() -> None:
    with pytest.raises(ObjectiveError, match=r"global_token_mean needs LossScale\.window_tokens"):
        Objective(reduction="global_token_mean").loss(sample().batch(), LossScale())


def test_a_missing_length_is_an_error() -> None:
    with pytest.raises(
        ObjectiveError, match=r"fixed_length needs a length: set it, or LossScale\.max_completion_length"
    ):
        Objective(reduction="fixed_length").loss(sample().batch(), LossScale())


def test_accumulation_must_be_positive() -> None:
    with pytest.raises(ObjectiveError, match="accumulation must be positive, got 0"):
        LossScale(accumulation=0)


@pytest.mark.parametrize(
    ("length", "message"),
    [(0, "length must satisfy 1 <= length, got 0"), (2.5, "length must be a whole number or null, got 2.5")],
)
def test_length_is_checked(length: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(reduction={"name": "fixed_length", "length": length})
