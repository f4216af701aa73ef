"""Properties of all objectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.objective import (
    Objective,
    clips,
    reductions,
)

from .sampling import gradient, sample

TERMS = ["kl", {"name": "kl", "estimator": "k2", "bias_corrected": True}, {"name": "entropy_bonus", "coef": 0.1}]
WITH_TERMS = Objective.from_spec({"recipe": "grpo", "regularizers": TERMS})


@pytest.mark.parametrize("clip", list(clips))
@pytest.mark.parametrize("reduction", list(reductions))
def test_every_clip_works_with_every_reduction_and_token_level_advantages(clip: str, reduction: str) -> None:
    drawn = sample(5)
    objective = Objective(clip=clip, reduction=reduction)
    _, by_completion = gradient(objective, drawn)
    _, by_token = gradient(objective, drawn, advantages=drawn.advantages[:, None].expand(-1, 7))
    torch.testing.assert_close(by_token, by_completion)
    assert by_completion.abs().sum() > 0


def test_rloo_is_the_gradient_of_the_log_probability_of_whole_completions() -> None:
    drawn = sample(6)
    _, slope = gradient(Objective.from_spec("rloo"), drawn)
    expected = -drawn.advantages[:, None] * drawn.mask / 4  # mean over 4 completions of -A · Σ_t logp
    torch.testing.assert_close(slope, expected)


def test_metrics_of_micro_batches_add_up_to_those_of_the_whole() -> None:
    drawn, objective = sample(8, (6, 9)), WITH_TERMS
    undivided = objective.loss(drawn.batch()).metrics
    parts = [objective.loss(drawn.batch(rows)).metrics for rows in (slice(0, 1), slice(1, 6))]
    for key, mean in undivided.items():
        torch.testing.assert_close((parts[0][key] + parts[1][key]).value, mean.value, msg=key)


def test_metrics_are_detached_and_named_once() -> None:
    metrics = gradient(WITH_TERMS, sample())[0].metrics
    assert not any(mean.total.requires_grad or mean.count.requires_grad for mean in metrics.values())
    assert set(metrics) == {
        "objective/clip",
        "objective/kl",
        "kl/k3",
        "objective/kl_2",
        "kl/k2",
        "objective/entropy_bonus",
        "clip_fraction/low",
        "clip_fraction/high",
        "clip_fraction/region",
        "ratio/mean",
        "ratio/abs_log",
        "advantage/abs_mean",
        "entropy",
    }


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, False),
        ({"regularizers": ["kl"]}, False),
        ({"regularizers": ["entropy_bonus"]}, True),
    ],
)
def test_the_entropy_gradient_is_asked_for_only_where_the_loss_uses_it(parts: dict[str, Any], expected: bool) -> None:
    assert Objective(**parts).needs_entropy_gradient is expected


def test_the_entropy_bonus_reaches_the_entropy() -> None:
    drawn = sample()
    entropy = drawn.entropy.clone().requires_grad_()
    objective = Objective(regularizers=[{"name": "entropy_bonus", "coef": 0.5}], reduction="token_mean")
    objective.loss(drawn.batch(entropy=entropy)).loss.backward()
    torch.testing.assert_close(entropy.grad, -0.5 * drawn.mask.double() / drawn.mask.sum())
