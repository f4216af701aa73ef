from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError
from kit.objective import RewardBatch, TokenBatch
from kit.objective.batch import LOG_RATIO_LIMIT, bounded_exp, sequence_mean

from .sampling import sample

NAN, INF = float("nan"), float("inf")


def test_padding_is_filled_and_live_positions_are_kept() -> None:
    drawn = sample()
    rubbish = torch.full_like(drawn.logps, -INF)
    dirty = {
        name: torch.where(drawn.mask, getattr(drawn, name).detach(), rubbish)
        for name in ("logps", "old_logps", "ref_logps", "entropy")
    }
    batch = drawn.batch(**dirty, advantages=torch.where(drawn.mask, drawn.advantages[:, None], rubbish))
    for name in (*dirty, "advantages"):
        value = getattr(batch, name)
        assert (value[~drawn.mask] == 0).all()
    torch.testing.assert_close(batch.logps[drawn.mask], drawn.logps.detach()[drawn.mask])


def test_padding_has_exactly_zero_gradient_even_where_the_loss_is_nan() -> None:
    logps = torch.tensor([[-1.0, -INF]], requires_grad=True)
    batch = TokenBatch(logps, torch.zeros(1, 2), torch.ones(1, 1), torch.tensor([[True, False]]))
    (torch.log(batch.logps * -1) / batch.logps).sum().backward()  # 0/0 at the padded position
    assert logps.grad is not None
    assert logps.grad[0, 1] == 0
    assert torch.isfinite(logps.grad[0, 0])


def test_an_unknown_sampler_logp_stays_nan_only_where_it_is_live() -> None:
    mask = torch.tensor([[True, True, False]])
    sampler = torch.tensor([[-1.0, NAN, NAN]])
    batch = TokenBatch(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 1), mask, sampler_logps=sampler)
    assert batch.sampler_logps is not None
    torch.testing.assert_close(batch.sampler_logps, torch.tensor([[-1.0, NAN, 0.0]]), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "raised"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_is_raised_and_double_is_kept(dtype: torch.dtype, raised: torch.dtype) -> None:
    batch = sample(dtype=dtype).batch()
    for value in (batch.logps, batch.old_logps, batch.advantages, batch.ref_logps, batch.entropy):
        assert value is not None
        assert value.dtype == raised


def test_ratios_of_a_golden_batch() -> None:
    logps = torch.log(torch.tensor([[0.4, 0.9, 0.5]]))
    old = torch.log(torch.tensor([[0.1, 0.9, 0.1]]))
    batch = TokenBatch(logps, old, torch.ones(1, 1), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(batch.ratio, torch.tensor([[4.0, 1.0, 1.0]]))
    torch.testing.assert_close(batch.sequence_ratio, torch.tensor([[2.0]]))  # sqrt(4 · 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logps": torch.zeros(4)}, r"TokenBatch.logps has shape \(4,\), expected \(B, T\)"),
        ({"old_logps": torch.zeros(4, 6)}, r"TokenBatch.old_logps has shape \(4, 6\), expected \(4, 7\)"),
        ({"old_logps": None}, r"TokenBatch.old_logps is NoneType, expected a tensor of shape \(4, 7\)"),
        ({"mask": torch.ones(4, 6).bool()}, r"TokenBatch.mask has shape \(4, 6\), expected \(4, 7\)"),
        ({"mask": torch.ones(4, 7)}, r"TokenBatch.mask has dtype torch.float32, expected torch.bool"),
        ({"ref_logps": torch.zeros(4, 7).long()}, r"TokenBatch.ref_logps has dtype torch.int64, expected a floating"),
        ({"advantages": torch.zeros(4)}, r"TokenBatch.advantages has shape \(4,\), expected \(4, 1\) or \(4, 7\)"),
        ({"advantages": torch.zeros(4, 1).long()}, r"TokenBatch.advantages has dtype torch.int64"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_seen(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        sample(size=(4, 7)).batch(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.zeros(3, 1)}, r"RewardBatch.rewards has shape \(3, 1\), expected \(N,\)"),
        ({"rewards": torch.zeros(3).long()}, r"RewardBatch.rewards has dtype torch.int64"),
        ({"rewards": torch.tensor([0.0, INF, 0.0])}, r"RewardBatch.rewards hold infinity"),
        ({"group": torch.zeros(2).long()}, r"RewardBatch.group has shape \(2,\), expected \(3,\)"),
        ({"group": torch.zeros(3)}, r"RewardBatch.group has dtype torch.float32, expected torch.int64"),
        ({"components": torch.zeros(3)}, r"RewardBatch.components has shape \(3,\), expected \(3, K\)"),
        ({"component_weights": torch.ones(4)}, r"component_weights need components"),
        ({"lengths": torch.ones(4)}, r"RewardBatch.lengths has shape \(4,\), expected \(3,\)"),
    ],
)
def test_a_wrong_reward_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        RewardBatch(**{"rewards": torch.zeros(3), "group": torch.zeros(3).long(), **changes})


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
