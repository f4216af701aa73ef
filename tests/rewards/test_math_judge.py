import pytest

from rewards.components import math_judge
from rewards.components.math_judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    math_judge.warm_up()


EQUAL = [
    # units, currency, separators, wrappers
    ("12", "$12$ cm"), ("12 cm", "12"), (r"12\text{ cm}", "$12$ cm"), (r"10\sqrt{3}\text{ m}^2", r"10\sqrt{3}"),
    (r"\$5", "5 dollars"), ("1234", r"1\,234"), ("1,234", "1234"), ("1234", "1 234"), (r"1{,}000", "1000"),
    ("72", "72.00"), ("-1", "−1"), (r"$\frac{3}{4}$", "3/4"), ("72", "**72**."),
    # numbers
    (r"\frac{1}{3}", "0.333333"), (r"\frac12", "0.5"), (r"3\frac{1}{2}", "3.5"), ("2^{10}", "1024"), (r"2\pi", "6.283185"),
    (r"\frac{1}{2^{99}}", "2^{-99}"), (r"\log_2 8", "3"), (r"\binom{5}{2}", "10"), ("1+2i", "2i+1"), ("√8", r"2\sqrt2"),
    # percent
    (r"50\%", "0.5"), ("50", r"50\%"), ("0.5", r"50\%"), (r"12.5\%", "12.5"), (r"\frac{1}{8}", r"12.5\%"),
    # logarithms of powers
    (r"\log_2(x^{3/2})", r"\frac32\log_2 x"), (r"\frac{3}{2}\log_2 x", r"\log_2(x^{3/2})"), (r"\ln x^3", r"3\ln x"),
    (r"\log_4 x", r"\frac12 \log_2 x"), (r"\ln x+\ln y", r"\ln(xy)"), (r"\ln x-\ln y", r"\ln(x/y)"), (r"2\ln x", r"\ln x^2"),
    (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), (r"\frac{\sqrt x}{\sqrt y}", r"\sqrt{\frac xy}"),
    (r"2\pi\sqrt{\frac{m}{k}}", r"\frac{2\pi}{\sqrt{k/m}}"), (r"\frac{1}{\sqrt{x}}", r"\sqrt{\frac1x}"),
    # names and chains
    ("7", "x=7"), ("x=7", "7"), ("7", "3+4=7"), ("7", "x=3+4=7"), ("f(x)=x^2", "x^2"), ("y=2x+1", "y-2x=1"),
    (r"\sqrt{2}", r"\sqrt{2}\approx 1.414"),
    # expressions
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt{2}}{2}"), (r"\frac12", r"\sin 30^\circ"), ("2ab", "2ba"),
    # lists, sets, tuples, intervals
    ("(1,2)", "(1, 2)"), ("(1,2)", r"\left(1,2\right)"), ("1,2", "2,1"), (r"\{1,2\}", "2, 1"), ("1,2", "x=1, x=2"),
    (r"\pm 2", "2,-2"), (r"1\pm\sqrt 2", r"1+\sqrt{2},1-\sqrt{2}"), ("[1,2)", "[1,2)"), ("100,200", "200, 100"),
    (r"(-\infty,2]\cup(3,4)", r"(3,4)\cup(-\infty,2]"), ("1<x<2", "(1,2)"), ("[1,2]", r"1\le x\le 2"), ("x>2", "2<x"),
    ("(-2,3)", r"x \in (-2, 3)"), (r"\emptyset", "∅"), ("x=1,y=2", "y=2, x=1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    # a name in front of a whole, and a whole behind a name
    ("v=(1,2)", "(1,2)"), (r"\vec{v}=(1,2)", "(1,2)"), ("(1,2)", "v=(1,2)"), (r"S=\{1,2\}", r"\{2,1\}"), ("[1,2]", "D=[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"A=\begin{pmatrix}1&2\\3&4\end{pmatrix}"), ("v=(1,2)", "v=(1,2.0)"),
    # vectors in other brackets, sets by a condition, unions of inequalities
    (r"\langle 1,2\rangle", "(1,2)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left\langle 1, 2\right\rangle"),
    ("(3,-1,2)", r"\begin{bmatrix} 3 \\ -1 \\ 2 \end{bmatrix}"), ("<1,2>", "(1,2)"),
    (r"\{x|-2\leq x < 1\}", "[-2,1)"), ("[-2,1)", r"\{x \mid -2 \le x < 1\}"), (r"\{x\in\mathbb{R} : x>2\}", r"(2,\infty)"),
    (r"\{x|x>2\}", r"\{ y \mid y > 2 \}"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"x>3 \text{ or } x \le 2", r"(-\infty,2]\cup(3,\infty)"), (r"\ln 2", r"\log_e 2"), ("9.8 m/s^2", "9.8"),
    ("9.8", r"9.8\ m/s^2"), ("30 minutes", "30 min"), ("5 ft", r"5\text{ feet}"), ("12 cm", r"12\text{ cm}^2"), ("3 hours", "3"),
    (r"90^\circ", "90 degrees"),
    # units in parts
    (r"1 / 4 \mathrm{~m} / \mathrm{s}", r"\frac14"), (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", "9.8"),
    ("72", r"72 \mathrm{~km} / \mathrm{h}"),
    (r"4 \times 10^{33} \mathrm{erg} / \mathrm{s}", "4e33"), (r"5 \text{ kg} \cdot \text{m}", "5"),
    # words
    ("10:30", "10:30"), ("1:3", "1:3"), ("A", r"\text{A}"),
    (r"\text{Monday}", "Monday"), (r"\text{even}", "even."),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_answers_that_mean_the_same_are_equal(reference: str, answer: str) -> None:
    assert judge(answer, reference) == "equal"


DIFFERENT = [
    # logarithms that have a value where the other has none, or another one
    (r"\sqrt{x^2}", "x"), (r"\ln (x+3)^2", r"2\ln(x+3)"), (r"\sqrt{(x+3)^2}", "x+3"), ("(a^b)^c", "a^{bc}"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"), (r"\ln(xy)", r"\ln x+\ln y"), (r"\ln(x/y)", r"\ln x-\ln y"),
    (r"\ln x-\ln y", r"\ln(xy)"), (r"\ln x-\ln y", r"\ln(y/x)"), (r"x", r"\sqrt{x^2}"), (r"\ln x+\ln y", r"\ln(x+y)"),
    (r"\sqrt{\frac xy}", r"\frac{\sqrt x}{\sqrt y}"),
    # numbers smaller than any rounding
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\frac{1}{2004!}", r"\frac{1}{2004!+2005!}"), ("10^{-200}", "10^{-201}"),
    ("(x-a)^{6000}", "(x-a)^{5999}"),
    (r"\ln x^2", r"2\ln x"), (r"\log(x y)", r"\log x+\log y"), (r"\log_2(x^{3/2})", r"\frac52\log_2 x"),
    (r"\log_2(x^{3/2})", r"\frac32\log_3 x"), (r"\frac32\log_2 x", "10000000000000"), ("123454321987", r"\log_2(x^{3/2})"),
    # an equation is right only when all its sides are
    ("7", "8=7"), ("7", "3=7"), ("7", "2x=7"), ("7", "x=8=7"), ("72", "72=70"), ("x=7", "y=7"), ("7", r"7 \approx 8"),
    # hedges and lists
    ("7", "5 or 7"), ("2", "x=1,x=2"), ("72", "70, 72"), ("72", "72 and 70"), ("12", "1,2"), ("1,2", "1,3"), ("72", "7 2"),
    # numbers that are near, by the size of what differs
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), (r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}"), ("0.0000001", "0.0000002"),
    ("1/3", "0.33"), ("1", "1.00009"), ("0", "10^{-30}"), (r"50\%", "5"),
    # order and brackets
    ("(1,2)", "(2,1)"), ("(3,1)", "(5,2)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"), (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"1<x\le 2"), ("x>2", "x<2"), ("x>2", r"x\ge 2"),
    # a name in front of a whole
    ("v=(1,2)", "w=(1,2)"), ("v=(1,2)", "(2,1)"), ("(1,2)", "v=(1,3)"), (r"S=\{1,2\}", "1"), ("(1,2)", "(x,y)=(2,1)"),
    ("(1,2)", "5=(1,2)"), ("[1,2]", "x=(1,2)"), (r"\{1,2\}", r"\{1\}=\{1,2\}"),
    # vectors, sets by a condition, unions of inequalities
    (r"\langle 1,2\rangle", "(2,1)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{1,2\}"),
    (r"\{x|-2\leq x < 1\}", "(-2,1)"), ("[-2,1)", r"\{x \mid -2 \le x \le 1\}"), (r"(2,\infty)", r"\{x \mid y > 2\}"),
    (r"\{x|x>2\}", "2"), ("2", r"\{x|x>2\}"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>4"),
    (r"(-\infty,2)\cup(3,\infty)", r"x \le 2 \text{ or } x>3"), (r"(-\infty,2)\cup(3,\infty)", "x<2"), (r"\ln 2", r"\log_3 2"),
    # units in parts
    (r"1 / 4 \mathrm{~m} / \mathrm{s}", r"\frac15"), (r"2.5 \text{ million}", "2.5"), ("2.5", "2.5 million"), ("x^2+C", "x^2"),
    ("x^2", "x^2+C"),
    # another unit of measure
    ("3 hours", "3 minutes"), (r"3	ext{ cm}", r"3	ext{ m}"), ("30 minutes", "30 hours"), (r"\$5", r"5	ext{ cents}"),
    (r"90^\circ", r"90	ext{ radians}"), ("5 kg", "5 g"), ("2 weeks", r"2	ext{ days}"),
    # words
    ("10:30", "1:3"), ("10:30", "10:31"), ("10:30 AM", "22:30"), ("A", "B"), ("Monday", r"\text{dayMon}"),
    ("x+1", "y+1"), ("2ab", "2cd"), ("12", "13 cm"), ("7", "seven"), ("7", "answer"), ("7", ""), ("1,234", "2,341"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_answers_that_mean_something_else_are_not(reference: str, answer: str) -> None:
    assert judge(answer, reference) in ("different", "unread")


@pytest.mark.parametrize(
    ("reference", "answer"),
    [(r"\ln 2", r"\log_e 2"), (r"x \ge 1", r"[1,\infty)"), (r"\{x|x>1\}", r"(1,\infty)"), ("[0,1]", r"0 \le x \le 1")],
)
def test_an_interval_is_as_worked_out_as_its_inequality(reference: str, answer: str) -> None:
    assert judge(answer, reference, final=True) == judge(reference, answer, final=True) == "equal"


@pytest.mark.parametrize("answer", ["}{", r"\frac{", "\\", "{" * 900, r"\sqrt{" * 300, "\ud800", "\x00", "((((", "?!"])
def test_what_is_no_mathematics_is_not_equal_and_does_not_raise(answer: str) -> None:
    assert judge(answer, "7") in ("different", "unread")


@pytest.mark.parametrize(
    "answer", ["5^{5^{5^{5^{5}}}}", r"\dfrac{5^{5^{5^{5^5}}-4}-5}{16}", "99999999!", "10^{10^{10}}"]
)
def test_numbers_too_large_to_evaluate_are_not_evaluated(answer: str) -> None:
    assert judge(answer, "72") == "too_large"
    assert judge(answer, answer) == "equal"


@pytest.mark.parametrize("answer", ["123454321", r"123454321\log_2 x", "x+y"])
def test_what_differs_in_value_is_not_simplified(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """SymPy would make 2^123454321 of 123454321 log 2, and work on that for minutes."""
    asked: list[object] = []
    monkeypatch.setattr("math_verify.grader.simplify", lambda difference: asked.append(difference) or difference)
    assert judge(answer, r"\log_{2}\left(x^{3/2}\right)") == "different"
    assert not asked
    assert judge(r"x(x+1)", "x^2+x") == "different"  # the stand-in simplifies nothing
    assert asked


def test_a_reference_that_cannot_be_read_is_told_from_an_answer_that_cannot() -> None:
    assert judge("7", r"\frac{") == "reference"
    assert judge(r"\frac{", "7") == "unread"
    assert judge("72", "72'") == judge("72'", "72") == judge("1,2,4", r"1,2,\ldots") == "different"


def test_a_list_of_numbers_with_three_digits_may_be_a_list_after_all() -> None:
    assert judge("200, 300, 100", "100,200,300") == "equal"
    assert judge("100200300", "100,200,300") == "equal"
