import json

import pytest

from rewards.components.code.blocks import code_block
from rewards.components.code.calls import calls_from_asserts, parse_calls
from rewards.components.code.harness import NotPlain, decode, encode
from rewards.components.code.stdio import StdioTest, parse_stdio_tests, same_output
from rewards.components.json_values import same_value


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [object(), Liar(1), [Liar(1)], b"x", 1j, print, type])
def test_values_that_could_lie_do_not_cross(value):
    with pytest.raises(NotPlain):
        encode(value)


@pytest.mark.parametrize(
    "line",
    [
        1.5,
        {"list": 1},
        {"set": [{"list": []}]},
        {"what": []},
        {"int": "x"},
        {"float": "0x1p99999"},
        {"dict": [[1]]},
        {"list": [], "set": []},
    ],
)
def test_forged_lines_are_refused(line):
    with pytest.raises(NotPlain):
        decode(line)


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (0, False, False),
        ([1, 2], (1, 2), False),
        ([1, [True]], [1, [1]], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({1}, frozenset({1}), True),
        ({1}, frozenset({True}), False),
        (float("nan"), float("nan"), True),
        (0.3, 0.1 + 0.2, False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_strictly(expected, value, same):
    assert same_value(expected, value) is same


def test_tolerance_and_tuples_are_allowed_where_asked_for():
    assert same_value([0.3], [0.1 + 0.2], tolerance=1e-9)
    assert same_value([1, 2], (1, 2), tuples_are_lists=True)
    assert not same_value(10**400, 1.0, tolerance=1e-9)


MBPP = [
    "assert f(1, [2]) == 3",
    "assert f('a', k=(1,)) == (3, 4)",
    "assert set(f(1)) == set((4, 5))",
    "assert 5 == f(1)",
    "assert f(1) is None",
    "assert f(1)",
    "assert not f(1)",
    "assert abs(f(1) - 2.5) < 1e-3",
    "assert math.isclose(f(1), 2.5, rel_tol=0.001)",
    "assert f(1) == -1 and f(2) == [0] * 3 + [1]",
    "assert len(f(1)) == 2, 'message'",
]


def test_assertions_become_calls_with_the_expected_value_outside():
    name, calls = calls_from_asserts(MBPP)
    assert name == "f"
    assert [call.expected for call in calls] == [3, (3, 4), {4, 5}, 5, None, True, False, 2.5, 2.5, -1, [0, 0, 0, 1], 2]
    accepted = [3, (3, 4), [5, 4, 4], 5, None, [0], [], 2.5005, 2.502, -1, [0, 0, 0, 1], (1, 1)]
    rejected = [4, [3, 4], [5], 6, 0, 0, "x", 2.502, 2.503, 1, [0], (1,)]
    assert all(call.accepts(value) for call, value in zip(calls, accepted, strict=True))
    assert not any(call.accepts(value) for call, value in zip(calls, rejected, strict=True))


HUMANEVAL = '''
METADATA = {"author": "x"}


def check(candidate):
    """doc"""
    assert candidate([1.0, 2.0], 0.3) == True
    assert abs(candidate(3.5) - 0.5) < 1e-6
    assert True, "This prints if this assert fails"


check(has_close_elements)
'''


def test_humaneval_checks_become_calls_of_the_entry_point():
    name, calls = parse_calls(HUMANEVAL, "has_close_elements")
    assert name == "has_close_elements"
    assert [call.args for call in calls] == [([1.0, 2.0], 0.3), (3.5,)]


def test_functions_of_pytest_are_read():
    name, calls = calls_from_asserts(
        "from solution import f\n\ndef test_a():\n    assert f(1) == 2\n    assert f(2) == 4"
    )
    assert (name, [call.expected for call in calls]) == ("f", [2, 4])


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) == g(1)",
        "assert f(1) == f(2)",
        "assert f(open('x')) == 1",
        "assert f(*args) == 1",
        "assert f(1) != 2",
        "for n in range(3):\n    assert f(n) == n",
        "assert f(f(1)) == 3",
        "assert f(1) == [n for n in range(3)]",
        "assert f(1) == 9 ** 9 ** 9",
        "assert f(1) == 'a' * 10 ** 10",
        "assert f(1) == __import__('os').getpid()",
    ],
)
def test_assertions_that_would_have_to_be_run_refuse_the_row(tests):
    with pytest.raises(ValueError, match="outside the sandbox"):
        calls_from_asserts(tests)


@pytest.mark.parametrize("tests", ["", "assert True", "assert (", "x\0", "(" * 10_000])
def test_texts_without_assertions_are_refused(tests):
    with pytest.raises(ValueError, match=r"no assertion|not Python"):
        calls_from_asserts(tests)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ({"function": "f", "calls": [{"args": [1, [2]], "expected": 3}]}, None),
        (json.dumps({"function": "f", "calls": [{"args": [1, [2]], "expected": 3}]}), None),
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}, None),
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}, None),
        ([{"input": "1\n[2]", "output": "3", "testtype": "functional"}], "f"),
        ({"test_cases": [{"fn_name": "f", "input": "1\n[2]", "output": "3", "type": "function_call"}]}, None),
        ("assert f(1, [2]) == 3", None),
    ],
)
def test_the_shapes_of_data_sets_give_the_same_call(reference, name):
    function, [call] = parse_calls(reference, name)
    assert (function, call.args) == ("f", (1, [2]))
    assert call.accepts(3)
    assert not call.accepts(4)


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


def test_the_last_block_marked_as_python_is_the_program():
    text = "```python\nfirst\n```\n```py\nsecond\n```\nprints\n```\n42\n```\n```text\nnot this\n```"
    assert code_block(text).value == "second\n"


def test_without_a_mark_the_last_unmarked_block_is():
    assert code_block("```\na\n```\n```\nb\n```\n```cpp\nc\n```").value == "b\n"


def test_blocks_inside_the_reasoning_do_not_count():
    assert code_block("<think>\n```python\nx\n```\n</think>\nnone").reason == "missing"
    assert code_block("<think>\n```python\nx\n```").reason == "unterminated_think"
    assert code_block("<think>a</think><answer>```python\nx\n```</answer>").value == "x\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing"),
        ("print(1)", "missing"),
        ("```cpp\nint main\n```", "missing"),
        ("```python\nprint(1)", "unterminated"),
        ("```python\nprint(1)\n```\n```python\nprint(2)", "unterminated"),
        ("```python\n\n```", "blank"),
        ("```python\n\x00\n```", None),
        ("```python\n" + "x" * 100_001 + "\n```", "too_long"),
        ("x" * 10_000_000, "too_long"),
        ("\ud800" * 10, "missing"),
    ],
)
def test_completions_without_a_program_say_why(text, reason):
    assert code_block(text).reason == reason


def test_fences_inside_a_longer_fence_and_carriage_returns():
    assert code_block("````python\n```\ninner\n```\n````").value == "```\ninner\n```\n"
    assert code_block("```python\r\nprint(1)\r\n```\r\n").value == "print(1)\r\n"
    assert code_block("~~~python\nprint(1)\n~~~").value == "print(1)\n"
    assert code_block("```{.python}\nprint(1)\n```").value == "print(1)\n"
    assert code_block("```python\ns = '''```'''\n```").value == "s = '''```'''\n"
