from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective import Objective, TokenBatch, regularizers

from .sampling import gradient, sample

ESTIMATORS = ["k1", "k2", "k3", "abs"]


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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_is_zero_at_the_reference(estimator: str) -> None:
    assert regularizers.kl(estimator)(one_token(0.0)).item() == 0


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_kl_is_never_negative(estimator: str) -> None:
    drawn = sample(0, (16, 16), spread=2.0)
    assert (regularizers.kl(estimator)(drawn.batch()) >= 0).all()


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


def test_a_scheduled_coefficient_follows_the_step() -> None:
    objective = Objective(clip="reinforce", regularizers=[{"name": "kl", "coef": "linear(0.4, 0.0, 4)"}])
    drawn = sample(0)
    losses = []
    for drawn.step in range(6):
        losses.append(gradient(objective, drawn)[0].loss.item())
    plain = gradient(Objective(clip="reinforce"), drawn)[0].loss.item()
    full = losses[0] - plain
    assert [loss - plain for loss in losses] == pytest.approx([full, 0.75 * full, 0.5 * full, 0.25 * full, 0, 0])


def test_two_terms_of_one_name_are_logged_apart() -> None:
    objective = Objective(regularizers=[{"name": "kl", "estimator": "k2"}, {"name": "kl", "estimator": "k1"}, "kl"])
    metrics = gradient(objective, sample())[0].metrics
    assert {"objective/kl", "objective/kl_2", "objective/kl_3", "kl/k1", "kl/k2", "kl/k3"} <= set(metrics)
    assert metrics["objective/kl_2"].total == metrics["kl/k1"].total


def test_only_a_regularizer_with_a_reference_needs_one() -> None:
    assert Objective(regularizers=["kl"]).needs == {"ref_logps"}
    assert Objective(regularizers=["entropy_bonus"]).needs == {"entropy"}
    assert Objective().needs == frozenset()


def test_a_missing_reference_is_explained() -> None:
    message = (
        "kl needs ref_logps, but the run has no reference policy. Set model.reference: base, or remove the regularizer."
    )
    with pytest.raises(ObjectiveError, match=message.replace(".", r"\.")):
        Objective(regularizers=["kl"]).loss(sample().batch(ref_logps=None))


def test_a_missing_entropy_is_explained() -> None:
    with pytest.raises(ObjectiveError, match="entropy_bonus needs entropy"):
        Objective(regularizers=["entropy_bonus"]).loss(sample().batch(entropy=None))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "kl", "estimator": "k4"}, "estimator must be one of k1, k2, k3, abs, got 'k4'"),
        ({"name": "kl", "level": "word"}, "level must be one of token, sequence, got 'word'"),
        ({"name": "kl", "bias_corrected": 1}, "bias_corrected must be true or false, got 1"),
        ({"name": "kl", "coef": -0.1}, "coef must satisfy 0 <= coef, got -0.1"),
        ({"name": "kl", "coef": "linear(0.1, -0.1, 10)"}, "coef must satisfy 0 <= coef, got -0.1"),
        (
            {"name": "kl", "beta": 0.1},
            "has no hyper-parameter 'beta'.*It takes: estimator, bias_corrected, level, coef",
        ),
        ({"coef": 0.1}, "A regularizer needs a name"),
    ],
)
def test_hyper_parameters_are_checked(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(regularizers=[spec])
