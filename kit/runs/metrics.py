"""The numbers of a run: metrics.jsonl by column, with a cache that makes long files fast; steps of lines and evaluations.

Parsing JSON is slow, so parsed numbers are cached in .metrics/ beside the file: blocks of `LINES` lines, each with the checksum
of the bytes that it was parsed from. A block with another checksum is parsed again, and the folder can be deleted at any time.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from kit.errors import RunError
from kit.runs.files import parse_lines

LINES = 2000
METRICS_FOLDER = ".metrics"
Columns = dict[str, "array.array[float]"]


class Block(NamedTuple):
    """Numbers of some lines in a row: `columns` of `lines` values each, from `size` bytes with checksum `crc`."""

    size: int
    crc: int
    lines: int
    columns: Columns


class MetricsCache:
    """The columns of one metrics file."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent / METRICS_FOLDER
        self._kept = self._offset = 0  # blocks that `keep_up` knows of, and where they end

    def load(self) -> Columns:
        """Every number of every whole line by its key, NaN where a line has none; {} without a file.

        Raises `RunError` when the file cannot be read, or a line before the last is broken.
        """
        columns: Columns = {}
        try:
            with open(self.path, "rb") as file:
                lines = 0
                for index in itertools.count():
                    block = self._block(file, index, lines)
                    _append(columns, block, lines)
                    lines += block.lines
                    if block.lines < LINES:
                        return columns
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        return columns

    def keep_up(self) -> None:
        """Caches the blocks that have become full since the last call. Damaged lines are reported by `load`."""
        with contextlib.suppress(OSError, RunError), open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._kept = self._offset = 0  # the file was cut: its blocks are looked at again
            while True:
                file.seek(self._offset)
                block = self._block(file, self._kept, self._kept * LINES)
                if block.lines < LINES:
                    return
                self._kept, self._offset = self._kept + 1, self._offset + block.size

    def _block(self, file: BinaryIO, index: int, before: int) -> Block:
        """The block at the file's position, kept or parsed; the position is moved behind it."""
        start, kept = file.tell(), _read(self.folder / f"{index:06}")
        if kept is not None:
            if zlib.crc32(data := file.read(kept.size)) == kept.crc and len(data) == kept.size:
                return kept
            file.seek(start)
        lines = list(itertools.islice(file, LINES))
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        data = b"".join(lines)
        block = Block(len(data), zlib.crc32(data), len(lines), _numbers(parse_lines(lines, self.path, before + 1)))
        if block.lines == LINES:
            _write(self.folder / f"{index:06}", block)
        return block


def _numbers(records: list[dict[str, Any]]) -> Columns:
    columns = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(records)):
        values = [record.get(key, math.nan) for record in records]
        try:
            columns[key] = array.array("d", values)
        except (TypeError, OverflowError):  # null, or no number
            numbers = [value if isinstance(value, (int, float)) else math.nan for value in values]
            if not all(map(math.isnan, numbers)):
                columns[key] = array.array("d", numbers)
    return columns


def _append(columns: Columns, block: Block, before: int) -> None:
    for key, found in block.columns.items():
        column = columns.setdefault(key, array.array("d"))
        column.extend(itertools.repeat(math.nan, before - len(column)))
        column.extend(found)
    for column in columns.values():
        column.extend(itertools.repeat(math.nan, before + block.lines - len(column)))


def _read(path: Path) -> Block | None:
    """A cached block; None where there is none, or it is damaged."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        size, crc, lines, keys = json.loads(head)
        if len(body) != 8 * lines * len(keys) or lines != LINES:
            return None
        view = memoryview(body)
        parts = (view[place : place + 8 * lines] for place in range(0, len(body), 8 * lines))
        return Block(
            size, crc, lines, {key: array.array("d", part.tobytes()) for key, part in zip(keys, parts, strict=True)}
        )
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, block: Block) -> None:
    """Caches a block atomically; a disk error is ignored."""
    head = json.dumps([block.size, block.crc, block.lines, list(block.columns)]).encode() + b"\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(head + b"".join(column.tobytes() for column in block.columns.values()))
        os.replace(temporary, path)


Point = tuple[float, float]
Metrics = Sequence[Mapping[str, Any]]
Evaluations = Mapping[str, Mapping[str, Any]]
ENDS = ("low", "value", "high")
"""Of an estimate with its 95 % interval."""


def points(metrics: Metrics, *names: str, factor: float = 1.0) -> list[Point]:
    """(step, value) of the first of `names` that has any, by step; lines without it or with no finite value left out."""
    for name in names:
        values = {
            float(line.get("step", place)): factor * line[name]
            for place, line in enumerate(metrics, 1)
            if is_number(line.get(name))
        }
        if values:
            return sorted(values.items())
    return []


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def step_of(name: str, last: int) -> int | None:
    """The optimiser step of an evaluation by its name: `before`, `step-00050`, `after`; None for any other."""
    number = name.removeprefix("step-")
    return {"before": 0, "after": last}.get(name, int(number) if number.isdigit() else None)


def placed(metrics: Metrics, evaluations: Evaluations) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, scores) of the evaluations that belong to a step, in order; those made anew later are none of them."""
    last = last_step(metrics)
    steps = {name: step_of(name, last) for name in evaluations}
    # What an evaluation says of itself counts more than its name.
    known = {
        name: int(scores["step"]) if is_number(scores.get("step")) else steps[name]
        for name, scores in evaluations.items()
        if steps[name] is not None
    }
    chosen = [(step, evaluations[name]) for name, step in known.items() if step is not None]
    return sorted(chosen, key=lambda pair: pair[0])


def result_of(evaluations: Evaluations, last: int = 0) -> str | None:
    """The name of the evaluation of a run's result: `after` where there is one, else that of the latest step.

    After a rollback `after` is of an earlier step than others, whose weights were thrown away. `last` is the run's last
    step. None where nothing was scored after training began.
    """
    if evaluations.get("after"):
        return "after"
    steps = {name: step_of(name, last) for name, scores in evaluations.items() if name != "before" and scores}
    known = [
        (said if is_number(said := evaluations[name].get("step")) else step, name)
        for name, step in steps.items()
        if step is not None
    ]
    return max(known)[1] if known else None


def last_step(metrics: Metrics) -> int:
    """The last optimiser step on record; 0 without one."""
    return max((int(line.get("step") or 0) for line in metrics), default=0)
