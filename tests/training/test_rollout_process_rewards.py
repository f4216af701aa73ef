"""Process rewards are assigned to the tokens of their completions, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError

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
