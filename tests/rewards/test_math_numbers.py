import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.components.math_text import parse_number, parse_reference


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", Fraction(72)),
        ("72.00", Fraction(72)),
        ("72.", Fraction(72)),
        ("0072", Fraction(72)),
        (".5", Fraction(1, 2)),
        ("+5", Fraction(5)),
        ("-5", Fraction(-5)),
        ("−5", Fraction(-5)),
        ("- 5", Fraction(-5)),
        ("1,234", Fraction(1234)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1 234", Fraction(1234)),
        ("1\u202f234", Fraction(1234)),
        (r"1\,234", Fraction(1234)),
        ("1{,}234", Fraction(1234)),
        ("$12", Fraction(12)),
        (r"\$12", Fraction(12)),
        ("-$12", Fraction(-12)),
        ("$-12", Fraction(-12)),
        ("$12$", Fraction(12)),
        ("$12$ cm", Fraction(12)),
        (r"\(12\)", Fraction(12)),
        (r"\boxed{12}", Fraction(12)),
        ("**12**", Fraction(12)),
        ("€12", Fraction(12)),
        ("12%", Fraction(12)),
        (r"12\%", Fraction(12)),
        ("12 %.", Fraction(12)),
        ("12 apples", Fraction(12)),
        ("12 apples.", Fraction(12)),
        ("12km/h", Fraction(12)),
        ("12 cm^2", Fraction(12)),
        (r"12\text{ cm}", Fraction(12)),
        (r"12\text{ cm}^2", Fraction(12)),
        ("12 dollars per week", Fraction(12)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("1e3", Fraction(1000)),
        ("1.5E-2", Fraction(3, 200)),
    ],
)
def test_number_is_read_exactly(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", "-", "$", "%", "8=7", "x = 7", "7 or 8", "7 or eight", "7, 8", "7; 8", "7-8", "7–8", "7 8",
        "7 to 8", "about 7", "seven", "5 million", "5k", "2 dozen", "7x", "7!", "7^2", "7*1", "7+1", "--7", "+-7",
        "1,23", "1,2345", "1,,234", "12:30", "(1,2)", "1/0", "1/", r"\frac{1}{0}", r"\frac{1}{2", "1.2.3", "nan", "inf",
        "1e", "1e1001", "1e999999999", "1e-999999999", "9" * 201, r"\dfrac{5^{5^{5^{5^5}}-4}-5}{16}", "٣", "7²", "\x00",
        "\ud800",
        "it is 7", "7 not 8", "72 #### 72", r"\boxed{7}\boxed{8}", "1 two words too many here",
    ],
)  # fmt: skip
def test_anything_but_one_number_is_refused(text: str) -> None:
    assert parse_number(text) is None


def test_close_numbers_differ() -> None:
    # 1/2^98 and 1/2^99 are both 0.0 to many a tolerance; as rationals they are not equal.
    assert parse_number(f"1/{2**98}") != parse_number(f"1/{2**99}")
    assert parse_number("0.30000000000000004") != parse_number("0.3")


def test_huge_exponents_do_not_take_time() -> None:
    start = time.process_time()
    for text in ("1e999999999", "1e-999999999", "1e" + "9" * 190, "1e1000", "1e-1000"):
        parse_number(text)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        (72, 72),
        (72.0, 72),
        ("72", 72),
        ("6 x 12 = <<6*12=72>>72\n#### 72", 72),
        ("#### 1,072", 1072),
        ("long " * 100 + "\n#### 7", 7),
    ],
)
def test_reference_is_a_number_or_a_worked_solution(reference: object, value: int) -> None:
    assert parse_reference(reference) == value


@pytest.mark.parametrize("reference", [None, True, "", "seventy", [72], {"a": 1}])
def test_unusable_reference_is_none(reference: object) -> None:
    assert parse_reference(reference) is None


@given(
    st.text(st.characters(exclude_categories=()), max_size=300)
)  # all there are; by encoding they take a second to find
def test_no_text_raises(text: str) -> None:
    parse_number(text)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_grouped_and_plain_writing_agree(number: object) -> None:
    assert parse_number(f"{number:,}") == parse_number(f"{number}") == Fraction(str(number))


@pytest.mark.parametrize(
    "text",
    [
        "72 thirds",
        "72 halves",
        "72 hundredths",
        "72 crore",
        "72 lakh",
        "72 mil",
        "72 doubled",
        "72 negative",
        "72 below",
        "72 incorrect",
        "72 no",
        "4 PM",
    ],
)
def test_words_that_change_the_number_are_no_units(text):
    assert parse_number(text) is None
