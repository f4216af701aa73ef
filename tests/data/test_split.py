"""Training and held-out rows do not overlap, and the split does not depend on the order of rows."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data import load_data
from kit.data.load import split_rows
from kit.data.rows import prompt_key

# Few different prompts and references, so that doubles are common.
pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=2, max_size=40).filter(
    lambda rows: len({prompt for prompt, _ in rows}) > 1
)


def sides(rows, heldout, seed):
    split = split_rows([str(prompt) for prompt, _ in rows], [repr(row) for row in rows], heldout, seed)
    return split, [rows[index] for index in split.train], [rows[index] for index in split.heldout]


@given(pairs, st.integers(0, 20), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_no_prompt_stands_on_both_sides(rows, heldout, seed):
    split, train, held = sides(rows, heldout, seed)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in held}
    assert len({prompt for prompt, _ in held}) == len(held) == min(heldout, len({prompt for prompt, _ in rows}) // 2)
    assert sorted([*split.train, *split.heldout, *split.doubles]) == list(range(len(rows)))
    assert train
    assert split.train == sorted(split.train)


def test_files_in_another_order_hold_out_the_same_rows(jsonl, config):
    rows = [{"prompt": f"{number % 80} + 1", "answer": str(number)} for number in range(100)]
    first = load_data(config(jsonl(*rows), heldout=25))
    random.Random(1).shuffle(rows)
    second = load_data(config(jsonl(*rows), heldout=25))
    assert first.heldout.to_list() == second.heldout.to_list()
    assert len(first.heldout) == 25
    assert not {str(prompt) for prompt in first.train["prompt"]} & {str(prompt) for prompt in first.heldout["prompt"]}
    counts = first.info["rows"]
    assert counts["train"] + counts["heldout"] + counts["heldout_duplicates"] == counts["used"] == 100


def test_the_seed_chooses_other_rows_and_the_system_prompt_does_not(jsonl, config):
    path = jsonl(*({"prompt": f"{number}", "answer": number} for number in range(60)))
    held = {
        (seed, system): load_data(config(path, heldout=20, seed=seed, system_prompt=system)).heldout["reference"][:]
        for seed in (0, 1)
        for system in (None, "Think.")
    }
    assert held[0, None] == held[0, "Think."]
    assert held[0, None] != held[1, None]


def test_a_replaced_system_message_cannot_make_a_leak(jsonl, config):
    # The rows differ only in their system message; with the configured one in its place they are the same prompt.
    rows = [
        {"messages": [{"role": "system", "content": str(copy)}, {"role": "user", "content": str(number)}]}
        for number in range(20)
        for copy in range(3)
    ]
    split = load_data(config(jsonl(*rows), heldout=10, system_prompt="ours"))
    assert not {str(prompt) for prompt in split.train["prompt"]} & {str(prompt) for prompt in split.heldout["prompt"]}
    assert (len(split.train), len(split.heldout), split.info["rows"]["heldout_duplicates"]) == (30, 10, 20)


def test_space_around_and_unicode_form_do_not_make_another_prompt():
    assert prompt_key("caf\u00e9", ignore_system=False) == prompt_key(" cafe\u0301\n", ignore_system=False)
    assert prompt_key("a b", ignore_system=False) != prompt_key("a  b", ignore_system=False)
    assert prompt_key("a", ignore_system=False) == prompt_key([{"role": "user", "content": "a"}], ignore_system=True)


def test_the_limit_takes_the_first_rows(jsonl, config):
    split = load_data(
        config(jsonl(*({"prompt": str(number), "n": number} for number in range(50))), limit=10, heldout=4)
    )
    assert sorted([*split.train["n"], *split.heldout["n"]]) == list(range(10))
    assert split.train["n"][:] == sorted(split.train["n"])
