"""Excel workbooks: read like any other file, and harmless whatever they hold."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from kit.data import load_data, sources
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


def bomb(path: Path, size: int) -> Path:
    """A workbook with a part of so many equal bytes."""
    workbook(path, ["question"], ["1+1?"])
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/media/x.bin", b"0" * size)
    return path


def test_a_zip_bomb_is_refused_before_it_is_read(tmp_path, config, monkeypatch):
    path = bomb(tmp_path / "bomb.xlsx", 3 * 1024**2)
    assert path.stat().st_size < 20_000
    assert len(load_data(config(path)).train) == 1
    monkeypatch.setattr(sources, "MOST_UNPACKED", 2 * 1024**2)
    with pytest.raises(DataError, match="unpacks to more than 2 MiB"):
        load_data(config(path))


def test_entities_that_multiply_are_refused(tmp_path, config):
    names = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    laughs = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "ha">{names}]>'.encode()
    path = workbook(tmp_path / "laughs.xlsx", ["question"], ["1+1?"])
    replaced(path, "xl/workbook.xml", lambda xml: laughs + xml.partition(b"?>")[2].replace(b"Sheet", b"&e11;", 1) if b"?>" in xml
             else laughs + xml.replace(b'name="Sheet"', b'name="&e11;"'))  # fmt: skip
    with pytest.raises(DataError, match="is not a workbook that can be read"):
        load_data(config(path))


def test_rows_beyond_the_last_are_not_made_up(tmp_path, config):
    path = workbook(tmp_path / "far.xlsx", ["question"], ["1+1?"], ["2+2?"])
    replaced(path, "xl/worksheets/sheet1.xml", lambda xml: xml.replace(b'r="3"', b'r="999999999999"'))
    assert len(load_data(config(path)).train) == 1


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
