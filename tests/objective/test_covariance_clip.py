from __future__ import annotations

import math

import pytest
import torch

from kit.objective import Objective, TokenBatch, clips

from .sampling import gradient, sample


def two_completions(drift: float = 0.0) -> TokenBatch:
    """A = +2 and -2; a masked column; log ratio `drift` nats everywhere.

    mean logp of the four live tokens is -1.5 and mean A is 0, so the covariances are
    [2 · 1, 2 · -1], [-2 · 0.8, -2 · -0.8] = [2, -2], [-1.6, 1.6].
    """
    logps = torch.tensor([[-0.5, -2.5, -9.0], [-0.7, -2.3, -9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]] * 2)
    return TokenBatch(logps, logps.detach() - drift, torch.tensor([[2.0], [-2.0]]).double(), mask)


def at_step(batch: TokenBatch, step: int) -> TokenBatch:
    return TokenBatch(batch.logps, batch.old_logps, batch.advantages, batch.mask, step=step)


def test_clip_cov_cuts_one_of_the_candidates() -> None:
    seen = set()
    for step in range(30):
        batch = at_step(two_completions(), step)
        loss = clips.clip_cov()(batch)
        cut = (loss == 0) & batch.mask
        assert cut.sum() == 1  # floor(2e-4 · 4) = 0, but at least one
        seen.add(tuple(cut.nonzero()[0].tolist()))
        assert (loss[batch.mask & ~cut].abs() == 2).all()  # -A on policy
        (slope,) = torch.autograd.grad(loss.sum(), batch.logps)
        assert (slope[cut] == 0).all()
    assert seen == {(0, 0), (1, 1)}  # covariances 2 and 1.6, within (1, 5)


def test_clip_cov_cuts_the_share_of_all_live_tokens() -> None:
    loss = clips.clip_cov(share=0.5)(two_completions())  # 2 of 4
    assert loss[:, :2].tolist() == [[0, -2], [2, 0]]


@pytest.mark.parametrize("bounds", [{"cov_low": 1.7}, {"cov_high": 1.7}])
def test_clip_cov_leaves_tokens_outside_of_the_interval(bounds: dict[str, float]) -> None:
    loss = clips.clip_cov(share=0.9, **bounds)(two_completions())
    kept = 1 if "cov_low" in bounds else 0  # 2 alone is above 1.7, 1.6 alone below
    assert loss[0, 0].item() == (0 if kept else -2)
    assert loss[1, 1].item() == (2 if kept else 0)


def test_clip_cov_leaves_tokens_that_are_clipped_already() -> None:
    batch = two_completions(drift=0.5)  # r = 1.65 > 1.2: the completion with A > 0 is clipped
    loss = clips.clip_cov(share=0.9)(batch)
    assert loss[0, 0].item() == pytest.approx(-2.4)
    assert loss[1, 1].item() == 0


def test_clip_cov_logs_the_fraction() -> None:
    metrics = Objective(clip=clips.clip_cov(share=0.5)).loss(two_completions()).metrics
    assert metrics["clip_fraction/covariance"].value.item() == 0.5
    assert metrics["clip_fraction/region"].value.item() == 0.5
    assert metrics["clip_fraction/high"].value.item() == 0


@pytest.mark.parametrize("hyper", [{"share": 0.0, "cov_low": -9.0}, {"cov_low": 99.0, "cov_high": 100.0}])
def test_clip_cov_without_candidates_is_ppo_clip(hyper: dict[str, float]) -> None:
    drawn = sample(1, (6, 9))
    (left, g_left), (right, g_right) = (
        gradient(Objective(clip=clip), drawn) for clip in (clips.clip_cov(**hyper), "ppo_clip")
    )
    torch.testing.assert_close(left.loss, right.loss)
    torch.testing.assert_close(g_left, g_right)


def test_the_choice_of_clip_cov_is_that_of_the_step() -> None:
    drawn, clip = sample(2, (8, 16)), clips.clip_cov(share=0.1, cov_low=-9.0, cov_high=9.0)
    first, again, later = (clip(drawn.batch(step=step)) for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_kl_cov_penalises_the_token_with_the_highest_covariance() -> None:
    loss = clips.kl_cov(kl_coef=5.0)(two_completions(drift=0.3))
    plain = 2 * math.exp(0.3)
    assert loss[0, 0].item() == pytest.approx(-plain + 5 * 0.3)
    assert loss[0, 1].item() == pytest.approx(-plain)
    assert loss[1, :2].tolist() == pytest.approx([plain, plain])


def test_kl_cov_penalises_the_share_of_all_live_tokens() -> None:
    batch = two_completions(drift=-0.3)
    held = clips.kl_cov(share=0.5)(batch) + batch.ratio * batch.advantages
    assert held[:, :2].flatten().tolist() == pytest.approx([0.3, 0, 0, 0.3])  # 2 of 4: covariances 2 and 1.6


@pytest.mark.parametrize("hyper", [{"share": 0.0}, {"share": 0.5, "kl_coef": 0.0}])
def test_kl_cov_without_penalty_is_the_unclipped_surrogate(hyper: dict[str, float]) -> None:
    drawn = sample(1, (6, 9))
    (left, g_left), (right, g_right) = (
        gradient(Objective(clip=clip), drawn)
        for clip in (clips.kl_cov(**hyper), lambda batch: -batch.ratio * batch.advantages)
    )
    torch.testing.assert_close(left.loss, right.loss)
    torch.testing.assert_close(g_left, g_right)


def test_equal_covariances_do_not_widen_the_share() -> None:
    drawn = sample(0, (1, 20))  # one completion, one advantage: no covariance
    batch = drawn.batch()
    held = clips.kl_cov(share=0.1)(batch) + batch.ratio * batch.advantages
    assert (held.abs() > 1e-9).sum() == 1  # floor(0.1 · 19)
