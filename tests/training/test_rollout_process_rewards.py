"""Process rewards and rewards per token are assigned to the tokens of their completions, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError, RewardError
from kit.trainer.advantages import lay_out

from .rollouts import NewTrainer, generated, train


def with_steps(reward: Any, **changes: Any) -> Callable[..., list[float]]:
    """The reward of the completion, and a process reward of 0.5 at each third token."""

    def scored(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        rows = [[0.5 if place % 3 == 2 else 0.0 for place in range(len(ids))] for ids in completion_ids]
        log_extra("token_rewards", changes.get("change", lambda values: values)(rows))
        return list(reward(completion_ids))

    return scored


def test_process_rewards_are_laid_over_tokens(new_trainer: NewTrainer, reward: Any) -> None:
    objective = {"advantage": {"name": "token_returns", "gamma": 0.5}}
    trainer = new_trainer(
        objective=objective, extra={"reward_funcs": with_steps(reward)}, gradient_accumulation_steps=3
    )
    torch.manual_seed(0)
    output = generated(trainer)
    for row, mask in enumerate(output["completion_mask"].bool()):
        ids = output["completion_ids"][row][mask].tolist()
        rewards = [0.5 if place % 3 == 2 else 0.0 for place in range(len(ids))]
        rewards[-1] += reward([ids])[0]
        want = [sum(r * 0.5 ** (u - t) for u, r in enumerate(rewards) if u >= t) for t in range(len(ids))]
        torch.testing.assert_close(output["advantages"][row, : len(ids)], torch.tensor(want))
        assert not output["advantages"][row, len(ids) :].any()
    assert "token_rewards" not in trainer._logs["extra"]  # TRL's table of completions cannot show lists


@pytest.mark.parametrize("advantage", ["group_zscore", "leave_one_out"])
def test_process_rewards_beside_an_estimator_of_whole_completions_are_refused(
    new_trainer: NewTrainer, reward: Any, advantage: str
) -> None:
    trainer = new_trainer(objective={"advantage": advantage}, extra={"reward_funcs": with_steps(reward)})
    with pytest.raises(ObjectiveError, match=f"advantage '{advantage}' reads one reward per completion"):
        train(trainer)


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
