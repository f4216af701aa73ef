import time

import pytest

from rewards.components.math_text import (
    MAX_MATH_CHARS,
    match_form,
    number,
    numeral,
    plain,
    reference_text,
    same_order,
    split,
    words,
    written_out,
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("$12$ cm", "12"),
        (r"12\text{ cm}^2", "12"),
        ("5 km/h", "5"),
        ("12cm", "12"),
        (r"\$1,234.50", "1234.50"),
        (r"1\,234", "1234"),
        ("1 234 567", "1234567"),
        ("(1,234)", "(1,234)"),
        (r"\left(1,\,2\right)", "(1, 2)"),
        ("5 or 7", "5,7"),
        (r"1\text{ and }2", "1,2"),
        ("50 percent", "50%"),
        (r"\dfrac12", r"\frac12"),
        (r"90^\circ", "90"),
        (r"x \in [1,2]", "[1,2]"),
        ("7 hundred", "7 hundred"),
        ("2 x", "2 x"),
        (r"$\boxed{7}$", "7"),
        ("", ""),
    ],
)
def test_plain_takes_off_what_carries_no_meaning(text: str, form: str) -> None:
    assert plain(text) == form


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("7", "scalar", ("7",)),
        ("(7)", "scalar", ("7",)),
        ("1,2", "list", ("1", "2")),
        ("(1,2)", "tuple", ("1", "2")),
        ("(1,2]", "interval", ("1", "2")),
        (r"\{1,2\}", "set", ("1", "2")),
        (r"\{x | x = 2k\}", "scalar", (r"\{x | x = 2k\}",)),
        (r"(1,2)\cup[3,4]", "union", ("(1,2)", "[3,4]")),
        ("(1,2),(3,4)", "list", ("(1,2)", "(3,4)")),
        (r"1\pm 2", "list", ("1+ 2", "1- 2")),
        ("f(1,2)+3", "scalar", ("f(1,2)+3",)),
        (r"\begin{pmatrix}1 & 2 \\ 3&4 \\ \end{pmatrix}", "matrix", ("1", "2", "3", "4")),
        (r"\left[\begin{array}{c|c} 1 & 2 \end{array}\right]", "scalar", (r"[\begin{array}{c|c} 1 & 2 \end{array}]",)),
        (r"\left[\begin{array}{cc} 1 & 2 \end{array}\right]", "matrix", ("1", "2")),
        (r"\begin{pmatrix}1,2\end{pmatrix}", "matrix", ("1", "2")),
        (r"\begin{pmatrix}1 \\ 2 & 3\end{pmatrix}", "scalar", (r"\begin{pmatrix}1 \\ 2 & 3\end{pmatrix}",)),
    ],
)
def test_split_finds_the_outermost_structure(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert split(plain(text))[:2] == (kind, parts)


def test_words_are_told_from_variables() -> None:
    assert words(r"\text{No Solution}") == words("no solution.") == "no solution"
    assert words("xyz") is None
    assert words(r"\text{No}") == words("no") == "no"
    assert words("2x") is None


def test_numbers_are_exact_and_plain() -> None:
    assert number("72.00") == 72
    assert number(r"-\frac{1}{2}") * 2 == -1
    assert number("50%") is None
    assert number("1e5") == 100_000


def test_numbers_in_every_notation_are_exact():
    assert number("1.5e3") == number(r"1.5\times 10^3") == number(r"1.5\cdot10^{3}") == 1500
    assert number("3 1/2") * 2 == number(r"3\frac12") * 2 == 7
    assert number("-3 1/2") * 2 == -7
    assert number("3 5/2") is number("1 2") is number("2e-1") is number("1e99999") is None
    assert numeral("1011_2") == numeral(r"(1011)_{2}") == numeral(r"1011_{\text{two}}") == ("1011", "2")
    assert numeral("x_2") is numeral("1011") is None


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        (r"0.\overline{3}", r"\frac{1}{3}"),
        (r"0.1\bar6", r"\frac{1}{6}"),  # 15/90
        ("0.(3)", r"\frac{1}{3}"),
        (r"0.\overline{9}", "1"),
        ("0.5(3)", "0.5(3)"),
        (r"0.\overline{3}4", r"0.\overline{3}4"),
        (r"\overline{AB}", r"\overline{AB}"),
    ],
)
def test_repeating_decimals_are_written_as_fractions(text, fraction):
    assert written_out(text) == fraction


def test_the_order_of_letters_counts_where_they_are_no_product():
    assert same_order("cat", "act") is same_order("AB", "BA") is same_order("2AB", "2BA") is False
    assert same_order("cat", "cat") is True
    assert same_order("xy", "yx") is same_order("2abc", "2bca") is same_order("nRT", "n R T+1") is None


def test_match_form_has_one_spelling_for_a_fraction() -> None:
    assert match_form(r"\dfrac12") == match_form("1/2") == match_form(r"x = \frac{1}{2}") == "1/2"
    assert match_form(r"12\text{ cm}") == "12"


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("72", "72"),
        (72, "72"),
        (7.5, "7.5"),
        (["72"], "72"),
        ("6 x 12\n#### 72", "72"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (None, None),
        (True, None),
        ("", None),
        (" \x00", None),
        ([], None),
        (["7", "8"], None),
        ({}, None),
        pytest.param(10**5000, None, id="huge"),
        ("7" * (MAX_MATH_CHARS + 1), None),
        (r"\boxed{7", None),
    ],
)
def test_reference_text_is_the_final_answer_or_none(reference: object, text: str | None) -> None:
    assert reference_text(reference) == text


def test_brackets_around_brackets_are_taken_off_at_once() -> None:
    began = time.process_time()
    for _ in range(100):
        assert split("(" * 400 + "[1,2)" + ")" * 400) == split("[1,2)")
    assert time.process_time() - began < 0.5  # one by one: 6 s
    assert split("((1)+(2))") == split("(1)+(2)")
    assert split("((-1))").parts == ("(-1)",)


def test_the_longest_answers_of_anything_are_read_quickly() -> None:
    for pattern in (
        "{",
        "}",
        "(",
        ",",
        " ",
        "1,",
        "1 ",
        "$",
        "\\",
        r"\text{",
        "=",
        "a ",
        "1:",
        r"\cup",
        "^",
        "1,234",
        "A ",
        "A'",
        "Aa",
        "1.",
        r"1.\overline{",
        r"\dot3",
        "_{",
        "1e",
        r"\color{",
    ):
        text = (pattern * MAX_MATH_CHARS)[:MAX_MATH_CHARS]
        start = time.process_time()
        split(plain(text)), words(text), number(text), match_form(text), numeral(text)
        same_order(text, text + "A"), written_out(text)
        assert time.process_time() - start < 0.2, pattern
