"""The probe of hooks: its gradient against autograd, every recipe alive, and one planted dead hook of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import LossOutput, LossScale, Objective, TokenBatch
from kit.objective.probe import dead_hooks, logps_gradient
from kit.objective.recipes import recipe_names

from .sampling import gradient, sample, scale_for

WITH_ALL_KINDS: dict[str, Any] = {
    "clip": "ppo_clip",
    "weights": ["sampler_correction", {"name": "high_entropy_only", "quantile": 0.3}],
    "regularizers": [{"name": "kl", "coef": 0.04}, "entropy_bonus", {"name": "nll_on_correct", "coef": 0.1}],
    "reduction": "global_token_mean",
}


def dead(objective: Objective, **changes: Any) -> list[str]:
    drawn = sample(3, (5, 9))
    return [hook.name for hook in dead_hooks(objective, drawn.batch(**changes), scale_for(drawn))]


@pytest.mark.parametrize("spec", [*recipe_names(), WITH_ALL_KINDS], ids=str)
def test_the_gradient_is_that_of_autograd(spec: Any) -> None:
    objective, drawn = Objective.from_spec(spec), sample(1, (5, 9))
    _, want = gradient(objective, drawn)
    assert want.any()
    assert torch.equal(logps_gradient(objective, drawn.batch(), scale_for(drawn)), want)


def test_other_fields_with_gradient_are_held_constant() -> None:
    drawn = sample(1, (5, 9))
    objective = Objective(regularizers=["entropy_bonus", {"name": "kl", "estimator": "full", "coef": 1.0}])
    attached = {"entropy": 2.0 * drawn.logps, "full_kl": drawn.logps**2}  # as if both came from the same model
    found = logps_gradient(objective, drawn.batch(**attached), scale_for(drawn))
    torch.testing.assert_close(found, logps_gradient(Objective(), drawn.batch(), scale_for(drawn)))


class Turning:
    """A regularizer with state: its sign turns at every call."""

    def __init__(self) -> None:
        self.sign = 1.0

    def __call__(self, batch: TokenBatch) -> Tensor:
        self.sign = -self.sign
        return self.sign * batch.logps

    def state_dict(self) -> dict[str, float]:
        return {"sign": self.sign}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.sign = state["sign"]


def test_state_of_hooks_and_controllers_is_left_as_it_was() -> None:
    turning = Turning()
    adaptive = {"name": "kl", "coef": "adaptive_kl(target=0.05, horizon=10)"}
    objective, drawn = Objective(regularizers=[turning, adaptive]), sample(1, (5, 9))
    before = objective.state_dict()
    first = logps_gradient(objective, drawn.batch(), scale_for(drawn))
    assert turning.sign == 1.0
    assert dead_hooks(objective, drawn.batch(), scale_for(drawn)) == []
    assert objective.state_dict() == before
    assert torch.equal(logps_gradient(objective, drawn.batch(), scale_for(drawn)), first)


# --- alive ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.4])
@pytest.mark.parametrize("spec", [*recipe_names(), WITH_ALL_KINDS], ids=str)
def test_every_hook_of_every_recipe_is_alive(spec: Any, spread: float) -> None:
    for seed in range(3):
        drawn = sample(seed, (5, 9), torch.float32, spread)
        assert dead_hooks(Objective.from_spec(spec), drawn.batch(), scale_for(drawn)) == []


@pytest.mark.parametrize(
    "regularizers",
    [
        [{"name": "kl", "coef": 0.0}],
        [{"name": "kl", "coef": 1e-8}],  # as in the first steps of a warm-up
        [{"name": "kl", "coef": "linear(0.0, 0.1, 10)"}],
        [{"name": "entropy_bonus", "average": "tokens"}],
    ],
    ids=str,
)
def test_a_term_that_cannot_act_raises_no_false_alarm(regularizers: list[Any]) -> None:
    assert dead(Objective(regularizers=regularizers)) == []


def test_weights_that_are_zero_everywhere_raise_no_false_alarm() -> None:
    parts = {"weights": ["drop_truncated", "sampler_correction"], "regularizers": [{"name": "nll_on_correct"}]}
    assert dead(Objective(**parts), truncated=torch.ones(5, 1, dtype=torch.bool)) == []


def test_a_clip_that_uses_only_the_sign_of_the_advantage_raises_no_false_alarm() -> None:
    assert dead(Objective(clip=lambda batch: -batch.advantages.sign() * batch.ratio)) == []


# --- dead -------------------------------------------------------------------------------------------------------------


def pieces(objective: Objective, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Clip, product of the weights, sum of the terms; (B, T) each."""
    weight, terms = torch.ones_like(batch.logps), torch.zeros_like(batch.logps)
    for hook in objective.weights:
        weight = weight * hook(batch).detach()
    for hook in objective.regularizers:
        terms = terms + hook.coef_at(batch.step) * hook(batch)
    return objective.clip(batch), weight, terms


Ignoring = Callable[[Objective, TokenBatch, LossScale], Tensor]


def without_clip(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    _, weight, terms = pieces(objective, batch)
    return objective.reduction.at(0)((weight * -batch.ratio * batch.advantages + terms) * batch.mask, batch.mask, scale)


def without_terms(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    clip, weight, _ = pieces(objective, batch)
    return objective.reduction.at(0)(weight * clip * batch.mask, batch.mask, scale)


def without_advantages(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    _, weight, terms = pieces(objective, batch)
    clip = objective.clip(batch).detach() + objective.clip(batch) - objective.clip(batch).detach()
    clip = torch.where(batch.advantages == 0, clip, clip / batch.advantages)
    return objective.reduction.at(0)((weight * clip + terms) * batch.mask, batch.mask, scale)


@pytest.mark.parametrize(
    ("ignoring", "names"),
    [
        (without_advantages, ["group_zscore"]),
        (without_clip, ["sapo"]),
        (without_terms, ["kl"]),
    ],
)
def test_a_hook_that_the_loss_ignores_is_named(ignoring: Ignoring, names: list[str]) -> None:
    class Broken(Objective):
        def loss(self, batch: TokenBatch, scale: LossScale | None = None) -> LossOutput:
            return LossOutput(ignoring(self, batch, scale or LossScale()), {}, {}, {})

    parts = {"weights": ["sampler_correction"], "regularizers": [{"name": "kl", "coef": 0.1}]}
    clip = "reinforce" if ignoring is without_advantages else "sapo"
    assert dead(Objective(clip=clip, **parts)) == []
    assert dead(Broken(clip=clip, **parts)) == names


def test_a_clip_that_ignores_the_advantages_is_named_by_its_advantage() -> None:
    assert dead(Objective(clip=lambda batch: -batch.logps)) == ["group_zscore"]
    assert dead(Objective(advantage="leave_one_out", clip=lambda batch: batch.ratio)) == ["leave_one_out"]
