"""Roles of columns, and the errors for columns that have none."""

from __future__ import annotations

import pytest

from kit.data import load_data
from kit.errors import DataError


def test_the_first_known_name_wins_and_the_others_stay(jsonl, config):
    train = load_data(config(jsonl({"problem": "p", "question": "q", "solution": "s", "answer": "a"}))).train
    assert train[0] == {
        "prompt": [{"role": "user", "content": "q"}], "reference": "a", "problem": "p", "solution": "s", "answer": "a",
        "question": "q",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (0.5, "0.5"), (True, "true"), (None, None), ("", ""), ([1, "a"], '[1, "a"]'), ({"k": 1}, '{"k": 1}')],
)
def test_references_become_text(jsonl, config, value, text):
    assert load_data(config(jsonl({"prompt": "a", "answer": value}))).train[0]["reference"] == text


def test_renamed_columns_reach_the_reward_under_our_name(jsonl, config):
    path = jsonl({"question": "q", "answer": "a", "unit_tests": "t", "completions": "c"})
    split = load_data(config(path, rename={"unit_tests": "tests", "answer": "worked", "completions": "samples"}))
    assert split.train[0] == {
        "prompt": [{"role": "user", "content": "q"}], "reference": "a", "answer": "a",
        "question": "q", "worked": "a", "tests": "t", "samples": "c",
    }  # fmt: skip
    assert split.info["mapping"]["rename"] == {"unit_tests": "tests", "answer": "worked", "completions": "samples"}


def test_columns_whose_name_is_taken_are_left_out_with_a_note(jsonl, config):
    path = jsonl({"prompt": "old", "text": "t", "completions": "c", "reference": "r", "gold": "g"})
    split = load_data(config(path, prompt_column="text", reference_column="gold"))
    assert split.train.column_names == ["prompt", "reference", "gold", "text"]
    assert split.train[0]["reference"] == "g"
    assert [note.split("'")[1] for note in split.info["notes"]] == ["prompt", "completions", "reference"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_column": "qestion"}, r"data\.prompt_column: there is no column 'qestion'\. Did you mean 'question'"),
        (
            {"reference_column": "anser"},
            r"no column 'anser'\. Did you mean 'answer'\? Columns seen: question, answer, id",
        ),
        ({"rename": {"idx": "number"}}, r"data\.rename: there is no column 'idx'"),
        ({"rename": {"id": "prompt"}}, "'id' cannot be renamed to 'prompt'"),
        ({"rename": {"id": "completions"}}, "'id' cannot be renamed to 'completions'"),
        ({"rename": {"id": "x", "answer": "x"}}, "two columns would have the name 'x'"),
        ({"reference_column": "question"}, "'question' cannot be both prompt and reference"),
    ],
)
def test_a_mapping_that_does_not_work_is_refused(jsonl, config, fields, message):
    with pytest.raises(DataError, match=message):
        load_data(config(jsonl({"question": "q", "answer": "a", "id": 1}), **fields))


def test_columns_of_mixed_types_are_named_with_the_first_row_that_deviates(jsonl, config):
    values = [None, 3, 4.5, "3", 4]
    split = load_data(config(jsonl(*({"prompt": f"{n}", "label": v, "urgency": v} for n, v in enumerate(values)))))
    assert split.train["label"] == [None, "3", "4.5", "3", "4"]
    assert split.train["urgency"] == [None, "3", "4.5", '"3"', "4"]
    label, urgency = split.info["notes"]
    assert label == (
        "Column 'label' has values of type number (first in row 2), str (first in row 4); the reward gets text in all rows."
    )
    assert urgency.startswith(
        "Column 'urgency' has values without a common type (first: \"3\" in row 4), so the reward gets the values of all rows"
    )
