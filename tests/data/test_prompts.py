"""Texts and conversations after the chat template."""

from __future__ import annotations

import pytest

from kit.data import load_data

USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "theirs"}
ASSISTANT = {"role": "assistant", "content": "hello"}
OURS = {"role": "system", "content": "ours"}


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("hi", {}, [USER]),
        ("hi", {"system_prompt": "ours"}, [OURS, USER]),
        ("hi", {"chat": False}, "hi"),
        ("hi", {"chat": False, "system_prompt": "ours"}, "ours\n\nhi"),
        (" hi\n", {"chat": False}, " hi\n"),
        ([USER], {}, [USER]),
        ([SYSTEM, USER], {}, [SYSTEM, USER]),
        ([SYSTEM, USER], {"system_prompt": "ours"}, [OURS, USER]),
        ([SYSTEM, USER, ASSISTANT, USER], {"system_prompt": "ours"}, [OURS, USER, ASSISTANT, USER]),
        ([USER | {"name": "x"}], {}, [USER]),
    ],
)
def test_prompts_are_dressed(jsonl, config, prompt, fields, expected):
    assert load_data(config(jsonl({"prompt": prompt}), **fields)).train[0]["prompt"] == expected


def test_a_last_assistant_message_is_the_reference_if_no_column_is(jsonl, config):
    split = load_data(config(jsonl({"messages": [USER, ASSISTANT]})))
    assert split.train[0] == {"prompt": [USER], "reference": "hello"}
    assert "last message of 'messages'" in split.info["notes"][0]


def test_a_last_assistant_message_is_dropped_if_a_column_is_the_reference(jsonl, config):
    assert load_data(config(jsonl({"messages": [USER, ASSISTANT], "answer": "42"}))).train[0] == {
        "prompt": [USER], "reference": "42", "answer": "42",
    }  # fmt: skip
