"""Charts as SVG text, to stand inside a page: lines with bands and whiskers, rows of intervals, bars.

Colours are the page's CSS variables with a light fallback, so that one drawing serves light and dark. Every chart has a
title and a description in words. All texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kit.runs.metrics import MOST_POINTS, Point, downsample, trend

Band = Sequence[tuple[float, float, float]]  # (x, low, high)
WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400.0, 170.0, 48.0, 12.0, 30.0, 38.0
COLORS = ("#2563a8", "#c2570c", "#2e7d4f", "#7c4db3", "#b3322f", "#5b6472")
LETTER = 6.1
"""Mean width of a letter of the legend, in units of the drawing."""


@dataclass(frozen=True)
class Frame:
    """From numbers to places in the drawing."""

    x_ticks: list[float]
    y_ticks: list[float]
    top: float

    @property
    def bottom(self) -> float:
        return self.top + PLOT_HEIGHT

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.bottom - (value - low) / (high - low) * PLOT_HEIGHT

    def path(self, points: Iterable[Point]) -> str:
        """`x,y x,y`, to a tenth of a unit."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def lines(
    series: Mapping[str, Sequence[Point]],
    title: str,
    x_label: str,
    y_label: str,
    bands: Mapping[str, Band] | None = None,
    *,
    whiskers: Mapping[str, Band] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    y_range: tuple[float | None, float | None] = (None, None),
    smooth: bool = True,
) -> Markup:
    """A line chart as SVG. Values that are not finite are left out; without any the chart says so.

    Args:
        series: (x, y) points by name, ordered by x. Long ones are drawn with at most 500 points, peaks kept, and, with
            `smooth`, with their running mean over the single values.
        bands: (x, low, high) areas by the name of their series.
        whiskers: (x, low, high) intervals by the name of their series, whose points then get markers.
        marks: (x, text) vertical lines.
        y_range: what the y axis must reach at least, each end a number or None.
    """
    clean = {name: _finite(points) for name, points in series.items()}
    clean = {name: points for name, points in clean.items() if points}
    areas = {name: _finite(band) for name, band in (bands or {}).items() if name in clean}
    bars = {name: _finite(band) for name, band in (whiskers or {}).items() if name in clean}
    if not clean:
        return _svg(title, "There is nothing to draw yet.", TOP + 30, [_text(LEFT, TOP + 16, "nothing to draw yet")])
    legend, top = _legend(list(clean))
    frame = _frame(clean, [*areas.values(), *bars.values()], y_range, top)
    body = [*legend, *_axes(frame, x_label, y_label), *_marks(frame, marks)]
    for color, (name, points) in enumerate(clean.items()):
        body += _area(frame, areas.get(name, []), color)
        body += _curve(frame, points, color, smooth=smooth and name not in bars)
        body += _whiskers(frame, points, bars.get(name), name, color)
    return _svg(title, describe(clean, x_label, y_label), frame.bottom + BOTTOM, body)


def intervals(rows: Sequence[tuple[str, float, float, float]], title: str, *, reference: float | None = None) -> Markup:
    """Values with their intervals, one below the other on one axis, as SVG; `reference` is a vertical line (0, say)."""
    kept = [row for row in rows if all(map(_is_finite, row[1:]))]
    if not kept:
        return _svg(title, "There is nothing to draw yet.", TOP + 30, [_text(LEFT, TOP + 16, "nothing to draw yet")])
    ends = [bound for row in kept for bound in row[1:]] + ([] if reference is None else [reference])
    axis = ticks(min(ends), max(ends), 5)

    def place(value: float) -> float:
        return 14 + (value - axis[0]) / (axis[-1] - axis[0]) * (WIDTH - 28)

    bottom = TOP + 40 * len(kept)
    body = [_line(place(tick), TOP, place(tick), bottom, "grid") for tick in axis]
    body += [_text(place(tick), bottom + 15, number(tick), "middle") for tick in axis]
    if reference is not None:
        body.append(_line(place(reference), TOP, place(reference), bottom, "mark"))
    for index, (label, value, low, high) in enumerate(kept):
        y = TOP + 40 * index + 29
        body.append(_text(14, y - 14, _short(label, 38), strong=True))
        body.append(_text(WIDTH - 14, y - 14, f"{number(value)} [{number(low)}, {number(high)}]", "end"))
        body.append(_stroke(f'<line x1="{place(low):.1f}" y1="{y}" x2="{place(high):.1f}" y2="{y}" ', 0, 3))
        body.append(_dot(place(value), y, 0, 4.5))
    words = "; ".join(f"{label}: {number(value)}, {number(low)} to {number(high)}" for label, value, low, high in kept)
    return _svg(title, f"95 % intervals. {words}.", bottom + 24, body)


def bars(rows: Sequence[tuple[str, float]], title: str) -> Markup:
    """Values from 0 upward as horizontal bars, as SVG; negative ones count as 0."""
    kept = [(label, max(0.0, value)) for label, value in rows if _is_finite(value)]
    longest = max((value for _, value in kept), default=0.0) or 1.0
    body = []
    for index, (label, value) in enumerate(kept):
        y, width = TOP + 38 * index, max(1.5, value / longest * (WIDTH - 28))
        body += [_text(14, y + 13, _short(label, 44), strong=True), _text(WIDTH - 14, y + 13, number(value), "end")]
        body.append(Markup('<rect x="14" y="{}" width="{:.1f}" height="9" rx="2" style="{}"/>').format(
            y + 19, width, f"fill:{_color(0)}"))  # fmt: skip
    words = "; ".join(f"{label}: {number(value)}" for label, value in kept)
    return _svg(title, f"{words}." if words else "There is nothing to draw yet.", TOP + 38 * len(kept) + 8, body)


def describe(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """What a chart shows, in words, for those who do not see it."""
    parts = []
    for name, points in series.items():
        (first_x, first), (last_x, last) = points[0], points[-1]
        low, high = min(y for _, y in points), max(y for _, y in points)
        parts.append(
            f"{name}: from {number(first)} at {number(first_x, 6)} to {number(last)} at {number(last_x, 6)}, "
            f"lowest {number(low)}, highest {number(high)}"
        )
    return f"{y_label} over {x_label}. " + "; ".join(parts) + "."


def _frame(
    series: Mapping[str, list[Point]], areas: Sequence[Band], reach: tuple[float | None, float | None], top: float
) -> Frame:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    ys += [bound for area in areas for _, low, high in area for bound in (low, high)]
    ys += [end for end in reach if end is not None]
    across = ticks(min(xs), max(xs), 6)
    if all(float(x).is_integer() for x in xs) and max(xs) - min(xs) < 6:  # single steps: no tick between two of them
        across = [float(x) for x in range(int(min(xs)), int(max(xs)) + 1)] if max(xs) > min(xs) else across
    low, high = min(xs), max(xs)
    inside = [tick for tick in across if low <= tick <= high]
    across = sorted({low, *inside, high}) if high > low else across
    level, bottom = max(ys), min(ys)
    if level == bottom == reach[0]:
        level += 1.0  # all on the floor: the axis goes up from it
    return Frame(across, ticks(bottom, level, 5), top)


def _axes(frame: Frame, x_label: str, y_label: str) -> list[Markup]:
    body = [_line(LEFT, frame.y(tick), WIDTH - RIGHT, frame.y(tick), "grid") for tick in frame.y_ticks]
    body += [_text(LEFT - 6, frame.y(tick) + 4, number(tick), "end") for tick in frame.y_ticks]
    free = -math.inf
    for tick in _spread(frame.x_ticks):
        text = number(tick, 6)
        anchor = "start" if tick == frame.x_ticks[0] else "end" if tick == frame.x_ticks[-1] else "middle"
        if frame.x(tick) - len(text) * LETTER / 2 > free or anchor == "start":
            body.append(_text(frame.x(tick), frame.bottom + 15, text, anchor))
            free = frame.x(tick) + len(text) * LETTER
    body.append(_line(LEFT, frame.bottom, WIDTH - RIGHT, frame.bottom, "axis"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, frame.bottom + 31, x_label, "middle"))
    body.append(_text(LEFT - 40, frame.top - 12, y_label))
    return body


def _spread(across: list[float]) -> list[float]:
    """The ends, and the ticks between that stand clear of them."""
    clear = (across[-1] - across[0]) / 10
    return [
        tick
        for tick in across
        if tick in (across[0], across[-1]) or (tick - across[0] > clear and across[-1] - tick > 1.4 * clear)
    ]


def _legend(names: list[str]) -> tuple[list[Markup], float]:
    """Swatches and names in as many rows as they need, and where the plot below begins."""
    x, y, body = 8.0, TOP + 8, []
    if len(names) == 1:
        return [], TOP + 20
    for color, name in enumerate(names):
        text = _short(name, 34)
        width = 22 + len(text) * LETTER + 10
        if x + width > WIDTH and x > 8:
            x, y = 8.0, y + 16
        body.append(_stroke(f'<line x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 14:.1f}" y2="{y - 4:.1f}" ', color, 3))
        body.append(_text(x + 18, y, text))
        x += width
    return body, y + 30


def _area(frame: Frame, band: Band, color: int) -> list[Markup]:
    if len(band) < 2:
        return []
    low = downsample([(x, bottom) for x, bottom, _ in band], MOST_POINTS // 2)
    high = downsample([(x, top) for x, _, top in band], MOST_POINTS // 2)
    points = frame.path([*low, *reversed(high)])
    return [Markup('<polygon points="{}" style="fill:{};fill-opacity:.16"/>').format(points, _color(color))]


def _curve(frame: Frame, points: list[Point], color: int, *, smooth: bool) -> list[Markup]:
    if len(points) == 1:
        return [_dot(frame.x(points[0][0]), frame.y(points[0][1]), color)]
    polyline = f'<polyline fill="none" stroke-linejoin="round" points="{frame.path(downsample(points))}" '
    over = trend(points) if smooth else None
    if over is None:
        return [_stroke(polyline, color, 1.8)]
    means = downsample(over, MOST_POINTS // 2)
    mean = f'<polyline fill="none" stroke-linejoin="round" points="{frame.path(means)}" '
    return [_stroke(polyline, color, 0.8, opacity=0.35), _stroke(mean, color, 2)]


def _whiskers(frame: Frame, points: list[Point], band: Band | None, name: str, color: int) -> list[Markup]:
    if band is None:
        return []
    body = []
    for x, low, high in band:
        place, top, bottom = frame.x(x), frame.y(high), frame.y(low)
        shape = f"M{place:.1f},{top:.1f}V{bottom:.1f}M{place - 4:.1f},{top:.1f}h8M{place - 4:.1f},{bottom:.1f}h8"
        body.append(_stroke(f'<path fill="none" d="{shape}" ', color, 1.4))
    return body + [
        _dot(frame.x(x), frame.y(y), color, 3.4, f"{name}: {number(y)} at {number(x, 6)}") for x, y in points
    ]


def _marks(frame: Frame, marks: Sequence[tuple[float, str]]) -> list[Markup]:
    low, high = frame.x_ticks[0], frame.x_ticks[-1]
    body = []
    for x, text in marks:
        if low <= x <= high:
            place = f'<line x1="{frame.x(x):.1f}" y1="{frame.top:.1f}" x2="{frame.x(x):.1f}" y2="{frame.bottom:.1f}" '
            body.append(Markup('{}class="mark"><title>{}</title></line>').format(Markup(place), text))
    return body


def _svg(title: str, words: str, height: float, body: Sequence[Markup]) -> Markup:
    head = Markup(
        '<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:g} {:g}" role="img" '
        'font-family="system-ui,sans-serif" font-size="11.5"><title>{}</title><desc>{}</desc>'
    ).format(WIDTH, round(height), title, words)
    heading = Markup('<text x="8" y="17" class="heading" font-size="13.5" font-weight="600">{}</text>').format(
        _short(title, 54)
    )
    return head + heading + Markup("").join(body) + Markup("</svg>")


def _text(x: float, y: float, text: str, anchor: str = "start", *, strong: bool = False) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(
        x, y, anchor, Markup(' class="heading"') if strong else "", text
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def _stroke(shape: str, color: int, width: float, *, opacity: float = 1.0) -> Markup:
    style = f"stroke:{_color(color)};stroke-width:{width:g}" + ("" if opacity == 1 else f";stroke-opacity:{opacity:g}")
    return Markup(f'{shape}style="{style}"/>')


def _dot(x: float, y: float, color: int, radius: float = 3.0, words: str = "") -> Markup:
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{:g}" style="fill:{}"><title>{}</title></circle>').format(
        x, y, radius, _color(color), words
    )


def _color(index: int) -> str:
    index %= len(COLORS)
    return f"var(--series{index + 1},{COLORS[index]})"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _finite(rows: Sequence[tuple[float, ...]]) -> list[tuple]:  # type: ignore[type-arg]
    """Rows whose numbers are all finite."""
    return [tuple(row) for row in rows if all(map(_is_finite, row))]


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
