"""Parameters of presets, read from their signatures and docstrings, and the check of values."""

import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

# Ranges that components do not check themselves, by parameter name.
_ABOVE_ZERO = frozenset({"budget", "deadline", "max_length", "max_requests", "time_factor", "timeout", "workers"})
_NOT_BELOW_ZERO = frozenset({"cache", "first_index", "retries", "tolerance"})
_SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a preset, as its signature and its docstring describe it.

    Args:
        name: keyword argument of `load`.
        words: entry under `Args:` in the docstring.
        default: default value; None for a required parameter.
        required: whether the parameter has no default.
        types: types of its values, including NoneType if None is allowed.
    """

    name: str
    words: str
    default: Any
    required: bool
    types: tuple[Any, ...]

    @property
    def accepted_values(self) -> str:
        """Description of the accepted values, for example `a number above 0, or nothing`."""
        words = " or ".join(_SIMPLE[kind] for kind in self.types if kind in _SIMPLE) or "a list or mapping"
        if int in self.types or float in self.types:
            words += " above 0" if self._is_above_zero else ", 0 or above it" if self._is_not_below_zero else ""
        return words + (", or nothing" if type(None) in self.types else "")

    def accepts(self, value: Any) -> bool:
        """Return whether a value has one of the types, is finite and in range. The preset checks lists and mappings."""
        if value is None:
            return type(None) in self.types or Any in self.types
        if _is_number(value) and ((self._is_above_zero and value <= 0) or (self._is_not_below_zero and value < 0)):
            return False
        kinds = [kind for kind in self.types if kind is not type(None)]
        if any(kind not in _SIMPLE for kind in kinds):
            return True
        for kind in kinds:
            if kind is float:
                fits = _is_number(value) and math.isfinite(value)
            else:
                fits = type(value) is kind or (kind is str and isinstance(value, os.PathLike))
            if fits:
                return True
        return False

    @property
    def _is_above_zero(self) -> bool:
        return self.name in _ABOVE_ZERO

    @property
    def _is_not_below_zero(self) -> bool:
        return self.name in _NOT_BELOW_ZERO or self.name.endswith("_weight")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parameters_of(build: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a preset, in the order of its signature."""
    hints, words = typing.get_type_hints(build), _documented(inspect.getdoc(build) or "")
    parameters = []
    for name, parameter in inspect.signature(build).parameters.items():
        hint = hints.get(name, Any)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        required = parameter.default is parameter.empty
        parameters.append(
            Parameter(name, words.get(name, ""), None if required else parameter.default, required, kinds)
        )
    return parameters


def _documented(text: str) -> dict[str, str]:
    """Return the entries under `Args:`, by name."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in text.partition("\nArgs:\n")[2].splitlines():
        if line.strip() and not line.startswith(" "):
            break
        if entry := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2].strip())
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def with_options(group: type, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the fields of a dataclass to a preset's parameters, for options that presets share.

    The decorated function takes the fields as one object, its parameter `options`. The entries of the dataclass replace the
    line `options: ...` under `Args:` in its docstring.

    Args:
        group: dataclass with an `Args:` section.
        defaults: defaults that differ from those of the dataclass.
    """

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        signature, fields = inspect.signature(build), inspect.signature(group).parameters

        @functools.wraps(build)
        def preset(**params: Any) -> Any:
            shared = {name: params.pop(name) for name in fields if name in params}
            return build(options=group(**(defaults | shared)), **params)

        direct = [parameter for name, parameter in signature.parameters.items() if name != "options"]
        added = [each.replace(default=defaults.get(name, each.default)) for name, each in fields.items()]
        order = sorted([*direct, *added], key=lambda each: each.default is not each.empty)
        entries = (inspect.getdoc(group) or "").partition("\nArgs:\n")[2]
        preset.__doc__ = re.sub(r" {4}options: .*", lambda _: entries, inspect.getdoc(build) or "")
        preset.__annotations__ = {each.name: each.annotation for each in order}
        vars(preset)["__signature__"] = signature.replace(parameters=order)
        return preset

    return decorate
