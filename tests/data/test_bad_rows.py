"""Rows that cannot be used are counted and reported with number and reason."""

from __future__ import annotations

import pytest

from kit.data import load_data
from kit.errors import DataError

GOOD = {"prompt": "fine", "answer": "1"}
USER = {"role": "user", "content": "hi"}

DEFECTS = [
    ({"answer": "1"}, "'prompt' is missing"),
    ({"prompt": None}, "'prompt' is missing"),
    ({"prompt": ""}, "'prompt' is empty"),
    ({"prompt": " \n\t"}, "'prompt' is empty"),
    ({"prompt": 7}, "'prompt' is of type int"),
    ({"prompt": {"role": "user"}}, "'prompt' is of type dict"),
    ('{"prompt": "a"', "broken JSON"),
    ("[1, 2]", "a JSON list; expected an object"),
    ('"text"', "a JSON str; expected an object"),
    ({"prompt": "a\0b"}, "'prompt' contains a NUL character"),
    ('{"prompt": "\\ud800"}', "'prompt' contains a lone surrogate"),
    ({"prompt": "a", "answer": "\0"}, "'answer' contains a NUL character"),
    ('{"prompt": "a", "meta": {"k": ["\\udfff"]}}', "'the row' contains a lone surrogate"),
    ({"prompt": [USER]}, "'prompt' is a list of messages, while the rows before it have text"),
]
MESSAGE_DEFECTS = [
    ([], "'prompt' has no messages"),
    (["hi"], "message 1 of 'prompt' is of type str"),
    ([{"content": "hi"}], "message 1 of 'prompt' has no role"),
    ([USER, {"role": "assistant"}], "message 2 of 'prompt' has no content"),
    ([{"role": "user", "content": ["hi"]}], "has content of type list"),
    ([{"role": "human", "content": "hi"}], "has the role 'human'; known: system, user"),
    ([{"role": "user", "content": " "}], "message 1 of 'prompt' is empty"),
    ([USER, {"role": "system", "content": "late"}], "message 2 of 'prompt' is a system message"),
    ([{"role": "assistant", "content": "hi"}], "'prompt' has no user message"),
    ([USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "two assistant messages"),
    ([USER, {"role": "assistant", "content": "a\0"}], "'prompt' contains a NUL character"),
    ("text", "'prompt' is text, while the rows before it have a list of messages"),
]


@pytest.mark.parametrize(("line", "reason"), DEFECTS)
def test_a_bad_row_stops_the_run_unless_it_may_be_left_out(jsonl, config, line, reason):
    path = jsonl(GOOD, GOOD, line, GOOD)
    with pytest.raises(DataError) as error:
        load_data(config(path))
    text = str(error.value)
    assert "1 of 4 rows cannot be used" in text
    assert f"row 3: {reason}" in text
    assert "data.skip_bad_rows: true" in text
    info = load_data(config(path, skip_bad_rows=True)).info
    assert (info["rows"]["read"], info["rows"]["used"], info["rows"]["skipped"]) == (4, 3, 1)
    assert (info["bad_rows"][0]["row"], reason in info["bad_rows"][0]["reason"]) == (3, True)


@pytest.mark.parametrize(("messages", "reason"), MESSAGE_DEFECTS)
def test_a_bad_conversation_is_a_bad_row(jsonl, config, messages, reason):
    split = load_data(config(jsonl({"prompt": [USER]}, {"prompt": messages}), skip_bad_rows=True))
    assert split.train.num_rows == 1
    assert reason in split.info["bad_rows"][0]["reason"]


@pytest.mark.parametrize("lines", [[{"prompt": ""}, {"prompt": " "}], ["{", "{"], [{}, {}]])
def test_nothing_but_bad_rows_is_an_error_in_any_case(jsonl, config, lines):
    with pytest.raises(DataError, match="2 of 2 rows cannot be used") as error:
        load_data(config(jsonl(*lines), skip_bad_rows=True))
    assert "No valid row remains" in str(error.value)
