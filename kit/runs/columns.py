"""The numbers of metrics.jsonl by column, for charts: a hundred thousand steps in well under a second.

Parsing JSON is what takes long, so numbers once parsed are kept beside the file, in .metrics/: blocks of `LINES` lines, each
with the checksum of the bytes that it stands for. A block whose checksum does not fit is made anew, and the folder can be
deleted at any time.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kit.errors import RunError
from kit.runs.files import parse_lines

LINES = 2000
FOLDER = ".metrics"
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
        self.path, self.folder = path, path.parent / FOLDER
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
        """Keeps the blocks that have become full since the last call; faults are left to those who read."""
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
    """A kept block; None where there is none, or it is not whole."""
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
    """Keeps a block, if the disk lets; whoever reads it meanwhile sees all of it or nothing."""
    head = json.dumps([block.size, block.crc, block.lines, list(block.columns)]).encode() + b"\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(head + b"".join(column.tobytes() for column in block.columns.values()))
        os.replace(temporary, path)
