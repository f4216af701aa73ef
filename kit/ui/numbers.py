"""Numbers that are written into a box. Gradio's own number boxes show 0 for none once they are mounted: a text can be empty."""

from __future__ import annotations

import math
from typing import Any

from kit.errors import ConfigError


def number_of(value: Any, label: str, low: float, high: float, kind: str = "a number") -> float | None:
    """The number of a box between `low` and `high`; None where it was left empty. Raises `ConfigError`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        found = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not low <= found <= high:
        raise ConfigError(
            f"{label}: '{str(value)[:40]}' was given; expected {kind} from {low:,.10g} to {high:,.10g}, or nothing."
        )
    return found


def whole_of(value: Any, label: str, low: int, high: int) -> int | None:
    """The same for numbers without a fraction."""
    found = number_of(value, label, low, high, "a whole number")
    if found is not None and not found.is_integer():
        raise ConfigError(
            f"{label}: '{str(value)[:40]}' was given; expected a whole number from {low:,} to {high:,}, or nothing."
        )
    return None if found is None else int(found)
