"""kit.report.scores: the difference between two evaluations."""

from __future__ import annotations

from math import comb, sqrt

import pytest

from kit.report.scores import difference, sign_test

from .conftest import score


def binomial_tail(better: int, worse: int) -> float:
    """The probability of a split at least as uneven, counted over all splits, as a reference."""
    total = better + worse
    observed = comb(total, better)
    return sum(comb(total, k) for k in range(total + 1) if comb(total, k) <= observed) / 2**total


@pytest.mark.parametrize(
    ("better", "worse"), [(0, 0), (1, 0), (5, 0), (6, 0), (7, 3), (3, 7), (18, 2), (10, 10), (170, 4)]
)
def test_the_sign_test_is_the_exact_one(better: int, worse: int) -> None:
    assert sign_test(better, worse) == pytest.approx(binomial_tail(better, worse))


def test_the_same_problems_are_compared_one_by_one() -> None:
    before, after = [True, False, False, False] * 10, [True, True, True, False] * 10
    change = difference("greedy_accuracy", score(before, 0), score(after, 9))
    assert change is not None
    assert (change.value, change.paired, change.better, change.worse) == (0.5, True, 20, 0)
    assert change.low > 0.3
    assert change.verdict == "better"


@pytest.mark.parametrize("key", ["greedy_accuracy", "pass@1", "greedy_reward"])
def test_five_changed_problems_are_never_enough(key: str) -> None:
    def verdict(changed: int) -> str:
        result = difference(key, score([False] * changed, 0), score([True] * changed, 9))
        assert result is not None
        return result.verdict

    assert verdict(5) == "not distinguishable"  # the bootstrap interval [1, 1] does not show how few there are
    assert verdict(6) == "better"


def test_other_problems_are_not_paired() -> None:
    before, after = score([False] * 10, 0), score([True] * 10, 9)
    after["per_problem"]["id"] = [f"{i:016x}" for i in range(10, 20)]
    change = difference("greedy_accuracy", before, after)
    assert change is not None
    assert not change.paired
    # before 0 [0, 0.1], after 1 [0.9, 1]: 1 - sqrt(0.1² + 0.1²) and 1 + sqrt(0 + 0)
    assert (change.value, change.low, change.high) == pytest.approx((1.0, 1 - sqrt(0.02), 1.0))


def test_problems_without_a_reward_on_one_side_are_left_out() -> None:
    before, after = score([False] * 8, 0), score([True] * 8, 9)
    after["per_problem"]["greedy_reward"][0] = None
    change = difference("greedy_reward", before, after)
    assert change is not None
    assert (change.problems, change.better) == (7, 7)
