"""All file types give the same rows, and a broken file gives an error with the reason."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.data import load_data
from kit.errors import DataError

ROWS = [
    {"question": "1+1?", "answer": "2", "topic": "sum"},
    {"question": "2*3?", "answer": "6", "topic": "product"},
    {"question": "Größe «π»?", "answer": "3,14", "topic": None},
]
EXPECTED = [
    {"prompt": [{"role": "user", "content": row["question"]}], "reference": row["answer"], "topic": row["topic"]}
    for row in ROWS
]


def write(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text('question,answer,topic\n1+1?,2,sum\n2*3?,6,product\nGröße «π»?,"3,14",\n', encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, config, suffix):
    split = load_data(config(write(tmp_path / f"rows{suffix}")))
    own = [{"answer": row["reference"], "question": row["prompt"][0]["content"]} for row in EXPECTED]
    assert split.train.to_list() == [row | columns for row, columns in zip(EXPECTED, own, strict=True)]
    assert split.info["columns"] == ["prompt", "reference", "topic", "answer", "question"]
    assert split.info["mapping"] == {"prompt": "question", "reference": "answer", "rename": {}}
    assert split.info["rows"] == {
        "read": 3, "used": 3, "train": 3, "heldout": 0, "heldout_duplicates": 0, "skipped": 0, "too_long": 0,
        "without_reference": 0,
    }  # fmt: skip


def test_parameters_of_a_task_are_named_if_the_source_is_a_file(tmp_path, config):
    source = write(tmp_path / "rows.csv")
    assert not any("task_params" in note for note in load_data(config(source)).info["notes"])
    notes = load_data(config(source, task_params={"min_terms": 2})).info["notes"]
    assert any("data.task_params has no effect" in note for note in notes)


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path, config):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [row[0]["content"] for row in load_data(config(path)).train["prompt"]] == ["a", "b"]


def test_a_column_without_a_common_type_becomes_json_text(jsonl, config):
    path = jsonl(
        {"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}, {"prompt": "c", "x": {"k": [1]}}, {"prompt": "d"}
    )
    split = load_data(config(path))
    assert split.train["x"][:] == ["1", '"one"', '{"k": [1]}', None]
    assert "'x'" in split.info["notes"][0]


def test_parquet_keeps_images_undecoded_and_names_class_labels(tmp_path, config):
    from datasets import ClassLabel, Dataset, Features, Image, Value
    from PIL import Image as Picture

    png = io.BytesIO()
    Picture.new("RGB", (2, 3)).save(png, format="PNG")
    image = {"bytes": png.getvalue(), "path": None}
    features = Features({"prompt": Value("string"), "image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    rows = Dataset.from_dict({"prompt": ["a", "b"], "image": [image, image], "label": [1, -1]}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    train = load_data(config(tmp_path / "rows.parquet")).train
    assert train["reference"][:] == ["dog", None]
    assert "image" not in train.column_names
    assert train[0]["images"][0].size == (2, 3)
    assert train.to_list()[0]["images"] == [image]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_semicolons_and_tabs_separate_where_there_is_no_comma(tmp_path, config, separator):
    path = tmp_path / "rows.csv"
    path.write_text(f"question{separator}answer\n1+1, quickly?{separator}2\n", encoding="utf-8")
    assert load_data(config(path)).train.to_list()[0] == {
        "prompt": [{"role": "user", "content": "1+1, quickly?"}], "reference": "2", "answer": "2",
        "question": "1+1, quickly?",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"rows": []}', "contains a dict with the keys rows; expected a list of objects"),
        ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}', r"rename it to \.jsonl"),
        ("a.json", b"[1, 2", "not valid JSON"),
        ("a.json", b'["\xff"]', "not UTF-8 at byte 2, in line 1. Save"),
        ("a.csv", "prompt\nGröße\n".encode() + b"caf\xe9\n", "not UTF-8 .* in line 3"),
        ("a.csv", b'prompt,answer\na,1\n"b,2\nc,3\n', "CSV near line 3: a quote is opened there but not closed"),
        ("a.csv", b'prompt,answer\n"a"b,1\n', "CSV near line 2: ',' expected"),
        ("a.csv", b"a,a\n1,2", "two columns with the same name"),
        ("a.csv", b"prompt\n" + b"x" * 140_000, "not valid CSV near line 2"),
        ("a.parquet", b"no parquet", "not valid Parquet"),
        ("a.txt", b"text", r"files of type '\.txt' are not supported. Types: \.jsonl"),
        ("a.jsonl.gz", b"text", r"'\.gz'"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, config, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(config(tmp_path / name))
