"""Saved completions, read lazily: one file a step, the columns that are asked for, the latest few files kept.

What goes over many steps works from the latest backwards within a time, and says how far it came.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.report.record import split
from kit.runs.store import RunDir

NAME = re.compile(r"step-(\d{1,12})\.parquet")
KEPT_FILES = 24
MOST_PASSES = 16
"""Optimiser steps on one generation batch whose tokens are looked for."""
SCAN_SECONDS = 1.5
MOST_FOUND = 2000
FAILED = ("error", "timeout", "infra")
Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Completions of one prompt of one step."""

    step: int
    place: int
    rows: list[Row]

    @property
    def prompt(self) -> str:
        return str(self.rows[0].get("prompt") or "")

    @property
    def totals(self) -> list[float]:
        return [row["total"] for row in self.rows if row["total"] is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.totals) / len(self.totals) if self.totals else None

    @property
    def spread(self) -> float:
        return max(self.totals) - min(self.totals) if self.totals else 0.0


@dataclass
class Scan:
    """How far a look at many steps came: `reached` is the earliest step that was read, None when all were.

    `cut` is (step, rows) of one that alone has more rows than are taken.
    """

    read: int = 0
    steps: int = 0
    reached: int | None = None
    cut: tuple[int, int] | None = None
    broken: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.reached is None


def components(row: Mapping[str, Any]) -> list[str]:
    """Names of the reward's components, in their order."""
    names = [key.removeprefix("reward/") for key in row if key.startswith("reward/") and key.count("/") == 1]
    return [name for name in names if not isinstance(row[f"reward/{name}"], str)]


class Batches:
    """The completions of runs. Shared by all browsers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: OrderedDict[Path, tuple[int, list[tuple[int, Path]]]] = OrderedDict()
        self._files: OrderedDict[tuple[Path, int, int], list[Row]] = OrderedDict()

    def steps(self, run: RunDir) -> list[tuple[int, Path]]:
        """(step, file) in the order of steps."""
        try:
            changed = run.completions.stat().st_mtime_ns
        except OSError:
            return []
        with self._lock:
            known = self._listed.get(run.completions)
        if known is not None and known[0] == changed:
            return known[1]
        found = sorted(
            (int(match[1]), path) for path in run.completions.iterdir() if (match := NAME.fullmatch(path.name))
        )
        with self._lock:
            self._listed[run.completions] = (changed, found)
            while len(self._listed) > 8:
                self._listed.popitem(last=False)
        return found

    def rows(self, run: RunDir, path: Path) -> list[Row]:
        """All rows of a file, each with its `total`, `group` and `place`. Raises `RunError` when it cannot be read."""
        try:
            stat = path.stat()
        except OSError as error:
            raise RunError(f"{path.name} cannot be read: {error.strerror or error}.") from None
        key = (path, stat.st_mtime_ns, stat.st_size)
        with self._lock:
            known = self._files.get(key)
            if known is not None:
                self._files.move_to_end(key)
                return known
        table = prepared(read(path), _weights(run), _group_size(run))
        with self._lock:
            self._files[key] = table
            while len(self._files) > KEPT_FILES:
                self._files.popitem(last=False)
        return table

    def groups(self, run: RunDir, path: Path) -> list[Group]:
        """The rows of a file by prompt."""
        found: dict[int, list[Row]] = {}
        for row in self.rows(run, path):
            found.setdefault(row["group"], []).append(row)
        return [Group(int(rows[0].get("step") or 0), place, rows) for place, rows in found.items()]

    def with_tokens(self, run: RunDir, groups: Sequence[Group]) -> dict[int, Row]:
        """What the policy said of single tokens, by the row of the completions of that step; of a step's passes the last.

        Of the steps up to the next generation batch. A file that cannot be read is left out.
        """
        if not groups:
            return {}
        step = groups[0].step
        following = next((each for each, _ in self.steps(run) if each > step), None)
        found: dict[int, Row] = {}
        for later in range(step, min(step + MOST_PASSES, following or step + MOST_PASSES)):
            path = run.tokens / f"step-{later:05d}.parquet"
            if path.is_file():
                with contextlib.suppress(RunError):
                    found |= {row["row"]: row for row in read(path) if row.get("rollout") == step}
        return found

    def search(self, run: RunDir, wanted: Callable[[Row], bool], before: int | None = None) -> tuple[list[Row], Scan]:
        """Rows of all steps (those earlier than `before`) that are wanted, the latest steps first, as far as time lets.

        A step is given whole or left for the next look, which begins before `reached`.
        """
        files = [pair for pair in reversed(self.steps(run)) if before is None or pair[0] < before]
        found: list[Row] = []
        scan = Scan(steps=len(files))
        for step, path in within(files):
            rows: list[Row] = []
            try:
                rows = [row for row in self.rows(run, path) if wanted(row)]
            except RunError as error:
                scan.broken.append(str(error))
            if found and len(found) + len(rows) > MOST_FOUND:
                break
            found += rows
            scan.read, scan.reached = scan.read + 1, step
            if len(found) > MOST_FOUND:
                scan.cut = (step, len(found))
                break
        if scan.read >= scan.steps:
            scan.reached = None
        return found[:MOST_FOUND], scan


def within(files: Sequence[tuple[int, Path]], seconds: float | None = None) -> Iterator[tuple[int, Path]]:
    """The files until the time is over; one at least."""
    end = time.monotonic() + (SCAN_SECONDS if seconds is None else seconds)
    for number, pair in enumerate(files):
        if number and time.monotonic() > end:
            return
        yield pair


def read(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Row]:
    """The wanted columns of a file. Raises `RunError` when it cannot be read."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if wanted(name)]
            table: list[Row] = file.read(columns=names, use_threads=False).to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise RunError(f"{path.name} cannot be read: {error}") from None
    return table


def prepared(table: list[Row], weights: Sequence[float], size: int) -> list[Row]:
    """Rows with their weighted reward, None where nothing applied, and their group's number."""
    names = components(table[0]) if table else []
    factors = list(weights) if len(weights) == len(names) else [1.0] * len(names)
    for at, row in enumerate(table):
        row["row"] = at
    for number, rows in enumerate(split(table, size)):
        for place, row in enumerate(rows):
            values = [
                factor * value
                for name, factor in zip(names, factors, strict=True)
                if isinstance(value := row.get(f"reward/{name}"), (int, float))
            ]
            row |= {"total": sum(values) if values else None, "group": number, "place": place}
    return table


def failed(row: Row) -> bool:
    """Whether a component of the row's reward could not be computed."""
    return any(value in FAILED for key, value in row.items() if key.endswith("/status"))


def unweighted(run: RunDir, row: Row | None) -> bool:
    """Whether the weights of the reward's components are not on record, so that each counts 1."""
    return row is not None and len(_weights(run)) != len(components(row))


def _weights(run: RunDir) -> list[float]:
    try:
        found = json.loads(run.env.read_text(encoding="utf-8"))["trainer_arguments"]["reward_weights"]
        return [float(one) for one in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _group_size(run: RunDir) -> int:
    try:
        match = re.search(r"^\s+num_generations:\s*(\d{1,6})\s*$", run.config.read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return 0
    return int(match[1]) if match else 0
