"""Figures of a run for notebooks and papers: the same panels as in its report. matplotlib without pyplot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import RunError
from kit.runs.metrics import Evaluations, Metrics, Panel, Point, Range, panels, step_of, trend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "step_of"]
COLORS = ("#2563a8", "#c2570c", "#2e7d4f", "#7c4db3", "#b3322f", "#5b6472")
MARKERS = "osD^v<"
WIDTH, HEIGHT = 4.6, 3.0  # of a panel with its labels, in inches
LEFT, BELOW = 0.75, 0.5  # of that, for what stands left of the axes and below them
ABOVE = 0.3  # for the title of the whole figure


def draw(title: str, metrics: Metrics, evaluations: Evaluations, path: str | Path | None) -> Figure:
    """The figure of one run. Raises `RunError` when there is nothing to draw, or `path` cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    shown = panels(metrics, evaluations)
    if not shown:
        raise RunError(f"{title} has no metrics yet; there is nothing to draw.")
    columns = min(len(shown), 2 if len(shown) <= 4 else 3)
    rows = -(-len(shown) // columns)
    width, height = WIDTH * columns, HEIGHT * rows + ABOVE
    figure = _shown_by_notebooks()(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color="#1f2937", y=1 - 0.1 / height)
    # Fixed places: matplotlib's own layouts measure every text again and again, most of the time that a figure takes.
    figure.subplots_adjust(
        left=LEFT / width, right=1 - 0.15 / width, bottom=BELOW / height, top=1 - (ABOVE + 0.3) / height,
        wspace=(LEFT + 0.15) / (WIDTH - LEFT - 0.15), hspace=(BELOW + 0.3) / (HEIGHT - BELOW - 0.3),
    )  # fmt: skip
    for place, panel in enumerate(shown, start=1):
        _draw(figure.add_subplot(rows, columns, place), panel)
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise RunError(f"The figure cannot be saved to {path}: {error}") from error
    return figure


@cache
def _shown_by_notebooks() -> type[Figure]:
    """A figure that a notebook shows as a picture also where nobody has imported pyplot."""
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    return RunFigure


def _draw(axes: Axes, panel: Panel) -> None:
    for number, (name, line) in enumerate(panel.lines.items()):
        color = COLORS[number % len(COLORS)]
        _band(axes, panel.bands.get(name, ()), color)
        if name in panel.whiskers:
            _whiskers(axes, name, line, panel.whiskers[name], number)
        else:
            _line(axes, name, line, color, smooth=panel.smooth)
    axes.set_title(panel.title, fontsize=10, y=1.0)  # fixed, or every tick above the axes is measured for it
    axes.set_xlabel("optimiser step", fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    # Both ends are stretched to what the panel asks for, never cut.
    bottom, top = axes.get_ylim()
    reach = [end for end in (panel.low, panel.high) if end is not None]
    axes.set_ylim(min([bottom if panel.low is None else _lowest(panel), *reach]), max([top, *reach]))
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _lowest(panel: Panel) -> float:
    ranges = [low for part in (panel.bands, panel.whiskers) for rows in part.values() for _, low, _ in rows]
    return min([y for line in panel.lines.values() for _, y in line] + ranges)


def _line(axes: Axes, name: str, line: Sequence[Point], color: str, *, smooth: bool) -> None:
    over = trend(line) if smooth else None
    steps, values = zip(*line, strict=True)
    marker = "o" if len(line) == 1 else None
    axes.plot(
        steps, values, color=color, linewidth=1.8 if over is None else 0.8, alpha=1.0 if over is None else 0.35,
        label=name if over is None else None, marker=marker,
    )  # fmt: skip
    if over is not None:
        axes.plot(*zip(*over, strict=True), color=color, linewidth=1.8, label=name)


def _band(axes: Axes, band: Sequence[Range], color: str) -> None:
    if len(band) > 1:
        steps, low, high = zip(*band, strict=True)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _whiskers(axes: Axes, name: str, line: Sequence[Point], whiskers: Sequence[Range], number: int) -> None:
    color, ends = COLORS[number % len(COLORS)], {step: (low, high) for step, low, high in whiskers}
    steps, values = zip(*line, strict=True)
    below = [max(0.0, y - ends[x][0]) if x in ends else 0.0 for x, y in line]
    above = [max(0.0, ends[x][1] - y) if x in ends else 0.0 for x, y in line]
    axes.errorbar(
        steps, values, yerr=[below, above], color=color, marker=MARKERS[number % len(MARKERS)], markersize=4,
        capsize=3, linewidth=1.2, label=name,
    )  # fmt: skip
