"""Charts as SVG: `svg` draws a panel that `kit.report.panels` chooses, `figure` puts the charts of a run into one picture.

Reports, the page, notebooks and comparisons use these charts. They need no script, take light and dark colors from the page's
CSS variables with a light fallback, and have a title and a text description. All texts are escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from kit.errors import RunError
from kit.report.panels import (
    MOST_POINTS,
    Numbers,
    Panel,
    Series,
    columns_of,
    downsample,
    panels,
    trend,
)
from kit.runs.files import one_line
from kit.runs.metrics import Evaluations, Metrics, Point

WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400.0, 170.0, 48.0, 12.0, 30.0, 38.0
COLORS = ("#2563a8", "#c2570c", "#2e7d4f", "#7c4db3", "#b3322f", "#5b6472")
LETTER = 6.1
"""Mean width of a character of the legend, in drawing units."""
FIGURE_STYLE = (
    ".figure text{fill:#576172}.figure .heading{fill:#1c2430}.figure .grid{stroke:#dfe3e8}.figure .axis{stroke:#576172}"
    ".figure .mark{stroke:#576172;stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Frame:
    """Converts data values to drawing coordinates."""

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

    def path(self, x: Numbers, y: Numbers) -> str:
        """Coordinates as `x,y x,y`, with one decimal."""
        return " ".join(
            f"{self.x(across):.1f},{self.y(up):.1f}" for across, up in zip(x.tolist(), y.tolist(), strict=True)
        )


def lines(
    series: Mapping[str, Sequence[Point]],
    title: str,
    x_label: str,
    y_label: str,
    *,
    marks: Sequence[tuple[float, str]] = (),
    y_range: tuple[float | None, float | None] = (None, None),
    smooth: bool = True,
) -> Markup:
    """A line chart of points by name, ordered by x, as SVG. `y_range`: the minimal range of the y axis."""
    drawn = [Series.of_points(name, points, dots=False) for name, points in series.items()]
    return svg(Panel(title, y_label, drawn, *y_range, smooth=smooth), x_label, marks)


def svg(panel: Panel, x_label: str = "optimiser step", marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """A panel as SVG, with (x, text) `marks` as vertical lines. Without values it contains a message.

    A long series is drawn with at most 500 points, including all peaks, and in a smooth panel with its running mean.
    """
    series = [each for each in map(Series.finite, panel.series) if len(each.y)]
    if not series:
        return _empty(panel.title)
    legend, top = _legend([each.name for each in series])
    frame = _frame(series, (panel.low, panel.high), top)
    body = [*legend, *_axes(frame, x_label, panel.label)]
    for x, text in marks:
        if frame.x_ticks[0] <= x <= frame.x_ticks[-1]:
            line = f'<line x1="{frame.x(x):.1f}" y1="{frame.top:.1f}" x2="{frame.x(x):.1f}" y2="{frame.bottom:.1f}" '
            body.append(Markup('{}class="mark"><title>{}</title></line>').format(Markup(line), text))
    for place, each in enumerate(series):
        color = place if each.color is None else each.color
        body += _dots(frame, each, color) if each.dots else _curve(frame, each, color, smooth=panel.smooth)
    return _svg(panel.title, describe(series, x_label, panel.label), frame.bottom + BOTTOM, body)


def intervals(rows: Sequence[tuple[str, float, float, float]], title: str, *, reference: float | None = None) -> Markup:
    """Values with their intervals, one below the other on one axis, as SVG. `reference`: a vertical line, e.g. 0."""
    finite = [row for row in rows if all(map(math.isfinite, row[1:]))]
    if not finite:
        return _empty(title)
    ends = [bound for row in finite for bound in row[1:]] + ([] if reference is None else [reference])
    axis = ticks(min(ends), max(ends), 5)

    def place(value: float) -> float:
        return 14 + (value - axis[0]) / (axis[-1] - axis[0]) * (WIDTH - 28)

    bottom = TOP + 40 * len(finite)
    body = [_line(place(tick), TOP, place(tick), bottom, "grid") for tick in axis]
    body += [_text(place(tick), bottom + 15, number(tick), "middle") for tick in axis]
    if reference is not None:
        body.append(_line(place(reference), TOP, place(reference), bottom, "mark"))
    for index, (label, value, low, high) in enumerate(finite):
        y = TOP + 40 * index + 29
        body.append(_text(14, y - 14, one_line(label, 38), strong=True))
        body.append(_text(WIDTH - 14, y - 14, f"{number(value)} [{number(low)}, {number(high)}]", "end"))
        body.append(_stroke(f'<line x1="{place(low):.1f}" y1="{y}" x2="{place(high):.1f}" y2="{y}" ', 0, 3))
        body.append(_dot(place(value), y, 0, 4.5))
    words = "; ".join(
        f"{label}: {number(value)}, {number(low)} to {number(high)}" for label, value, low, high in finite
    )
    return _svg(title, f"95 % intervals. {words}.", bottom + 24, body)


def describe(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """A text description of a chart, for screen readers."""
    parts = [
        f"{each.name}: from {number(each.y[0])} at {number(each.x[0], 6)} to {number(each.y[-1])} at {number(each.x[-1], 6)}, "
        f"lowest {number(each.y.min())}, highest {number(each.y.max())}"
        for each in series
    ]
    return f"{y_label} over {x_label}. " + "; ".join(parts) + "."


def _frame(series: Sequence[Series], reach: tuple[float | None, float | None], top: float) -> Frame:
    xs = np.concatenate([each.x for each in series])
    ys = np.concatenate([part for each in series for part in (each.y, *each.band()[1:])])
    ends = [*(end for end in reach if end is not None), float(ys.min()), float(ys.max())]
    low, bottom, level = float(xs.min()), min(ends), max(ends)
    high = max(float(xs.max()), low + 1.0)  # leave space for the next step after a single one
    across = ticks(low, high, 6)
    if high - low < 6 and np.all(xs == np.floor(xs)):  # no ticks between integer steps
        across = [float(x) for x in range(int(low), int(high) + 1)]
    across = sorted({low, *(tick for tick in across if low <= tick <= high), high})
    if level == bottom == reach[0]:
        level += 1.0  # all values are at the lower end: extend the axis upwards
    return Frame(across, ticks(bottom, level, 5), top)


def _axes(frame: Frame, x_label: str, y_label: str) -> list[Markup]:
    body = [_line(LEFT, frame.y(tick), WIDTH - RIGHT, frame.y(tick), "grid") for tick in frame.y_ticks]
    body += [_text(LEFT - 6, frame.y(tick) + 4, number(tick), "end") for tick in frame.y_ticks]
    free = -math.inf
    first, last = frame.x_ticks[0], frame.x_ticks[-1]
    clear = (last - first) / 10
    for tick in frame.x_ticks:
        if tick not in (first, last) and not (tick - first > clear and last - tick > 1.4 * clear):
            continue
        text = number(tick, 6)
        anchor = "start" if tick == first else "end" if tick == last else "middle"
        if frame.x(tick) - len(text) * LETTER / 2 > free or anchor == "start":
            body.append(_text(frame.x(tick), frame.bottom + 15, text, anchor))
            free = frame.x(tick) + len(text) * LETTER
    body.append(_line(LEFT, frame.bottom, WIDTH - RIGHT, frame.bottom, "axis"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, frame.bottom + 31, x_label, "middle"))
    body.append(_text(LEFT - 40, frame.top - 12, y_label))
    return body


def _legend(names: list[str]) -> tuple[list[Markup], float]:
    """Swatches and names in one or more rows, and the y coordinate at which the plot begins."""
    x, y, body = 8.0, TOP + 8, []
    if len(names) == 1:
        return [], TOP + 20
    for color, name in enumerate(names):
        text = one_line(name, 34)
        width = 22 + len(text) * LETTER + 10
        if x + width > WIDTH and x > 8:
            x, y = 8.0, y + 16
        body.append(_stroke(f'<line x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 14:.1f}" y2="{y - 4:.1f}" ', color, 3))
        body.append(_text(x + 18, y, text))
        x += width
    return body, y + 30


def _curve(frame: Frame, curve: Series, color: int, *, smooth: bool) -> list[Markup]:
    if len(curve.y) == 1:
        return [_dot(frame.x(float(curve.x[0])), frame.y(float(curve.y[0])), color)]
    x, low, high = curve.band()
    body, mean = [], trend(curve.y) if smooth else None
    if len(x) > 1:
        below, above = downsample(low, MOST_POINTS // 2), downsample(high, MOST_POINTS // 2)[::-1]
        outline = f"{frame.path(x[below], low[below])} {frame.path(x[above], high[above])}"
        body.append(Markup('<polygon points="{}" style="fill:{};fill-opacity:.16"/>').format(outline, _color(color)))
    if mean is None:
        return [*body, _polyline(frame, curve.x, curve.y, MOST_POINTS, color, 1.8)]
    body.append(_polyline(frame, curve.x, curve.y, MOST_POINTS, color, 0.8, opacity=0.35))
    return [*body, _polyline(frame, curve.x, mean, MOST_POINTS // 2, color, 2)]


def _polyline(
    frame: Frame, x: Numbers, y: Numbers, most: int, color: int, width: float, opacity: float = 1.0
) -> Markup:
    chosen = downsample(y, most)
    shape = f'<polyline fill="none" stroke-linejoin="round" points="{frame.path(x[chosen], y[chosen])}" '
    return _stroke(shape, color, width, opacity=opacity)


def _dots(frame: Frame, curve: Series, color: int) -> list[Markup]:
    """Points with whiskers, and the line between them."""
    body = [_polyline(frame, curve.x, curve.y, MOST_POINTS, color, 1.8)] if len(curve.y) > 1 else []
    for x, low, high in zip(*(numbers.tolist() for numbers in curve.band()), strict=True):
        place, top, bottom = frame.x(x), frame.y(high), frame.y(low)
        shape = f"M{place:.1f},{top:.1f}V{bottom:.1f}M{place - 4:.1f},{top:.1f}h8M{place - 4:.1f},{bottom:.1f}h8"
        body.append(_stroke(f'<path fill="none" d="{shape}" ', color, 1.4))
    for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
        body.append(_dot(frame.x(x), frame.y(y), color, 3.4, f"{curve.name}: {number(y)} at {number(x, 6)}"))
    return body


def _empty(title: str) -> Markup:
    return _svg(title, "There is nothing to draw yet.", TOP + 30, [_text(LEFT, TOP + 16, "nothing to draw yet")])


def _svg(title: str, words: str, height: float, body: Sequence[Markup]) -> Markup:
    head = Markup(
        '<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:g} {:g}" role="img" '
        'font-family="system-ui,sans-serif" font-size="11.5"><title>{}</title><desc>{}</desc>'
    ).format(WIDTH, round(height), title, words)
    heading = Markup('<text x="8" y="17" class="heading" font-size="13.5" font-weight="600">{}</text>').format(
        one_line(title, 54)
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


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover `low` to `high`. Their distance is 1, 2, 2.5 or 5 times a power of ten."""
    if not high - low > 1e-12 * max(abs(low), abs(high), 1e-200):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, e.g. `0.915`, `12.8`, `1.5e-5`, `10,000`; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** max(6, digits) or abs(value) < 10**-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−", 1 if value < 0 else 0)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−", 1)


class Figure(Markup):
    """Several charts in one SVG picture, which a notebook displays."""

    def __repr__(self) -> str:
        return f"<Figure of {str(self).count('<svg ') - 1} charts>"

    def _repr_svg_(self) -> str:
        return str(self)


def figure(title: str, charts: Sequence[Markup]) -> Figure:
    """A picture of charts with a title, in rows of two or three, on white, without a style sheet."""
    columns = 2 if len(charts) <= 4 else 3
    heights = [float(re.findall(r'viewBox="0 0 \S+ (\S+)"', chart)[0]) for chart in charts]
    placed, top = Markup(), 28.0
    for first in range(0, len(charts), columns):
        for column, chart in enumerate(charts[first : first + columns]):
            size = f'<svg x="{column * WIDTH:g}" y="{top:g}" width="{WIDTH:g}" height="{heights[first + column]:g}" '
            placed += Markup(str(chart).replace("<svg ", size, 1))
        top += max(heights[first : first + columns]) + 8
    head = Markup(
        '<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" width="{0:g}" height="{1:g}" '
        'font-family="system-ui,sans-serif"><style>{2}</style><rect width="100%" height="100%" fill="#fff"/>'
        '<text x="8" y="19" class="heading" font-size="15" font-weight="600">{3}</text>'
    ).format(WIDTH * min(columns, len(charts)), top, FIGURE_STYLE, title)
    return Figure(head + placed + Markup("</svg>"))


def draw(title: str, metrics: Metrics, evaluations: Evaluations, path: str | Path | None = None) -> Figure:
    """The curves of a run; `path` (.svg) saves them. Raises `RunError` if there are none."""
    shown = panels(columns_of(metrics), evaluations)
    if not shown:
        raise RunError(f"{title} has no metrics yet; there is nothing to draw.")
    drawn = figure(title, [svg(panel) for panel in shown])
    if path is not None:
        Path(path).write_text(drawn, encoding="utf-8")
    return drawn
