"""kit.evaluation.statistics: estimators against enumeration, published values and arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kit.evaluation.statistics import bootstrap_mean, drop_p, pass_at_k, rise_p, wilson


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(
    ("correct", "samples", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(correct: int, samples: int, low: float, high: float) -> None:
    estimate = wilson(correct, samples)
    assert estimate.value == correct / samples
    assert estimate.low == pytest.approx(low, abs=5e-5)
    assert estimate.high == pytest.approx(high, abs=5e-5)


def test_no_samples_say_nothing() -> None:
    for estimate in (wilson(0, 0), bootstrap_mean([])):
        assert math.isnan(estimate.value)
        assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_intervals_cover_the_truth_about_95_times_in_100() -> None:
    rng, truth, samples = np.random.default_rng(1), 0.3, 100
    draws = rng.random((200, samples)) < truth
    by_wilson = [wilson(int(draw.sum()), samples) for draw in draws]
    by_bootstrap = [bootstrap_mean([float(x) for x in draw]) for draw in draws]
    for estimates in (by_wilson, by_bootstrap):
        covered = sum(estimate.low <= truth <= estimate.high for estimate in estimates) / len(estimates)
        assert 0.90 <= covered <= 0.99


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_shares_that_are_all_alike_have_an_interval_all_the_same(value: float) -> None:
    """Twenty problems of twenty solved: Wilson's lower bound is n / (n + z²) = 20 / (20 + 3.8415) = 0.8389."""
    assert bootstrap_mean([value] * 20).low == bootstrap_mean([value] * 20).high == value  # any quantity: no width
    low, high = bootstrap_mean([value] * 20, shares=True)[1:]
    assert (low, high) == (pytest.approx((0.8389, 1.0), abs=1e-4) if value else pytest.approx((0.0, 0.1611), abs=1e-4))


def test_drop_p_is_the_share_of_signs_that_fall_as_far() -> None:
    """Compared with the enumeration of all signs, for equal sizes (exact) and different sizes (10,000 draws)."""
    rng = np.random.default_rng(3)
    for before, after in [
        ([1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0]),
        (list(rng.random(9)), list(rng.random(9) * 0.6)),
        (list(rng.random(12)), list(rng.random(12))),
    ]:
        falls = np.asarray(before) - np.asarray(after)
        signs = np.asarray(list(itertools.product([-1, 1], repeat=len(falls))))
        share = ((signs * np.abs(falls)).sum(axis=1) >= falls.sum() - 1e-12).mean()
        assert drop_p(before, after) == pytest.approx(share, abs=0.015)


def test_drop_p_of_right_and_wrong_is_mcnemars_exact_test() -> None:
    # 8 problems lost, 2 won: P(at least 8 heads of 10) = (45 + 10 + 1) / 1024
    before, after = [1] * 8 + [0] * 2 + [1] * 50, [0] * 8 + [1] * 2 + [1] * 50
    assert drop_p(before, after) == pytest.approx(56 / 1024, abs=1e-15)
    assert drop_p([1, 0], [1, 0]) == 1.0
    assert drop_p([], []) == 1.0


def test_rise_p_of_eight_values_by_hand() -> None:
    """Mann-Kendall: S = 28 of 28 pairs, variance 8 * 7 * 21 / 18 = 65.333, z = 27 / 8.0829 = 3.3404."""
    assert rise_p(range(8)) == pytest.approx(0.5 * math.erfc(3.3404 / math.sqrt(2)), rel=1e-3)
    assert rise_p([8, 7, 6, 5, 4, 3, 2, 1]) == 1.0
    assert rise_p([1.0] * 20) == 1.0
    assert rise_p(range(7)) == 1.0  # too few to say


def test_rise_p_with_ties_and_long_series() -> None:
    # 5 zeros, then 5 ones: S = 25; variance = (10*9*25 - 2 * 5*4*15) / 18 = 91.667; z = 24 / 9.5743 = 2.5067
    assert rise_p([0] * 5 + [1] * 5) == pytest.approx(0.5 * math.erfc(2.5067 / math.sqrt(2)), rel=1e-3)
    rng = np.random.default_rng(5)
    assert rise_p(rng.normal(size=3000) + np.linspace(0, 0.5, 3000)) < 1e-4
    flat = [rise_p(rng.normal(size=size)) for size in (20, 100, 1000) for _ in range(60)]
    assert 0.01 <= np.mean(np.asarray(flat) <= 0.05) <= 0.10
