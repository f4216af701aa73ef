"""Work that may be skipped in a step: the declarations of every registered hook are compared with its behaviour."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import LossScale, Objective, clips, reductions, regularizers, weights
from kit.objective.hook import Hook
from kit.objective.objective import parts_obstacle, skipping_obstacle
from kit.objective.recipes import recipe_names
from kit.objective.registry import HookRegistry

from .sampling import Sample, sample, scale_for

LEAVES = ("logps", "entropy", "full_kl", "teacher_kl")
# Hyper-parameters, besides the defaults, under which a declaration could be wrong.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "two_sided": [{"level": "sequence"}],
    "cispo": [{"level": "sequence", "eps_high": 1.0}],
    "sapo": [{"level": "sequence"}],
    "vespo": [{"sampler_cap": 2.0}],
    "gmpo": [{"eps_low": 0.01, "eps_high": 0.01}],
    "kl": [
        {"estimator": estimator, "bias_corrected": corrected, "level": level}
        for estimator in ("k1", "k2", "k3", "abs", "full")
        for corrected, level in ((False, "token"), (True, "token"), (True, "sequence"))
    ],
    "distill": [{"tokens": "sampled"}, {"divergence": "forward", "tokens": "top_k"}],
    "entropy_bonus": [{"average": "tokens"}],
    "sampler_correction": [
        {"mode": mode, "min": 0.9, "max": 1.1}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric")
    ],
    "high_entropy_only": [{"quantile": 0.5}],
    "off_policy_mask": [{"delta": 0.0}],
}
ACROSS = {"high_entropy_only"}
"""Hooks that look across completions."""


def hooks(*registries: HookRegistry) -> list[Any]:
    return list(_hooks(*registries))


def _hooks(*registries: HookRegistry) -> Iterator[Any]:
    for registry in registries:
        for name in registry:
            for number, values in enumerate([{}, *VARIANTS.get(name, [])]):
                yield pytest.param(registry, name, values, id=f"{registry.kind}-{name}-{number}")


def objective_with(hook: Hook) -> Objective:
    """An objective whose gradient goes through this hook."""
    if hook.kind == "weight":
        return Objective(clip="ppo_clip", weights=[hook], reduction="sequence_sum")
    if hook.kind == "regularizer":
        return Objective(clip="ppo_clip", regularizers=[hook], reduction="sequence_sum")
    return Objective(clip=hook, reduction="sequence_sum") if hook.kind == "clip" else Objective(reduction=hook)


def gradients(objective: Objective, drawn: Sample, **changes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and its gradient with respect to each tensor of the policy."""
    leaves = {name: changes.get(name, getattr(drawn, name)).detach().clone().requires_grad_() for name in LEAVES}
    batch = drawn.batch(**leaves, **{name: value for name, value in changes.items() if name not in LEAVES})
    loss = objective.loss(batch, scale_for(drawn)).loss
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else (None,) * 4
    return loss.detach(), {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }


def looks_across(hook: Hook) -> bool:
    """Return whether the gradient of the first two completions depends on the policy's tensors of the others."""
    objective = objective_with(hook)
    for seed, spread in itertools.product(range(3), (0.05, 0.8)):
        drawn = sample(seed, (5, 6), spread=spread)
        generator = torch.Generator().manual_seed(seed)
        changed = {}
        for name in LEAVES:
            value = getattr(drawn, name).detach().clone()
            moved = value[2:] + 3.0 * torch.randn(value[2:].shape, generator=generator, dtype=value.dtype)
            value[2:] = moved.clamp(max=-1e-3) if name == "logps" else moved.abs()
            changed[name] = value
        _, before = gradients(objective, drawn)
        _, after = gradients(objective, drawn, **changed)
        if any(not torch.allclose(before[name][:2], after[name][:2], rtol=1e-9, atol=1e-12) for name in LEAVES):
            return True
    return False


def pulls_without_advantage(hook: Hook) -> bool:
    """Return whether completions with zero advantages contribute to the loss or get a gradient."""
    objective = Objective(clip=hook) if hook.kind == "clip" else Objective(clip=no_loss, regularizers=[hook])
    for seed, spread, wide in itertools.product(range(2), (0.05, 0.8), (False, True)):
        drawn = sample(seed, (5, 6), spread=spread)
        advantages = drawn.advantages.clone()[:, None]
        advantages = advantages.expand(5, 6).clone() if wide else advantages
        advantages[1::2] = 0.0
        _, slopes = gradients(objective, drawn, advantages=advantages)
        if any(slope[1::2].any() for slope in slopes.values()):
            return True
        loss, _ = gradients(objective, drawn, advantages=torch.zeros_like(advantages))
        if loss != 0:
            return True
    return False


def no_loss(batch: Any) -> Tensor:
    return 0.0 * batch.logps * batch.advantages


@pytest.mark.parametrize(("registry", "name", "values"), hooks(clips, weights, regularizers))
def test_row_separable_is_true_where_it_is_said_and_only_there(
    registry: HookRegistry, name: str, values: dict[str, Any]
) -> None:
    hook = registry[name](**values)
    assert hook.row_separable == (name not in ACROSS)
    if hook.row_separable:
        assert not looks_across(hook)


@pytest.mark.parametrize("name", list(reductions))
def test_every_reduction_weighs_a_completion_by_masks_alone(name: str) -> None:
    hook = reductions[name](**({"length": 9} if name == "fixed_length" else {}))
    assert hook.row_separable
    drawn = sample(3, (5, 6))
    scale, slopes = LossScale(2.0, drawn.mask.sum(), 6), []
    for factor in (1.0, -7.0):
        per_token = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * drawn.mask
        per_token[2:] *= factor
        per_token.requires_grad_()
        slopes.append(torch.autograd.grad(hook.at(0)(per_token, drawn.mask, scale), per_token)[0][:2])
    assert torch.equal(*slopes)
    assert hook.at(0)(torch.zeros(5, 6), drawn.mask, scale) == 0


@pytest.mark.parametrize(("registry", "name", "values"), hooks(clips, regularizers))
def test_zero_at_zero_advantage_is_true_where_it_is_said(
    registry: HookRegistry, name: str, values: dict[str, Any]
) -> None:
    hook = registry[name](**values)
    if hook.zero_at_zero_advantage:
        assert not pulls_without_advantage(hook)
    elif values or name not in VARIANTS:  # with their defaults, some have no effect on so few tokens
        assert name == "nll_on_correct" or pulls_without_advantage(hook), "the hook could declare it"


# --- obstacles of an objective ----------------------------------------------------------------------------------------


def test_every_recipe_without_distillation_needs_no_flat_completion() -> None:
    for name in recipe_names():
        objective = Objective.from_spec(name)
        assert parts_obstacle(objective) is None, name
        assert (skipping_obstacle(objective) is None) == (name not in ("opd", "sdpo")), (
            name
        )  # these learn without an advantage


@pytest.mark.parametrize(
    ("parts", "across", "flat"),
    [
        (
            {"regularizers": [{"name": "kl"}]},
            None,
            "regularizer 'kl' has a gradient for completions without an advantage",
        ),
        ({"regularizers": [{"name": "kl", "coef": 0.0}]}, None, None),
        ({"regularizers": [{"name": "kl", "coef": "linear(0.0, 0.1, 10)"}]}, None, "regularizer 'kl' has a gradient"),
        ({"regularizers": ["entropy_bonus"]}, None, "regularizer 'entropy_bonus' has a gradient"),
        ({"regularizers": ["nll_on_correct"]}, None, "regularizer 'nll_on_correct' has a gradient"),
        (
            {"weights": ["high_entropy_only"]},
            "weight 'high_entropy_only' depends on other completions",
            "depends on other",
        ),
        ({"weights": ["off_policy_mask", "drop_truncated"]}, None, None),
    ],
)
def test_an_objective_says_which_term_forbids_it(parts: dict[str, Any], across: str | None, flat: str | None) -> None:
    objective = Objective.from_spec({"recipe": "dapo", **parts})
    for reason, want in ((parts_obstacle(objective), across), (skipping_obstacle(objective), flat)):
        assert reason == want if want is None else want in str(reason)


def own_clip(batch: Any) -> Tensor:
    return -batch.advantages * batch.ratio


def test_of_a_users_own_hook_nothing_is_assumed_until_it_says_so() -> None:
    assert "own_clip.row_separable = True" in str(parts_obstacle(Objective(clip=own_clip)))
    own_clip.row_separable = True  # type: ignore[attr-defined]
    try:
        assert parts_obstacle(Objective(clip=own_clip)) is None
        assert "own_clip.zero_at_zero_advantage = True" in str(skipping_obstacle(Objective(clip=own_clip)))
        own_clip.zero_at_zero_advantage = True  # type: ignore[attr-defined]
        assert skipping_obstacle(Objective(clip=own_clip)) is None
    finally:
        for name in ("row_separable", "zero_at_zero_advantage"):
            own_clip.__dict__.pop(name, None)


def test_a_hook_with_state_is_never_called_more_often() -> None:
    class Kept:
        row_separable = True

        def __call__(self, batch: Any) -> Tensor:
            return -batch.advantages * batch.ratio

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    assert parts_obstacle(Objective(clip=Kept())) is not None
    del Kept.state_dict
    assert parts_obstacle(Objective(clip=Kept())) is None


# --- logs of the policy -----------------------------------------------------------------------------------------------


def test_metrics_of_the_policy_are_means_over_the_scored_completions() -> None:
    objective = Objective(clip="ppo_clip", weights=["off_policy_mask"], regularizers=[{"name": "kl", "coef": 0.0}])
    drawn = sample(2, (4, 6))
    scored = torch.tensor([[True], [False], [True], [False]])
    advantages = drawn.advantages[:, None] * scored
    unknown = {
        name: getattr(drawn, name).detach().masked_fill(~scored, 0.0) for name in ("logps", "old_logps", "entropy")
    }
    got = objective.loss(drawn.batch(advantages=advantages, scored=scored, **unknown), scale_for(drawn))
    full = objective.loss(drawn.batch(advantages=advantages), scale_for(drawn))
    alone = objective.loss(drawn.batch(rows=slice(0, 4, 2)), scale_for(drawn))
    torch.testing.assert_close(got.loss, full.loss)
    of_all = {"objective/clip", "advantage/abs_mean"} | {
        name for name in got.metrics if name.startswith("clip_fraction")
    }
    assert len(of_all) == 5
    assert got.metrics.keys() == full.metrics.keys()
    for name, mean in got.metrics.items():
        want = (full if name in of_all else alone).metrics[name]
        torch.testing.assert_close((mean.total, mean.count), (want.total, want.count), msg=name)
    sampled = got.samples["log_ratio"].view(4, 6)
    assert torch.isnan(sampled[1::2]).all()
    assert torch.equal(~torch.isnan(sampled[::2]), drawn.mask[::2])
