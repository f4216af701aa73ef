"""What holds for every objective, whatever its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import rest_in_matrix

from kit.objective import (
    Objective,
    clips,
    recipe_names,
    reductions,
    regularizers,
    weights,
)

from .sampling import Sample, gradient, sample, scale_for

TERMS = ["kl", {"name": "kl", "estimator": "k2", "bias_corrected": True}, {"name": "entropy_bonus", "coef": 0.1}]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("clip", {"name": "two_sided", "delta": 1.4}),
    *(("clip", {"name": name, "level": "sequence"}) for name in ("two_sided", "cispo", "sapo")),
    ("clip", {"name": "dual_clip", "c": 1.3}),
    ("clip", {"name": "vespo", "sampler_cap": 1.2}),
    *(
        ("weights", {"name": "sampler_correction", "mode": mode, "min": 0.7, "max": 1.3})
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric")
    ),
    ("weights", {"name": "off_policy_mask", "delta": 0.0}),
    *(("regularizers", {"name": "kl", "estimator": name}) for name in ("k1", "k2", "abs", "full")),
    ("regularizers", {"name": "entropy_bonus", "average": "tokens"}),
]
OBJECTIVES: dict[str, Objective] = {
    **{name: Objective.from_spec(name) for name in recipe_names()},
    **{f"{name}+terms": Objective.from_spec({"recipe": name, "regularizers": TERMS}) for name in recipe_names()},
    **{f"clip {name}": Objective(clip=name) for name in clips},
    **{f"weight {name}": Objective(weights=[name]) for name in weights},
    **{f"regularizer {name}": Objective(regularizers=[{"name": name, "coef": 0.3}]) for name in regularizers},
    **{
        f"{kind} {' '.join(map(str, spec.values()))}": Objective(**{kind: spec if kind == "clip" else [spec]})
        for kind, spec in VARIANTS
    },
}
THIRD_BY_NAME = pytest.mark.parametrize("name", rest_in_matrix(3, OBJECTIVES))


def padded(drawn: Sample, extra: int, rubbish: float) -> Sample:
    def widen(values: torch.Tensor) -> torch.Tensor:
        filled = torch.where(drawn.mask, values.detach(), torch.full_like(values, rubbish))
        return torch.cat([filled, torch.full((values.shape[0], extra), rubbish, dtype=values.dtype)], 1)

    mask = torch.cat([drawn.mask, torch.zeros(drawn.mask.shape[0], extra, dtype=torch.bool)], 1)
    return Sample(
        widen(drawn.logps).requires_grad_(),
        widen(drawn.old_logps),
        widen(drawn.ref_logps),
        widen(drawn.entropy),
        drawn.advantages,
        mask,
        widen(drawn.sampler_logps),
        widen(drawn.full_kl),
        drawn.rewards,
        drawn.truncated,
        widen(drawn.teacher_logps),
        widen(drawn.teacher_kl),
    )


@THIRD_BY_NAME
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    extra=st.integers(0, 5),
    rubbish=st.sampled_from([0.0, 7.0, float("-inf"), float("inf"), float("nan"), -1e30]),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_padding_changes_nothing_and_gets_exactly_no_gradient(
    name: str, seed: int, extra: int, rubbish: float, spread: float
) -> None:
    objective, drawn = OBJECTIVES[name], sample(seed, (4, 6), spread=spread)
    wide = padded(drawn, extra, rubbish)
    out, expected = gradient(objective, drawn)
    wide_out = objective.loss(wide.batch(), scale_for(drawn))  # the run's maximal length stays the same
    wide_out.loss.backward()
    assert wide.logps.grad is not None
    torch.testing.assert_close(wide_out.loss, out.loss)
    torch.testing.assert_close(wide.logps.grad[:, :6], expected)
    assert (wide.logps.grad[~wide.mask] == 0).all()
    for key, mean in out.metrics.items():
        torch.testing.assert_close(wide_out.metrics[key].value, mean.value, msg=key)


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
    drawn, objective = sample(8, (6, 9)), OBJECTIVES["grpo+terms"]
    whole = objective.loss(drawn.batch()).metrics
    parts = [objective.loss(drawn.batch(rows)).metrics for rows in (slice(0, 1), slice(1, 6))]
    for key, mean in whole.items():
        torch.testing.assert_close((parts[0][key] + parts[1][key]).value, mean.value, msg=key)


def test_metrics_are_detached_and_named_once() -> None:
    metrics = gradient(OBJECTIVES["grpo+terms"], sample())[0].metrics
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
