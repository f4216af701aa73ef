"""rewards.audit: what is paid on rows of one's own; each attack is found where a reward is careless about it."""

import doctest

import pytest

import rewards
from rewards import Preset, RewardsError, audit, from_function
from rewards.audit import ATTACKS

ROWS = [
    {"prompt": f"What is ${n} + {n + 1}$?", "answer": str(2 * n + 1), "more": n} for n in range(10, 30)
] + [{"prompt": [{"role": "user", "content": "Say (1, 2)."}], "answer": "(1, 2)", "more": 0}]  # fmt: skip


def boxed(text: str) -> str:
    before, _, inner = text.rpartition("\\boxed{")
    return inner[:-1] if inner.endswith("}") and "boxed" not in before and "<" not in text else ""


def reward(judge):
    """A preset around a function of (content of the last box, reference)."""

    def function(completions, answer, **columns):
        texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]
        return [float(judge(boxed(text or ""), expected)) for text, expected in zip(texts, answer, strict=True)]

    return Preset([(from_function(function)[0], 1.0)], name="mine")


def rates(preset, rows=ROWS, **given):
    found = audit.audit(preset, rows, style="boxed", **given)
    return {result.attack: (result.rows, result.paid) for result in found.results}, found


def computed(text):
    try:
        return eval(text, {"__builtins__": {}})
    except Exception:
        return None


PLANTED = {  # what a careless reward takes for right, and which attack has to find it
    "echo": lambda given, wanted: given == wanted or ("+" in given and str(computed(given)) == wanted),
    "constants": lambda given, wanted: given in (wanted, "nan"),
    "hedges": lambda given, wanted: wanted in given.replace(",", " ").split(),
    "near-misses": lambda given, wanted: given.lstrip("-") == wanted,
    "shuffles": lambda given, wanted: given.isdigit() and given[-1] in "13579" and "4" not in given,
}


@pytest.mark.parametrize("attack", PLANTED)
def test_each_attack_finds_the_reward_that_is_careless_about_it(attack: str) -> None:
    preset = reward(PLANTED[attack])
    found, report = rates(preset, ROWS[:20], attacks=(attack,))
    rows, paid = found[attack]
    assert rows == 20
    assert paid > 10
    assert not report.passed
    assert any(problem.startswith(f"{attack} is paid on {paid} of 20 rows") for problem in report.problems)
    example = report.results[-1].examples[0]
    assert (example.row, example.reference) == (1, "21") or attack == "shuffles"
    exact, report = rates(reward(lambda given, wanted: given == wanted), ROWS[:20], attacks=(attack,))
    assert exact[attack] == (20, 0)
    assert report.passed


def test_honest_answers_stand_beside_and_say_whether_the_rates_mean_anything() -> None:
    found, report = rates(reward(lambda given, wanted: given == wanted), attacks=("shuffles",))
    assert found["right"] == (21, 21)
    assert found["spellings"] == (21, 0)  # `$21$` is not `21` for this one
    _, report = rates(reward(lambda given, wanted: False), attacks=("shuffles",))
    assert report.problems == ["only 0 of 21 right answers are paid, so the rates say little: is the style right, and is the "
                               "reference in the column that the reward reads?"]  # fmt: skip


def test_one_completion_at_which_a_function_raises_costs_only_itself() -> None:
    def raises(completions, answer, **columns):
        return [float(text.endswith("{" + wanted + "}")) for text, wanted in zip(completions, answer, strict=True)]

    preset = Preset([(from_function(raises)[0], 1.0)], name="mine")
    found, _ = rates(preset, ROWS[:5], attacks=("hedges",))  # among them a completion that is None
    assert found == {"right": (5, 5), "spellings": (5, 0), "hedges": (5, 0)}


def test_the_style_is_the_one_that_is_paid() -> None:
    found = audit.audit(reward(lambda given, wanted: given == wanted), ROWS, attacks=())
    assert found.style == "boxed"
    assert audit.audit(rewards.load("gsm8k-hash"), ROWS, attacks=()).style == "hash"


def test_a_sample_of_the_rows_is_drawn_by_seed() -> None:
    preset = reward(PLANTED["shuffles"])

    def examples(seed: int) -> list[object]:
        result = rates(preset, attacks=("shuffles",), most=5, seed=seed)[1].as_dict()["results"][-1]
        assert result["rows"] == 5
        return result["examples"]

    assert examples(1) == examples(1) != examples(2)


def test_what_cannot_be_audited_is_said() -> None:
    preset = rewards.load("gsm8k-hash")
    with pytest.raises(RewardsError, match="No row has a reference"):
        audit.audit(preset, [{"prompt": "?"}, {"prompt": "?", "answer": None}])
    with pytest.raises(RewardsError, match=r"No attack 'echos'\. Did you mean 'echo'"):
        audit.audit(preset, ROWS, attacks=("echos",))


def test_no_attack_is_paid_by_the_presets_for_numbers() -> None:
    for name in ("gsm8k-hash", "gsm8k-reasoning", "gsm8k-xml", "math-match"):
        report = audit.audit(rewards.load(name), ROWS, most=8)
        assert report.passed, report.problems
        assert [result.attack for result in report.results] == ["right", "spellings", *ATTACKS]


def test_examples_hold() -> None:
    assert doctest.testmod(audit).failed == 0
