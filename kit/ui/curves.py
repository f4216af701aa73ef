"""The numbers behind the charts: read as the file grows, thinned to at most 500 points a series, packed for the browser.

A poll of a long run parses only the lines that were added. What is sent is one JSON text: numbers as base64 of 16-bit
places between a series' lowest and highest value, so that all charts of a run fit into some 30 KiB.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from kit.errors import RunError
from kit.runs.metrics import MOST_POINTS, SIMPLE, STANDARD_DEVIATION, Panel, panels
from kit.runs.store import RunDir

Numbers = NDArray[np.float64]
BUDGET = 30_000
"""Characters for the numbers of all series of a payload."""
FEWEST_PARTS = 40
MISSING, TOP = 65535, 65534
TAIL = 96
"""Bytes before the last position that are compared, to see whether a file was rewritten below it."""
COMPONENT = re.compile(r"rewards/(.+)/mean")


class Growing:
    """The columns of one metrics.jsonl, kept in memory and added to."""

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
    """Files that are being looked at, the latest few: every browser shares them."""

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


def run_panels(columns: Mapping[str, Numbers], evaluations: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The charts of a run, what matters most first: title, label, and series as columns or as points."""
    found = [_reward(columns), _components(columns), *map(_of_points, _heldout(columns, evaluations)), _length(columns)]
    for title, label, names in SIMPLE:
        factor = 100.0 if label.endswith("(%)") else 1.0
        series = [
            {"name": name, "y": columns[key] * factor}
            for name, keys in names.items()
            for key in [next((key for key in keys if key in columns), None)]
            if key is not None
        ]
        low = None if title == "Entropy" else 0.0
        found.append({"title": title, "label": label, "series": series, "low": low, "smooth": title != "Learning rate"})
    return [panel for panel in found if panel["series"]]


def _reward(columns: Mapping[str, Numbers]) -> dict[str, Any]:
    panel: dict[str, Any] = {"title": "Reward on training prompts", "label": "mean", "series": []}
    if "reward" in columns:
        one = {"name": "mean", "y": columns["reward"]}
        if "reward_std" in columns:
            one |= {"lo": columns["reward"] - columns["reward_std"], "hi": columns["reward"] + columns["reward_std"]}
            panel["label"] = f"mean, {STANDARD_DEVIATION}"
        panel["series"] = [one]
    return panel


def _components(columns: Mapping[str, Numbers]) -> dict[str, Any]:
    series = [{"name": match[1], "y": columns[key]} for key in columns if (match := COMPONENT.fullmatch(key))]
    return {"title": "Components of the reward", "label": "mean, unweighted", "series": series}


def _length(columns: Mapping[str, Numbers]) -> dict[str, Any]:
    panel: dict[str, Any] = {"title": "Completion length", "label": "tokens, mean", "series": [], "low": 0.0}
    if "completions/mean_length" in columns:
        one = {"name": "mean", "y": columns["completions/mean_length"]}
        ends = [columns.get(f"completions/{end}_length") for end in ("min", "max")]
        if ends[0] is not None and ends[1] is not None:
            one |= {"lo": ends[0], "hi": ends[1]}
            panel["label"] = "tokens: mean, shortest to longest"
        panel["series"] = [one]
    return panel


def _heldout(columns: Mapping[str, Numbers], evaluations: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    last = int(np.nanmax(columns["step"])) if len(columns.get("step", ())) else 0
    return panels([{"step": last}], evaluations)


def _of_points(panel: Panel) -> dict[str, Any]:
    series = [
        {"name": name, "points": points, "whiskers": panel.whiskers.get(name, [])}
        for name, points in panel.lines.items()
    ]
    return {"title": panel.title, "label": panel.y_label, "series": series, "low": panel.low, "high": panel.high}


def steps_of(columns: Mapping[str, Numbers]) -> Numbers:
    """The optimiser step of every line; its place where it has none."""
    rows = max(map(len, columns.values()), default=0)
    places = np.arange(1, rows + 1, dtype=np.float64)
    steps = columns.get("step")
    return places if steps is None else np.where(np.isfinite(steps), steps, places)


def pack(
    found: Sequence[Mapping[str, Any]],
    grids: Sequence[Numbers],
    marks: Sequence[tuple[float, str]] = (),
    budget: int = BUDGET,
) -> dict[str, Any]:
    """Panels as plain JSON. A series names its grid (steps) by `grid`, 0 unless told."""
    dense = sum(1 + ("lo" in one) for panel in found for one in panel["series"] if "y" in one) or 1
    # Three numbers a part (lowest, highest, mean) of two bytes, a third more as base64.
    parts = max(FEWEST_PARTS, min(MOST_POINTS // 2, budget // (dense * 8)))
    single = min(MOST_POINTS, max(2 * FEWEST_PARTS, budget // (dense * 3)))
    edges = [None if len(grid) <= single else np.linspace(0, len(grid), parts + 1).astype(int) for grid in grids]
    return {
        "grids": [_centres(grid, edge) for grid, edge in zip(grids, edges, strict=True)],
        "panels": [
            {
                **{key: value for key, value in panel.items() if key != "series" and value is not None},
                "series": [_series(one, edges) for one in panel["series"]],
            }
            for panel in found
        ],
        "marks": [[step, text] for step, text in marks],
    }


def _centres(grid: Numbers, edges: NDArray[np.int_] | None) -> list[float]:
    steps = grid if edges is None else grid[(edges[:-1] + edges[1:]) // 2]
    if edges is not None:
        steps = steps.copy()
        steps[0], steps[-1] = grid[0], grid[-1]
    return [int(step) if float(step).is_integer() else float(step) for step in steps]


def _series(one: Mapping[str, Any], edges: Sequence[NDArray[np.int_] | None]) -> dict[str, Any]:
    plain = {key: value for key, value in one.items() if key in ("name", "color", "grid", "dash")}
    if "points" in one:
        return plain | {
            "points": [[step, _rounded(value)] for step, value in one["points"]],
            "whiskers": [[step, _rounded(low), _rounded(high)] for step, low, high in one["whiskers"]],
        }
    edge, y = edges[one.get("grid", 0)], one["y"]
    finite = y[np.isfinite(y)]
    plain |= {"last": _rounded(float(finite[-1])) if len(finite) else None}
    if edge is None:
        packed = {"v": quantised(y)}
        if "lo" in one:
            packed |= {"lo": quantised(one["lo"]), "hi": quantised(one["hi"])}
        return plain | packed
    least, most, mean = parted(y, edge)
    packed = {"a": quantised(least), "b": quantised(most), "v": quantised(mean)}
    if "lo" in one:
        packed |= {"lo": quantised(parted(one["lo"], edge)[2]), "hi": quantised(parted(one["hi"], edge)[2])}
    return plain | packed


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
