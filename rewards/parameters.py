"""Values of a preset's parameters, checked before anything is built: a wrong one must not show as a reward of 0.0."""

import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from rewards.errors import PresetError

# Limits that components do not check themselves.
_ABOVE_ZERO = frozenset({"budget", "deadline", "max_length", "max_requests", "time_factor", "timeout", "workers"})
_NOT_BELOW_ZERO = frozenset({"cache", "first_index", "retries", "tolerance"})
_SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a preset, for a form: what its signature and its docstring say of it."""

    name: str
    words: str
    """Its entry under `Args:`."""
    wanted: str
    """What a value has to be, e.g. `a number above 0, or nothing`."""
    default: Any
    """None also where it has to be given: `required`."""
    required: bool
    kind: str
    """number, whole, switch, choice, text or other (a list or mapping)."""
    choices: tuple[str, ...] = ()
    optional: bool = False
    """Whether None is a value."""

    @property
    def is_weight(self) -> bool:
        return self.name.endswith("_weight")


def parameters_of(build: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a preset, in the order of its signature."""
    hints, words = typing.get_type_hints(build), _documented(inspect.getdoc(build) or "")
    found = []
    for name, parameter in inspect.signature(build).parameters.items():
        hint = hints.get(name, Any)
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        plain = [option for option in options if option is not type(None)]
        choices = tuple(str(one) for option in plain if get_origin(option) is Literal for one in get_args(option))
        kinds = {bool: "switch", int: "whole", float: "number", str: "text"}
        required = parameter.default is parameter.empty
        found.append(
            Parameter(
                name,
                words.get(name, ""),
                _in_words(name, options),
                None if required else parameter.default,
                required,
                "choice" if choices else kinds.get(plain[0], "other") if len(plain) == 1 else "other",
                choices,
                type(None) in options,
            )
        )
    return found


def _in_words(name: str, options: tuple[Any, ...]) -> str:
    words = (
        _wanted(options) if any(option in _SIMPLE or get_args(option) for option in options) else "a list or mapping"
    )
    if int in options or float in options:
        above = " above 0" if name in _ABOVE_ZERO else ""
        above = ", 0 or above it" if name in _NOT_BELOW_ZERO or name.endswith("_weight") else above
        words += above
    return words + (", or nothing" if type(None) in options else "")


def _documented(text: str) -> dict[str, str]:
    """What stands under `Args:`, by name."""
    _, found, rest = text.partition("\nArgs:\n")
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines() if found else []:
        if line.strip() and not line.startswith(" "):
            break
        if entry := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2].strip())
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def check_values(name: str, build: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raise PresetError for a value of another type than the parameter's, one that is not finite, a weight below 0, or
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
