"""Rewards per token against values written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.errors import RewardError
from kit.trainer.advantages import lay_out

NAN = float("nan")


def mask_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows).bool()


def test_tool_tokens_get_no_reward_and_the_last_live_token_gets_it() -> None:
    mask = mask_of([1, 0, 1, 0])  # of four tokens, the second and the last are a tool's
    laid = lay_out(torch.tensor([2.0]), mask, [[7] * 4], [[0.5, 9.0, 0.25, 9.0]])
    assert laid.tolist() == [[0.5, 0, 2.25, 0]]


def test_a_completion_without_score_or_without_live_tokens_gets_no_reward_of_its_own() -> None:
    mask = mask_of([1, 1, 0], [0, 0, 0])
    laid = lay_out(torch.tensor([NAN, 3.0]), mask, [[7] * 2, [7] * 3], [[0.5, 0.0], [1.0, 1.0, 1.0]])
    assert laid.tolist() == [[0.5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("row", "count"), [([1.0], "1 numbers"), ([1.0] * 3, "3 numbers"), ([], "0 numbers")])
def test_token_rewards_of_a_wrong_length_are_refused(row: Any, count: str) -> None:
    mask = mask_of([1, 1, 0], [1, 1, 0])
    with pytest.raises(RewardError, match=f"completion 1 holds {count}, but the completion has 2 tokens"):
        lay_out(torch.zeros(2), mask, [[7] * 2, [7] * 2], [[0.0, 0.0], row])
