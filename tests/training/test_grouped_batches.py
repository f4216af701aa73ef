"""kit.trainer.policy_loss.grouped_by_prompt: prompts stay together in a micro-batch, with the same gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.trainer.policy_loss import grouped_by_prompt

from .rollouts import NewTrainer, assert_gradients_close, drift, losses_and_gradients, rollout

SIZE = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 3, "num_iterations": 2}


def prompts_of(batch: dict[str, Any]) -> int:
    return len({tuple(row) for row in batch["prompt_ids"].tolist()})


def shuffled(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, mixed over the micro-batches, so that each group is spread over all of them."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    rows = {
        name: torch.cat([batch[name] for batch in batches])[order]
        for name, value in batches[0].items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    return [
        batch | {name: value[place * 4 : place * 4 + 4] for name, value in rows.items()}
        for place, batch in enumerate(batches)
    ]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "luspo"])
def test_a_step_has_the_same_gradient(new_trainer: NewTrainer, name: str) -> None:
    trainer = new_trainer(objective=name, unchecked=True, extra={"skip_flat_groups": False}, **SIZE)
    mixed = shuffled(rollout(trainer))
    drift(trainer)
    together = grouped_by_prompt(mixed)
    assert [prompts_of(batch) for batch in together] == [1, 1, 1]
    assert max(prompts_of(batch) for batch in mixed) == 3
    losses, gradients = losses_and_gradients(trainer, mixed, 3)
    other_losses, other_gradients = losses_and_gradients(trainer, together, 3)
    torch.testing.assert_close(torch.as_tensor(losses).sum(), torch.as_tensor(other_losses).sum(), atol=2e-6, rtol=1e-5)
    assert_gradients_close(other_gradients, gradients)


@pytest.mark.parametrize(
    ("objective", "extra", "groups"),
    [
        ("dapo", {}, True),
        ("dapo", {"share_prompts": False}, False),
        ("dapo", {"packing": False}, False),
        ("bnpo", {}, False),
        ({"recipe": "dapo", "weights": ["high_entropy_only"]}, {}, False),
    ],
    ids=["shared", "not shared", "not packed", "token_mean", "across completions"],
)
def test_batches_are_grouped_only_if_that_saves_work_exactly(
    new_trainer: NewTrainer, objective: Any, extra: dict[str, Any], groups: bool
) -> None:
    trainer = new_trainer(objective=objective, unchecked=True, extra=extra, **SIZE)
    sizes: list[int] = []
    make = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **more: (sizes.append(prompts_of(inputs)), make(model, inputs))[1]
    trainer.train()
    assert len(sizes) == 3
    assert (sizes == [1, 1, 1]) == groups


def test_a_step_that_is_one_of_several_on_a_rollout_keeps_its_rows(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(
        objective="dapo", unchecked=True, **SIZE | {"gradient_accumulation_steps": 1}, steps_per_generation=3
    )
    assert not trainer.shares_prompts


def test_what_cannot_be_divided_by_rows_is_left_alone() -> None:
    rows = {
        "prompt_ids": torch.tensor([[1], [2]]),
        "prompt_mask": torch.ones(2, 1),
        "completion_ids": torch.tensor([[3], [4]]),
        "completion_mask": torch.ones(2, 1),
        "advantages": torch.zeros(2),
        "num_items_in_batch": torch.tensor(3),
    }
    other = rows | {"prompt_ids": torch.tensor([[2], [1]])}
    assert [batch["prompt_ids"].tolist() for batch in grouped_by_prompt([rows, other])] == [[[1], [1]], [[2], [2]]]
    odd = [rows | {"pixel_values": torch.zeros(7, 3)}, other | {"pixel_values": torch.zeros(7, 3)}]
    assert [batch["prompt_ids"].tolist() for batch in grouped_by_prompt(odd)] == [[[1], [2]], [[2], [1]]]
