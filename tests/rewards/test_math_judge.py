r"""Golden pairs (reference, answer): spellings of right answers, wrong answers of policies, and echoed questions."""

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


EQUAL = [
    ("12", "$12$ cm"), ("12 cm", "12"), (r"12\text{ cm}", "$12$ cm"), (r"10\sqrt{3}\text{ m}^2", r"10\sqrt{3}"),
    (r"\$5", "5 dollars"), ("1234", r"1\,234"), ("1,234", "1234"), ("1234", "1 234"), ("1{,}000", "1000"),
    ("72", "72.00"), ("-1", "−1"), (r"$\frac{3}{4}$", "3/4"), ("72", "**72**."), (r"\frac{1}{3}", "0.333333"),
    (r"3\frac{1}{2}", "3.5"), ("2^{10}", "1024"), (r"2\pi", "6.283185"), (r"\frac{1}{2^{99}}", "2^{-99}"),
    (r"\log_2 8", "3"), (r"\binom{5}{2}", "10"), ("1+2i", "2i+1"), ("√8", r"2\sqrt2"), (r"50\%", "0.5"),
    ("50", r"50\%"), ("0.5", r"50\%"), (r"12.5\%", "12.5"), (r"\frac{1}{8}", r"12.5\%"),
    (r"\log_2(x^{3/2})", r"\frac32\log_2 x"), (r"\frac{3}{2}\log_2 x", r"\log_2(x^{3/2})"), (r"\ln x^3", r"3\ln x"),
    (r"\log_4 x", r"\frac12 \log_2 x"), (r"\ln x+\ln y", r"\ln(xy)"), (r"\ln x-\ln y", r"\ln(x/y)"),
    (r"2\ln x", r"\ln x^2"), (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), (r"\frac{\sqrt x}{\sqrt y}", r"\sqrt{\frac xy}"),
    (r"2\pi\sqrt{\frac{m}{k}}", r"\frac{2\pi}{\sqrt{k/m}}"), (r"\frac{1}{\sqrt{x}}", r"\sqrt{\frac1x}"), ("7", "x=7"),
    ("x=7", "7"), ("7", "3+4=7"), ("7", "x=3+4=7"), ("f(x)=x^2", "x^2"), ("y=2x+1", "y-2x=1"),
    (r"\sqrt{2}", r"\sqrt{2}\approx 1.414"), ("x^2+2x+1", "(x+1)^2"), (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac12", r"\sin 30^\circ"), ("2ab", "2ba"), ("(1,2)", "(1, 2)"), ("(1,2)", r"\left(1,2\right)"), ("1,2", "2,1"),
    (r"\{1,2\}", "2, 1"), ("1,2", "x=1, x=2"), (r"\pm 2", "2,-2"), (r"1\pm\sqrt 2", r"1+\sqrt{2},1-\sqrt{2}"),
    ("[1,2)", "[1,2)"), ("100,200", "200, 100"), (r"(-\infty,2]\cup(3,4)", r"(3,4)\cup(-\infty,2]"), ("1<x<2", "(1,2)"),
    ("[1,2]", r"1\le x\le 2"), ("x>2", "2<x"), ("(-2,3)", r"x \in (-2, 3)"), (r"\emptyset", "∅"),
    ("x=1,y=2", "y=2, x=1"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    ("v=(1,2)", "(1,2)"), (r"\vec{v}=(1,2)", "(1,2)"), ("(1,2)", "v=(1,2)"), (r"S=\{1,2\}", r"\{2,1\}"),
    ("[1,2]", "D=[1,2]"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"A=\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("v=(1,2)", "v=(1,2.0)"), (r"\langle 1,2\rangle", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left\langle 1, 2\right\rangle"),
    ("(3,-1,2)", r"\begin{bmatrix} 3 \\ -1 \\ 2 \end{bmatrix}"), (r"\{x|-2\leq x < 1\}", "[-2,1)"),
    ("[-2,1)", r"\{x \mid -2 \le x < 1\}"), (r"\{x\in\mathbb{R} : x>2\}", r"(2,\infty)"),
    (r"\{x|x>2\}", r"\{ y \mid y > 2 \}"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"x>3 \text{ or } x \le 2", r"(-\infty,2]\cup(3,\infty)"), ("9.8 m/s^2", "9.8"), ("9.8", r"9.8\ m/s^2"),
    ("30 minutes", "30 min"), ("5 ft", r"5\text{ feet}"), ("12 cm", r"12\text{ cm}^2"), ("3 hours", "3"),
    (r"90^\circ", "90 degrees"), (r"1 / 4 \mathrm{~m} / \mathrm{s}", r"\frac14"),
    (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", "9.8"), ("72", r"72 \mathrm{~km} / \mathrm{h}"),
    (r"4 \times 10^{33} \mathrm{erg} / \mathrm{s}", "4e33"), (r"5 \text{ kg} \cdot \text{m}", "5"), ("10:30", "10:30"),
    ("1:3", "1:3"), ("A", r"\text{A}"), (r"\text{Monday}", "Monday"), (r"\text{even}", "even."), ("2", r"12 \bmod 5"),
    ("2", r"12 \mod 5"), ("7", r"\sum_{k=1}^{7} 1"), ("2x=14", "x=7"), ("10", "5(2)"), ("6", "(2)(3)"),
    ("1", r"2(\frac12)"), ("2.5", r"2\frac12"), (r"\frac{5}{2}", r"2\frac{1}{2}"), (r"\frac{7}{2}", "3 1/2"),
    ("7/2", "3 1/2"), ("-3.5", r"-3\frac12"), (r"\sin x", "sin x"), (r"\gamma", r"\gamma"), ("y'+y=0", "y+y'=0"),
    ("-1", r"e^{i\pi}"), ("i^2", "-1"), (r"\sqrt{-1}", "i"), ("a+bi", "a+ib"), (r"\sum_{i=1}^{3} i", "6"),
    ("nRT", "n R T"), ("nRT", r"n\cdot R\cdot T"), ("2abc", "2cab"), ("xy", "yx"), ("ab", "ba"), ("10_2", "10_{2}"),
    ("10_2", "(10)_2"), ("10_2", "10"), ("2A_{16}", "2a_{16}"), ("x=70_8", "70_8"), ("70_8", "x=70_8"),
    ("x_{12}", "x_{12}"), (r"\log_{10} 100", "2"), (r"\sqrt{12}", r"2\sqrt3"), (r"1,2,3,\ldots", r"1,2,3,\dots"),
    (r"1+2+\cdots+n", r"1 + 2 + \ldots + n"), (r"\frac13", r"0.\overline{3}"), (r"0.\overline{3}", r"0.\bar{3}"),
    (r"0.\overline{142857}", r"\frac17"), (r"\frac16", r"0.1\overline{6}"), ("1", r"0.\overline{9}"),
    (r"2\frac13", r"2.\overline{3}"), (r"-\frac13", r"-0.\overline{3}"), (r"33.\overline{3}\%", r"\frac13"),
    ("1500", "1.5e3"), ("1500", "1.5E3"), ("0.005", "5e-3"), ("2e-1", "-1+2e"), (r"6.02\times10^{23}", "6.02e23"),
    (r"6.02\times10^{23}", r"6.02\cdot 10^{23}"), ("0.005", r"5\times10^{-3}"), ("12", r"\mathbf{12}"),
    ("12", r"\mathrm{12}"), ("12", r"\text{12}"), ("12", r"\underline{12}"), ("12", r"\boldsymbol{12}"),
    ("5", r"\text{5 dollars}"), ("5", r"\text{\$5}"), ("12", "=12"), ("12", "12 = x"), ("12", "y = x = 12"),
    ("12", "x = 12 = y"), ("x=12", "12=x"), ("12=x", "12"), ("x=12", "y=x=12"), ("7", r"\approx 7"),
    ("7", r"x \approx 7"), (r"\sqrt2", r"x=\sqrt2\approx 1.41"), (r"\sqrt2", r"x=\sqrt2\approx 1.4"),
    (r"\frac13", r"\frac13\approx 0.33"), (r"\sqrt2\approx 1.414", r"\sqrt2"), (r"x\approx 1.41", "1.41"),
    ("a=1,b=2", "1,2"), ("a=1,b=2", "b=2,a=1"), ("(x,y)=(1,2)", "(1,2)"), ("(x,y)=(1,2)", "x=1,y=2"),
    ("(x,y)=(1,2)", "y=2,x=1"), ("(1,2)", "x=1,y=2"), ("(1,2)", "y=2,x=1"), ("(1,2)", "(x,y)=(1,2)"),
    ("1,2", "x=1,x=2"), ("1,2", "x_1=2,x_2=1"), (r"\text{Yes}", "Yes"), (r"\text{No}", "no"), ("Yes", r"\text{Yes}"),
    (r"\text{odd}", "odd"), (r"\text{A}", "A"), (r"\text{(C)}", "C"), (r"\text{(C)}", "(C)"), ("C", r"\text{(C)}"),
    (r"\text{Team 1}", "Team 1"), (r"\varnothing", r"\{\}"), (r"\mathbb R", r"(-\infty,\infty)"),
    (r"\mathbb{R}", r"\text{all real numbers}"), ("x+y=1", "2x+2y=2"), ("x^2-4=0", "x^2=4"), ("|x|", "||x||"),
    ("1/2", r"50\%"), (r"\frac{\pi^2}{6}", "1.644934"), (r"\tan^{-1} 1", r"\frac{\pi}{4}"), (r"\pi r^2", r"\pi r^{2}"),
    ("125 miles", r"125\textnormal{ miles}"), ("10000", r"10,\! 000"), ("(11,7)or(7,11)", "(7,11), (11,7)"),
    ("1,2", "x=1 or x=2"), ("1,2", "1or 2"), ("5", "5m^2"), ("5", "5m"), ("5", "5 km"), ("12cm", "12"),
    ("12 apples", "12"), (r"5\text{ m}", "5"), ("28", "28 percentage"), ("2x+3", r"2x+3\text{ m}"),
    (r"\log_2 8 = 3", "3"), (r"\cos(0)=1, \sin(0)=0", "1, 0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left[\begin{array}{c}1\\2\\\end{array}\right]"),
    (r"\frac{1}{2}", r"\\frac{1}{2}"),
    (r"\begin{pmatrix}6&8\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}5&6\end{pmatrix}"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_another_spelling_is_right(reference: str, answer: str) -> None:
    assert judge(answer, reference) == "equal"


DIFFERENT = [
    (r"\sqrt{x^2}", "x"), (r"\ln (x+3)^2", r"2\ln(x+3)"), (r"\sqrt{(x+3)^2}", "x+3"), ("(a^b)^c", "a^{bc}"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"), (r"\ln(xy)", r"\ln x+\ln y"), (r"\ln(x/y)", r"\ln x-\ln y"),
    (r"\ln x-\ln y", r"\ln(xy)"), (r"\ln x-\ln y", r"\ln(y/x)"), ("x", r"\sqrt{x^2}"), (r"\ln x+\ln y", r"\ln(x+y)"),
    (r"\sqrt{\frac xy}", r"\frac{\sqrt x}{\sqrt y}"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!+2005!}"), ("10^{-200}", "10^{-201}"), ("(x-a)^{6000}", "(x-a)^{5999}"),
    (r"\ln x^2", r"2\ln x"), (r"\log(x y)", r"\log x+\log y"), (r"\log_2(x^{3/2})", r"\frac52\log_2 x"),
    (r"\log_2(x^{3/2})", r"\frac32\log_3 x"), (r"\frac32\log_2 x", "10000000000000"),
    ("123454321987", r"\log_2(x^{3/2})"), ("7", "8=7"), ("7", "3=7"), ("7", "2x=7"), ("7", "x=8=7"), ("72", "72=70"),
    ("x=7", "y=7"), ("7", r"7 \approx 8"), ("7", "5 or 7"), ("2", "x=1,x=2"), ("72", "70, 72"), ("72", "72 and 70"),
    ("12", "1,2"), ("1,2", "1,3"), ("72", "7 2"), (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}"), ("0.0000001", "0.0000002"), ("1/3", "0.33"), ("1", "1.00009"),
    ("0", "10^{-30}"), (r"50\%", "5"), ("(1,2)", "(2,1)"), ("(3,1)", "(5,2)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"),
    (r"\{1,2\}", "(1,2)"), ("(1,2)", r"1<x\le 2"), ("x>2", "x<2"), ("x>2", r"x\ge 2"), ("v=(1,2)", "w=(1,2)"),
    ("v=(1,2)", "(2,1)"), ("(1,2)", "v=(1,3)"), (r"S=\{1,2\}", "1"), ("(1,2)", "(x,y)=(2,1)"), ("(1,2)", "5=(1,2)"),
    ("[1,2]", "x=(1,2)"), (r"\{1,2\}", r"\{1\}=\{1,2\}"), (r"\langle 1,2\rangle", "(2,1)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{1,2\}"),
    (r"\{x|-2\leq x < 1\}", "(-2,1)"), ("[-2,1)", r"\{x \mid -2 \le x \le 1\}"), (r"(2,\infty)", r"\{x \mid y > 2\}"),
    (r"\{x|x>2\}", "2"), ("2", r"\{x|x>2\}"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>4"),
    (r"(-\infty,2)\cup(3,\infty)", r"x \le 2 \text{ or } x>3"), (r"(-\infty,2)\cup(3,\infty)", "x<2"),
    (r"\ln 2", r"\log_3 2"), (r"1 / 4 \mathrm{~m} / \mathrm{s}", r"\frac15"), (r"2.5 \text{ million}", "2.5"),
    ("2.5", "2.5 million"), ("x^2+C", "x^2"), ("x^2", "x^2+C"), ("3 hours", "3 minutes"), ("3\text{ cm}", "3\text{ m}"),
    ("30 minutes", "30 hours"), (r"\$5", "5\text{ cents}"), (r"90^\circ", "90\text{ radians}"), ("5 kg", "5 g"),
    ("2 weeks", "2\text{ days}"), ("10:30", "1:3"), ("10:30", "10:31"), ("10:30 AM", "22:30"), ("A", "B"),
    ("Monday", r"\text{dayMon}"), ("x+1", "y+1"), ("2ab", "2cd"), ("12", "13 cm"), ("7", "seven"), ("7", "answer"),
    ("7", ""), ("1,234", "2,341"), ("7", r"7 = \text{wrong}"), ("7", r"\text{not } = 7"), ("(1,2)", "(y,x)=(1,2)"),
    ("3", "3 am"), (r"1000\pi", r"\approx 3140"), ("100!", "100!+1"), (r"12 \text{ noon}", r"12 \text{ midnight}"),
    (r"3 \text{ days ago}", r"3 \text{ days}"), ("7", "5(2)"), ("5", "(2)(3)"), ("72", "70 2"), ("72", "70{2}"),
    ("72", r"70\;2"), ("72", r"70\ 2"), ("2.5", r"2(\frac12)"), ("3", r"2\frac{2}{2}"), ("11/2", "1 1/2"), ("E", "e"),
    ("i", "I"), ("I_1", "I_2"), (r"\sin x", "nis x"), (r"\cos x", r"\sin x"), (r"\Gamma", r"\gamma"),
    (r"\gamma_1", r"\gamma_2"), ("x'", "x"), ("f'(x)", "f(x)"), ("y'", "y''"), ("72", "72'"), ("72", "72''"),
    ("a+bi", "a-bi"), ("3+4i", "3-4i"), (r"\angle ABC", r"\angle ACB"), (r"\angle ABC", r"\angle BAC"),
    (r"\triangle ABC", r"\triangle ABD"), (r"\triangle ABC", r"\triangle abc"), (r"\overline{AB}", r"\overline{AC}"),
    (r"\overrightarrow{AB}", r"\overrightarrow{BA}"), (r"\overrightarrow{AB}", "AB"), (r"\overline{z}", "z"),
    (r"\bar{x}", "x"), (r"\vec{a}", "a"), (r"\hat{x}", "x"), ("nRT", "RTn"), (r"\frac{nRT}{V}", r"\frac{nTR}{V}"),
    ("xyz", "zyx"), ("AB", "BA"), ("x+Y", "x+y"), ("A^T", "A"), ("x^T", "x"), ("A^{-1}", "A"),
    ("f^{-1}(x)", r"\frac{1}{f(x)}"), ("f^{-1}(x)", "f(x)"), ("f(x)", "f(y)"), ("f(x)", "g(x)"), ("90", "(10)_{2}"),
    ("10_2", "2"), ("10", "10_{10}"), ("1011_2", "1011_3"), ("2A_{16}", "2B_{16}"), ("x=70_8", "70_9"),
    (r"\frac{1}{2}", r"\frac{1}{2}_3"), ("x_1", "x_2"), ("x_1", "x"), (r"\frac{1}{23}", r"\frac123"), ("2", r"\sqrt12"),
    ("12", r"12\cdots"), ("12", r"12\dots"), ("12", "12…"), (r"1,2,3,\ldots", r"2,1,3,\ldots"),
    ("1,2,3", r"1,2,3,\ldots"), (r"\frac{1}{3}", r"0.333\ldots"), (r"\frac16", r"0.\overline{16}"),
    (r"\frac13", r"0.\overline{4}"), (r"0.\overline{3}", "0.3"), (r"0.\overline{3}", "0.33"), ("1500", "1.5e4"),
    ("0.005", "5e-2"), ("2e-1", "0.2"), (r"6.02\times10^{23}", "6.02e22"), (r"6.02\times10^{23}", r"6.03\times10^{23}"),
    ("0", "1e-200"), ("12", "12="), ("12", "12 = 12 = 13"), ("7", "7=8"), ("12", r"12 = \pi"), ("12", r"\pi = 12"),
    ("x=12", "x=13=12"), ("7", "x=7, y=8"), ("7", r"\approx 7.05"), ("7", r"7\approx 7.05"), ("7", r"7\approx 8"),
    ("100", r"x \approx 101"), ("2024", r"x\approx 2040"), ("100", r"\text{Area}\approx 99.1"),
    (r"\sqrt2", r"\approx 1.4"), (r"\sqrt2", r"\approx 1.42"), (r"\sqrt2", r"x=\sqrt2\approx 1.5"),
    (r"\sqrt2", r"\sqrt3\approx 1.41"), (r"\frac13", r"x \approx 0.333"), (r"\frac13", r"\frac13\approx 0.34"),
    (r"x\approx 1.41", "1.42"), ("3.14", r"\pi"), (r"\pi", "3.14"), ("a=1,b=2", "2,1"), ("a=1,b=2", "a=2,b=1"),
    ("(x,y)=(1,2)", "(2,1)"), ("(x,y)=(1,2)", "x=2,y=1"), ("(1,2)", "y=1,x=2"), ("Yes", r"\text{No}"), ("Yes", "No"),
    ("C", r"\text{(D)}"), ("cat", "act"), (r"\text{cat}", "act"), ("Ann", "Nan"), ("dog", "god"), ("CAB", "ABC"),
    ("ABCD", "abcd"), ("A", "a"), ("4 PM", "4 AM"), ("4 PM", "4"), (r"4 \text{ PM}", r"4 \text{ AM}"),
    (r"5 \text{ June}", r"5 \text{ July}"), ("June 5", "June 6"), (r"\text{Monday}", r"\text{Friday}"),
    (r"\text{Team 1}", r"\text{Team 2}"), (r"\text{Team 1}", r"\text{Meat 1}"),
    (r"5 \text{ km north}", r"5 \text{ km south}"), (r"\mathbb{R}", r"\mathbb{Z}"), ("x^2+1=0", "x^2+2=0"),
    ("x^2=4", "x^2=9"), ("x+y=1", "x+y=2"), ("n!", "n"), ("12", "12!"), ("12", "1 2"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("10^{20}", "10^{20}+1"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\sin^{-1}(x)", r"\frac{1}{\sin x}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"2\pi r", r"2\pi R"), (r"\alpha", r"\beta"), (r"\epsilon", "e"), ("2x+3", "2x+3m"), ("5m^2", "5"), ("5m", "5"),
    ("5 m", "5"), ("2x+3", "2x+3 km"),
    (r"\begin{pmatrix} 7 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 8 \\ -3 \end{pmatrix}"),
    (r"\begin{pmatrix}1,2\end{pmatrix}", r"\begin{pmatrix}2,1\end{pmatrix}"),
    (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 6 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", "5"), (r"\log_2 32 = 5", "2-2=0"), (r"\log_2 32 = 5", "5=6"),
    ("6=6", "0=0"), ("p=5,q=2;p=7,q=2", "(5,2),(7,3)"), ("p=5,q=2;p=7,q=2", "(2,5),(2,7)"),
    ("(11,7)or(7,11)", "(11,7)"), ("1,1", "1"), ("5", "5x"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_what_means_something_else_is_wrong(reference: str, answer: str) -> None:
    assert judge(answer, reference) in ("different", "unread")


# What the question says, for an answer that has to be worked out.
UNEVALUATED = [
    ("72", r"6 \cdot 12"), (r"2\sqrt{3}", r"\sqrt{12}"), ("64a^6", "(4a^2)^3"), ("4", "2+2"), ("1024", "2^{10}"),
    ("4", r"\sqrt{16}"), ("120", "5!"), ("56", r"\binom{8}{3}"), (r"\frac{1}{2}", r"\cos 60^\circ"),
    (r"\frac{\sqrt{3}}{2}", r"\cos 30^\circ"), ("5", r"\log_2 32"), ("2", r"\lfloor 2.7 \rfloor"),
    (r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}"), (r"\frac{3}{2}", r"\frac{\frac{3}{4}}{\frac{1}{2}}"),
    ("0.73", "0.8-0.07"), (r"3\sqrt{6}", r"\sqrt{6}+\sqrt{24}"), (r"3\pi", r"\pi+2\pi"),
    (r"\frac{\pi}{4}", r"\arctan 1"), ("6+9i", "(1+2i)6-3i"), (r"-128-128i\sqrt{3}", r"(-1+i\sqrt{3})^8"),
    ("2^{10}", r"2^9 \cdot 2"), ("0.5", r"25\% \cdot 2"), (r"\{3, 4\}", r"\{1+2, 4\}"),
    (r"\begin{pmatrix} 3 \\ 4 \end{pmatrix}", r"\begin{pmatrix} 1+2 \\ 4 \end{pmatrix}"), ("x = 5", "x = 2+3"),
    ("(1, 5)", "(1, 2+3)"), (r"\log_2 32 = 5", r"\log_2 32"), ("4t", "3t+4-6t+7t-4"), ("5x-3", "(2x+5)-(-3x+8)"),
    ("3s^2", r"\frac{2s^5}{s^3}-6s^2+\frac{7s^3}{s}"),
    ("18x^8", r"(\frac{4}{x})^{-1}(\frac{3x^3}{x})^2(\frac{1}{2x})^{-3}"),
    (r"\sec x", r"\frac{\sin x}{\cos x}+\frac{\cos x}{1+\sin x}"), ("[-2, 7]", r"x^2-5x-4 \le 10"),
    (r"(-\infty, -3)", r"\frac{2x-5}{x+3} \ge 2"), (r"(3, \infty)", "2x > 6"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), UNEVALUATED)
def test_what_is_not_worked_out_is_no_answer(reference: str, answer: str) -> None:
    assert judge(answer, reference, final=True) in ("unevaluated", "different")
    assert judge(answer, reference) != "unevaluated"


WORKED_OUT = [
    ("72", "72.0"), ("72", r"x = 6 \cdot 12 = 72"), ("72", r"72 = 6 \cdot 12"), (r"\frac{3}{4}", r"\frac{6}{8}"),
    (r"\frac{3}{4}", "0.75"), (r"\frac{7}{2}", r"3\frac{1}{2}"), ("1000000", "10^6"), ("1500", r"1.5 \times 10^3"),
    ("0.5", r"50\%"), ("1024", "1,024"), ("2^{10}", "1024"), ("2^{10}", "2^{10}"), ("5!", "120"), ("5!", "5!"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"1+\sqrt{2}", r"\sqrt{2}+1"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{1}{2}+\frac{\sqrt{5}}{2}"), ("6+9i", "9i+6"), (r"2\pi", r"\pi \cdot 2"),
    (r"\frac{\pi}{4}", r"\pi/4"), ("e^2", "e^{2}"), ("2x+2", "2(x+1)"), ("2(x+1)", "2x+2"), ("(x+5)^2", "x^2+10x+25"),
    ("x^2+10x+25", "(x+5)^2"), ("21y+14", "7(3y+2)"), (r"\sec x", r"\frac{1}{\cos x}"), ("y = 2x+1", "2x+1"),
    ("y = 2x+1", "y-2x=1"), ("[-2, 7]", r"-2 \le x \le 7"), (r"(3, \infty)", "x > 3"), ("x > 3", "3 < x"),
    (r"\log_2 32 = 5", "5"), (r"\{3, 4\}", "4, 3"), (r"\frac{11+9a}{20}", r"\frac{9a+11}{20}"),
    (r"\begin{pmatrix} 1 \\ 0.5 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{1}{2} \end{pmatrix}"),
    (r"x^2 \sin x", r"x^2 \cdot \sin x"), (r"x \ge 1", r"[1,\infty)"), (r"[1,\infty)", r"x \ge 1"),
    (r"\{x|x>1\}", r"(1,\infty)"), (r"(1,\infty)", r"\{x|x>1\}"), ("[0,1]", r"0 \le x \le 1"),
    (r"0 \le x \le 1", "[0,1]"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), WORKED_OUT)
def test_another_form_that_is_worked_out_is_right(reference: str, answer: str) -> None:
    assert judge(answer, reference, final=True) == "equal"


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
    """SymPy would turn 123454321 log 2 into log(2^123454321) and compute for minutes."""
    differences: list[object] = []
    monkeypatch.setattr("math_verify.grader.simplify", lambda difference: differences.append(difference) or difference)
    assert judge(answer, r"\log_{2}\left(x^{3/2}\right)") == "different"
    assert not differences
    judge(r"x(x+1)", "x^2+x")
    assert differences


def test_a_reference_that_cannot_be_read_is_told_from_an_answer_that_cannot() -> None:
    assert judge("7", r"\frac{") == "reference"
    assert judge(r"\frac{", "7") == "unread"
    assert judge("72", "72'") == judge("72'", "72") == judge("1,2,4", r"1,2,\ldots") == "different"


def test_a_list_of_numbers_with_three_digits_may_be_a_list_after_all() -> None:
    assert judge("200, 300, 100", "100,200,300") == "equal"
    assert judge("100200300", "100,200,300") == "equal"


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

    known = [("wrong", "the answer is cop"), ("ok", ""), ("wrong", "not equal to the ")]
    assert reasons(prompts) == known
    assert (
        reasons([[{"role": "system", "content": "Box it."}, {"role": "user", "content": p}] for p in prompts]) == known
    )
    assert reasons([""] * 3) == [("ok", ""), ("ok", ""), ("wrong", "not equal to the ")]
    assert reasons(prompts, lenient=True)[2] == ("wrong", "the answer is cop")
    assert reasons([""] * 3, lenient=True)[2] == ("ok", "")
