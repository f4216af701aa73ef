"""Prompts after the chat template. Those above the length limit are removed from training and held-out rows, and counted."""

from __future__ import annotations

import pytest

from kit.data import filter_by_length, load_data
from kit.errors import DataError


def words(prompts):
    return [len(prompt[0]["content"].split()) for prompt in prompts]


@pytest.fixture
def split(jsonl, config):
    # Prompts of 1 to 20 words.
    return load_data(config(jsonl(*({"prompt": "w " * number} for number in range(1, 21))), heldout=8))


def test_long_prompts_leave_both_sides(split):
    short = filter_by_length(split, words, 12)
    assert sorted(words([*short.train["prompt"], *short.heldout["prompt"]])) == list(range(1, 13))
    rows = short.info["rows"]
    assert (rows["too_long"], rows["train"] + rows["heldout"], rows["used"]) == (8, 12, 20)
    assert (rows["train"], rows["heldout"]) == (len(short.train), len(short.heldout))
    assert short.info["max_prompt_tokens"] == 12
    assert split.info["rows"]["too_long"] == 0  # the input split is unchanged


def test_nothing_left_is_an_error_with_the_median(jsonl, config):
    split = load_data(config(jsonl(*({"prompt": "w " * number} for number in (3, 5, 9)))))
    with pytest.raises(
        DataError, match=r"Every train prompt .* median of 3 prompts is 5 tokens, the shortest 3, the longest 9"
    ):
        filter_by_length(split, words, 2)


def test_counting_goes_in_batches(jsonl, config):
    split = load_data(config(jsonl(*({"prompt": str(number)} for number in range(2500)))))
    sizes = []

    def count(prompts):
        sizes.append(len(prompts))
        return [1] * len(prompts)

    filter_by_length(split, count, 5)
    assert sizes == [1000, 1000, 500]


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
