"""How many of the tokens that a train phase forwards are of use: counted, so that it cannot slip."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .rollouts import NewTrainer, rollout

GROUP, PROMPTS = 8, 4
Draw = Callable[[random.Random], int]
# By task: tokens of a prompt and of a completion, at a quarter of the real sizes. Numbers in natural tasks are skewed:
# GSM8K's answers hardly vary in length, those of reasoning models have a long tail, cut by the limit.
TASKS: dict[str, tuple[Draw, Draw, int]] = {
    "long tail": (
        lambda draw: draw.randrange(16, 48),
        lambda draw: min(128, int(draw.lognormvariate(3.0, 1.0)) + 1),
        128,
    ),
}


def train_phase(trainer: Any, task: str) -> list[dict[str, Any]]:
    """Micro-batches as TRL makes them: all completions padded to the longest, in any order, in equal parts."""
    prompt_length, completion_length, limit = TASKS[task]
    draw, rows = random.Random(0), []
    for _ in range(PROMPTS):
        prompt = [draw.randrange(4, 60) for _ in range(prompt_length(draw))]
        rows += [
            (prompt, [draw.randrange(4, 60) for _ in range(min(limit, completion_length(draw)))]) for _ in range(GROUP)
        ]
    draw.shuffle(rows)
    width, completion = max(len(prompt) for prompt, _ in rows), max(len(tokens) for _, tokens in rows)
    ids = torch.zeros(len(rows), width + completion, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(rows):
        place = slice(width - len(prompt), width + len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(prompt + tokens), 1
    template = rollout(trainer)[0]
    whole = {
        "prompt_ids": ids[:, :width],
        "prompt_mask": mask[:, :width],
        "completion_ids": ids[:, width:],
        "completion_mask": mask[:, width:],
        "advantages": torch.randn(len(rows), generator=torch.Generator().manual_seed(0)),
    }
    size = trainer.args.per_device_train_batch_size
    counted = {"num_items_in_batch": mask[:, width:].sum().float()}
    assert {*whole, *counted} <= {*template, "advantages"}
    return [
        {name: part[start : start + size] for name, part in whole.items()} | counted
        for start in range(0, len(rows), size)
    ]


def forwarded(trainer: Any, batches: list[dict[str, Any]]) -> int:
    """Tokens that go through the model for these micro-batches, seen where they enter it."""
    seen: list[int] = []
    model = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(batches)
    for inputs in batches:
        trainer.compute_loss(trainer.model, dict(inputs)).backward()
    handle.remove()
    return sum(seen)


def unique(batches: list[dict[str, Any]]) -> int:
    """Live tokens, each prompt once."""
    prompts = {
        tuple(row[mask.bool()].tolist())
        for b in batches
        for row, mask in zip(b["prompt_ids"], b["prompt_mask"], strict=True)
    }
    return sum(map(len, prompts)) + sum(int(batch["completion_mask"].sum()) for batch in batches)


@pytest.mark.parametrize("task", list(TASKS))
def test_nine_tokens_of_ten_are_of_use(new_trainer: NewTrainer, task: str) -> None:
    whole = {"per_device_train_batch_size": PROMPTS * GROUP, "num_generations": GROUP, "generation_batch_size": 32}
    trainer, stock = new_trainer(objective="grpo", unchecked=True, **whole), new_trainer(stock=True, **whole)
    batches = train_phase(trainer, task)
    forwarded(trainer, batches)  # the proof is no part of a train phase: it is made once a run
    useful = unique(batches)
    ratio, before = useful / forwarded(trainer, batches), useful / forwarded(stock, batches)
    assert trainer.packing_report["packing"] == "packed"
    assert 0.9 <= ratio <= 1.05
    assert before < 0.5
