from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from kit.errors import ConfigError, ObjectiveError
from kit.objective import Objective
from kit.objective.metrics import Mean
from kit.objective.schedules import AdaptiveEntropy, AdaptiveKL, Controller, is_schedule, parse_schedule

from .sampling import sample, scale_for


def test_adaptive_kl_golden_updates() -> None:
    coef = AdaptiveKL(target=0.05, horizon=1000, start=0.1)
    assert coef(0) == 0.1
    coef.observe(0.055, 100)  # error 0.1: 0.1·(1 + 0.1·100/1000)
    assert coef(1) == pytest.approx(0.101)
    coef.observe(5.0, 100)  # error 99, taken for 0.2: 0.101·1.02
    assert coef(2) == pytest.approx(0.10302)
    coef.observe(0.0, 500)  # error -1, taken for -0.2: 0.10302·0.9
    assert coef(3) == pytest.approx(0.092718)
    coef.observe(0.05, 500)  # on target
    assert coef(4) == pytest.approx(0.092718)


def test_adaptive_entropy_golden_updates() -> None:
    coef = AdaptiveEntropy(target=0.2, delta=0.1, min=0.0, max=0.25)
    assert coef(0) == 0
    applied = []
    for entropy in (0.1, 0.2, 0.05, 0.3, 0.3, 0.1):
        coef.observe(entropy, 8)
        applied.append(coef(0))
    # up by 0.1, again at the target itself, and stopped at max; two steps above it fall to 0.05 unseen; back to 0.15
    assert applied == pytest.approx([0.1, 0.2, 0.25, 0, 0, 0.15])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low", "high", "start"), [(0.0, 1.0, None), (0.01, 0.03, 0.02), (0.0, 0.02, 0.0)])
def test_adaptive_entropy_follows_trls_rule(low: float, high: float, start: float | None, seed: int) -> None:
    target, delta, generator = 0.4, 0.005, random.Random(seed)
    controller = AdaptiveEntropy(target, delta, low, high, start)
    coef, last = low if start is None else start, math.inf
    for step in range(60):
        used = coef if last <= target else 0.0
        assert controller(step) == pytest.approx(used)
        last = generator.choice([target, generator.uniform(0.0, 0.9)])
        controller.observe(last, 16)
        coef = min(coef + delta, high) if last <= target else max(coef - delta, low)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("adaptive_kl(0.05)", AdaptiveKL(0.05)),
        ("adaptive_kl(target=0.05, start=0.2)", AdaptiveKL(0.05, start=0.2)),
        ({"schedule": "adaptive_kl", "target": 0.05, "horizon": 500}, AdaptiveKL(0.05, 500)),
        ("adaptive_entropy(0.2, 0.01, max=0.5)", AdaptiveEntropy(0.2, 0.01, 0.0, 0.5)),
        ({"schedule": "adaptive_entropy", "target": 0.2, "min": 0.1, "start": None}, AdaptiveEntropy(0.2, min=0.1)),
    ],
)
def test_strings_and_dicts_mean_a_controller(spec: Any, expected: Controller) -> None:
    assert is_schedule(spec)
    assert parse_schedule(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adaptive_lk(0.1)", r"No schedule is called 'adaptive_lk'. Did you mean 'adaptive_kl'\?"),
        ("adaptive_kl()", "adaptive_kl needs target, horizon, start: .*missing"),
        ("adaptive_kl(traget=0.1)", r"adaptive_kl has no 'traget'. Did you mean 'target'\? It takes: target, horizon"),
        ("adaptive_kl(target)", "a schedule takes plain numbers"),
        ("adaptive_kl(0)", "adaptive_kl: target must be a finite number and positive, got 0"),
        ("adaptive_kl(0.1, -5)", "adaptive_kl: horizon must be a finite number and positive, got -5"),
        ("adaptive_kl(0.1, start=0)", "adaptive_kl: start must be a finite number and positive, got 0"),
        ("adaptive_entropy(-0.1)", "adaptive_entropy: target must be a finite number and not negative, got -0.1"),
        ("adaptive_entropy(0.1, min=2)", "min <= start <= max must hold, got min=2, start=2, max=1.0"),
    ],
)
def test_a_wrong_controller_says_what_was_seen(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_schedule(spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"clip": {"eps_high": "adaptive_kl(0.1)"}},
        {"advantage": {"name": "gae", "lam": "adaptive_entropy(0.1)"}},
        {"clip": {"name": "cispo", "eps_high": AdaptiveKL(0.1)}},
    ],
)
def test_a_controller_steers_nothing_but_a_coefficient(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"adaptive_\w+ controls a regularizer's coef, not (eps_high|lam)"):
        Objective.from_spec(spec)


def steered() -> Objective:
    return Objective(
        regularizers=[
            {"name": "kl", "coef": "adaptive_kl(0.05, horizon=100, start=0.2)"},
            {"name": "kl", "estimator": "k2", "coef": 0.1},
            {"name": "entropy_bonus", "coef": "adaptive_entropy(50.0, delta=0.1)"},
        ]
    )


def observe(objective: Objective, seeds: tuple[int, ...]) -> tuple[float, float]:
    """Run one optimiser step of micro-batches of 4; return the means of the first term and of the entropy over all tokens."""
    total: dict[str, Mean] = {}
    sums, tokens = torch.zeros(2, dtype=torch.float64), 0
    for seed in seeds:
        drawn = sample(seed)
        out = objective.loss(drawn.batch(), scale_for(drawn))
        assert set(out.observed) == {"regularizers.0", "regularizers.2"}
        total = {key: total[key] + mean if key in total else mean for key, mean in out.observed.items()}
        gap = (drawn.ref_logps - drawn.logps.detach())[drawn.mask]
        sums += torch.stack([(gap.exp() - gap - 1).sum(), drawn.entropy[drawn.mask].sum()])
        tokens += int(drawn.mask.sum())
    objective.observe(total, 4 * len(seeds))
    kl, entropy = (sums / tokens).tolist()
    return kl, entropy


def test_observing_a_step_moves_the_coefficients() -> None:
    objective = steered()
    assert [hook.coef_at(0) for hook in objective.regularizers] == [0.2, 0.1, 0.0]
    kl, entropy = observe(objective, (1, 2, 3))
    error = min(max(kl / 0.05 - 1, -0.2), 0.2)
    assert entropy < 50
    expected = [0.2 * (1 + error * 12 / 100), 0.1, 0.1]
    assert [hook.coef_at(1) for hook in objective.regularizers] == pytest.approx(expected)


def test_the_coefficient_takes_effect_in_the_next_step_and_is_logged() -> None:
    objective, drawn = steered(), sample(4)
    first = objective.loss(drawn.batch(), scale_for(drawn))
    assert first.metrics["coef/kl"].value.item() == pytest.approx(0.2)
    assert first.metrics["coef/entropy_bonus"].value.item() == 0
    assert "coef/kl_2" not in first.metrics  # a constant coefficient is not logged
    observe(objective, (1, 2))
    second = objective.loss(drawn.batch(), scale_for(drawn))
    coefs = [hook.coef_at(1) for hook in objective.regularizers]
    assert second.metrics["coef/kl"].value.item() == pytest.approx(coefs[0])
    assert second.metrics["coef/entropy_bonus"].value.item() == pytest.approx(coefs[2])
    terms = {name: first.metrics[name].value for name in ("objective/kl", "objective/entropy_bonus")}
    fixed = Objective(regularizers=[{"name": "kl", "coef": coefs[0]}, {"name": "kl", "estimator": "k2", "coef": 0.1},
                                    {"name": "entropy_bonus", "coef": coefs[2]}])  # fmt: skip
    torch.testing.assert_close(second.loss, fixed.loss(drawn.batch(), scale_for(drawn)).loss)
    assert all(second.metrics[name].value == value for name, value in terms.items())


def test_an_objective_saves_and_restores_its_controllers() -> None:
    objective, again = steered(), steered()
    assert set(objective.state_dict()) == {"regularizers.0.coef", "regularizers.2.coef"}
    observe(objective, (1, 2))
    again.load_state_dict(json.loads(json.dumps(objective.state_dict())))
    assert [hook.coef_at(1) for hook in again.regularizers] == [hook.coef_at(1) for hook in objective.regularizers]
    with pytest.raises(ObjectiveError, match="this objective keeps state for no parts"):
        Objective().load_state_dict(objective.state_dict())


def test_what_a_controller_observes_must_be_there() -> None:
    objective, drawn = Objective(regularizers=[{"name": "kl", "coef": "adaptive_entropy(0.2)"}]), sample()
    with pytest.raises(ObjectiveError, match="'kl' follows the entropy, but the batch carries no entropy"):
        objective.loss(drawn.batch(entropy=None), scale_for(drawn))
