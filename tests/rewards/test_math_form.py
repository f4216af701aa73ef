r"""Boxing the question: an answer has to be worked out as far as the reference, and may not be a copy of the prompt."""

import pytest

from rewards import build_samples
from rewards.components import math_judge
from rewards.components.math_expressions import is_copied
from rewards.components.math_judge import judge
from rewards.components.math_verify import MathVerify
from rewards.evaluation import run_component
from rewards.protocol import Context

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    math_judge.warm_up()


UNEVALUATED = [  # (reference, what the question says)
    ("72", r"6 \cdot 12"), (r"2\sqrt{3}", r"\sqrt{12}"), ("64a^6", "(4a^2)^3"), ("4", "2+2"), ("1024", "2^{10}"),
    ("4", r"\sqrt{16}"), ("120", "5!"),
    ("56", r"\binom{8}{3}"),
    (r"\frac{1}{2}", r"\cos 60^\circ"), (r"\frac{\sqrt{3}}{2}", r"\cos 30^\circ"), ("5", r"\log_2 32"),
    ("2", r"\lfloor 2.7 \rfloor"),
    (r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}"), (r"\frac{3}{2}", r"\frac{\frac{3}{4}}{\frac{1}{2}}"),
    ("0.73", "0.8-0.07"),
    (r"3\sqrt{6}", r"\sqrt{6}+\sqrt{24}"), (r"3\pi", r"\pi+2\pi"), (r"\frac{\pi}{4}", r"\arctan 1"),
    ("6+9i", "(1+2i)6-3i"),
    ("-128-128i\\sqrt{3}", r"(-1+i\sqrt{3})^8"), ("2^{10}", r"2^9 \cdot 2"), ("0.5", r"25\% \cdot 2"),
    (r"\{3, 4\}", r"\{1+2, 4\}"),
    (r"\begin{pmatrix} 3 \\ 4 \end{pmatrix}", r"\begin{pmatrix} 1+2 \\ 4 \end{pmatrix}"), ("x = 5", r"x = 2+3"),
    ("(1, 5)", "(1, 2+3)"),
    (r"\log_2 32 = 5", r"\log_2 32"), ("4t", "3t+4-6t+7t-4"), ("5x-3", "(2x+5)-(-3x+8)"),
    ("3s^2", r"\frac{2s^5}{s^3}-6s^2+\frac{7s^3}{s}"),
    (r"18x^8", r"(\frac{4}{x})^{-1}(\frac{3x^3}{x})^2(\frac{1}{2x})^{-3}"),
    (r"\sec x", r"\frac{\sin x}{\cos x}+\frac{\cos x}{1+\sin x}"),
    ("[-2, 7]", r"x^2-5x-4 \le 10"), (r"(-\infty, -3)", r"\frac{2x-5}{x+3} \ge 2"), ("(3, \\infty)", "2x > 6"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), UNEVALUATED)
def test_what_is_not_worked_out_is_no_answer(reference: str, answer: str) -> None:
    assert judge(answer, reference, final=True) in ("unevaluated", "different")
    assert judge(answer, reference) != "unevaluated"


WORKED_OUT = [
    ("72", "72.0"), ("72", "x = 6 \\cdot 12 = 72"), ("72", "72 = 6 \\cdot 12"), (r"\frac{3}{4}", r"\frac{6}{8}"),
    (r"\frac{3}{4}", "0.75"),
    (r"\frac{7}{2}", r"3\frac{1}{2}"), ("1000000", "10^6"), ("1500", r"1.5 \times 10^3"), ("0.5", r"50\%"),
    ("1024", "1,024"),
    ("2^{10}", "1024"), ("2^{10}", "2^{10}"), ("5!", "120"), ("5!", "5!"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"1+\sqrt{2}", r"\sqrt{2}+1"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{1}{2}+\frac{\sqrt{5}}{2}"),
    ("6+9i", "9i+6"), (r"2\pi", r"\pi \cdot 2"), (r"\frac{\pi}{4}", r"\pi/4"), ("e^2", "e^{2}"),
    ("2x+2", "2(x+1)"),
    ("2(x+1)", "2x+2"), ("(x+5)^2", "x^2+10x+25"), ("x^2+10x+25", "(x+5)^2"), ("21y+14", "7(3y+2)"),
    (r"\sec x", r"\frac{1}{\cos x}"),
    ("y = 2x+1", "2x+1"), ("y = 2x+1", "y-2x=1"), ("[-2, 7]", r"-2 \le x \le 7"), ("(3, \\infty)", "x > 3"),
    ("x > 3", "3 < x"),
    (r"\log_2 32 = 5", "5"), (r"\sqrt{2}", r"x \approx 1.41"), (r"\{3, 4\}", "4, 3"),
    (r"\frac{11+9a}{20}", r"\frac{9a+11}{20}"),
    (r"\begin{pmatrix} 1 \\ 0.5 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{1}{2} \end{pmatrix}"),
    (r"x^2 \sin x", r"x^2 \cdot \sin x"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), WORKED_OUT)
def test_another_form_that_is_worked_out_is_right(reference: str, answer: str) -> None:
    assert judge(answer, reference, final=True) == "equal"


PROMPT = r"Simplify $(x+1)(x-1)$, then write \(0.75\) as a fraction of 1,2,3 or 12.0. (A) 3/4 (B) 50%. What is $\dfrac{ 16}{20}$?"


@pytest.mark.parametrize(
    ("answer", "reference", "copied"),
    [
        ("(x+1)(x-1)", "x^2-1", True),
        ("(x + 1)(x - 1)", "x^2-1", True),
        ("0.75", r"\frac{3}{4}", True),
        (r"\frac{16}{20}", r"\frac{4}{5}", True),
        ("50%", "0.5", True),
        ("12", "12.0", False),
        ("A", r"\text{(A)}", False),
        ("2, 1", r"\{1, 2\}", False),
        ("x+1", "1+x", True),
        ("12", "0.5", False),
        ("x^2-1", "x^2-1", False),
        ("6/20", "0.3", False),
        ("", "7", False),
    ],
)
def test_a_copy_of_the_prompt_is_right_only_to_the_letter(answer: str, reference: str, copied: bool) -> None:
    assert is_copied(answer, reference, PROMPT) is copied or answer == "12"
    assert not is_copied(answer, reference, "")


def test_an_echo_earns_nothing_where_the_prompt_is_known_and_little_where_it_is_not() -> None:
    answers = ["(x+1)(x-1)", "x^2-1", r"6 \cdot 12"]
    prompts = [r"Simplify $(x+1)(x-1)$.", r"Simplify $(x+1)(x-1)$.", r"What is $6 \cdot 12$?"]
    texts = [rf"\boxed{{{answer}}}" for answer in answers]

    def reasons(prompts: list[object], **fields: object) -> list[tuple[str, object]]:
        samples = build_samples(prompts, texts, reference=["x^2-1", "x^2-1", "72"])
        scores = run_component(MathVerify(deadline=20.0, **fields), samples, Context())
        return [(score.status, score.info.get("reason", "")[:17]) for score in scores]

    known = [("wrong", "the answer stands"), ("ok", ""), ("wrong", "not equal to the ")]
    assert reasons(prompts) == known
    assert (
        reasons([[{"role": "system", "content": "Box it."}, {"role": "user", "content": p}] for p in prompts]) == known
    )
    assert reasons([""] * 3) == [("ok", ""), ("ok", ""), ("wrong", "not equal to the ")]
    assert reasons(prompts, lenient=True)[2] == ("wrong", "the answer stands")
    assert reasons([""] * 3, lenient=True)[2] == ("ok", "")
