from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kit.errors import ConfigError
from kit.objective import Objective, TokenBatch, clips

from .sampling import gradient, sample


def one_token(ratio: float, advantage: float, **fields: Any) -> TokenBatch:
    """One completion of one token with this ratio; the current logp is -1."""
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        logps=logps,
        old_logps=logps.detach() - math.log(ratio),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        mask=torch.tensor([[True]]),
        **fields,
    )


def value(name: str, ratio: float, advantage: float, **hyperparameters: Any) -> float:
    return clips.build({"name": name, **hyperparameters})(one_token(ratio, advantage)).item()


# --- identities and limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_clip", "two_sided", "dual_clip", "cispo", "sapo"])
def test_on_policy_every_token_clip_has_the_gradient_of_reinforce(name: str) -> None:
    drawn = sample(1, (6, 9), spread=0.0)
    (_, expected), (_, actual) = (gradient(Objective(clip=clip), drawn) for clip in ("reinforce", name))
    torch.testing.assert_close(actual, expected)


# --- golden numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside: -1.1 · 2
        (1.5, 2.0, -2.4),  # too high and good: -1.2 · 2
        (1.5, -2.0, 3.0),  # too high and bad, min keeps the worse: -(1.5 · -2)
        (0.5, -2.0, 1.6),  # too low and bad: -(0.8 · -2)
        (0.5, 2.0, -1.0),  # too low and good: -0.5 · 2
    ],
)
def test_ppo_clip(ratio: float, advantage: float, expected: float) -> None:
    assert value("ppo_clip", ratio, advantage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (5.0, -2.0, 6.0),  # r bounded at delta 3: -(3 · -2); ppo_clip has 10
        (2.0, -2.0, 4.0),  # below delta: -(2 · -2)
        (5.0, 2.0, -2.4),  # A > 0: the upper bound 1.2 is active first
    ],
)
def test_two_sided(ratio: float, advantage: float, expected: float) -> None:
    assert value("two_sided", ratio, advantage, delta=3.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (5.0, -2.0, 6.0),  # ppo_clip gives 10, the cap is -c·A = -3 · -2 = 6
        (2.0, -2.0, 4.0),  # ppo_clip gives 4, below the cap
        (0.5, -2.0, 1.6),  # -(0.8 · -2) = 1.6, below the cap
        (5.0, 2.0, -2.4),  # A > 0: no cap
    ],
)
def test_dual_clip(ratio: float, advantage: float, expected: float) -> None:
    assert value("dual_clip", ratio, advantage, c=3.0) == pytest.approx(expected)


def test_dual_clip_stops_the_gradient_at_the_cap() -> None:
    for ratio, expected in [(5.0, 0.0), (2.0, 4.0)]:  # d(-rA)/dlogp = -rA = 4 below the cap
        batch = one_token(ratio, -2.0)
        (slope,) = torch.autograd.grad(clips.dual_clip(c=3.0)(batch).sum(), batch.logps)
        assert slope.item() == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 2.0), (9.0, 5.0), (0.1, 0.1)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio: float, weight: float) -> None:
    batch = one_token(ratio, 3.0)
    loss = clips.cispo(eps_high=5.0)(batch)
    assert loss.item() == pytest.approx(weight * 3.0)  # -w · A · logp, logp = -1
    (slope,) = torch.autograd.grad(loss.sum(), batch.logps)
    assert slope.item() == pytest.approx(-weight * 3.0)


def test_gspo_weighs_a_completion_by_its_geometric_mean_ratio() -> None:
    logps = torch.log(torch.tensor([[0.4, 0.9, 0.5]], dtype=torch.float64))
    old = torch.log(torch.tensor([[0.1, 0.9, 0.1]], dtype=torch.float64))
    batch = TokenBatch(logps, old, torch.tensor([[2.0]]).double(), torch.tensor([[True, True, False]]))
    # ratios 4 and 1, the third is masked: s = sqrt(4 · 1) = 2, unclipped: -2 · 2
    assert clips.gspo(eps_low=0.5, eps_high=3.0)(batch).tolist() == [[pytest.approx(-4.0)] * 3]
    # clipped at 1 + 4e-4: -1.0004 · 2
    assert clips.gspo()(batch).tolist() == [[pytest.approx(-2.0008)] * 3]


def test_reinforce() -> None:
    assert value("reinforce", 7.0, 3.0) == pytest.approx(3.0)  # -3 · -1, whatever the ratio


# --- clip fractions ----------------------------------------------------------------------------------------------


def test_clip_fractions_count_live_tokens_by_the_sign_of_the_advantage() -> None:
    ratios = torch.tensor([[0.5, 1.5, 1.0, 9.0], [0.5, 1.5, 1.0, 9.0]], dtype=torch.float64)
    batch = TokenBatch(
        logps=ratios.log().requires_grad_(),
        old_logps=torch.zeros(2, 4, dtype=torch.float64),
        advantages=torch.tensor([[1.0], [-1.0]]),
        mask=torch.tensor([[True, True, True, False]] * 2),
    )
    metrics = Objective(clip="ppo_clip").loss(batch).metrics
    counts = {key: (metrics[f"clip_fraction/{key}"].total.item(), metrics[f"clip_fraction/{key}"].count.item())
              for key in ("low", "high", "region")}  # fmt: skip
    # of 6 live tokens: row 0 (A > 0) clips 1.5, row 1 (A < 0) clips 0.5
    assert counts == {"low": (1, 6), "high": (1, 6), "region": (2, 6)}


# --- guards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "ppo_clip", "eps_low": -0.1}, r"ppo_clip: eps_low must satisfy 0 <= eps_low < 1, got -0.1"),
        ({"name": "ppo_clip", "eps_high": math.nan}, r"eps_high must be a number or a schedule, got nan"),
        ({"name": "two_sided", "delta": 1.2}, r"delta must satisfy 1.2 < delta, got 1.2"),
        ({"name": "dual_clip", "c": 1.0}, r"dual_clip: c must satisfy 1 < c, got 1.0"),
        ({"name": "cispo", "eps_high": 0}, r"cispo: eps_high must satisfy 0 < eps_high, got 0.0"),
        ({"name": "ppo_clip", "eps_hgih": 0.3}, r"no hyper-parameter 'eps_hgih'. Did you mean 'eps_high'\?"),
        ({"name": "ppo_clap"}, r"No clip is called 'ppo_clap'. Did you mean 'ppo_clip'\?"),
        ({"name": "ppo_clip", "eps_low": "linear(0.2, 1.5, 9)"}, r"eps_low must satisfy 0 <= eps_low < 1, got 1.5"),
    ],
)  # fmt: skip
def test_hyper_parameters_are_checked_where_they_are_set(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(clip=spec)


# --- soft gates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 3.0, -6.0),  # σ(0) · 4/1 · 3 = 6: an offset of 2A, the slope is what counts
        (2.0, 3.0, -8.772703),  # σ(1) = 0.7310586; · 4 · 3
        (2.0, -3.0, 8.466000),  # σ(1.05) = 0.7407749; · 4/1.05 · 3
    ],
)
def test_sapo(ratio: float, advantage: float, expected: float) -> None:
    assert value("sapo", ratio, advantage) == pytest.approx(expected, rel=1e-6)


# --- levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two_sided", "cispo"])
def test_by_completion_the_fractions_count_completions(name: str) -> None:
    objective = Objective(clip={"name": name, "level": "sequence"})
    metrics = gradient(objective, sample(0, (4, 7)))[0].metrics
    assert metrics["clip_fraction/region"].count.item() == 4
