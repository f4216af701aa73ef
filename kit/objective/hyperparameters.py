"""Hyper-parameters of a hook, read off its factory's signature: name, type, default; and checked where they are set."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import kit.objective.controllers  # noqa: F401  (files adaptive_kl and adaptive_entropy among the schedules)
from kit.errors import ConfigError
from kit.objective.schedules import Schedule, is_schedule, parse_schedule
from kit.registry import did_you_mean

_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class HyperParameter:
    """One keyword of a hook's factory. `required` ones have no default."""

    name: str
    annotation: Any
    default: Any
    required: bool

    @property
    def schedulable(self) -> bool:
        """True for floats: they may follow a schedule."""
        return float in _alternatives(self.annotation)

    def coerce(self, value: Any, owner: str, origin: str = "") -> Any:
        """`value` in the declared type, or a `Schedule`. Raises `ConfigError` naming hook, key and value.

        `origin` is where the value comes from, for that message.
        """
        if self.schedulable and is_schedule(value):
            return parse_schedule(value)
        if self.annotation is _EMPTY or self.annotation is Any:
            return value
        for kind in _alternatives(self.annotation):
            fits, result = _fit(value, kind)
            if fits:
                return result
        raise ConfigError(f"{owner}: {self.name} must be {_spell(self.annotation)}, got {value!r}{origin}.")


def discover(factory: Callable[..., Any], skip: int = 0) -> dict[str, HyperParameter]:
    """The hyper-parameters of `factory`, in order, without its first `skip` parameters."""
    found = list(signature(factory).parameters.values())[skip:]
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    return {p.name: HyperParameter(p.name, p.annotation, p.default, p.default is _EMPTY) for p in named}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Its signature with annotations resolved where they can be. Raises `ConfigError` for a C function without one."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{function!r} has no Python signature; wrap it in a function of the batch.") from None


def complete(
    known: Mapping[str, HyperParameter], given: Mapping[str, Any], owner: str, hints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Every hyper-parameter with its value: what was given, or the default; both checked by the annotation.

    Raises `ConfigError` for an unknown key (with the hint for it, or the nearest known one), a missing one, or a value
    of the wrong type.
    """
    for key in given:
        if key not in known:
            if hints and key in hints:
                raise ConfigError(f"{owner} has no hyper-parameter '{key}': {hints[key]}")
            takes = ", ".join(known) or "no hyper-parameters"
            raise ConfigError(f"{owner} has no hyper-parameter '{key}'.{did_you_mean(key, known)} It takes: {takes}.")
    missing = [name for name, parameter in known.items() if parameter.required and name not in given]
    if missing:
        raise ConfigError(f"{owner} needs a value for {', '.join(missing)}.")
    return {
        name: parameter.coerce(given[name], owner)
        if name in given
        else parameter.coerce(parameter.default, owner, ", its default")
        for name, parameter in known.items()
    }


def check_range(
    owner: str,
    name: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    finite: bool = False,
) -> None:
    """Raises `ConfigError` unless `low <= value < high`, or `low < value` if `open_low`.

    No `high`: inf is fine, unless `finite`.
    """
    if finite and math.isinf(value):
        raise ConfigError(f"{owner}: {name} must be finite, got {value!r}.")
    above = value > low if open_low else value >= low
    below = value < high or math.isinf(high)
    if not (above and below):
        upper = "" if math.isinf(high) else f" < {high:g}"
        lower = f"{low:g} {'<' if open_low else '<='} "
        raise ConfigError(f"{owner}: {name} must satisfy {lower}{name}{upper}, got {value!r}.")


def check_choice(owner: str, name: str, value: str, options: Collection[str]) -> None:
    """Raises `ConfigError` unless `value` is one of `options`."""
    if value not in options:
        listed = ", ".join(options)
        raise ConfigError(f"{owner}: {name} must be one of {listed}, got {value!r}.{did_you_mean(str(value), options)}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if kind is type(None):
        return value is None, None
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        return fits, float(value) if fits else None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind), value
    if isinstance(kind, type) and kind is not Schedule:
        return isinstance(value, kind), value
    return True, value  # a type this module does not know: the factory checks it itself


def _spell(annotation: Any) -> str:
    def one(kind: Any) -> str:
        if typing.get_origin(kind) is Literal:
            return "one of " + ", ".join(map(str, typing.get_args(kind)))
        names = {float: "a number or a schedule", int: "a whole number", bool: "true or false", type(None): "null"}
        return names.get(kind, getattr(kind, "__name__", str(kind)))

    return " or ".join(one(kind) for kind in _alternatives(annotation))
