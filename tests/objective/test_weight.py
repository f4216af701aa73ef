from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kit.objective import Objective, TokenBatch, weights

from .sampling import gradient, sample


def one_completion(ratios: list[float], advantage: float = 1.0, **fields: Any) -> TokenBatch:
    """A completion with these ratios of the old policy to the engine, NaN for an unknown one; the last token is masked."""
    old = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    mask[0, -1] = False
    sampler = old - torch.tensor([ratios], dtype=torch.float64).log()
    logps = old.clone().requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    return TokenBatch(logps, old, advantages, mask, **{"sampler_logps": sampler, **fields})


def weigh(batch: TokenBatch, **spec: Any) -> list[float]:
    return weights.build(spec)(batch)[batch.mask].tolist()


# --- sampler_correction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", {}, [3, 0.5, 1]),  # 4 moved to 3; the unknown one counts as 1
        ("token_truncate", {"min": 0.8}, [3, 0.8, 1]),
        ("token_truncate", {"max": None}, [4, 0.5, 1]),
        ("token_mask", {}, [0, 0.5, 1]),
        ("token_mask", {"min": 0.8, "max": None}, [4, 0, 1]),
        ("sequence_truncate", {}, [2, 2, 2]),  # 4 · 0.5 · 1
        ("sequence_truncate", {"max": 1.5}, [1.5] * 3),
        ("sequence_truncate", {"min": 2.5}, [2.5] * 3),
        ("sequence_mask", {}, [2, 2, 2]),
        ("sequence_mask", {"max": 1.5}, [0, 0, 0]),
        ("sequence_mask", {"min": 2.5}, [0, 0, 0]),
        ("geometric", {}, [2 ** (1 / 3)] * 3),  # (4 · 0.5 · 1)^(1/3) = 1.26
        ("geometric", {"max": 1.25}, [0, 0, 0]),
        ("geometric", {"min": 1.27}, [0, 0, 0]),
    ],
)
def test_sampler_correction(mode: str, bounds: dict[str, float], expected: list[float]) -> None:
    batch = one_completion([4.0, 0.5, math.nan, 100.0])  # the last one is masked
    assert weigh(batch, name="sampler_correction", mode=mode, **bounds) == pytest.approx(expected)


def test_the_masked_share_is_logged() -> None:
    objective = Objective(weights=[{"name": "sampler_correction", "mode": "token_mask"}])
    metrics = objective.loss(one_completion([4.0, 0.5, math.nan, 100.0])).metrics
    assert metrics["masked/sampler_correction"].value.item() == pytest.approx(1 / 3)
    assert metrics["weight/sampler_correction"].value.item() == pytest.approx(0.5)  # (0 + 0.5 + 1) / 3


# --- high_entropy_only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (0.0, [1, 1, 1, 1, 1]),
        (0.5, [1, 0, 1, 1, 0]),  # the median is 0.3
        (0.6, [1, 0, 1, 0, 0]),  # between 0.3 and 0.5: 0.38
        (0.8, [0, 0, 1, 0, 0]),  # between 0.5 and 0.9: 0.58
        (0.99, [0, 0, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_high_entropy_only(quantile: float, expected: list[int], dtype: torch.dtype) -> None:
    entropy = torch.tensor([[0.5, 0.1, 0.9, 0.3, 0.0, 7.0]], dtype=dtype)  # the last one is masked
    batch = one_completion([1.0] * 6, entropy=entropy)
    assert weigh(batch, name="high_entropy_only", quantile=quantile) == expected


@pytest.mark.parametrize(("quantile", "tokens", "live"), [(0.3, 51, 36), (0.6, 171, 69), (0.8, 10001, 2001)])
def test_a_quantile_that_falls_on_a_token_keeps_it(quantile: float, tokens: int, live: int) -> None:
    entropy = torch.rand(1, tokens + 1, generator=torch.Generator().manual_seed(0))
    batch = one_completion([1.0] * (tokens + 1), entropy=entropy)  # the last one is masked
    # tokens - quantile · (tokens - 1), where float32 has 0.3 · 50 = 15.000001
    assert sum(weigh(batch, name="high_entropy_only", quantile=quantile)) == live


# --- off_policy_mask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "advantage", "delta", "expected"),
    [
        ([1.0, 1.0, 1.0], -1.0, 0.5, [1, 1]),
        (None, -1.0, 0.5, [1, 1]),  # falls back on the old policy, equal to the current one here
        ([math.exp(-2), 1.0, 1.0], -1.0, 0.5, [0, 0]),  # sampler - logp: mean (2 + 0) / 2 = 1
        ([math.exp(-2), 1.0, 1.0], -1.0, 1.0, [1, 1]),
        ([math.exp(-2), 1.0, 1.0], 1.0, 0.5, [1, 1]),  # A > 0 is kept
        ([math.exp(-2), 1.0, 1.0], 0.0, 0.5, [1, 1]),
        ([math.nan, 1.0, 1.0], -1.0, 0.5, [1, 1]),  # unknown counts as 0
        ([math.exp(2), 1.0, 1.0], -1.0, 0.0, [1, 1]),  # a token that became likelier
    ],
)
def test_off_policy_mask(sampler: list[float] | None, advantage: float, delta: float, expected: list[int]) -> None:
    batch = one_completion(sampler or [1.0] * 3, advantage, **({} if sampler else {"sampler_logps": None}))
    assert weigh(batch, name="off_policy_mask", delta=delta) == expected


# --- drop_truncated ----------------------------------------------------------------------------------------------


def test_drop_truncated_keeps_the_denominator() -> None:
    drawn = sample(4)
    drawn.truncated = torch.tensor([True, False, False, False])
    out, slope = gradient(Objective(weights=["drop_truncated"], reduction="token_mean"), drawn)
    _, plain = gradient(Objective(reduction="token_mean"), drawn)
    assert (slope[0] == 0).all()
    torch.testing.assert_close(slope[1:], plain[1:])
    assert out.metrics["masked/drop_truncated"].value.item() == pytest.approx(
        (drawn.mask[0].sum() / drawn.mask.sum()).item()
    )
