"""kit.objective.curves: the hooks' own numbers over the ratio."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kit.objective.curves import POINTS, Curve, curves
from kit.objective.recipes import recipe_names


def at(found: list[float], ratios: list[float], ratio: float) -> float:
    """The number at the point of the grid that is nearest."""
    place = min(range(len(ratios)), key=lambda each: abs(ratios[each] - ratio))
    return found[place]


def edges(curve: Curve, ratios: list[float]) -> tuple[float, float] | None:
    inside = [ratio for ratio, active in zip(ratios, curve.clipped, strict=True) if active]
    return (min(inside), max(inside)) if inside else None


def test_ppo_gains_up_to_its_bounds_and_pulls_until_there() -> None:
    found = curves(
        {"recipe": "grpo", "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}, "regularizers": []}
    )
    ratios, better, worse = found.ratios, found.clip["better"], found.clip["worse"]
    # A = 1: min(r, 1.28); its slope by log-probability is r up to there and 0 beyond. A = -1: -max(r, 0.8).
    assert at(better.gain, ratios, 1.1) == pytest.approx(at(ratios, ratios, 1.1), rel=1e-4)
    assert at(better.gain, ratios, 1.45) == pytest.approx(1.28, rel=1e-4)
    assert at(better.pull, ratios, 1.1) == pytest.approx(at(ratios, ratios, 1.1), rel=1e-4)
    assert at(better.pull, ratios, 1.45) == 0
    assert at(worse.gain, ratios, 0.6) == pytest.approx(-0.8, rel=1e-4)
    assert at(worse.pull, ratios, 0.6) == 0
    assert at(worse.pull, ratios, 1.4) == pytest.approx(-1.4, rel=2e-2)
    low, high = edges(better, ratios) or (0, 0)
    assert (low, high) == (pytest.approx(1.28, abs=0.02), ratios[-1])
    assert (edges(worse, ratios) or (0, 0))[1] == pytest.approx(0.8, abs=0.02)


def test_the_range_shows_narrow_bounds_too() -> None:
    ratios = curves("gspo").ratios
    assert 0.99 < ratios[0] < 1 - 3e-4
    assert 1 + 4e-4 < ratios[-1] < 1.01


@pytest.mark.parametrize(
    ("clip", "bounds"),
    [
        ({"name": "two_sided"}, (0.8, 1.2, 4.0)),
        ({"name": "two_sided", "delta": 12.0}, (0.8, 1.2, 12.0)),
        ({"name": "dual_clip"}, (0.8, 1.2, 3.0)),
        ({"name": "ppo_clip", "eps_low": 0.2, "eps_high": 2.0}, (0.8, 3.0)),
        ({"name": "ppo_clip", "eps_low": 0.5, "eps_high": 0.01}, (0.5, 1.01)),
    ],
)
def test_the_range_reaches_past_every_bound(clip: dict[str, Any], bounds: tuple[float, ...]) -> None:
    found = curves({"clip": clip})
    ratios, worse = found.ratios, found.clip["worse"]
    assert ratios[0] < bounds[0] - 0.05
    assert ratios[-1] > 1 + 1.2 * (bounds[-1] - 1)
    if clip["name"] != "ppo_clip":  # a bad completion that has become much likelier: pulled by ppo_clip, here no more
        assert worse.pull[-1] == 0
        assert worse.gain[-1] == pytest.approx(-bounds[-1], rel=1e-4)
        assert curves({"clip": "ppo_clip"}).ratios[-1] < 2


def test_a_pull_that_fades_is_no_bound() -> None:
    assert curves({"clip": {"name": "sapo", "tau_pos": 30.0, "tau_neg": 30.0}}).ratios[-1] == pytest.approx(
        1.62, abs=0.1
    )


def test_a_penalty_is_what_the_regularizer_says_times_its_coefficient() -> None:
    found = curves({"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.5, "estimator": "k3"}]})
    kl, ratios = found.penalties["kl"], found.ratios
    ratio = at(ratios, ratios, 1.4)
    # k3 = ref/new - 1 - log(ref/new) with ref = old: 1/r - 1 + log r
    assert at(kl.gain, ratios, 1.4) == pytest.approx(-0.5 * (1 / ratio - 1 + math.log(ratio)), rel=1e-3)
    assert at(kl.pull, ratios, 1.4) < 0 < at(kl.pull, ratios, 0.6), "back towards the reference"


def test_a_coefficient_of_0_is_told() -> None:
    found = curves({"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.0}]})
    assert not found.penalties
    assert "coefficient 0" in found.notes[0]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_curves_of_numbers(name: str) -> None:
    found = curves(name)
    assert len(found.ratios) == POINTS
    for curve in (*found.clip.values(), *found.penalties.values()):
        assert len(curve.gain) == len(curve.pull) == len(curve.clipped) == POINTS
        assert all(map(math.isfinite, [*curve.gain, *curve.pull]))
