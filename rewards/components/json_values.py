r"""Find JSON in model output in linear time, parse it strictly, and compare it exactly.

>>> find_json('The result:\n```json\n{"a": [1, 2]}\n```').value
{'a': [1, 2]}
>>> find_json('{"a": 1} {"a": 2}').reason
'several values'
>>> same_json({"a": 1}, {"a": 1.0}), same_json(True, 1)
(True, False)
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rewards.extract import final_text

MAX_JSON_CHARS = 100_000
MAX_DEPTH = 64
MAX_VALUES = 20_000  # all nested values together
_MAX_FENCES = 1_000


@dataclass(frozen=True)
class ParsedJson:
    """A parsed value, or the `reason` why there is none. A JSON `null` has the value None and no reason."""

    value: Any = None
    reason: str | None = None


def find_json(text: str, strict: bool = True) -> ParsedJson:
    """Return the JSON value of a completion: its complete final text, its last fenced block, or its last object or array.

    `strict` rejects several values: text after the value, a second fenced block, and braces in the text before an unfenced
    value. An earlier value is never used.
    """
    final = final_text(text)
    if final.value is None:
        return ParsedJson(reason=final.reason)
    parsed = parse_json(final.value)
    if parsed.reason is None:
        return parsed
    if final.value.count("```") > _MAX_FENCES:
        return ParsedJson(reason="several values")
    fences = list(_fences(final.value))
    if len(fences) % 2:
        return ParsedJson(reason="unterminated")
    if fences:
        (_, begin), (end, after) = fences[-2:]
        if strict and len(fences) > 2:
            return ParsedJson(reason="several values")
        if strict and (final.value[end:after].strip("` \t\r") or final.value[after:].strip()):
            return ParsedJson(reason="text after the value")
        return parse_json(final.value[begin:end])
    begin, end, reason = _last_brackets(final.value)
    if reason is not None:
        return ParsedJson(reason=parsed.reason if final.value[0] in "{[" and reason == "missing" else reason)
    if strict and final.value[end:].strip():
        return ParsedJson(reason="text after the value")
    if strict and any(mark in final.value[:begin] for mark in "{}"):
        return ParsedJson(reason="several values")
    return parse_json(final.value[begin:end])


def parse_json(text: str) -> ParsedJson:
    """Parse one strict JSON value: no NaN or infinities, no repeated keys, at most `MAX_DEPTH` levels."""
    if len(text) > MAX_JSON_CHARS:
        return ParsedJson(reason="too_long")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    except _RepeatedKey as failure:
        return ParsedJson(reason=f"repeated key {failure}"[:200])
    except (ValueError, RecursionError, MemoryError):
        return ParsedJson(reason="not JSON")
    stack, count = [(value, 1)], 0
    while stack:
        item, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            return ParsedJson(reason="nested too deep" if depth > MAX_DEPTH else "too many values")
        if isinstance(item, dict | list):
            stack += [(inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item)]
    return ParsedJson(value)


def parse_reference(reference: Any) -> Any:
    """Return the JSON value of a dataset: text is parsed, other values are returned unchanged.

    Raises:
        ValueError: the text is not JSON.
    """
    if not isinstance(reference, str | bytes):
        return reference
    return json.loads(reference)


def same_json(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON: numbers by value, true is not 1, arrays in order, keys in any order."""
    return same_value(left, right, tuples_are_lists=True)


def same_value(expected: Any, value: Any, *, tolerance: float = 0.0, tuples_are_lists: bool = False) -> bool:
    """Return whether plain values are equal; unlike in Python, a bool equals no number, and NaN equals NaN.

    Integers and floats compare by value, within tolerance × max(1, |expected|). `tuples_are_lists` is for expected values
    from JSON, which has no tuples.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        if expected == value or (expected != expected and value != value):
            return True
        try:
            if not tolerance or not (math.isfinite(expected) and math.isfinite(value)):
                return False
            return abs(expected - value) <= tolerance * max(1.0, abs(expected))
        except OverflowError:
            return False
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        if not tuples_are_lists and isinstance(expected, list) != isinstance(value, list):
            return False
        return len(expected) == len(value) and all(
            same_value(e, v, tolerance=tolerance, tuples_are_lists=tuples_are_lists)
            for e, v in zip(expected, value, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(
            same_value(item, value[key], tolerance=tolerance, tuples_are_lists=tuples_are_lists)
            for key, item in expected.items()
        )
    if isinstance(expected, set | frozenset) and isinstance(value, set | frozenset):
        return _typed(expected) == _typed(value)
    return type(expected) is type(value) and bool(expected == value)


def _typed(items: "set[Any] | frozenset[Any]") -> "set[tuple[bool, Any]]":
    return {(isinstance(item, bool), item) for item in items}


class _RepeatedKey(ValueError):
    pass


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("number out of range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        earlier_keys: set[str] = set()
        raise _RepeatedKey(next(repr(key) for key, _ in pairs if key in earlier_keys or earlier_keys.add(key)))  # type: ignore[func-returns-value]
    return value


def _fences(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every line that starts with three backticks, after at most a few spaces."""
    start = text.find("```")
    while start >= 0:
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        if not text[max(text.rfind("\n", max(0, start - 8), start) + 1, start - 8) : start].strip():
            yield start, line_end
        start = text.find("```", line_end)


def _last_brackets(text: str) -> tuple[int, int, str | None]:
    """Return begin and end of the last object or array and None, or the reason why there is none; searches backwards.

    From the end of a JSON value, every quote after an even number of backslashes is the edge of a string. One backward pass
    therefore finds the opening bracket, and reads each character once.
    """
    end = max(text.rfind("}"), text.rfind("]")) + 1
    if max(text.rfind("{"), text.rfind("[")) >= end:
        return 0, 0, "unterminated"
    if not end:
        return 0, 0, "missing"
    depth, position, limit = 0, end - 1, max(0, end - MAX_JSON_CHARS)
    inside = False
    while position >= limit:
        character = text[position]
        if character == '"':
            slashes = position
            while slashes > limit and text[slashes - 1] == "\\":
                slashes -= 1
            if not inside or (position - slashes) % 2 == 0:
                inside = not inside
            position = slashes - 1
            continue
        if not inside and character in "}]":
            depth += 1
        elif not inside and character in "{[":
            depth -= 1
            if depth == 0:
                return position, end, None
        position -= 1
    return 0, 0, "too_long" if limit else "unbalanced"
