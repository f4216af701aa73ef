"""The position of each token in its pack, the token that it predicts, and the position of its score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.scoring.packing import NO_LABEL, Group, NotPackable, Pack, lay_out

from .packs import rows_of

A, B = [11, 12, 13], [21, 22]


def rows(*texts: tuple[list[int], list[int]], width: int = 4, completion: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(texts), width + completion), 9)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(texts):
        place = slice(width - len(prompt), width + len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(prompt + tokens), 1
    return ids, mask


def texts(pack: Pack) -> dict[int, list[int]]:
    """For each score's place: the text up to its token and the token itself, reconstructed from the pack alone."""
    ids, labels, text_of_place = pack.ids[0].tolist(), pack.labels[0].tolist(), {}
    places = iter(pack.places.tolist())
    for group in pack.groups:
        start = group.start + group.prompt
        for length in group.lengths:
            text = ids[group.start : group.start + group.prompt]
            for token in range(start, start + length):
                text = [*text, ids[token]]
                assert pack.positions[0, token] == len(text) - 1
                text_of_place[next(places)] = [*text, labels[token]]
            start += length
    return text_of_place


def test_a_group_is_its_prompt_and_the_completions_behind_it() -> None:
    ids, mask = rows((A, [1, 2]), (B, [3]), (A, [4, 5, 6]), (A, []))
    (pack,) = lay_out(ids, mask, 3)
    assert pack.ids.tolist() == [[11, 12, 13, 4, 5, 13, 1, 21, 22]]
    assert pack.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1]]
    assert pack.labels.tolist() == [[-100, -100, 4, 5, 6, 1, 2, -100, 3]]
    assert pack.groups == (Group(0, 2, (3, 2)), Group(7, 1, (1,)))
    assert pack.places.tolist() == [6, 7, 8, 0, 1, 3]


def test_without_sharing_every_row_has_its_prompt() -> None:
    (pack,) = lay_out(*rows((A, [1, 2]), (A, [4])), 3, share=False)
    assert pack.ids.tolist() == [[11, 12, 13, 1, 11, 12, 13]]
    assert pack.groups == (Group(0, 2, (2,)), Group(4, 2, (1,)))


def test_the_mask_says_what_a_token_is() -> None:
    ids, mask = rows(([9, 9], [9, 9]))  # the padding id, all live
    (pack,) = lay_out(ids, mask, 3)
    assert (pack.ids.tolist(), pack.labels.tolist()) == ([[9, 9, 9]], [[-100, 9, 9]])


def test_rows_without_completions_need_nothing() -> None:
    assert lay_out(*rows((A, []), (B, [])), 3) == []


@pytest.mark.parametrize(("limit", "packs"), [(None, [10]), (10, [10]), (9, [8, 2]), (6, [5, 5, 2]), (1, [5, 4, 3, 2])])
def test_a_pack_keeps_to_the_limit_and_a_larger_group_is_divided(limit: int | None, packs: list[int]) -> None:
    laid_out = lay_out(*rows((A, [1, 2]), (A, [4, 5, 6]), (A, [7]), (B, [8])), 3, limit=limit)
    assert [pack.tokens for pack in laid_out] == packs


@pytest.mark.parametrize(
    ("mask", "reason"),
    [([1, 0, 1, 1, 0], "padding between"), ([0, 1, 1, 0, 1], "padding between"), ([0, 0, 0, 1, 0], "no prompt")],
)
def test_rows_that_a_pack_would_change_are_refused(mask: list[int], reason: str) -> None:
    with pytest.raises(NotPackable, match=reason):
        lay_out(torch.arange(5)[None], torch.tensor([mask]), 2)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    share=st.booleans(),
    limit=st.none() | st.integers(1, 40),
)
def test_every_token_is_predicted_once_from_its_own_text(**drawn: Any) -> None:
    batch = rows_of(drawn["prompts"], drawn["lengths"], seed=drawn["seed"])
    packs = lay_out(batch.ids, batch.mask, batch.completion, share=drawn["share"], limit=drawn["limit"])
    actual: dict[int, list[int]] = {}
    for pack in packs:
        assert pack.labels.ne(NO_LABEL).sum() == len(pack.places)
        assert pack.tokens == sum(group.tokens for group in pack.groups)
        assert drawn["limit"] is None or pack.tokens <= drawn["limit"] or sum(len(g.lengths) for g in pack.groups) == 1
        actual |= texts(pack)
    expected = {}
    for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask.bool(), strict=True)):
        for column in range(int(mask[-batch.completion :].sum())):
            stop = ids.shape[0] - batch.completion + column + 1
            expected[row * batch.completion + column] = ids[:stop][mask[:stop]].tolist()
    assert actual == expected
