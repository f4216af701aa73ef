"""Axes and numbers of charts: round ticks and short labels."""

from __future__ import annotations

import math


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) that cover `low` to `high`, both ends outside or on it."""
    if not high - low > 1e-12 * max(abs(low), abs(high), 1e-200):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def number(value: float | None, digits: int = 3) -> str:
    """`0.915`, `12.8`, `1.5e-5`, `10,000`: `digits` significant ones, never a tail of zeros; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** max(6, digits) or abs(value) < 10**-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{_trim(mantissa)}e{int(exponent)}".replace("-", "−", 1 if value < 0 else 0)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = _trim(f"{value:,.{decimals}f}")
    return text.replace("-", "−", 1)


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
