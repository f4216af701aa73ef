"""Calls of a function and what they must return: reading them from the shapes that data sets use, and judging."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewards.components.code.literals import WRAPPERS
from rewards.components.code.values import same_value

__all__ = ["Call", "parse_calls"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call and the value that it must give.

    `wrappers` are applied to the returned value, first to last, before it is compared; `truth` compares its truth value
    only; `absolute` and `tolerance` allow a distance, the latter relative to max(1, |expected|). `from_json` says that
    the expectation was written as JSON, which knows no tuples. `alternatives` are right too.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any
    wrappers: tuple[str, ...] = ()
    truth: bool = False
    absolute: float = 0.0
    from_json: bool = False
    alternatives: tuple[Any, ...] = ()

    def accepts(self, value: Any, tolerance: float = 0.0) -> bool:
        """Whether a plain value, as decoded from the sandbox, is what this call must return."""
        try:
            for wrapper in self.wrappers:
                value = WRAPPERS[wrapper](value)
            if self.truth:
                return bool(value) is self.expected
            if self.absolute:
                return not isinstance(value, bool) and bool(abs(value - self.expected) <= self.absolute)
            return any(
                same_value(right, value, tolerance=tolerance, tuples_are_lists=self.from_json)
                for right in (self.expected, *self.alternatives)
            )
        except Exception:
            return False  # a value of another kind than the test is about


def parse_calls(reference: Any, function: str | None = None) -> tuple[str, list[Call]]:
    """The function's name and its calls.

    Shapes: {function, calls: [{args, kwargs, expected}]}; {fn_name, inputs, outputs}; a list of {input, output} with one
    JSON value a line; assertions as text or a list of texts (see `calls_from_asserts`); any of these as JSON, and with
    {test_cases: …} around them.

    Args:
        reference: the row's tests.
        function: name from another column; needed where the tests do not say it.

    Raises:
        ValueError: another shape, no calls, no name, or assertions whose expected values cannot stay outside.
    """
    from rewards.components.code.asserts import calls_from_asserts

    if isinstance(reference, str) and reference.lstrip()[:1] in ("{", "["):
        reference = json.loads(reference)
    if isinstance(reference, Mapping) and "test_cases" in reference:
        function = function or reference.get("fn_name")
        reference = reference["test_cases"]
    if isinstance(reference, str) or (isinstance(reference, list) and reference and isinstance(reference[0], str)):
        return calls_from_asserts(reference, function)
    if isinstance(reference, Mapping) and "calls" in reference:
        name, calls = reference.get("function", function), [_plain_call(row) for row in reference["calls"]]
    elif isinstance(reference, Mapping) and "inputs" in reference:
        name, calls = reference.get("fn_name", function), _apps_calls(reference)
    elif isinstance(reference, list) and all(isinstance(row, Mapping) for row in reference):
        name = function or next((row["fn_name"] for row in reference if row.get("fn_name")), None)
        calls = [_lines_call(row) for row in reference]
    else:
        raise ValueError("no calls: give {function, calls: [{args, expected}]} or assertions")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"no function name: give `function` or a column `entry_point`, got {name!r}"[:200])
    if not calls:
        raise ValueError("no calls: a row without tests accepts everything")
    return name, calls


def _plain_call(row: Mapping[str, Any]) -> Call:
    if "expected" not in row:
        raise ValueError(f"a call needs `args` and `expected`, got {row!r}"[:200])
    kwargs = row.get("kwargs") or {}
    return Call(args=tuple(row.get("args") or ()), kwargs=kwargs, expected=row["expected"], from_json=True)


def _apps_calls(tests: Mapping[str, Any]) -> list[Call]:
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests need lists `inputs` and `outputs` of one length")
    return [
        # These data sets put some outputs into a list of one, others not.
        Call(
            args=tuple(args),
            expected=output,
            from_json=True,
            alternatives=tuple(output) if isinstance(output, list) and len(output) == 1 else (),
        )
        for args, output in zip(inputs, outputs, strict=True)
    ]


def _lines_call(row: Mapping[str, Any]) -> Call:
    kind = row.get("type", row.get("testtype", "functional"))
    if kind not in ("functional", "function_call"):
        raise ValueError(f"a test of type {kind!r} calls no function: use the preset code-stdio"[:200])
    args = tuple(json.loads(line) for line in str(row["input"]).splitlines() if line.strip())
    return Call(args=args, expected=json.loads(str(row["output"])), from_json=True)
