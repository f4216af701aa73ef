"""Excel workbooks (.xlsx) as records: the first sheet with cells, its first row as column names. Needs openpyxl.

A workbook is a zip file, and a small one may stand for gigabytes. Its parts are unpacked once, counted and thrown away,
before anything is read. Formulas are not computed: what Excel computed and saved beside them is read, and of a cell
without it the row says so. Macros, links and whatever else a workbook carries are not looked at.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kit.data.rows import Fault, Record, Source
from kit.errors import DataError, EnvironmentUnsupported

MOST_UNPACKED = 512 * 1024**2
"""Bytes that all parts of a workbook may have, unpacked."""
MOST_PARTS = 2000
MOST_COLUMNS, LAST_ROW = 1000, 1_048_576
"""Columns that are read at most, and the last row that Excel has: a damaged file may number further ones."""
CHUNK = 1024**2


def read_excel(path: Path, file: str | None) -> Source:
    """Row 1 holds the names; rows are numbered as Excel numbers them. Raises `DataError` for what is no honest workbook,
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
        # Twice: once with what Excel has computed, once with the formulas themselves, so that neither stands for the other.
        books = [
            openpyxl.load_workbook(path, read_only=True, keep_links=False, data_only=data_only)
            for data_only in (True, False)
        ]
        try:
            sheets = books[1].worksheets
            name, begin = next(((sheet.title, cell) for sheet in sheets if (cell := _first_cell(sheet))), ("", None))
            if begin is None:
                return Source([], [], 0)
            if begin[0] > 1:
                raise DataError(
                    f"{path.name}: row 1 is empty; put the column names there, from A1 on. The table of the sheet '{name}' "
                    f"begins at {openpyxl.utils.get_column_letter(begin[1])}{begin[0]}."
                )
            names = _header(next(_table(books[0][name], 1, MOST_COLUMNS)), path)
            # A column more than is named: values there are a fault.
            computed, written = (_table(book[name], LAST_ROW, len(names) + 1) for book in books)
            source = _rows(names, computed, written, path, file)
        finally:
            for book in books:
                book.close()
    except (DataError, EnvironmentUnsupported):
        raise
    except Exception as error:  # a damaged workbook makes the parser raise whatever it stumbles over
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path.name} is not a workbook that can be read ({words}). Save it as .xlsx or as CSV UTF-8."
        ) from None
    others = [sheet.title for sheet in sheets if sheet.title != name]
    if others:
        source.notes.append(f"The sheet '{name}' is read; left out: {', '.join(others)[:200]}.")
    return source


def check_size(path: Path) -> None:
    """Raises `DataError` for a file that is no zip, or whose parts unpack to more than is taken, whatever they declare."""
    too_much = (
        f"{path.name} unpacks to more than {MOST_UNPACKED // 1024**2} MiB, which a table of prompts does not (a zip bomb does). "
        "It was not read. Save the sheet as CSV or Parquet if it is meant so."
    )
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if len(parts) > MOST_PARTS or sum(part.file_size for part in parts) > MOST_UNPACKED:
                raise DataError(too_much)
            left = MOST_UNPACKED
            for part in parts:  # of each zipfile gives no more than it declares, and says so where there is more
                with archive.open(part) as stream:
                    while chunk := stream.read(CHUNK):
                        left -= len(chunk)
                        if left < 0:
                            raise DataError(too_much)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:150]
        raise DataError(
            f"{path.name} is not an Excel workbook (.xlsx), which is a zip file ({words}). An old .xls: save it as .xlsx."
        ) from None


def _table(sheet: Any, last: int, columns: int) -> Iterator[tuple[Any, ...]]:
    """The rows of a sheet as values. What the sheet says of its own size is not believed."""
    if not hasattr(sheet, "reset_dimensions"):  # a chart on a page of its own
        return iter(())
    sheet.reset_dimensions()
    return iter(sheet.iter_rows(max_row=last, max_col=columns, values_only=True))


def _first_cell(sheet: Any) -> tuple[int, int] | None:
    """[row, column] of the first cell with a value, counted from 1."""
    for number, row in enumerate(_table(sheet, LAST_ROW, MOST_COLUMNS), start=1):
        if row.count(None) < len(row):
            return number, next(column for column, value in enumerate(row, start=1) if value is not None)
    return None


def _header(row: tuple[Any, ...], path: Path) -> list[str]:
    header = list(row)
    while header and header[-1] is None:
        header.pop()
    names = ["" if value is None else str(value).strip() for value in header]
    if not names or not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{path.name}: the first row has to name every column, each differently. Seen: {', '.join(names)[:200] or 'nothing'}."
        )
    return names


def _rows(names: list[str], computed: Iterator[Any], written: Iterator[Any], path: Path, file: str | None) -> Source:
    next(computed, None)
    next(written, None)
    records: list[Record | Fault] = []
    formulas = 0
    for number, (values, raw) in enumerate(zip_longest(computed, written, fillvalue=()), start=2):
        if all(value is None for value in raw):
            continue
        cells = dict.fromkeys(names)
        fault = ""
        for name, value, text in zip(names, values, raw, strict=False):
            if isinstance(text, str) and text.startswith("=") and value != text:
                formulas += 1
                if value is None:
                    fault = (
                        fault
                        or f"'{name}' is a formula ({text[:40]}) without a saved value; save the file in Excel once"
                    )
            cells[name] = _plain(value)
        if any(value is not None for value in raw[len(names) :]):
            fault = fault or f"it has values beyond the {len(names)} named columns"
        records.append(Fault(number, fault, file) if fault else Record(number, cells, file))
    notes = []
    if formulas:
        notes.append(
            f"{formulas} cells of {path.name} are formulas: the values that Excel saved are read, nothing is computed."
        )
    return Source(records, names, len(records), notes=notes)


def _plain(value: Any) -> Any:
    """Numbers, texts and truth values as they are; dates and times as ISO text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
