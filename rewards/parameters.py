"""Values of a preset's parameters, checked before anything is built: a wrong one must not show as a reward of 0.0."""

import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from rewards.errors import PresetError

__all__ = ["check_values"]

# Limits that components do not check themselves.
_ABOVE_ZERO = frozenset({"budget", "deadline", "max_length", "max_requests", "time_factor", "timeout", "workers"})
_NOT_BELOW_ZERO = frozenset({"cache", "first_index", "retries", "tolerance"})
_SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_values(name: str, build: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raises PresetError for a value of another type than the parameter's, one that is not finite, a weight below 0, or
    a limit that is not above it. What a parameter is called says what it means, in every preset."""
    hints = typing.get_type_hints(build)
    for parameter, value in params.items():
        problem = _type_problem(hints.get(parameter, Any), value) or _range_problem(parameter, value)
        if problem is not None:
            raise PresetError(f"Preset {name!r}: {parameter} is {value!r}. Give {problem}."[:400])


def _type_problem(hint: Any, value: Any) -> str | None:
    """What would be right, or None. Only plain types are looked at; the rest is the preset's own business."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None or any(
        option not in (*_SIMPLE, type(None)) and get_origin(option) is not Literal for option in options
    ):
        return None if value is not None or type(None) in options or Any in options else _wanted(options)
    return None if any(_is(option, value) for option in options) else _wanted(options)


def _is(option: Any, value: Any) -> bool:
    if get_origin(option) is Literal:
        return value in get_args(option)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is option or (option is str and isinstance(value, os.PathLike))


def _wanted(options: tuple[Any, ...]) -> str:
    words = []
    for option in options:
        words += [repr(choice) for choice in get_args(option)] if get_origin(option) is Literal else []
        words += [_SIMPLE[option]] if option in _SIMPLE else []
    return " or ".join(words) or "another value"


def _range_problem(parameter: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if parameter in _ABOVE_ZERO and value <= 0:
        return "a number above 0"
    if (parameter in _NOT_BELOW_ZERO or parameter.endswith("_weight")) and value < 0:
        return "0 or a number above it"
    return None
