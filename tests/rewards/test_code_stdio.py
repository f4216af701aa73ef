import json

import pytest

from rewards.components.code.stdio import StdioTest, parse_stdio_tests, same_output

PAIRS = [StdioTest("1", "2"), StdioTest("3", "4")]


@pytest.mark.parametrize(
    "reference",
    [
        [{"input": "1", "output": "2"}, {"input": "3", "output": "4", "type": "stdin_stdout", "fn_name": None}],
        {"inputs": ["1", "3"], "outputs": ["2", "4"]},
        {"inputs": [["1"], "3"], "outputs": [["2"], "4"]},
        json.dumps({"inputs": ["1", "3"], "outputs": ["2", "4"]}),
        {"language": "python", "test_cases": [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]},
        [{"input": "1", "output": "2", "testtype": "stdin"}, {"input": "3", "output": "4"}],
    ],
)
def test_the_shapes_of_data_sets_give_the_same_tests(reference):
    assert parse_stdio_tests(reference) == PAIRS


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("1\n2\n3\n", True),
        ("1\n2\n3", True),
        ("1 \n2\t\n3\n\n\n", True),
        ("1\r\n2\r\n3\r\n", True),
        ("1\n2\n", False),  # a prefix: comparison by zip would let it pass
        ("", False),
        ("1\n2\n3\n4\n", False),
        ("1\n\n2\n3\n", False),
        (" 1\n2\n3\n", False),
        ("1 2 3", False),
        ("1.0\n2\n3", False),
    ],
)
def test_outputs_are_the_same_line_by_line(printed, same):
    assert same_output("1\n2\n3\n", printed) is same


def test_a_tolerance_compares_numbers_and_words():
    assert same_output("YES 0.3333333", "YES  0.33333331", 1e-6)
    assert not same_output("YES 0.3333333", "NO 0.3333333", 1e-6)
    # 1e-6 x max(1, 1e9) = 1000 apart at most
    assert same_output("1000000000.5", "1000000999.0", 1e-6)
    # whole numbers are exact, however they are written
    assert same_output("2", "1.9999999999", 1e-6)
    assert same_output("2", "+2", 1e-6)
    for near in ("1000000001", "1000000001.0", "1000000000.5", "1e9x", "nan", "inf"):
        assert not same_output("1000000000", near, 1e-6), near
    assert not same_output("1000000000", "1000001001.0", 1e-6)
    assert not same_output("inf", "1e999999", 1e-6)
    assert not same_output("1", "nan", 1e-6)
    assert not same_output("1 2", "1", 1e-6)
