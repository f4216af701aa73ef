from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kit.objective import Objective, TokenBatch, clips


def completion(ratios: list[float], advantage: float, sampler: list[float] | None = None) -> TokenBatch:
    """One completion with these token ratios, logp -1 everywhere, and a masked last token.

    `sampler`: ratios of the old policy to the generation engine.
    """
    logps = torch.full((1, len(ratios)), -1.0, dtype=torch.float64, requires_grad=True)
    old = logps.detach() - torch.tensor([ratios], dtype=torch.float64).log()
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    mask[0, -1] = False
    engine = None if sampler is None else old - torch.tensor([sampler], dtype=torch.float64).log()
    return TokenBatch(logps, old, torch.tensor([[advantage]]).double(), mask, sampler_logps=engine)


def slopes(clip: Any, batch: TokenBatch) -> list[float]:
    loss = (clip(batch) * batch.mask).sum()
    return torch.autograd.grad(loss, batch.logps)[0][0].tolist()


# --- gmpo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "advantage", "expected"),
    [
        ([4.0, 1.0, 9.0], 2.0, -2 * math.exp(0.2)),  # ln 4 counts as 0.4: mean (0.4 + 0) / 2
        ([4.0, 1.0, 9.0], -2.0, 4.0),  # A < 0 has no upper bound: sqrt(4 · 1) · 2
        ([0.25, 1.0, 9.0], -2.0, 2 * math.exp(-0.2)),  # -ln 4 counts as -0.4
        ([0.25, 1.0, 9.0], 2.0, -1.0),  # A > 0 has no lower bound: sqrt(1/4) · 2
    ],
)
def test_gmpo(ratios: list[float], advantage: float, expected: float) -> None:
    assert clips.gmpo()(completion(ratios, advantage)).tolist() == [[pytest.approx(expected)] * 3]


def test_gmpo_stops_the_gradient_of_the_tokens_beyond_the_bound_only() -> None:
    slope = slopes(clips.gmpo(), completion([4.0, 1.0, 9.0], 2.0))
    # the sum over 2 live tokens of -2·exp(mean) is -4·exp(0.2); each token has a half of it in the mean
    assert slope == pytest.approx([0.0, -2 * math.exp(0.2), 0.0])


def test_gmpo_averages_advantages_of_tokens_over_the_live_ones() -> None:
    batch = completion([4.0, 1.0, 9.0], 2.0)
    by_token = TokenBatch(batch.logps, batch.old_logps, torch.tensor([[1.0, 3.0, 99.0]]).double(), batch.mask)
    torch.testing.assert_close(clips.gmpo()(by_token), clips.gmpo()(batch))


# --- vespo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "advantage", "expected"),
    [
        ([2.0, 0.5, 9.0], 3.0, 3.0),  # w = 1, φ(1) = 1: -1 · 3 · -1
        ([2.0, 1.0, 9.0], 3.0, 12 * math.exp(-3)),  # φ(2) = 2² · e^(3 - 6)
        ([2.0, 1.0, 9.0], -3.0, -24 * math.exp(-2)),  # φ(2) = 2³ · e^(2 - 4)
        ([0.5, 1.0, 9.0], 3.0, 0.75 * math.exp(1.5)),  # φ(1/2) = 1/4 · e^(3 - 1.5)
    ],
)
def test_vespo(ratios: list[float], advantage: float, expected: float) -> None:
    batch = completion(ratios, advantage)
    assert clips.vespo()(batch)[0, :2].tolist() == pytest.approx([expected] * 2)
    # the weight is detached: d(-φ·A·logp)/dlogp = -φ·A
    assert slopes(clips.vespo(), batch) == pytest.approx([-expected, -expected, 0.0])


def test_the_sampler_ratio_joins_w_truncated_at_the_cap() -> None:
    batch = completion([2.0, 1.0, 9.0], 3.0, sampler=[3.0, math.nan, 5.0])
    # w = 2 · min(3, 2) · 1 (unknown) = 4, the third token is masked: φ(4) = 16 · e^(3 - 12)
    assert clips.vespo(sampler_cap=2.0)(batch)[0, 0].item() == pytest.approx(48 * math.exp(-9))
    assert clips.vespo()(batch)[0, 0].item() == pytest.approx(12 * math.exp(-3))


def test_vespo_logs_its_weight() -> None:
    metrics = Objective(clip="vespo").loss(completion([2.0, 1.0, 9.0], 3.0)).metrics
    assert metrics["vespo/phi"].value.item() == pytest.approx(4 * math.exp(-3))
