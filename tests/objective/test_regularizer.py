from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective import LossScale, Objective, TokenBatch, regularizers

from .sampling import gradient, sample


def one_token(gap: float, ratio: float = 1.0) -> TokenBatch:
    """One token with logp - ref = `gap` nats, and this ratio to the old policy."""
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        logps=logps,
        old_logps=logps.detach() - math.log(ratio),
        advantages=torch.ones(1, 1),
        mask=torch.tensor([[True]]),
        ref_logps=logps.detach() - gap,
        entropy=torch.tensor([[0.7]], dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("estimator", "gap", "expected"),
    [
        ("k1", 0.5, 0.5),
        ("k1", -0.5, -0.5),
        ("k2", -0.5, 0.125),  # 0.25 / 2
        ("abs", -0.5, 0.5),
        ("k3", math.log(2), 0.5 + math.log(2) - 1),  # exp(-ln 2) + ln 2 - 1
        ("k3", -math.log(2), 2 - math.log(2) - 1),  # exp(ln 2) - ln 2 - 1
    ],
)
def test_kl_golden_numbers(estimator: str, gap: float, expected: float) -> None:
    assert regularizers.kl(estimator)(one_token(gap)).item() == pytest.approx(expected)


def test_the_correction_multiplies_by_the_ratio() -> None:
    # k2 of gap 1 is 0.5; times the ratio 3
    assert regularizers.kl("k2", bias_corrected=True)(one_token(1.0, ratio=3.0)).item() == pytest.approx(1.5)


def test_the_correction_by_completion_uses_the_sequence_ratio() -> None:
    batch = sample(3).batch()
    plain = regularizers.kl("k3")(batch)
    corrected = regularizers.kl("k3", bias_corrected=True, level="sequence")(batch)
    torch.testing.assert_close(corrected, plain * batch.sequence_ratio)


def test_the_correction_carries_gradient_even_if_another_hook_read_the_ratio_without() -> None:
    def frozen_reader(batch: TokenBatch) -> Tensor:
        with torch.no_grad():
            return batch.ratio * 0 + 1

    kl = {"name": "kl", "coef": 1.0, "bias_corrected": True}
    drawn = sample(4)
    _, expected = gradient(Objective(clip="reinforce", regularizers=[kl]), drawn)
    _, actual = gradient(Objective(clip="reinforce", weights=[frozen_reader], regularizers=[kl]), drawn)
    torch.testing.assert_close(actual, expected)


def test_entropy_bonus_is_minus_the_entropy() -> None:
    assert regularizers.entropy_bonus()(one_token(0.0)).item() == pytest.approx(-0.7)


def several(entropies: list[list[float]], **fields: Any) -> TokenBatch:
    """On-policy completions with these entropies; NaN marks padding; logp is -1 everywhere."""
    entropy = torch.tensor(entropies, dtype=torch.float64)
    logps = torch.full_like(entropy, -1.0, requires_grad=True)
    advantages, mask = torch.zeros(len(entropies), 1), ~entropy.isnan()
    return TokenBatch(logps, logps.detach(), advantages, mask, entropy=entropy, **fields)


def test_the_full_divergence_is_that_of_the_batch() -> None:
    batch = sample(2).batch(ref_logps=None)
    hook = regularizers.kl("full")
    assert hook.needs == {"full_kl"}
    assert batch.full_kl is not None
    torch.testing.assert_close(hook(batch), batch.full_kl)
    corrected = regularizers.kl("full", bias_corrected=True)(batch)
    torch.testing.assert_close(corrected, batch.full_kl * batch.ratio)
    metrics = Objective(regularizers=[{"name": "kl", "estimator": "full"}]).loss(batch).metrics
    torch.testing.assert_close(metrics["kl/full"].value, batch.full_kl.sum() / batch.mask.sum())


def test_the_entropy_bonus_over_tokens_is_a_scalar_whatever_the_reduction() -> None:
    batch = several([[0.2, 0.4], [0.9, math.nan]])
    bonus = regularizers.entropy_bonus("tokens")
    assert bonus(batch).item() == pytest.approx(-0.5)  # -(0.2 + 0.4 + 0.9) / 3
    for reduction in ("sequence_mean", "token_mean", "sequence_sum"):
        spec = {"name": "entropy_bonus", "average": "tokens", "coef": 2.0}
        out = Objective(clip="reinforce", regularizers=[spec], reduction=reduction).loss(batch, LossScale(4))
        assert out.loss.item() == pytest.approx(-0.25)  # 2 · -0.5 / 4
        assert out.metrics["objective/entropy_bonus"].value.item() == pytest.approx(-0.5)


@pytest.mark.parametrize(("threshold", "expected"), [(1.0, [1, 0, 0, 1]), (0.5, [1, 1, 0, 1]), (2.0, [0, 0, 0, 1])])
def test_nll_on_correct(threshold: float, expected: list[int]) -> None:
    rewards = torch.tensor([[1.0], [0.5], [math.nan], [3.0]])
    out = regularizers.nll_on_correct(threshold=threshold)(several([[0.0]] * 4, rewards=rewards))
    assert out[:, 0].tolist() == expected  # -logp = 1


def test_terms_are_added_with_their_coefficients_and_logged_without() -> None:
    batch = one_token(0.5)
    objective = Objective(
        clip="reinforce",
        regularizers=[{"name": "kl", "coef": 0.1, "estimator": "k2"}, {"name": "entropy_bonus", "coef": 2.0}],
    )
    out = objective.loss(batch)
    assert out.loss.item() == pytest.approx(1.0 + 0.1 * 0.125 - 2.0 * 0.7)  # -A·logp = 1
    means = {key: mean.value.item() for key, mean in out.metrics.items()}
    assert means["objective/clip"] == pytest.approx(1.0)
    assert means["objective/kl"] == means["kl/k2"] == pytest.approx(0.125)
    assert means["objective/entropy_bonus"] == pytest.approx(-0.7)
    assert means["entropy"] == pytest.approx(0.7)


def test_a_missing_reference_is_explained() -> None:
    message = (
        "kl needs ref_logps, but the run has no reference policy. Set model.reference: base, or remove the regularizer."
    )
    with pytest.raises(ObjectiveError, match=message.replace(".", r"\.")):
        Objective(regularizers=["kl"]).loss(sample().batch(ref_logps=None))


# --- distillation -----------------------------------------------------------------------------------------------------


def test_distill_golden_numbers() -> None:
    batch = one_token(0.0)
    teacher = {"teacher_logps": batch.logps.detach() - 0.3, "teacher_kl": torch.full((1, 1), 0.7, dtype=torch.float64)}
    batch = replace(batch, **teacher)
    assert regularizers.distill()(batch).item() == pytest.approx(0.7)
    assert regularizers.distill("forward", "top_k", 5)(batch).item() == pytest.approx(0.7)
    sampled = regularizers.distill(tokens="sampled")(batch)
    assert sampled.item() == pytest.approx(0.3)  # log p - log p_teacher
    (slope,) = torch.autograd.grad(sampled.sum(), batch.logps)
    assert slope.item() == pytest.approx(0.3)  # (log p - log p_teacher) · grad log p


def test_sampled_tokens_estimate_the_reverse_kl_only() -> None:
    with pytest.raises(ConfigError, match="estimates the reverse KL only, got divergence forward"):
        regularizers.distill("forward", "sampled")


def test_two_different_divergences_from_the_teacher_are_refused() -> None:
    both = [{"name": "distill"}, {"name": "distill", "divergence": "forward"}]
    with pytest.raises(ConfigError, match=r"different divergences from the teacher \(reverse, forward\)"):
        _ = Objective(regularizers=both).divergence
    assert str(Objective(regularizers=[{"name": "distill", "tokens": "top_k"}]).divergence) == "reverse, top 100"
