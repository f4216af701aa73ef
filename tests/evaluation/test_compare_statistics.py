"""kit.studies.statistics: calibration and power with variation between seeds and between problems."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pairwise import every_pair

from kit.evaluation.statistics import t_cdf, t_quantile
from kit.studies.statistics import (
    Parts,
    detectable,
    difference,
    holm,
    scalar_difference,
    weigh,
)

Rng = np.random.Generator


def arms(
    rng: Rng,
    seeds: int,
    problems: int,
    *,
    seed_sd: float,
    effect: float = 0.0,
    spread: float = 0.0,
    shared: float = 0.5,
) -> tuple[np.ndarray, np.ndarray]:
    """Right or wrong answers of two arms (S, P), from random difficulties of problems and random quality of seeds.

    `effect` is the second arm's advantage in logits, `spread` its standard deviation over problems, `shared` the share of a
    seed's variance that both arms have in common.
    """
    difficulty, common = rng.normal(0.85, 1.5, problems), rng.normal(0, 1, seeds)
    scores = []
    for gain in (0.0, effect + spread * rng.normal(0, 1, problems)):
        own = rng.normal(0, 1, seeds)
        luck = seed_sd * (math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
        logits = difficulty + luck[:, None] + 0.7 * rng.normal(0, 1, (seeds, problems)) + gain
        scores.append((rng.random((seeds, problems)) < 1 / (1 + np.exp(-logits))).astype(float))
    return scores[0], scores[1]


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (30, 2.04227), (120, 1.97993)]
)
def test_student_t_is_that_of_the_tables(df: float, t: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(t, abs=2e-5)
    assert t_cdf(-t, df) == pytest.approx(0.025, abs=1e-6)


def test_the_parts_are_those_of_the_analysis_of_variance() -> None:
    baseline = np.zeros((2, 3))
    arm = np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 7.0]])
    # Run means 2 and 4: variance 2, by S = 2 -> 1. Problem means 1.5, 2.5, 5: variance 13/4 (mean 3: 2.25 + 0.25 + 4 = 6.5,
    # by 2), by P = 3 -> 13/12. Rest: run 1 is (0.5, 0.5, -1), run 2 its negative: 3 in all, by (2-1)(3-1) = 2, by S·P -> 1/4.
    total = difference(baseline, arm, paired_seeds=True)
    assert (total.value, total.parts.seeds, total.parts.problems) == (3.0, pytest.approx(1.0), pytest.approx(13 / 12))
    assert total.parts.both == pytest.approx(0.25)
    assert total.standard_error == pytest.approx(math.sqrt(1 + 13 / 12 - 1 / 4))


@every_pair(
    {
        "seed_sd": [0.0, 0.3, 0.6],
        "seeds, problems": [(2, 200), (2, 500), (3, 50), (3, 200), (5, 100)],
        "paired": [True, False],
    }
)
def test_a_against_a_is_rarely_called_a_difference(seeds: int, problems: int, seed_sd: float, paired: bool) -> None:
    rng, tries, shared = np.random.default_rng(7), 600, 0.5 if paired else 0.0
    alarms = sum(
        weigh(*arms(rng, seeds, problems, seed_sd=seed_sd, shared=shared), paired_seeds=paired)[2] < 0.05
        for _ in range(tries)
    )
    # Nominal is 5 %, of 600 tries 30 ± 5.3. Twenty comparisons of A with A then have at least 18 right with 92 %.
    assert alarms / tries <= 0.075


def test_two_seeds_have_the_degrees_of_freedom_of_their_variance_alone() -> None:
    # The run means of the difference happen to be equal: the variance of seeds is 0, and t still has 1 df.
    arm = np.array([[1.0, 2.0, 3.0, 2.0], [2.0, 1.0, 2.0, 3.0]])
    result = difference(np.zeros((2, 4)), arm, paired_seeds=True)
    assert (result.parts.seeds, result.parts.df) == (0.0, 1.0)
    assert result.high - result.value == pytest.approx(12.7062 * result.standard_error, rel=1e-5)
    # With two seeds in one arm; here the baseline's seeds vary little, those of the other five do.
    rng = np.random.default_rng(0)
    baseline, other = rng.normal(0, 1, (1, 200)).repeat(2, axis=0), rng.normal(0, 1, (5, 200))
    assert difference(baseline, other, paired_seeds=False).parts.df == pytest.approx(4.0)
    alike = rng.normal(0, 1, (1, 200)) + rng.normal(0, 0.1, (3, 200))  # three seeds whose problems decide
    assert difference(np.zeros((3, 200)), alike, paired_seeds=True).parts.df > 100
    assert difference(np.zeros((2, 200)), alike[:2], paired_seeds=True).parts.df == 1.0


@pytest.mark.parametrize(("seeds", "problems", "effect", "at_least"), [(3, 200, 1.0, 0.6), (5, 100, 1.0, 0.85)])
def test_a_planted_improvement_is_found(seeds: int, problems: int, effect: float, at_least: float) -> None:
    rng, tries = np.random.default_rng(11), 200
    results = [
        weigh(*arms(rng, seeds, problems, seed_sd=0.15, effect=effect, spread=0.5), paired_seeds=True)
        for _ in range(tries)
    ]
    assert sum(p < 0.05 and value > 0 for value, _, p in results) / tries >= at_least
    assert not any(p < 0.05 and value < 0 for value, _, p in results)


def test_one_seed_speaks_of_its_weights_only() -> None:
    rng = np.random.default_rng(2)
    result = difference(rng.random((1, 50)), rng.random((1, 50)) + 0.5, paired_seeds=True)
    assert not result.of_the_method
    assert result.p < 0.01
    assert difference(rng.random((1, 50)), rng.random((3, 50)), paired_seeds=False).of_the_method is False


def test_equal_scores_and_equal_shifts_have_no_error_to_judge_by() -> None:
    same = difference(np.ones((3, 4)), np.ones((3, 4)), paired_seeds=True)
    assert (same.value, same.p, same.low, same.high) == (0.0, 1.0, 0.0, 0.0)
    shifted = difference(np.zeros((1, 4)), np.ones((1, 4)), paired_seeds=True)
    assert shifted.p == 2 * 0.5**4  # a sign test: 4 of 4 problems, two-sided


def test_holm() -> None:
    # Sorted: 0.01 x 3, then 0.02 x 2 = 0.04, then 0.04 x 1; never below the one before.
    assert holm([0.04, 0.01, 0.02]) == [pytest.approx(0.04), pytest.approx(0.03), pytest.approx(0.04)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_scalars_of_runs_have_t_intervals() -> None:
    value, low, high = scalar_difference([1.0, 2.0, 3.0], [2.0, 4.0, 3.0], paired=True)
    # Differences 1, 2, 0: mean 1, standard deviation 1, by √3; t(0.975, 2) = 4.30265.
    assert (value, low, high) == (
        1.0,
        pytest.approx(1 - 4.30265 / math.sqrt(3), abs=1e-5),
        pytest.approx(1 + 4.30265 / math.sqrt(3), abs=1e-5),
    )
    assert scalar_difference([1.0, 1.0], [2.0, 2.0], paired=False) == (1.0, 1.0, 1.0)


def test_a_difference_that_is_called_detectable_is_found_four_times_out_of_five() -> None:
    seeds, problems, seed_sd, cell_sd = 6, 100, 0.06, 0.4
    both = cell_sd**2 / (seeds * problems)
    gap = detectable(  # the variances in expectation
        Parts(
            both,
            problems - 1,
            seed_sd**2 / seeds + both,
            seeds - 1,
            both,
            (seeds - 1) * (problems - 1),
            problems,
            seeds,
        )
    )
    rng, tries, hits = np.random.default_rng(9), 300, 0
    for _ in range(tries):
        arm = gap + rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, cell_sd, (seeds, problems))
        hits += weigh(np.zeros((seeds, problems)), arm, paired_seeds=True)[2] < 0.05
    assert 0.7 <= hits / tries <= 0.9
