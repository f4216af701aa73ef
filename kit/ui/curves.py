"""The numbers behind the charts: read as the file grows, thinned to at most 500 points a series, packed for the browser.

A poll of a long run parses only the lines that were added. What is sent is one JSON text: numbers as base64 of 16-bit
places between a series' lowest and highest value, so that all charts of a run fit into some 30 KiB.
"""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import orjson
from numpy.typing import NDArray

from kit.errors import RunError
from kit.report.panels import MOST_POINTS, Numbers, Panel, Series
from kit.runs.store import RunDir

BUDGET = 30_000
"""Characters for the numbers of all series of a payload."""
FEWEST_PARTS = 40
MISSING, TOP = 65535, 65534
TAIL = 96
"""Bytes before the last position that are compared, to see whether a file was rewritten below it."""


SCRIPT = (Path(__file__).parent / "charts.js").read_text(encoding="utf-8")


def charts(elem_id: str) -> gr.HTML:
    """A place for charts, filled with the JSON text of `pack` and drawn by charts.js in the browser."""
    return gr.HTML("", html_template='<div class="charts"></div>', js_on_load=SCRIPT, elem_id=elem_id)


class Growing:
    """The columns of one metrics.jsonl in memory, extended as the file grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.rows, self._inode, self._offset, self._tail = 0, -1, 0, b""
        self._columns: dict[str, array[float]] = {}

    def columns(self) -> dict[str, Numbers]:
        """All numbers so far by key, NaN where a line has none. Raises `RunError` for a damaged file."""
        with self._lock:
            self._catch_up()
            return {key: np.array(values) for key, values in self._columns.items()}

    def _catch_up(self) -> None:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                file.seek(max(0, self._offset - TAIL))
                if (
                    found.st_ino != self._inode
                    or found.st_size < self._offset
                    or file.read(len(self._tail)) != self._tail
                ):
                    self._forget()  # a resume has taken lines back, or it is another file
                    self._inode = found.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._add(line)
        self._offset += len(whole)
        self._tail = (self._tail + whole)[-min(TAIL, self._offset) :] if self._offset else b""

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            rows = self.rows
            self._forget()
            raise RunError(f"{self.path}, line {rows + 1}: not a JSON object. The file is damaged; remove the line.")
        columns, rows = self._columns, self.rows
        for key, value in record.items():
            if isinstance(value, (int, float)):
                column = columns.get(key)
                if column is None:
                    column = columns[key] = array("d", [math.nan]) * rows
                elif len(column) < rows:
                    column.extend(array("d", [math.nan]) * (rows - len(column)))
                column.append(float(value))
        self.rows = rows + 1


class Library:
    """The most recently used files, shared by all browsers."""

    def __init__(self, most: int = 12) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[Path, Growing] = OrderedDict()
        self._scores: OrderedDict[Path, tuple[int, int, dict[str, Any]]] = OrderedDict()

    def columns(self, run: RunDir) -> dict[str, Numbers]:
        """The run's numbers, all columns of the same length."""
        path = run.metrics_file
        with self._lock:
            growing = self._known.pop(path, None) or Growing(path)
            self._known[path] = growing
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        found = growing.columns()
        rows = max(map(len, found.values()), default=0)
        return {key: _padded(values, rows) for key, values in found.items()}

    def evaluations(self, run: RunDir) -> dict[str, dict[str, Any]]:
        """Held-out scores by name, without those of single problems; damaged files are left out."""
        found = {}
        for path in sorted(run.eval.glob("*.json")):
            try:
                stat = path.stat()
                known = self._scores.get(path)
                if known is None or known[:2] != (stat.st_mtime_ns, stat.st_size):
                    scores = json.loads(path.read_text(encoding="utf-8"))
                    slim = {key: one for key, one in scores.items() if key not in ("per_problem", "samples")}
                    known = self._scores[path] = (stat.st_mtime_ns, stat.st_size, slim)
                found[path.stem] = known[2]
            except (OSError, ValueError, AttributeError):
                continue
        while len(self._scores) > 400:
            self._scores.popitem(last=False)
        return found


def _padded(values: Numbers, rows: int) -> Numbers:
    return values if len(values) == rows else np.concatenate([values, np.full(rows - len(values), math.nan)])


def pack(found: Sequence[Panel], marks: Sequence[tuple[float, str]] = (), budget: int = BUDGET) -> dict[str, Any]:
    """Panels as plain JSON. Curves name the steps that they share by their place in `grids`."""
    curves = [one for panel in found for one in panel.series if not one.dots]
    grids = list({id(one.x): one.x for one in curves}.values())
    places = {id(x): place for place, x in enumerate(grids)}
    dense = sum(1 + (one.low is not None) for one in curves) or 1
    # Three numbers a part (lowest, highest, mean) of two bytes, a third more as base64.
    parts = max(FEWEST_PARTS, min(MOST_POINTS // 2, budget // (dense * 8)))
    single = min(MOST_POINTS, max(2 * FEWEST_PARTS, budget // (dense * 3)))
    edges = [None if len(grid) <= single else np.linspace(0, len(grid), parts + 1).astype(int) for grid in grids]

    def packed(one: Series, *, stacked: bool) -> dict[str, Any]:
        plain = {"name": one.name} | ({} if one.color is None else {"color": one.color})
        if one.dots:
            return plain | {"points": _rows(one.x, one.y), "whiskers": _rows(*one.band())}
        grid = places[id(one.x)]
        found = plain | {"grid": grid} | _curve(one, edges[grid])
        if stacked:  # drawn by its means alone
            found.pop("a", None), found.pop("b", None)
        return found

    return {
        "grids": [_centres(grid, edge) for grid, edge in zip(grids, edges, strict=True)],
        "panels": [
            {
                **{
                    key: getattr(panel, key)
                    for key in ("title", "label", "low", "high")
                    if getattr(panel, key) is not None
                },
                "smooth": panel.smooth,
                **({"stacked": True} if panel.stacked else {}),
                "series": [packed(one, stacked=panel.stacked) for one in panel.series],
            }
            for panel in found
        ],
        "marks": [[step, text] for step, text in marks],
    }


def _rows(*columns: Numbers) -> list[list[float]]:
    return [[int(row[0]) if row[0].is_integer() else row[0], *map(_rounded, row[1:])]
            for row in zip(*(column.tolist() for column in columns), strict=True)]  # fmt: skip


def _centres(grid: Numbers, edges: NDArray[np.int_] | None) -> list[float]:
    steps = grid if edges is None else grid[(edges[:-1] + edges[1:]) // 2]
    if edges is not None:
        steps = steps.copy()
        steps[0], steps[-1] = grid[0], grid[-1]
    return [int(step) if float(step).is_integer() else float(step) for step in steps]


def _curve(one: Series, edges: NDArray[np.int_] | None) -> dict[str, Any]:
    """Its numbers, or the lowest, highest and mean of each part, and its band; `last` is what the legend shows."""
    finite = one.y[np.isfinite(one.y)]
    found: dict[str, Any] = {"last": _rounded(float(finite[-1])) if len(finite) else None}
    numbers = {"v": one.y} | ({} if one.low is None or one.high is None else {"lo": one.low, "hi": one.high})
    if edges is not None:
        least, most, _ = parted(one.y, edges)
        numbers = {"a": least, "b": most} | {key: parted(values, edges)[2] for key, values in numbers.items()}
    return found | {key: quantised(values) for key, values in numbers.items()}


def parted(values: Numbers, edges: NDArray[np.int_]) -> tuple[Numbers, Numbers, Numbers]:
    """Lowest, highest and mean of the finite numbers of each part; NaN for a part without any."""
    known = np.isfinite(values)
    starts = edges[:-1]
    count = np.add.reduceat(known, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        least = np.minimum.reduceat(np.where(known, values, np.inf), starts)
        most = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / count
    empty = count == 0
    return np.where(empty, np.nan, least), np.where(empty, np.nan, most), np.where(empty, np.nan, mean)


def quantised(values: Numbers) -> list[Any]:
    """[lowest, highest, base64 of little-endian 16-bit places between them, 65535 where there is no number]."""
    known = np.isfinite(values)
    if not known.any():
        return [0, 0, base64.b64encode(np.full(len(values), MISSING, dtype="<u2").tobytes()).decode()]
    low, high = float(values[known].min()), float(values[known].max())
    span = (high - low) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        places = np.where(known, np.rint((values - low) / span * TOP), MISSING)
    return [low, high, base64.b64encode(np.nan_to_num(places, nan=MISSING).astype("<u2").tobytes()).decode()]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
