import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.components.math_text import (
    MAX_MATH_CHARS,
    match_form,
    number,
    numeral,
    parse_number,
    parse_reference,
    plain,
    reference_text,
    same_order,
    split,
    words,
)

NUMBERS = {
    Fraction(72): ["72", "72.00", "72.", "0072"],
    Fraction(1, 2): [".5"],
    Fraction(-5): ["-5", "−5", "- 5"],
    Fraction(1234): ["1,234", "1 234", "1\u202f234", r"1\,234", "1{,}234"],
    Fraction(2469135, 2): ["1,234,567.5"],
    Fraction(-12): ["-$12", "$-12"],
    Fraction(12): [
        "$12", r"\$12", "$12$", "$12$ cm", r"\(12\)", r"\boxed{12}", "**12**", "€12", "12%", r"12\%", "12 %.", "12 apples",
        "12 apples.", "12km/h", "12 cm^2", r"12\text{ cm}", r"12\text{ cm}^2", "12 dollars per week",
    ],
    Fraction(3, 4): ["3/4", r"\frac{3}{4}"],
    Fraction(-3, 4): [r"-\dfrac{3}{4}"],
    Fraction(1000): ["1e3", r"1\times 10^3", "10^{3}"],
    Fraction(3, 200): ["1.5E-2"],
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), [(value, text) for value, texts in NUMBERS.items() for text in texts])
def test_number_is_read_exactly(value: Fraction, text: str) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", "-", "$", "%", "8=7", "x = 7", "7 or 8", "7 or eight", "7, 8", "7; 8", "7-8", "7–8", "7 8",
        "7 to 8", "about 7", "seven", "5 million", "5k", "2 dozen", "7x", "7!", "7^2", "7*1", "7+1", "--7", "+-7",
        "1,23", "1,2345", "1,,234", "12:30", "(1,2)", "1/0", "1/", r"\frac{1}{0}", r"\frac{1}{2", "1.2.3", "nan", "inf",
        "1e", "1e1001", "1e999999999", "1e-999999999", "9" * 201, r"\dfrac{5^{5^{5^{5^5}}-4}-5}{16}", "٣", "7²", "\x00",
        "\ud800", "it is 7", "7 not 8", "72 #### 72", r"\boxed{7}\boxed{8}", "1 two words too many here", "72 thirds",
        "72 hundredths", "72 crore", "72 doubled", "72 negative", "72 incorrect", "72 no", "4 PM", r"3 \text{ of 10}",
    ],
)  # fmt: skip
def test_anything_but_one_number_is_refused(text: str) -> None:
    assert parse_number(text) is None


def test_numbers_in_every_notation_are_exact() -> None:
    assert number("3 1/2") * 2 == number(r"3\frac12") * 2 == 7
    assert number("-3 1/2") * 2 == -7
    assert number("3 5/2") is number("1 2") is number("2e-1") is number("1e99999") is number("50%") is None
    assert numeral("1011_2") == numeral(r"(1011)_{2}") == ("1011", "2")
    assert numeral("x_2") is numeral("1011") is None
    assert parse_number(f"1/{2**98}") != parse_number(f"1/{2**99}")


@pytest.mark.parametrize(
    ("reference", "value"),
    [(72, 72), (72.0, 72), ("6 x 12 = <<6*12=72>>72\n#### 72", 72), ("#### 1,072", 1072)]
    + [(unusable, None) for unusable in (None, True, "", "seventy", [72], {"a": 1})],
)
def test_reference_is_a_number_or_a_worked_solution(reference: object, value: int | None) -> None:
    assert parse_reference(reference) == value


@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_no_text_raises(text: str) -> None:
    parse_number(text)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_grouped_and_plain_writing_agree(number: object) -> None:
    assert parse_number(f"{number:,}") == parse_number(f"{number}") == Fraction(str(number))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\$1,234.50", "1234.50"), ("1 234 567", "1234567"), ("(1,234)", "(1,234)"), (r"\left(1,\,2\right)", "(1, 2)"),
        ("5 or 7", "5,7"), (r"1\text{ and }2", "1,2"), ("50 percent", "50%"), (r"90^\circ", "90"), (r"x \in [1,2]", "[1,2]"),
        ("7 hundred", "7 hundred"), ("2 x", "2 x"), (r"$\boxed{7}$", "7"), ("", ""), (r"0.1\bar6", r"\frac{1}{6}"),
        (r"0.\overline{9}", "1"), (r"\overline{AB}", r"\overline{AB}"),
    ],
)  # fmt: skip
def test_plain_takes_off_what_carries_no_meaning(text: str, form: str) -> None:
    assert plain(text) == form


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("7", "scalar", ("7",)), ("(7)", "scalar", ("7",)), ("((1)+(2))", "scalar", ("(1)+(2)",)),
        ("((-1))", "scalar", ("(-1)",)), ("1,2", "list", ("1", "2")), ("(1,2)", "tuple", ("1", "2")),
        ("(1,2]", "interval", ("1", "2")), (r"\{1,2\}", "set", ("1", "2")),
        (r"\{x | x = 2k\}", "scalar", (r"\{x | x = 2k\}",)), (r"(1,2)\cup[3,4]", "union", ("(1,2)", "[3,4]")),
        ("(1,2),(3,4)", "list", ("(1,2)", "(3,4)")), (r"1\pm 2", "list", ("1+ 2", "1- 2")),
        ("f(1,2)+3", "scalar", ("f(1,2)+3",)),
        (r"\begin{pmatrix}1 & 2 \\ 3&4 \\ \end{pmatrix}", "matrix", ("1", "2", "3", "4")),
        (r"\left[\begin{array}{cc} 1 & 2 \end{array}\right]", "matrix", ("1", "2")),
        (r"\begin{pmatrix}1,2\end{pmatrix}", "matrix", ("1", "2")),
        (r"\begin{pmatrix}1 \\ 2 & 3\end{pmatrix}", "scalar", (r"\begin{pmatrix}1 \\ 2 & 3\end{pmatrix}",)),
    ],
)  # fmt: skip
def test_split_finds_the_outermost_structure(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert split(plain(text))[:2] == (kind, parts)


def test_words_are_told_from_variables_and_their_letters_have_an_order() -> None:
    assert words(r"\text{No Solution}") == words("no solution.") == "no solution"
    assert words("xyz") is words("2x") is None
    assert same_order("cat", "act") is same_order("AB", "BA") is same_order("2AB", "2BA") is False
    assert same_order("cat", "cat") is True
    assert same_order("xy", "yx") is same_order("2abc", "2bca") is same_order("nRT", "n R T+1") is None


def test_match_form_has_one_spelling_for_a_fraction() -> None:
    assert match_form(r"\dfrac12") == match_form("1/2") == match_form(r"x = \frac{1}{2}") == "1/2"
    assert match_form(r"12\text{ cm}") == "12"


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (72, "72"), (7.5, "7.5"), (["72"], "72"), ("6 x 12\n#### 72", "72"), (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        *((unusable, None) for unusable in (None, True, "", " \x00", [], ["7", "8"], {}, "7" * 2001, r"\boxed{7")),
        pytest.param(10**5000, None, id="huge"),
    ],
)  # fmt: skip
def test_reference_text_is_the_final_answer_or_none(reference: object, text: str | None) -> None:
    assert reference_text(reference) == text


def test_the_longest_answers_of_anything_are_read_quickly() -> None:
    patterns = (
        "{|}|(|,| |1,|1 |$|\\|\\text{|=|a |1:|\\cup|^|1,234|A |A'|Aa|1.|1.\\overline{|\\dot3|_{|1e|1 cm |\\text{a}/"
    )
    for pattern in [*patterns.split("|"), "|", "(" * 990 + "1" + ")" * 990]:
        text = pattern if len(pattern) > 990 else (pattern * MAX_MATH_CHARS)[:MAX_MATH_CHARS]
        start = time.process_time()
        split(plain(text)), words(text), number(text), match_form(text), numeral(text), same_order(text, text + "A")
        assert time.process_time() - start < 0.2, pattern
    assert split("(" * 20 + "[1,2)" + ")" * 20) == split("[1,2)")
