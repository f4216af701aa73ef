"""Saved completions of a run: one Parquet file per step, read on demand. The latest few files stay in memory."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.report.record import split
from kit.runs.files import read_json
from kit.runs.store import RunDir

NAME = re.compile(r"step-(\d{1,12})\.parquet")
SEARCH_SECONDS = 1.5
"""A search ends after this time, but reads at least one step."""
MOST_MATCHES = 200
Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Completions of one prompt of one step; `number` counts the groups of the step from 0."""

    step: int
    number: int
    rows: list[Row]

    @property
    def totals(self) -> list[float]:
        return [row["total"] for row in self.rows if row["total"] is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.totals) / len(self.totals) if self.totals else None

    @property
    def differs(self) -> bool:
        """Whether the rewards differ, so that the group has a learning signal."""
        return bool(self.totals) and max(self.totals) - min(self.totals) > 1e-9


@dataclass(frozen=True)
class Matches:
    """Rows that match a search of the latest `read` of `steps` steps; `broken` are errors of unreadable files."""

    rows: list[Row]
    read: int
    steps: int
    broken: list[str]


def components(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the reward's components, in their order."""
    names = [key.removeprefix("reward/") for key in row if key.startswith("reward/") and key.count("/") == 1]
    return [name for name in names if not isinstance(row[f"reward/{name}"], str)]


def steps(run: RunDir) -> dict[int, Path]:
    """Return the file of each step, in the order of steps."""
    try:
        names = [(match, path) for path in run.completions.iterdir() if (match := NAME.fullmatch(path.name))]
    except OSError:
        return {}
    return dict(sorted((int(match[1]), path) for match, path in names))


def rows(run: RunDir, path: Path) -> list[Row]:
    """Read all rows of a file with their weighted `total`, `group` and `row` number. Raises `RunError` for an unreadable file."""
    try:
        stat = path.stat()
    except OSError as error:
        raise RunError(f"{path.name} cannot be read: {error.strerror or error}.") from None
    return _prepared(path, stat.st_mtime_ns, stat.st_size, tuple(weights(run)), _group_size(run))


def groups(run: RunDir, path: Path) -> list[Group]:
    """Return the rows of a file, grouped by prompt."""
    by_group: dict[int, list[Row]] = {}
    for row in rows(run, path):
        by_group.setdefault(row["group"], []).append(row)
    return [Group(int(members[0].get("step") or 0), number, members) for number, members in by_group.items()]


def search(run: RunDir, matches: Callable[[Row], bool]) -> Matches:
    """Search all steps, the latest first, until the time or the number of rows is used up."""
    files, end = list(steps(run).values()), time.monotonic() + SEARCH_SECONDS
    hits: list[Row] = []
    broken: list[str] = []
    read_files = 0
    for path in reversed(files):
        if read_files and (time.monotonic() > end or len(hits) >= MOST_MATCHES):
            break
        read_files += 1
        try:
            hits += [row for row in rows(run, path) if matches(row)]
        except RunError as error:
            broken.append(str(error))
    return Matches(hits[:MOST_MATCHES], read_files, len(files), broken)


def read(path: Path) -> list[Row]:
    """Read the rows of a Parquet file. Raises `RunError` if it cannot be read."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table: list[Row] = file.read(use_threads=False).to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise RunError(f"{path.name} cannot be read: {error}") from None
    return table


@functools.lru_cache(maxsize=24)
def _prepared(path: Path, changed: int, size: int, factors: tuple[float, ...], group_size: int) -> list[Row]:
    table = read(path)
    names = components(table[0]) if table else []
    if len(factors) != len(names):
        factors = (1.0,) * len(names)
    for number, row in enumerate(table):
        row["row"] = number
    for number, members in enumerate(split(table, group_size)):
        for row in members:
            values = [
                factor * value
                for name, factor in zip(names, factors, strict=True)
                if isinstance(value := row.get(f"reward/{name}"), (int, float))
            ]
            row |= {"total": sum(values) if values else None, "group": number}
    return table


def weights(run: RunDir) -> Sequence[float]:
    """Return the weights of the reward's components in training; [] if env.json has none."""
    arguments = read_json(run.env).get("trainer_arguments") or {}
    return [float(weight) for weight in arguments.get("reward_weights") or ()]


def _group_size(run: RunDir) -> int:
    try:
        match = re.search(r"^\s+num_generations:\s*(\d{1,6})\s*$", run.config.read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return 0
    return int(match[1]) if match else 0
