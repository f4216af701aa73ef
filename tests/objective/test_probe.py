"""The objective's probe: its gradient against autograd, and losses that ignore the advantages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import Objective, TokenBatch
from kit.objective.recipes import recipe_names
from kit.trainer.sanity_checks import ignores_advantages, logps_gradient

from .sampling import gradient, sample, scale_for

WITH_ALL_KINDS: dict[str, Any] = {
    "clip": "ppo_clip",
    "weights": ["sampler_correction", {"name": "high_entropy_only", "quantile": 0.3}],
    "regularizers": [{"name": "kl", "coef": 0.04}, "entropy_bonus", {"name": "nll_on_correct", "coef": 0.1}],
    "reduction": "global_token_mean",
}


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
    actual = logps_gradient(objective, drawn.batch(**attached), scale_for(drawn))
    torch.testing.assert_close(actual, logps_gradient(Objective(), drawn.batch(), scale_for(drawn)))


class Turning:
    """A regularizer with state: its sign alternates from call to call."""

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
    assert not ignores_advantages(objective, drawn.batch(), scale_for(drawn))
    assert objective.state_dict() == before
    assert torch.equal(logps_gradient(objective, drawn.batch(), scale_for(drawn)), first)


# --- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.4])
@pytest.mark.parametrize("spec", [*recipe_names(), WITH_ALL_KINDS], ids=str)
def test_the_advantages_of_every_recipe_count(spec: Any, spread: float) -> None:
    for seed in range(3):
        drawn = sample(seed, (5, 9), torch.float32, spread)
        assert not ignores_advantages(Objective.from_spec(spec), drawn.batch(), scale_for(drawn))


def ignored(objective: Objective, **changes: Any) -> bool:
    drawn = sample(3, (5, 9))
    return ignores_advantages(objective, drawn.batch(**changes), scale_for(drawn))


def test_weights_that_are_zero_everywhere_raise_no_false_alarm() -> None:
    parts = {"weights": ["drop_truncated", "sampler_correction"], "regularizers": [{"name": "nll_on_correct"}]}
    assert not ignored(Objective(**parts), truncated=torch.ones(5, 1, dtype=torch.bool))


def test_a_clip_that_uses_only_the_sign_of_the_advantage_raises_no_false_alarm() -> None:
    assert not ignored(Objective(clip=lambda batch: -batch.advantages.sign() * batch.ratio))


def test_a_clip_that_ignores_the_advantages_is_found() -> None:
    assert ignored(Objective(clip=lambda batch: -batch.logps))
    assert ignored(Objective(advantage="leave_one_out", clip=lambda batch: batch.ratio))
