from fractions import Fraction

import pytest

from rewards import build_samples, load
from rewards.components.countdown import value_and_numbers

PROMPT = "Use 19, 1 and 4 to make 72. Answer as <answer>(1 + 2) / 3</answer>."


def evaluation(*answers, nums=(19, 1, 4), target=72, **params):
    size = len(answers)
    completions = [f"<think>try</think><answer>{answer}</answer>" for answer in answers]
    samples = build_samples([PROMPT] * size, completions, nums=[list(nums)] * size, target=[target] * size)
    return load("countdown", **params).score(samples)


def statuses(*answers, **columns):
    return evaluation(*answers, **columns).statuses["accuracy"]


@pytest.mark.parametrize(
    "answer",
    ["(19 - 1) * 4", "4*(19-1)", "(19 - 1) × 4", r"(19-1) \times 4", "$(19-1)*4$", "(19 − 1) * 4 = 72", "[19-1]*4"],
)
def test_expressions_that_reach_the_target_are_right(answer):
    assert evaluation(answer).totals == [pytest.approx(1.1)]  # 1 + 0.1


NO_SOLUTION = [
    "72", "19 * 4 - 4", "(19 - 1) * 4 * 1", "19 * 4 - 1 * 4", "19 + 1 + 4", "70 = 72", "(19 - 1) * 4 = 71",
    "71 = (19 - 1) * 4", "72 = 72 = (19 - 1) * 4", "(19 - 1) * 4 or 72", "19 ** 1 + 4", "19 // 4 + 1", "19 % 4", "int('72')",
    "__import__('os').system('true')", "(lambda: 72)()", "1 / 0", "0x48", "7_2", "72.0", "(" * 300, "1" * 499, "",
]  # fmt: skip


def test_anything_else_is_wrong():
    assert set(statuses(*NO_SOLUTION)) <= {"wrong", "format"}


def test_values_are_exact():
    assert value_and_numbers("1 / 3 * 3") == (Fraction(1), [1, 3, 3])
    # 8 / (3 - 8/3) = 8 / (1/3) = 24, which floats miss
    assert statuses("8 / (3 - 8 / 3)", nums=(8, 3, 8, 3), target=24) == ["ok"]


def test_numbers_may_be_left_out_when_asked():
    assert statuses("19 + 1", target=20) == ["wrong"]
    assert statuses("19 + 1", target=20, use_all=False) == ["ok"]


def test_columns_may_be_json_or_named_numbers():
    sample = build_samples([PROMPT], ["<answer>(19-1)*4</answer>"], numbers=["[19, 1, 4]"], answer=["72"])
    assert load("countdown").is_correct(sample) == [True]


@pytest.mark.parametrize(
    ("nums", "target"),
    [(None, 72), ("nonsense", 72), ([], 72), ([1.5], 72), ([True], 72), ([19, 1, 4], None), ([1], "x"), ([1], [])],
)
def test_rows_without_a_task_are_errors(nums, target):
    samples = build_samples([PROMPT], ["<answer>(19-1)*4</answer>"], nums=[nums], target=[target])
    score = load("countdown").score(samples)
    assert score.statuses["accuracy"] == ["error"]
    assert "columns `nums` and `target`" in score.infos["accuracy"][0]["reason"]


@pytest.mark.parametrize("answer", ["6 = 1+2+3", "1+2+3 = 6.0", "+1+2+3", "1 + 2 + 3 = 6"])
def test_the_target_may_stand_on_either_side(answer):
    samples = build_samples(["?"], [f"<answer>{answer}</answer>"], nums=[[1, 2, 3]], target=[6])
    assert load("countdown").is_correct(samples) == [True]


def test_the_task_may_be_the_reference():
    task = {"target": 6, "numbers": [1, 2, 3]}
    assert load("countdown").is_correct(build_samples(["?"], ["<answer>1+2+3</answer>"], reference=[task])) == [True]
