"""Pictures of rows: allowed places, refused files, and prompts that differ only in their pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from kit.data import load_data
from kit.data.images import digest, read_pictures
from kit.errors import DataError


def png(shade: int) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (4, 3), (shade, 0, 0)).save(made, format="PNG")
    return made.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(png(200))
    (tmp_path / "dark.png").write_bytes(png(20))
    return tmp_path


def lines(folder: Path, *images: object, column: str = "image") -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "What is it?", column: image}) + "\n" for image in images))
    return path


def test_paths_count_from_the_source_and_one_question_has_many_pictures(folder, config):
    split = load_data(config(lines(folder, "red.png", "dark.png", "red.png"), heldout=1))
    # Three rows, two prompts: equal questions about equal pictures are one prompt and stay on one side.
    assert split.info["rows"]["heldout"] == 1
    assert split.info["rows"]["train"] + split.info["rows"]["heldout_duplicates"] == 2
    assert split.info["mapping"]["images"] == "image"
    assert split.train[0]["images"][0].size == (4, 3)


def test_lists_bytes_and_stored_images_are_read_alike(folder):
    content = png(200)
    for value in (
        "red.png",
        ["red.png"],
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "red.png"},
    ):
        assert digest(read_pictures(value, "image", folder)) == digest(read_pictures("red.png", "image", folder))
    assert digest(read_pictures(["red.png", "dark.png"], "image", folder)) != digest(
        read_pictures(["dark.png", "red.png"], "image", folder)
    )
    assert read_pictures(None, "image", folder) == read_pictures([], "image", folder) == []


def test_what_is_no_picture_is_named_with_its_row(folder, config):
    (folder / "torn.png").write_bytes(b"not a png")
    with pytest.raises(DataError) as caught:
        load_data(config(lines(folder, "red.png", "nowhere.png", "torn.png", 7), heldout=0))
    message = str(caught.value)
    assert "row 2: picture 1 of 'image': there is no file nowhere.png" in message
    assert "row 3: picture 1 of 'image' cannot be read as a picture" in message
    assert "row 4: picture 1 of 'image' is of type int" in message
    assert "data.image_column: none ignores 'image'" in message


def test_a_column_of_that_name_can_be_left_out_and_another_be_chosen(folder, config):
    path = lines(folder, "red.png", "dark.png")
    assert "images" not in load_data(config(path, heldout=0, image_column="none")).train.column_names
    path = lines(folder, "red.png", "dark.png", column="photo")
    assert "images" in load_data(config(path, heldout=0, image_column="photo")).train.column_names
    with pytest.raises(DataError, match=r"data\.image_column: there is no column 'foto'"):
        load_data(config(path, heldout=0, image_column="foto"))
