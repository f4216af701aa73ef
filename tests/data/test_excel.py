"""Excel workbooks: read like any other file, and harmless whatever they hold."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from kit.data import load_data
from kit.errors import DataError


def workbook(path: Path, *rows: list[Any], sheets: dict[str, list[list[Any]]] | None = None) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, content in (sheets or {"Sheet": list(rows)}).items():
        sheet = book.create_sheet(title)
        for row in content:
            sheet.append(row)
    book.save(path)
    return path


def replaced(path: Path, part: str, change: Any) -> Path:
    """The workbook with one of its XML parts changed."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts[part] = change(parts[part])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def test_the_first_sheet_with_cells_is_read(tmp_path, config):
    path = workbook(
        tmp_path / "rows.xlsx",
        sheets={"empty": [], "data": [["question", "answer"], ["1+1?", 2], [], ["2*3?", 6.5]], "more": [["x"]]},
    )
    split = load_data(config(path))
    assert [(row["prompt"][0]["content"], row["reference"]) for row in split.train] == [("1+1?", "2"), ("2*3?", "6.5")]
    assert split.info["notes"] == ["The sheet 'data' is read; left out: empty, more."]


def test_formulas_are_read_as_excel_saved_them_and_never_computed(tmp_path, config):
    path = workbook(tmp_path / "f.xlsx", ["question", "answer"], ["1+1?", "2"], ["3?", "=1+2"])
    change = lambda xml: xml.replace(b"<v />", b"<v>777</v>").replace(b"<v></v>", b"<v>777</v>")  # noqa: E731
    replaced(path, "xl/worksheets/sheet1.xml", change)
    assert load_data(config(path)).train["reference"][:] == ["2", "777"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["question", None, "x"], ["a", "b", "c"]], "has to name every column"),
        ([["question", "question"], ["a", "b"]], "each differently"),
        ([["=A9", "=B9"], ["a", "b"]], "has to name every column"),
        ([[], [], [None, "question", "answer"], [None, "1+1?", 2]], "from A1 on. Seen in row 3: , question, answer"),
        ([["question"], ["a", "b"]], "row 2: it has values beyond the 1 named"),
    ],
)
def test_a_table_that_is_none_says_so(tmp_path, config, rows, message):
    with pytest.raises(DataError, match=message):
        load_data(config(workbook(tmp_path / "t.xlsx", *rows)))
