"""Parse tests of input and output from the forms of common datasets, and compare outputs."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}", re.ASCII)


class StdioTest(NamedTuple):
    """One test: the input of a program and the output that it must print."""

    input: str
    output: str


def parse_stdio_tests(reference: Any) -> list[StdioTest]:
    """Return the tests of a list of {input, output}, of {inputs: [...], outputs: [...]}, or of either as JSON.

    {test_cases: [...]} around them is removed. Lists of lines are joined.

    Raises:
        ValueError: another form, no tests, a test that calls a function, or no test that expects any output.
    """
    reference, _ = unwrapped(reference)
    if isinstance(reference, Mapping):
        if reference.get("fn_name"):
            raise ValueError("these tests call a function: use the preset code-function")
        reference = [{"input": i, "output": o} for i, o in paired(reference)]
    if not isinstance(reference, list) or not reference:
        raise ValueError("no tests: give a list of {input, output}, or {inputs: [...], outputs: [...]}")
    tests = [_test(row) for row in reference]
    if not any(test.output.strip() for test in tests):
        raise ValueError("no test expects any output: a program that prints nothing would pass")
    return tests


def unwrapped(reference: Any) -> tuple[Any, str | None]:
    """Return the tests, parsed if they are JSON and without {test_cases: ...} around them; and the `fn_name` or None."""
    if isinstance(reference, str | bytes):
        reference = json.loads(reference)
    if isinstance(reference, Mapping) and "test_cases" in reference:
        return reference["test_cases"], reference.get("fn_name")
    return reference, None


def paired(tests: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return pairs from {inputs: [...], outputs: [...]}. Raises `ValueError` if the lists have different lengths."""
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests need lists `inputs` and `outputs` of equal length")
    return list(zip(inputs, outputs, strict=True))


def _test(row: Any) -> StdioTest:
    if not isinstance(row, Mapping) or not {"input", "output"} <= set(row):
        raise ValueError(f"a test needs `input` and `output`, got {row!r}"[:200])
    kind = row.get("type", row.get("testtype", "stdin"))
    if kind not in ("stdin", "stdin_stdout"):
        raise ValueError(f"a test of type {kind!r} does not have input and output: use the preset code-function"[:200])
    return StdioTest(_text(row["input"]), _text(row["output"]))


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"input and output must be text, got {type(value).__name__}")
    return value


def same_output(expected: str, printed: str, tolerance: float | None = None) -> bool:
    r"""Return whether both outputs have the same number of lines and equal lines, without white space at line ends.

    Blank lines at the end are ignored. With a `tolerance`, spacing between words is ignored, and numbers may differ by
    tolerance × max(1, |expected|). If a whole number is expected, a whole number must be equal, and a decimal may differ by
    the tolerance itself, at most 0.1.

    >>> same_output("1\n2\n", "1 \n2"), same_output("1\n2\n", "1\n"), same_output("0.5", "0.5000001", 1e-6)
    (True, False, True)
    """
    expected_lines, printed_lines = _lines(expected), _lines(printed)
    if len(expected_lines) != len(printed_lines):
        return False
    if tolerance is None:
        return expected_lines == printed_lines
    pairs = [(line.split(), other.split()) for line, other in zip(expected_lines, printed_lines, strict=True)]
    return all(
        len(words) == len(others)
        and all(word == other or _close(word, other, tolerance) for word, other in zip(words, others, strict=True))
        for words, others in pairs
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n")]


def _close(word: str, other: str, tolerance: float) -> bool:
    try:
        expected, value = float(word), float(other)
    except ValueError:
        return False
    if _WHOLE.fullmatch(word):  # a number near an answer modulo 10^9 + 7 is wrong
        return int(word) == int(other) if _WHOLE.fullmatch(other) else abs(expected - value) <= min(tolerance, 0.1)
    if not (math.isfinite(expected) and math.isfinite(value)):
        return False
    return abs(expected - value) <= tolerance * max(1.0, abs(expected))
