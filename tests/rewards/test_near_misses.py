"""Wrong answers near many references are rejected, and other spellings of right answers are accepted."""

import json
import random

import pytest
from pairwise import rest_in_matrix

from rewards import attacks
from rewards.attacks import CONSTANTS, echoes, near_misses, same_answer, spellings
from rewards.components import math_judge
from rewards.components.math_judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    math_judge.warm_up()


def matrices(count: int) -> list[str]:
    """Vectors and matrices as in benchmarks: small integers and fractions, 2 or 3 rows, 1 to 3 columns."""
    random_ = random.Random(17)
    made = []
    for at in range(count):
        rows, columns = random_.choice([2, 3]), 1 if at % 3 else random_.choice([2, 3])
        below = random_.choice([1, 1, 5, 13])
        entries = [
            [str(random_.randint(-20, 20)) + (f"/{below}" if below > 1 else "") for _ in range(columns)]
            for _ in range(rows)
        ]
        made.append("\\begin{pmatrix} " + " \\\\ ".join(" & ".join(row) for row in entries) + " \\end{pmatrix}")
    return made


def test_no_wrong_vector_is_right_and_every_spelling_of_a_right_one_is() -> None:
    references = matrices(72)
    wrong = [(reference, answer) for reference in references for answer in near_misses(reference)]
    assert len(wrong) >= 185
    assert [pair for pair in wrong if judge(pair[1], pair[0]) == "equal"] == []
    right = [(reference, answer) for reference in references for answer in spellings(reference)]
    assert len(right) == 4 * 72  # tight, bmatrix, newline, array
    assert [pair for pair in right if judge(pair[1], pair[0]) != "equal"] == []


REFERENCES = [
    "72", "-5", "0", "1", r"\frac{3}{4}", "0.25", "(1, 2)", "[0, 1)", "1, 2", r"\{1, 2\}", "x^2+2x+1",
    r"2\sqrt{3}", r"\text{Evelyn}",
    "A", "x < 3", "y = 2x+3", "1+2i", r"\frac{\pi}{6}", r"3 \pm \sqrt{2}", "10:30", r"50\%", "1011_2",
    r"(-\infty, 2) \cup (3, 4)",
    r"\log_2 8 = 3", "p=5, q=2; p=7, q=2", r"12\text{ cm}", "x=1, y=2", r"\begin{pmatrix} 7 \\ -2 \end{pmatrix}",
    r"\angle ABC",
    r"90^\circ", "6 + 9i", "2^{10}", r"\sin x", r"\$20", "20,000", "5m^2", "2x+3", r"\emptyset",
    r"x \in \mathbb{R}", "3:2",
]  # fmt: skip


@pytest.mark.parametrize("reference", REFERENCES)
def test_near_misses_are_wrong_and_spellings_right(reference: str) -> None:
    assert [answer for answer in near_misses(reference) if judge(answer, reference, final=True) == "equal"] == []
    assert [answer for answer in spellings(reference) if judge(answer, reference, final=True) != "equal"] == []


OF_CONSTANTS = {
    "0",
    "1",
    "(1, 2)",
    "1, 2",
    r"\{1, 2\}",
    "x=1, y=2",
    r"\log_2 8 = 3",
    r"50\%",
    r"\emptyset",
    r"x \in \mathbb{R}",
}


@pytest.mark.parametrize("shift", rest_in_matrix(2, range(8)))
def test_no_constant_is_right_for_a_reference_of_which_it_is_not_the_answer(shift: int) -> None:
    assert set(REFERENCES) > OF_CONSTANTS
    others = [reference for reference in REFERENCES if reference not in OF_CONSTANTS]
    pairs = [(others[(at * 7 + shift) % len(others)], constant) for at, constant in enumerate(CONSTANTS)]
    pairs += [("A", "A")]
    paid = [(ref, constant) for ref, constant in pairs if judge(constant, ref, final=True) == "equal"]
    assert [pair for pair in paid if not same_answer(*pair)] == []
    assert set(paid) == {("A", "A")}


def test_echoes_are_what_a_prompt_holds() -> None:
    prompt = "Compute $$\\frac{1}{2} + 3 = x.$$ If \\[y > 2\\] and 12 + 30 - 2 are $5, what is \\(a\\)? See p. 7-9."
    assert echoes(prompt) == ["\\frac{1}{2} + 3 = x", "\\frac{1}{2} + 3", "y > 2", "a", "12 + 30 - 2", "7-9"]
    assert echoes("no formula") == []
    assert len(echoes("$1+1$ $1+2$ $1+3$ " * 50 + "".join(f"$x_{at}$" for at in range(99)))) == attacks.MAX_ECHOES


def test_several_numbers_are_the_same_answer_in_any_order_and_spelling():
    assert same_answer(r"\pm 1", r"\{-1, 1\}")
    assert same_answer("1, 2", "2.0, 1")
    assert same_answer("0.50", r"\frac{1}{2}")
    assert not same_answer("(1,2)", "(2,1)")
    assert not same_answer("1", "1, 2")
    assert not same_answer("x, y", "y, x")


def test_an_equation_that_gives_the_answer_is_the_answer():
    assert same_answer("x=1", "1")
    assert same_answer("y = 0.5", r"\frac{1}{2}")
    assert same_answer("1=1", "1")
    assert same_answer("2-2=0", "0")
    assert not any(same_answer(answer, "1") for answer in ("8=1", "x=2", "x=y=2", "2=1", "1=2", "x=", "3-2=1"))
    assert not same_answer("2-2=0", "x=5")
    assert not same_answer("1", "x=1")  # the question may ask for the name


def test_near_misses_of_an_object_change_a_value_or_leave_out_a_key() -> None:
    others = near_misses('{"order": 27611, "label": "refund", "paid": false}')
    assert [json.loads(other) for other in others] == [
        {"order": 27612, "label": "refund", "paid": False},
        {"order": 27611, "label": "not refund", "paid": False},
        {"order": 27611, "label": "refund", "paid": True},
        {"order": 27611, "label": "refund"},
    ]
