"""Cache results in this process by content: the function, its arguments, and the component's version and fields."""

import contextlib
import hashlib
import json
import marshal
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

_MAX_VALUE = 4_000  # characters of JSON of a cached result
_MAX_RECENT = 50_000  # cached results; above this number, all are dropped
_NAMES = frozenset({"name", "floor", "low", "high", "version"})
_results: dict[str, str] = {}  # as JSON, so that callers cannot change them


def content_key(*parts: Any) -> str | None:
    """Return a digest of plain values, equal in all processes; None if a value is not plain.

    Values of different types have different digests: 1, 1.0, True and "1" give four keys.
    """
    try:
        return hashlib.sha256(marshal.dumps(parts, 2)).hexdigest()  # version 2 has no references between equal values
    except (ValueError, TypeError, MemoryError):
        return None


def component_key(component: Any, ignored: frozenset[str], *parts: Any) -> str | None:
    """Return a digest of a component's class, version and fields, and of plain values; None if a value is not plain.

    Args:
        component: a dataclass.
        ignored: fields that do not affect the result, in addition to name and range.
    """
    names = [f.name for f in fields(component) if f.name not in _NAMES | ignored]
    kind = f"{type(component).__module__}.{type(component).__qualname__}"
    return content_key(kind, component.version, [(name, getattr(component, name)) for name in names], *parts)


def recall(keys: Iterable[str]) -> dict[str, Any]:
    """Return the cached results of `keys`, by key.

    >>> remember({"key": {"passed": 3}})
    >>> recall(["key", "other"])
    {'key': {'passed': 3}}
    """
    return {key: json.loads(text) for key in keys if (text := _results.get(key)) is not None}


def remember(results: Mapping[str, Any]) -> None:
    """Cache plain results of up to 4,000 characters of JSON; skip others."""
    if len(_results) > _MAX_RECENT:
        _results.clear()
    for key, value in results.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if len(text := json.dumps(value)) <= _MAX_VALUE:
                _results[key] = text


def forget() -> None:
    """Drop all cached results."""
    _results.clear()
