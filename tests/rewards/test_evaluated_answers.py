import pytest

from rewards.components.reasoning_gym import may_be_evaluated


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("spiral_matrix", "[1, 2, 3]"),
        ("spiral_matrix", "1 2 3"),
        ("string_insertion", "['A', 'B']"),
        ("n_queens", "_ Q _\nQ _ _"),
        ("countdown", "(3 + 4) * 12 - 6 / 2"),
        ("polynomial_multiplication", "3*x**2 - 4*x*y + 1"),
        ("simple_integration", "x**3/3 - 7*x^(1/2) + C"),
        ("intermediate_integration", "-2*exp(x)*cos(3*x) + log(x)/2"),
        ("chain_sum", "__import__('os')"),  # never evaluated there
    ],
)
def test_plain_answers_pass(task: str, answer: str) -> None:
    assert may_be_evaluated(task, answer)


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("spiral_matrix", "exit()"),
        ("spiral_matrix", "[0] * 9**9**9"),
        ("spiral_matrix", "[a for a in 'aaaa' for b in 'aaaa']"),
        ("n_queens", "__import__('os').system('true')"),
        ("countdown", "exit()"),
        ("countdown", "9**9**9"),
        ("puzzle24", "a.b"),
        ("polynomial_multiplication", "input()"),
        ("polynomial_multiplication", "x.__class__"),
        ("polynomial_multiplication", "9**9**9"),
        ("polynomial_multiplication", "x**(999)"),
        ("polynomial_multiplication", "((2**99)**99)**99"),
        ("simple_integration", "eval('1')"),
        ("simple_integration", "[x]"),
    ],
)
def test_answers_that_could_call_or_explode_do_not(task: str, answer: str) -> None:
    assert not may_be_evaluated(task, answer)
