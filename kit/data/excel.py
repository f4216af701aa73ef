"""Excel workbooks (.xlsx) as records: the first sheet with cells, its first row as column names. Needs openpyxl.

A workbook is a zip file, and a small one may stand for gigabytes: what its parts unpack to is looked at first. Formulas are
not computed: the values that Excel saved beside them are read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.data.rows import Fault, Record, Source
from kit.errors import DataError, EnvironmentUnsupported
from kit.runs.files import one_line

MOST_UNPACKED = 512 * 1024**2
"""Bytes that all parts of a workbook may have, unpacked."""
MOST_COLUMNS, LAST_ROW = 1000, 1_048_576
"""Columns that are read at most, and the last row that Excel has: a damaged file may number further ones."""


def read_excel(path: Path, file: str | None) -> Source:
    """Reads the first sheet with cells; rows are numbered as in Excel. Raises `DataError` for what is no workbook,
    `EnvironmentUnsupported` without openpyxl."""
    check_size(path)
    try:
        import openpyxl
    except ImportError:
        raise EnvironmentUnsupported(
            f"{path.name} is an Excel workbook, which openpyxl reads: pip install openpyxl (or 'grpo-kit[excel]'), or save "
            "the sheet as CSV UTF-8."
        ) from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, keep_links=False, data_only=True)
        try:
            name, head, rows = next(filter(lambda table: table[1], map(_table, book.worksheets)), ("", None, []))
            others = [title for title in book.sheetnames if title != name]
        finally:
            book.close()
    except Exception as error:  # a damaged workbook makes the parser raise whatever it stumbles over
        raise DataError(
            f"{path.name} is not a workbook that can be read ({one_line(f'{type(error).__name__}: {error}', 200)}). Save it as "
            ".xlsx or as CSV UTF-8."
        ) from None
    if head is None:
        return Source([], [], 0)
    number, header = head
    names = ["" if value is None else str(value).strip() for value in header]
    while names and not names[-1]:
        names.pop()
    if number != 1 or not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{path.name}: row 1 of the sheet '{name}' has to name every column, each differently, from A1 on. Seen in row "
            f"{number}: {one_line(', '.join(names), 200)}."
        )
    records: list[Record | Fault] = []
    for number, row in rows:
        if any(value is not None for value in row[len(names) :]):
            records.append(Fault(number, f"it has values beyond the {len(names)} named columns", file))
        else:
            cells = dict.fromkeys(names) | dict(zip(names, map(_plain, row), strict=False))
            records.append(Record(number, cells, file))
    notes = [f"The sheet '{name}' is read; left out: {one_line(', '.join(others), 200)}."] if others else []
    return Source(records, names, len(records), notes=notes)


def check_size(path: Path) -> None:
    """Raises `DataError` for a file that is no zip, or whose parts unpack to more than is taken.

    The declared sizes suffice: zipfile gives no more of a part than it declares.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError) as error:
        raise DataError(
            f"{path.name} is not an Excel workbook (.xlsx), which is a zip file ({one_line(str(error), 150)}). An old .xls: save "
            "it as .xlsx."
        ) from None
    if size > MOST_UNPACKED:
        raise DataError(
            f"{path.name} unpacks to more than {MOST_UNPACKED // 1024**2} MiB, which a table of prompts does not (a zip bomb "
            "does). It was not read. Save the sheet as CSV or Parquet if it is meant so."
        )


Row = tuple[int, tuple[Any, ...]]
"""Number and values."""


def _table(sheet: Any) -> tuple[str, Row | None, list[Row]]:
    """A sheet's title, its first row with values, and the rows with values below."""
    head = next(_rows(sheet, 1, MOST_COLUMNS), None)
    if head is None:
        return sheet.title, None, []
    width = max(column for column, value in enumerate(head[1], start=1) if value is not None)
    return sheet.title, head, list(_rows(sheet, head[0] + 1, width + 1))  # a column more: values there are a fault


def _rows(sheet: Any, first: int, columns: int) -> Iterator[Row]:
    """The rows that hold values, from row `first` on. What the sheet says of its own size is not believed."""
    if not hasattr(sheet, "reset_dimensions"):  # a chart on a page of its own
        return
    sheet.reset_dimensions()
    rows = sheet.iter_rows(min_row=first, max_row=LAST_ROW, max_col=columns, values_only=True)
    for number, row in enumerate(rows, start=first):
        if row.count(None) < len(row):
            yield number, row


def _plain(value: Any) -> Any:
    """Numbers, texts and truth values as they are; dates and times as ISO text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
