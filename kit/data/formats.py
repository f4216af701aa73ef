"""A source to records: JSONL, JSON, CSV and Parquet here, folders, hub ids and tasks in their modules."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kit.data.rows import Fault, Record, Source
from kit.errors import DataError

TASK_PREFIX = "reasoning-gym:"


def read_files(paths: Sequence[Path]) -> Source:
    """The records of files of one kind, in the given order. Raises `DataError` for a kind that is not known."""
    several = len(paths) > 1
    parts = [_reader(path)(path, path.name if several else None) for path in paths]
    same = all(part.features == parts[0].features for part in parts)
    return Source(
        records=chain.from_iterable(part.records for part in parts),
        columns=list(dict.fromkeys(column for part in parts for column in part.columns)),
        total=sum(part.total for part in parts),
        features=parts[0].features if same else {},
        files=[path.name for path in paths],
    )


def read_jsonl(path: Path, file: str | None) -> Source:
    """One JSON object a line; blank lines are passed over. Broken lines are faults, numbered as editors do."""
    records: list[Record | Fault] = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_as_record(json.loads(line.decode()), number, file))
        except UnicodeDecodeError:
            records.append(Fault(number, "the line is not UTF-8", file))
        except json.JSONDecodeError as error:
            records.append(Fault(number, f"broken JSON: {error.msg} at column {error.colno}", file))
        except (ValueError, RecursionError) as error:
            records.append(Fault(number, f"broken JSON: {error}", file))
    return _listed(records)


def read_json(path: Path, file: str | None) -> Source:
    """A list of JSON objects. Raises `DataError` for anything else at the top."""
    text = _read_text(path)
    if not text.strip():
        return _listed([])
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = " Its lines look like JSON Lines: call it .jsonl." if text.lstrip().startswith("{") else ""
        raise DataError(f"{path} is not valid JSON: {error}.{lines}") from None
    if not isinstance(items, list):
        keys = f" with the keys {', '.join(items)}" if isinstance(items, dict) else ""
        raise DataError(f"{path} holds one {type(items).__name__}{keys}; expected a list of objects.")
    return _listed([_as_record(item, number, file) for number, item in enumerate(items, start=1)])


def read_csv(path: Path, file: str | None) -> Source:
    """Comma-separated with a header line, UTF-8. Values are text; an empty one is None. Row 1 follows the header."""
    rows = csv.reader(io.StringIO(_read_text(path), newline=""))
    records: list[Record | Fault] = []
    header: list[str] = []
    try:
        header = next(rows, [])
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) == len(header):
                records.append(
                    Record(number, {name: text or None for name, text in zip(header, row, strict=True)}, file)
                )
            else:
                records.append(Fault(number, f"{len(row)} values, but the header has {len(header)} columns", file))
    except csv.Error as error:
        raise DataError(
            f"{path} is not valid CSV near line {rows.line_num}: {error}. JSONL has no such limits."
        ) from None
    if len(set(header)) < len(header):
        raise DataError(f"{path} has two columns of one name: {', '.join(header)}.")
    return Source(records, header, len(records))


def read_parquet(path: Path, file: str | None) -> Source:
    """Parquet, read in batches. Column types of `datasets` are kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    from kit.data import arrow

    try:
        with pq.ParquetFile(path) as parquet:
            schema, total = parquet.schema_arrow, parquet.metadata.num_rows
    except pa.ArrowException as error:
        raise DataError(f"{path} is not valid Parquet: {error}.") from None
    try:
        features = dict(Features.from_arrow_schema(schema))
    except (TypeError, ValueError):  # an Arrow type that `datasets` has no name for
        features = {}

    def batches() -> Iterator[Any]:
        try:
            with pq.ParquetFile(path) as parquet:
                yield from parquet.iter_batches(arrow.BATCH)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged: {error}.") from None

    return Source(arrow.records(batches(), features, file), schema.names, total, arrow.storable(features))


READERS: dict[str, Callable[[Path, str | None], Source]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _reader(path: Path) -> Callable[[Path, str | None], Source]:
    try:
        return READERS[path.suffix.lower()]
    except KeyError:
        raise DataError(
            f"{path}: files of kind '{path.suffix or 'no suffix'}' are not read. Kinds: {', '.join(READERS)}."
        ) from None


def _as_record(item: Any, number: int, file: str | None) -> Record | Fault:
    if isinstance(item, dict):
        return Record(number, item, file)
    return Fault(number, f"a JSON {type(item).__name__}; expected an object with named columns", file)


def _listed(records: list[Record | Fault]) -> Source:
    columns = dict.fromkeys(name for record in records if isinstance(record, Record) for name in record.values)
    return Source(records, list(columns), len(records))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None
