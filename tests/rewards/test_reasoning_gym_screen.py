"""No constant (`nan`, `0`) is accepted for tasks of reasoning-gym whose answer differs."""

import json

import pytest

from rewards.components import reasoning_gym
from rewards.components.reasoning_gym import judge, may_be_evaluated

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

CONSTANTS = [
    "0", "1", "-1", "2", "0.5", "1/2", "nan", "NaN", "nan+nani", "(nan)", "inf", "-inf", "1e999", "i", "None", "null", "True",
    "False", "true", "yes", "No", "A", "B", "x", "C", "x+C", "[]", "[[]]", "{}", "()", "''", "0 0", "1 1", "[0]", "[1]", "[0, 0]",
    "?", "-", ".", ",", "the answer", "no solution", "impossible", "north", "R", "00:00:00", "2020-01-01", "Monday", "a b c",
]  # fmt: skip
SLOW_TO_MAKE = {"rearc", "arc_agi", "puzzle24", "figlet_font", "group_anagrams", "word_ladder", "zebra_puzzles", "sokoban",
                "countdown", "gsm_symbolic", "codeio", "advanced_geometry", "knight_swap"}  # fmt: skip
SLOW_TO_JUDGE = {"intermediate_integration", "simple_integration", "polynomial_multiplication", "rubiks_cube"}
NEEDS_CONFIGURATION = {"composite"}


def tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - NEEDS_CONFIGURATION)


def same(constant: str, reference: str) -> bool:
    """Return whether a constant equals the reference, as text or as a number."""
    try:
        return float(constant) == float(reference)
    except ValueError:
        return constant.casefold() == reference.strip().casefold()


def paid(task: str, rows: int, constants: list[str], seed: int) -> list[tuple[str, str]]:
    """The pairs (constant, reference) that are scored as right although they differ."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(task, size=rows, seed=seed)
    pairs = []
    for entry in (made[at] for at in range(rows)):
        row, reference = json.dumps(entry, default=str), str(entry["answer"])
        for constant in constants:
            if not same(constant, reference) and may_be_evaluated(task, constant):
                try:
                    value = judge(task, constant, row).get("value")
                except Exception:
                    continue  # the row's own verdict is `error`, which pays nothing
                pairs += [(constant, reference)] if value == 1.0 else []
    return pairs


HARMLESS = [
    ("spiral_matrix", "[1, 2, 3]"), ("spiral_matrix", "1 2 3"), ("string_insertion", "['A', 'B']"),
    ("n_queens", "_ Q _\nQ _ _"), ("countdown", "(3 + 4) * 12 - 6 / 2"),
    ("polynomial_multiplication", "3*x**2 - 4*x*y + 1"), ("simple_integration", "x**3/3 - 7*x^(1/2) + C"),
    ("intermediate_integration", "-2*exp(x)*cos(3*x) + log(x)/2"), ("chain_sum", "__import__('os')"),
]  # fmt: skip
HARMFUL = [
    ("spiral_matrix", "exit()"), ("spiral_matrix", "[0] * 9**9**9"),
    ("spiral_matrix", "[a for a in 'aaaa' for b in 'aaaa']"), ("n_queens", "__import__('os').system('true')"),
    ("countdown", "exit()"), ("countdown", "9**9**9"), ("puzzle24", "a.b"), ("polynomial_multiplication", "input()"),
    ("polynomial_multiplication", "x.__class__"), ("polynomial_multiplication", "9**9**9"),
    ("polynomial_multiplication", "x**(999)"), ("polynomial_multiplication", "((2**99)**99)**99"),
    ("simple_integration", "eval('1')"), ("simple_integration", "[x]"),
]  # fmt: skip


def test_answers_that_could_call_or_explode_are_not_evaluated() -> None:
    assert [case for case in HARMLESS if not may_be_evaluated(*case)] == []
    assert [case for case in HARMFUL if may_be_evaluated(*case)] == []


def test_a_few_constants_on_a_row_of_every_quick_task() -> None:
    quick = set(tasks()) - SLOW_TO_MAKE - SLOW_TO_JUDGE
    assert len(quick) > 80
    assert {task: some for task in quick if (some := paid(task, 1, ["0", "1", "nan", "True", "[]", "A"], 3))} == {}


@pytest.mark.parametrize("task", ["complex_arithmetic", "coin_flip"])
def test_what_reasoning_gym_pays_for_any_row_is_paid_here_for_none(task: str) -> None:
    assert paid(task, 3, ["nan", "nan+nani", "(NaN)", "inf", "0", "0.", "0.0"], 11) == []


@pytest.mark.parametrize(
    ("answer", "right"),
    [("1,2", False), ("0,12", False), ("12", True), ("+12.0", True), ("012", True), ("1,234", False)],
)
def test_a_comma_between_two_numbers_does_not_join_them(answer: str, right: bool) -> None:
    """Tasks that remove every comma read `1,2` as 12, so that one constant could be right on many rows."""
    row = json.dumps({"question": "5 + 7 =", "answer": "12", "metadata": {"source_dataset": "chain_sum"}})
    assert (judge("chain_sum", answer, row)["value"] == 1.0) == right


def test_a_comma_between_thousands_is_dropped() -> None:
    row = json.dumps({"question": "", "answer": "1234", "metadata": {"source_dataset": "chain_sum"}})
    assert judge("chain_sum", "1,234", row) == judge("chain_sum", "01,234.00", row) == {"value": 1.0}


@pytest.mark.parametrize("answer", ["1e999999999", "-1.E-99999", "2e1_000_000", "so 5e+1000"])
def test_a_huge_exponent_is_no_answer_and_is_not_worked_out(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """The coin task's verifier would turn `1e999999999` into a fraction, which takes hours and all memory."""
    scored: list[str] = []
    monkeypatch.setattr(reasoning_gym, "_score_answer", lambda task: lambda answer, entry: scored.append(answer) or 1.0)
    coin = json.dumps({"question": "?", "answer": "0.375", "metadata": {}})
    assert judge("coin_flip", answer, coin) == {"value": 0.0}
    assert scored == []
    assert judge("coin_flip", "37.5e-2", coin) == {"value": 1.0}
    assert scored == ["37.5e-2"]


def test_the_corrected_tasks_still_take_their_own_answers() -> None:
    import reasoning_gym

    for task in ("complex_arithmetic", "coin_flip"):
        made = reasoning_gym.create_dataset(task, size=3, seed=11)
        for entry in (made[at] for at in range(3)):
            assert judge(task, str(entry["answer"]), json.dumps(entry))["value"] == 1.0
    coin = json.dumps({"question": "?", "answer": "0.375", "metadata": {}})
    assert [judge("coin_flip", answer, coin)["value"] == 1.0 for answer in ("3/8", "0.37500", "0.3", "0.37", "0.3749")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.survival
@pytest.mark.parametrize("task", tasks())
def test_every_constant_on_every_task(task: str) -> None:
    """The limit of 0.5 % allows none of so few rows. The rows of this seed are generated quickly."""
    assert paid(task, 2 if task in SLOW_TO_MAKE | SLOW_TO_JUDGE else 6, CONSTANTS, 1) == []
