"""Rows with `prompt_ids`: what is read of them, what is refused, and on which side they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.config import DataConfig
from kit.data import load_data
from kit.data.tokens import decode_id_prompts, drop_unknown_ids
from kit.errors import DataError


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def load(folder: Path, *rows: dict[str, Any], **config: Any) -> Any:
    return load_data(DataConfig(source=rows_file(folder, *rows), **{"heldout": 0, **config}))


def as_text(ids: list[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


def as_ids(prompts: list[Any]) -> list[list[int]]:
    return [[int(word[1:]) for word in prompt[0]["content"].split()] for prompt in prompts]


def test_text_messages_and_ids_stand_in_one_dataset(tmp_path: Path) -> None:
    split = load(
        tmp_path,
        {"prompt": "a", "answer": "1"},
        {"messages": [{"role": "user", "content": "b"}], "answer": "2"},
        {"prompt_ids": [5, 6], "answer": "3"},
        {"prompt": "d", "prompt_ids": [7], "answer": "4"},
    )
    assert [row["prompt_ids"] for row in split.train] == [None, None, [5, 6], [7]]
    assert [row["prompt"][0]["content"] for row in split.train] == ["a", "b", "[5, 6]", "d"]
    told = decode_id_prompts(split, as_text, lambda prompts: [[0] for _ in prompts], chat=True)
    assert [row["prompt"][0]["content"] for row in told.train] == ["a", "b", "t5 t6", "d"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt_ids": []}, "'prompt_ids' is empty"),
        ({"prompt_ids": [1, 2.0]}, "2.0 at place 2"),
        ({"prompt_ids": [True]}, "True at place 1"),
        ({"prompt_ids": [1, -1]}, "-1 at place 2"),
        ({"prompt_ids": [1, None]}, "None at place 2"),
        ({"prompt_ids": [2**40]}, "run from 0"),
        ({"prompt_ids": "1 2"}, "of type str"),
        ({"prompt_ids": None}, "'prompt_ids' is missing"),
    ],
)
def test_bad_ids_are_refused_with_the_number_of_the_row(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, {"prompt_ids": [1]}, row)
    assert "row 2: " in str(caught.value)
    assert reason in str(caught.value)
    assert load(tmp_path, {"prompt_ids": [1]}, row, skip_bad_rows=True).info["rows"]["skipped"] == 1


def picture(folder: Path) -> str:
    from PIL import Image

    Image.new("RGB", (4, 3)).save(folder / "one.png")
    return "one.png"


def test_ids_and_pictures_in_one_row_are_refused_with_its_number(tmp_path: Path) -> None:
    both = {"prompt": "a", "prompt_ids": [1], "image": picture(tmp_path)}
    rows = [{"prompt": "b", "prompt_ids": [2], "image": None}, both]
    with pytest.raises(DataError, match=r"row 2: it has ids \('prompt_ids'\) and pictures \('image'\)"):
        load(tmp_path, *rows)
    assert load(tmp_path, *rows, skip_bad_rows=True).train["prompt_ids"] == [[2]]
    assert load(tmp_path, *rows, image_column="none").train["prompt_ids"] == [[2], [1]]


def test_ids_beyond_the_vocabulary_are_refused_or_left_out(tmp_path: Path) -> None:
    split = load(tmp_path, {"prompt_ids": [1]}, {"prompt_ids": [511]}, {"prompt_ids": [2, 512]})
    with pytest.raises(DataError, match=r"row 3: 'prompt_ids' holds 512, beyond the vocabulary of 512"):
        drop_unknown_ids(split, 512, skip=False)
    kept = drop_unknown_ids(split, 512, skip=True)
    assert kept.train["prompt_ids"] == [[1], [511]]
    assert (kept.info["rows"]["skipped"], kept.info["rows"]["used"], kept.info["rows"]["train"]) == (1, 2, 2)
    assert kept.info["bad_rows"][0]["row"] == 3


def test_equal_ids_and_equal_texts_stand_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{index}", "prompt_ids": [index]} for index in range(8)]
    rows += [{"prompt": None, "prompt_ids": [index]} for index in range(8)]
    rows += [{"prompt": f"p{index}", "prompt_ids": None} for index in range(8)]
    split = load(tmp_path, *rows, heldout=3)
    held = {row["prompt"][0]["content"] for row in split.heldout} | {str(row["prompt_ids"]) for row in split.heldout}
    assert len(split.heldout) == 3
    assert split.info["rows"]["heldout_duplicates"] == 6
    for row in split.train:
        assert row["prompt"][0]["content"] not in held
        assert str(row["prompt_ids"]) not in held


def test_training_rows_whose_text_has_the_ids_of_a_held_out_row_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"t{index}"} for index in range(6)] + [{"prompt_ids": [index]} for index in range(6)]
    split = load(tmp_path, *rows, heldout=3)
    told = decode_id_prompts(split, as_text, as_ids, chat=True)
    held = {row["prompt"][0]["content"] for row in told.heldout}
    assert len(split.train) - len(told.train) == told.info["rows"]["heldout_duplicates"] == len(held) == 3
    assert not held & {row["prompt"][0]["content"] for row in told.train}
