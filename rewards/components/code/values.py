"""Comparison of plain values: of JSON, and of what comes out of the sandbox."""

import math
from typing import Any


def same_value(expected: Any, value: Any, *, tolerance: float = 0.0, tuples_are_lists: bool = False) -> bool:
    """Python's equality for plain values, without its surprises: a truth value equals no number, NaN equals NaN.

    Integers and floats compare by value, floats within tolerance × max(1, |expected|). `tuples_are_lists` is for
    expectations that were written as JSON, which knows no tuples.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(expected, value, tolerance)
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


def _same_number(expected: float, value: float, tolerance: float) -> bool:
    if expected == value or (expected != expected and value != value):
        return True
    try:
        if not tolerance or not (math.isfinite(expected) and math.isfinite(value)):
            return False
        return abs(expected - value) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False
