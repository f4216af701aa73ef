"""kit.evaluation.heldout and majority_share: maj@k by enumeration and by hand."""

from __future__ import annotations

import pytest

import rewards
from kit.evaluation.heldout import normalised, votes
from kit.evaluation.statistics import majority_share


def judged(preset: str, reference: str, texts: list[str]) -> list[str | None]:
    samples = rewards.build_samples(["?"] * len(texts), texts, reference=[reference] * len(texts))
    return votes(samples, rewards.load(preset).verdicts(samples))


@pytest.mark.parametrize(
    ("answers", "correct", "share"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["8", "7", "8"], [False, True, False], 0.0),
        (["7", "8"], [True, False], 0.5),  # a tie of two: one is drawn
        (["7", "8", "9", "7", "9"], [True, False, False, True, False], 0.5),  # 7 and 9, twice each
        (["7", "8", "9"], [True, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),  # no answer is no vote, however many there are
        ([None, None], [False, False], 0.0),
        ([], [], 0.0),
        (["7", "7", "8"], [True, False, False], 0.5),  # the checker liked one of the two completions with this answer
    ],
)
def test_the_majority_is_right_with_this_probability(
    answers: list[str | None], correct: list[bool], share: float
) -> None:
    assert majority_share(answers, correct) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,000", "1000.0"),
        ("0.5", "1/2"),
        ("\\frac{1}{2}", "0.50"),
        ("Paris.", "  paris"),
        ("a  b", "A b"),
        ("$12", "12"),
    ],
)
def test_answers_that_mean_the_same_are_one_answer(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


def test_what_the_checker_extracted_votes_whatever_stands_around_it() -> None:
    texts = ["2 + 5 is 7\n#### 7", "so\n#### 7.0", "#### 8", "I do not know"]
    assert judged("gsm8k-hash", "7", texts) == ["7", "7", "8", None]
