"""Pairs (reference, answer) of which the second is what a policy tries, or a spelling that a right answer comes in."""

import pytest

from rewards.components import math_judge
from rewards.components.math_judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    math_judge.warm_up()


RIGHT = [
    ("2", r"12 \bmod 5"), ("2", r"12 \mod 5"), (r"7", r"\sum_{k=1}^{7} 1"), ("2x=14", "x=7"),
    ("10", "5(2)"), ("6", "(2)(3)"), ("1", r"2(\frac12)"), ("2.5", r"2\frac12"), (r"\frac{5}{2}", r"2\frac{1}{2}"),
    (r"\frac{7}{2}", "3 1/2"), ("7/2", "3 1/2"), ("-3.5", r"-3\frac12"), (r"\sin x", "sin x"), (r"\gamma", r"\gamma"),
    ("y'+y=0", "y+y'=0"), ("-1", r"e^{i\pi}"), ("i^2", "-1"), (r"\sqrt{-1}", "i"), ("a+bi", "a+ib"),
    (r"\sum_{i=1}^{3} i", "6"),
    ("nRT", "n R T"), ("nRT", r"n\cdot R\cdot T"), ("2abc", "2cab"), ("xy", "yx"), ("ab", "ba"), ("10_2", "10_{2}"),
    ("10_2", "(10)_2"), ("10_2", "10"), ("2A_{16}", "2a_{16}"), (r"70_{\text{eight}}", "70_8"), ("x=70_8", "70_8"),
    ("70_8", "x=70_8"), ("x_{12}", "x_{12}"), (r"\log_2 8", "3"), (r"\log_{10} 100", "2"), (r"\sqrt{12}", r"2\sqrt3"),
    (r"1,2,3,\ldots", r"1,2,3,\dots"), (r"1+2+\cdots+n", r"1 + 2 + \ldots + n"), (r"\frac13", r"0.\overline{3}"),
    (r"0.\overline{3}", r"0.\bar{3}"), (r"0.\overline{142857}", r"\frac17"),
    (r"\frac16", r"0.1\overline{6}"), (r"\frac13", "0.(3)"), ("1.5", "0.5(3)"),
    ("1", r"0.\overline{9}"), (r"2\frac13", r"2.\overline{3}"), (r"-\frac13", r"-0.\overline{3}"),
    (r"33.\overline{3}\%", r"\frac13"), ("1500", "1.5e3"), ("1500", "1.5E3"), ("0.005", "5e-3"), ("2e-1", "-1+2e"),
    (r"6.02\times10^{23}", "6.02e23"), (r"6.02\times10^{23}", r"6.02\cdot 10^{23}"), ("0.005", r"5\times10^{-3}"),
    ("12", r"\mathbf{12}"), ("12", r"\mathrm{12}"), ("12", r"\text{12}"), ("12", r"{\color{red}12}"),
    ("12", r"\textcolor{red}{12}"), ("12", r"\underline{12}"), ("12", r"\boldsymbol{12}"), ("12", r"{\bf 12}"),
    ("5", r"\text{5 dollars}"), ("5", r"\text{\$5}"), ("12", "=12"), ("12", "12 = x"), ("12", "y = x = 12"),
    ("12", "x = 12 = y"), ("x=12", "12=x"), ("12=x", "12"), ("x=12", "y=x=12"), ("7", r"\approx 7"),
    ("7", r"x \approx 7"), (r"\sqrt2", r"x\approx 1.41"), (r"\sqrt2", r"\approx 1.41"),
    (r"\sqrt2", r"x=\sqrt2\approx 1.41"), (r"\sqrt2", r"x=\sqrt2\approx 1.4"), (r"\frac13", r"\frac13\approx 0.33"),
    (r"\sqrt2\approx 1.414", r"\sqrt2"), (r"x\approx 1.41", "1.41"), ("a=1,b=2", "1,2"), ("a=1,b=2", "b=2,a=1"),
    ("(x,y)=(1,2)", "(1,2)"), ("(x,y)=(1,2)", "x=1,y=2"), ("(x,y)=(1,2)", "y=2,x=1"), ("(1,2)", "x=1,y=2"),
    ("(1,2)", "y=2,x=1"), ("(1,2)", "(x,y)=(1,2)"), ("1,2", "x=1,x=2"), ("1,2", "x_1=2,x_2=1"), ("1,2", "2,1"),
    (r"\text{Yes}", "Yes"), (r"\text{No}", "no"), ("Yes", r"\text{Yes}"), (r"\text{odd}", "odd"), (r"\text{A}", "A"),
    (r"\text{(C)}", "C"), (r"\text{(C)}", "(C)"), ("C", r"\text{(C)}"),
    (r"\text{Team 1}", "Team 1"), (r"\varnothing", r"\{\}"),
    (r"\mathbb R", r"(-\infty,\infty)"), (r"\mathbb{R}", r"\text{all real numbers}"), ("2x=14", "x=7"),
    ("x+y=1", "2x+2y=2"), ("y=2x+1", "y-2x=1"), ("x^2-4=0", "x^2=4"), ("|x|", "||x||"), (r"50\%", "0.5"),
    ("1/2", r"50\%"), ("1234", "1 234"), (r"\frac{\pi^2}{6}", "1.644934"), (r"\tan^{-1} 1", r"\frac{\pi}{4}"),
    (r"\pi r^2", r"\pi r^{2}"), ("125 miles", r"125\textnormal{ miles}"), ("10000", r"10,\! 000"),
    ("(11,7)or(7,11)", "(7,11), (11,7)"),
    ("1,2", "x=1 or x=2"), ("1,2", "1or 2"),
    ("5", "5m^2"),
    ("5", "5m"), ("5", "5 km"), ("12cm", "12"), ("12 apples", "12"), (r"5\text{ m}", "5"), ("28", "28 percentage"),
    ("2x+3", r"2x+3\text{ m}"),
    (r"\log_2 8 = 3", "3"), (r"\cos(0)=1, \sin(0)=0", "1, 0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1 \\[2pt] 2\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left[\begin{array}{c}1\\2\\\end{array}\right]"),
    (r"\frac{1}{2}", r"\\frac{1}{2}"),
    (r"\begin{pmatrix}6&8\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}5&6\end{pmatrix}"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), RIGHT)
def test_another_spelling_is_right(reference: str, answer: str) -> None:
    assert judge(answer, reference) == "equal"


WRONG = [
    ("7", r"7 = \text{wrong}"), ("7", r"\text{not } = 7"), ("(1,2)", "(y,x)=(1,2)"), ("3", "3 am"),
    (r"1000\pi", r"\approx 3140"),
    ("100!", "100!+1"), (r"12 \text{ noon}", r"12 \text{ midnight}"), (r"3 \text{ days ago}", r"3 \text{ days}"),
    ("7", "5(2)"), ("5", "(2)(3)"), ("72", "70 2"), ("72", "70{2}"), ("72", r"70\;2"), ("72", r"70\ 2"),
    ("2.5", r"2(\frac12)"), ("3", r"2\frac{2}{2}"), ("11/2", "1 1/2"), ("E", "e"), ("i", "I"), ("I_1", "I_2"),
    (r"\sin x", "nis x"), (r"\cos x", r"\sin x"), (r"\Gamma", r"\gamma"), (r"\gamma_1", r"\gamma_2"), ("x'", "x"),
    ("f'(x)", "f(x)"), ("y'", "y''"), ("72", "72'"), ("72", "72''"), ("a+bi", "a-bi"), ("3+4i", "3-4i"),
    (r"\angle ABC", r"\angle ACB"), (r"\angle ABC", r"\angle BAC"), (r"\triangle ABC", r"\triangle ABD"),
    (r"\triangle ABC", r"\triangle abc"), (r"\overline{AB}", r"\overline{AC}"),
    (r"\overrightarrow{AB}", r"\overrightarrow{BA}"), (r"\overrightarrow{AB}", "AB"), (r"\overline{z}", "z"),
    (r"\bar{x}", "x"), (r"\vec{a}", "a"), (r"\hat{x}", "x"), ("nRT", "RTn"), (r"\frac{nRT}{V}", r"\frac{nTR}{V}"),
    ("xyz", "zyx"), ("AB", "BA"), ("x+Y", "x+y"), ("A^T", "A"), ("x^T", "x"), ("A^{-1}", "A"),
    ("f^{-1}(x)", r"\frac{1}{f(x)}"), ("f^{-1}(x)", "f(x)"), ("f(x)", "f(y)"), ("f(x)", "g(x)"), ("90", "(10)_{2}"),
    ("10_2", "2"), ("10", "10_{10}"), ("1011_2", "1011_3"), ("2A_{16}", "2B_{16}"), ("x=70_8", "70_9"),
    (r"\frac{1}{2}", r"\frac{1}{2}_3"), ("x_1", "x_2"), ("x_1", "x"), (r"\frac{1}{23}", r"\frac123"),
    ("2", r"\sqrt12"), ("12", r"12\cdots"), ("12", r"12\dots"), ("12", "12…"), (r"1,2,3,\ldots", r"2,1,3,\ldots"),
    ("1,2,3", r"1,2,3,\ldots"), (r"\frac{1}{3}", r"0.333\ldots"), (r"\frac16", r"0.\overline{16}"),
    (r"\frac13", r"0.\overline{4}"), (r"0.\overline{3}", "0.3"), (r"0.\overline{3}", "0.33"), ("1500", "1.5e4"),
    ("0.005", "5e-2"), ("2e-1", "0.2"), (r"6.02\times10^{23}", "6.02e22"),
    (r"6.02\times10^{23}", r"6.03\times10^{23}"), ("0", "1e-200"), ("12", "12="), ("12", "12 = 12 = 13"),
    ("7", "8=7"), ("7", "7=8"), ("12", r"12 = \pi"), ("12", r"\pi = 12"), ("x=12", "x=13=12"), ("7", "x=7, y=8"),
    ("7", r"\approx 7.05"), ("7", r"7\approx 7.05"), ("7", r"7\approx 8"), ("100", r"x \approx 101"),
    ("2024", r"x\approx 2040"), ("100", r"\text{Area}\approx 99.1"), (r"\sqrt2", r"\approx 1.4"),
    (r"\sqrt2", r"\approx 1.42"), (r"\sqrt2", r"x=\sqrt2\approx 1.5"), (r"\sqrt2", r"\sqrt3\approx 1.41"),
    (r"\frac13", r"x \approx 0.333"), (r"\frac13", r"\frac13\approx 0.34"), (r"x\approx 1.41", "1.42"),
    ("3.14", r"\pi"), (r"\pi", "3.14"), ("a=1,b=2", "2,1"), ("a=1,b=2", "a=2,b=1"), ("(x,y)=(1,2)", "(2,1)"),
    ("(x,y)=(1,2)", "x=2,y=1"), ("(1,2)", "y=1,x=2"), ("Yes", r"\text{No}"), ("Yes", "No"), ("C", r"\text{(D)}"),
    ("cat", "act"), (r"\text{cat}", "act"), ("Ann", "Nan"), ("dog", "god"), ("CAB", "ABC"), ("ABCD", "abcd"),
    ("A", "a"), ("4 PM", "4 AM"), ("4 PM", "4"), (r"4 \text{ PM}", r"4 \text{ AM}"),
    (r"5 \text{ June}", r"5 \text{ July}"), ("June 5", "June 6"), (r"\text{Monday}", r"\text{Friday}"),
    (r"\text{Team 1}", r"\text{Team 2}"), (r"\text{Team 1}", r"\text{Meat 1}"),
    (r"5 \text{ km north}", r"5 \text{ km south}"), (r"\mathbb{R}", r"\mathbb{Z}"), ("x^2+1=0", "x^2+2=0"),
    ("x^2=4", "x^2=9"), ("x+y=1", "x+y=2"), ("n!", "n"), ("12", "12!"), ("12", "1 2"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("x>2", r"x\ge 2"), ("10^{20}", "10^{20}+1"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), (r"\sin^{-1}(x)", r"\frac{1}{\sin x}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"), (r"2\pi r", r"2\pi R"),
    (r"\alpha", r"\beta"), (r"\epsilon", "e"), ("2x+3", "2x+3m"), ("5m^2", "5"), ("5m", "5"), ("5 m", "5"),
    ("2x+3", "2x+3 km"),
    (r"\begin{pmatrix} 7 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 8 \\ -3 \end{pmatrix}"),
    (r"\begin{pmatrix}1,2\end{pmatrix}", r"\begin{pmatrix}2,1\end{pmatrix}"),
    (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 6 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", "5"), (r"\log_2 32 = 5", "2-2=0"), (r"\log_2 32 = 5", "5=6"),
    ("6=6", "0=0"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,3)"), ("p=5,q=2;p=7,q=2", "(2,5),(2,7)"), ("(11,7)or(7,11)", "(11,7)"),
    ("1,1", "1"), ("5", "5x"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), WRONG)
def test_what_looks_or_parses_alike_is_not(reference: str, answer: str) -> None:
    assert judge(answer, reference) in ("different", "unread")
