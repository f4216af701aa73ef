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
    """logp - ref = gap nats; the ratio to the old policy as given."""
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
    _, seen = gradient(Objective(clip="reinforce", weights=[frozen_reader], regularizers=[kl]), drawn)
    torch.testing.assert_close(seen, expected)


def test_entropy_bonus_is_minus_the_entropy() -> None:
    assert regularizers.entropy_bonus()(one_token(0.0)).item() == pytest.approx(-0.7)


def several(entropies: list[list[float]], **fields: Any) -> TokenBatch:
    """Completions on policy with these entropies; NaN marks padding. logp is -1 everywhere."""
    entropy = torch.tensor(entropies, dtype=torch.float64)
    logps = torch.full_like(entropy, -1.0, requires_grad=True)
    advantages, mask = torch.zeros(len(entropies), 1), ~entropy.isnan()
    fields = {"all_lengths": mask.sum(-1)} | fields
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


@pytest.mark.parametrize(
    ("floor", "level", "expected"),
    [
        (0.6, "batch", [0.4, 0.2, -0.3]),  # mean 0.5 is below 0.6: floor - H at every token
        (0.4, "batch", [0, 0, 0]),  # above
        (0.6, "token", [0.4, 0.2, 0]),  # relu(0.6 - H)
        (0.3, "token", [0.1, 0, 0]),
    ],
)
def test_entropy_floor(floor: float, level: str, expected: list[float]) -> None:
    batch = several([[0.2, 0.4], [0.9, math.nan]])
    out = regularizers.entropy_floor(floor=floor, level=level)(batch)
    assert out[batch.mask].tolist() == pytest.approx(expected)


def test_below_the_floor_the_gradient_is_that_of_an_entropy_bonus() -> None:
    grads = []
    for spec in ({"name": "entropy_floor", "floor": 9.0, "coef": 0.3}, {"name": "entropy_bonus", "coef": 0.3}):
        drawn = sample()
        entropy = drawn.entropy.clone().requires_grad_()
        Objective(regularizers=[spec]).loss(drawn.batch(entropy=entropy)).loss.backward()
        grads.append(entropy.grad)
    torch.testing.assert_close(*grads)


def test_length_penalty() -> None:
    rows = [[0.0] * 6, [0.0] * 4 + [math.nan] * 2, [0.0] + [math.nan] * 5, [math.nan] * 6]
    batch = several(rows, all_lengths=torch.tensor([6, 4, 1]))
    hook = regularizers.length_penalty(free=2, scale=2)
    # costs (6-2)/2 = 2, (4-2)/2 = 1, 0; the fourth has no live token
    out = hook(batch)  # on policy r = 1
    assert out[:3, 0].tolist() == pytest.approx([1.5, 0.0, -1.5])  # 2 - (1+0)/2, 1 - (2+0)/2, 0 - (2+1)/2
    metrics = Objective(regularizers=[hook]).loss(batch).metrics
    assert metrics["length_penalty/cost"].value.item() == pytest.approx(1.0)  # (2 + 1 + 0) / 3


def test_the_gradient_of_the_length_penalty_is_cost_times_that_of_the_log_probability() -> None:
    batch = several([[0.0] * 6, [0.0] * 4 + [math.nan] * 2])
    spec = {"name": "length_penalty", "free": 2, "scale": 2, "coef": 0.5}
    out = Objective(clip="reinforce", regularizers=[spec], reduction="sequence_sum").loss(batch)
    (slope,) = torch.autograd.grad(out.loss, batch.logps)
    # 0.5 · (2 - 1) and 0.5 · (1 - 2), each over 2 completions
    expected = torch.tensor([[0.25], [-0.25]]).double() * batch.mask
    torch.testing.assert_close(slope, expected)


def test_the_length_penalty_does_not_depend_on_micro_batches() -> None:
    """Its baseline is that of the generation batch: (1 + 0) / 2 for the first, whatever it is scored beside."""
    hook, lengths = regularizers.length_penalty(free=2, scale=2), torch.tensor([6, 4, 1])
    alone = several([[0.0] * 6], all_lengths=lengths)
    assert hook(alone).tolist() == [[1.5] * 6]


@pytest.mark.parametrize("rows", [[[0.0] * 6], [[math.nan] * 6]])
def test_a_completion_without_others_has_no_length_penalty(rows: list[list[float]]) -> None:
    assert (regularizers.length_penalty(free=1, scale=1)(several(rows)) == 0).all()


def test_reference_free_l2_is_added_once_a_step() -> None:
    norm = torch.tensor(6.0, requires_grad=True)
    objective = Objective(clip="reinforce", regularizers=[{"name": "reference_free_l2", "coef": 0.5}])
    out = objective.loss(several([[0.0], [0.0]], weight_norm=norm), LossScale(3))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(1.0)  # 0.5 · 6 / 3
    assert norm.grad is not None
    assert norm.grad.item() == pytest.approx(0.5 / 3)
    assert out.metrics["objective/reference_free_l2"].value.item() == 6


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


def test_sampled_tokens_tell_of_the_reverse_kl_only() -> None:
    with pytest.raises(ConfigError, match="estimate the reverse KL only, got divergence forward"):
        regularizers.distill("forward", "sampled")


def test_two_different_divergences_from_the_teacher_are_refused() -> None:
    both = [{"name": "distill"}, {"name": "distill", "divergence": "forward"}]
    with pytest.raises(ConfigError, match=r"different divergences from the teacher \(reverse, forward\)"):
        _ = Objective(regularizers=both).divergence
    assert str(Objective(regularizers=[{"name": "distill", "tokens": "top_k"}]).divergence) == "reverse, top 100"
