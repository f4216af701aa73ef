"""Excel workbooks (.xlsx) as records: the first sheet with cells, its first row as column names. Needs openpyxl.

Formulas are not computed: the values that Excel saved beside them are read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from kit.data.rows import Fault, Record, Source
from kit.errors import DataError, EnvironmentUnsupported
from kit.runs.files import one_line

MOST_UNPACKED = 512 * 1024**2
"""Bytes that all parts of a workbook may have, unpacked: it is a zip file, and a small one may stand for gigabytes."""
LAST_ROW = 1_048_576
"""The last row that Excel has: a damaged file may number further ones."""


def read_excel(path: Path, file: str | None) -> Source:
    """Reads the first sheet with cells; rows are numbered as in Excel. Raises `DataError` for what is no workbook or unpacks to
    more than is taken, `EnvironmentUnsupported` without openpyxl."""
    try:
        with zipfile.ZipFile(path) as archive:  # which gives no more of a part than it declares
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
    import pandas

    try:
        options: dict[str, Any] = {"header": None, "dtype": object, "na_filter": False, "nrows": LAST_ROW}
        sheets = pandas.read_excel(path, sheet_name=None, engine="openpyxl", **options)
    except ImportError:
        raise EnvironmentUnsupported(
            f"{path.name} is an Excel workbook, which openpyxl reads: pip install openpyxl (or 'grpo-kit[excel]'), or save "
            "the sheet as CSV UTF-8."
        ) from None
    except Exception as error:  # a damaged workbook makes the parser raise whatever it stumbles over
        raise DataError(
            f"{path.name} is not a workbook that can be read ({one_line(f'{type(error).__name__}: {error}', 200)}). Save it as "
            ".xlsx or as CSV UTF-8."
        ) from None
    title = next((title for title, sheet in sheets.items() if not sheet.empty), None)
    if title is None:
        return Source([], [], 0)
    table = [[_plain(value) for value in row] for row in sheets[title].itertuples(index=False)]
    numbered = [(number, row) for number, row in enumerate(table, start=1) if row.count(None) < len(row)]
    (first, header), *rows = numbered
    names = ["" if value is None else str(value).strip() for value in header]
    while names and not names[-1]:
        names.pop()
    if first != 1 or not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{path.name}: row 1 of the sheet '{title}' has to name every column, each differently, from A1 on. Seen in row "
            f"{first}: {one_line(', '.join(names), 200)}."
        )
    records: list[Record | Fault] = []
    for number, row in rows:
        if any(value is not None for value in row[len(names) :]):
            records.append(Fault(number, f"it has values beyond the {len(names)} named columns", file))
        else:
            records.append(Record(number, dict(zip(names, row, strict=False)), file))
    others = [name for name in sheets if name != title]
    notes = [f"The sheet '{title}' is read; left out: {one_line(', '.join(others), 200)}."] if others else []
    return Source(records, names, len(records), notes=notes)


def _plain(value: Any) -> Any:
    """Numbers, texts and truth values as they are; dates and times as ISO text; None for an empty cell and an error."""
    if value is None or value == "" or value != value:
        return None
    if isinstance(value, (str, int, float)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
