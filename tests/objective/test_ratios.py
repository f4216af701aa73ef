from __future__ import annotations

import pytest
import torch

from kit.objective.batch import LOG_RATIO_LIMIT, bounded_exp, sequence_mean


def test_bounded_exp_is_exp_up_to_the_limit() -> None:
    x = torch.linspace(-200, LOG_RATIO_LIMIT, 5001)
    assert torch.equal(bounded_exp(x), torch.exp(x))


def test_bounded_exp_goes_on_along_its_tangent() -> None:
    limit = torch.tensor(LOG_RATIO_LIMIT, dtype=torch.float64)
    # e^20 · (1 + 60)
    assert bounded_exp(limit + 60).item() == pytest.approx(61 * torch.exp(limit).item())


@pytest.mark.parametrize("x", [-1e4, -80.0, 19.9, 20.1, 80.0, 1e4])
def test_bounded_exp_and_its_gradient_are_finite_and_increasing(x: float) -> None:
    value = torch.tensor(x, requires_grad=True)
    bounded_exp(value).backward()
    assert value.grad is not None
    assert torch.isfinite(bounded_exp(value))
    assert torch.isfinite(value.grad)
    assert value.grad >= 0
    assert value.grad > 0 or x < -80


def test_sequence_mean_of_ragged_rows() -> None:
    values = torch.tensor([[1.0, 3.0, 100.0], [5.0, 6.0, 7.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert sequence_mean(values, mask).tolist() == [[2.0], [0.0]]
