"""Micro-batches of a training step with savings on or off: losses, gradients, and forwarded tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kit.objective import Objective

from .rollouts import NewTrainer, drift, generated

ROWS = 8


def mixed_rollout(new_trainer: NewTrainer, objective: Any = "dapo", **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer and three micro-batches of eight completions of six prompts, shuffled as in TRL.

    Lengths are ragged, one token of each completion comes from a tool, one completion of each micro-batch has no trained token,
    and the policy has moved since the rollout. Half of the completions of the first micro-batch, and all of the second, have no
    advantage.
    """
    defaults = {
        "per_device_train_batch_size": ROWS,
        "num_generations": 4,
        "gradient_accumulation_steps": 3,
        "num_iterations": 2,
    }
    extra = changes.pop("extra", {})
    trainer = new_trainer(objective=objective, unchecked=True, extra=extra, **defaults | changes)
    torch.manual_seed(1)
    output = generated(trainer)
    order = torch.randperm(len(output["completion_ids"]), generator=torch.Generator().manual_seed(0))
    batches = []
    for start in range(0, 3 * ROWS, ROWS):
        rows = order[start : start + ROWS]
        batch = {name: value[rows] if value.dim() else value for name, value in output.items()}
        batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
        batch["tool_mask"][:, 2] = 0
        batch["tool_mask"][3] = 0
        batches.append(batch)
    flat = torch.zeros(ROWS, dtype=torch.bool)
    flat[[0, 2, 5, 6]] = True
    for batch, rows in ((batches[0], flat), (batches[1], torch.ones_like(flat))):
        batch["advantages"] = batch["advantages"].masked_fill(
            rows if batch["advantages"].dim() == 1 else rows[:, None], 0.0
        )
    drift(trainer)
    return trainer, batches


def switch(trainer: Any, *, budget: int | None = None, skip: bool = False) -> None:
    trainer.set_savings(token_budget=budget, skip_flat_groups=skip)


def use(trainer: Any, objective: Any) -> None:
    """Replace the trainer's objective and keep its rollout."""
    trainer._objective = objective if isinstance(objective, Objective) else Objective.from_spec(objective)
    trainer.needs = trainer.objective.needs
    trainer.policy_loss.objective = trainer.objective


def in_a_step(trainer: Any, batches: list[Any], accumulation: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the micro-batches and the sum of the gradients of LoRA and value head, computed as in `training_step`."""
    trainer.model.train()
    trainer.model.zero_grad()
    if trainer.critic is not None:
        trainer.critic.head.zero_grad()
    trainer.current_gradient_accumulation_steps = accumulation
    losses = []
    trainer._stepping = True
    try:
        for inputs in batches:
            loss = trainer.compute_loss(trainer.model, dict(inputs))
            trainer.accelerator.backward(loss)
            losses.append(loss.detach())
    finally:
        trainer._stepping = False
    named = dict(trainer.model.named_parameters())
    if trainer.critic is not None:
        named |= {f"head.{name}": weight for name, weight in trainer.critic.head.named_parameters()}
    return torch.stack(losses), {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in named.items()
        if weight.requires_grad
    }


class Passes:
    """What `watching` records at the first layer.

    Tokens and rows of each pass with a graph, the earlier graphs that are still alive, and the number of passes without a graph.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self.without_graph = 0
        self.alive: list[int] = []


@contextmanager
def watching(trainer: Any) -> Iterator[Passes]:
    import weakref

    passes, graphs = Passes(), []
    layer = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers[0]

    def after(layer: Any, inputs: Any, output: Tensor) -> None:
        if not torch.is_grad_enabled():
            passes.without_graph += 1
            return
        passes.alive.append(sum(graph() is not None for graph in graphs))
        graphs.append(weakref.ref(output))
        passes.tokens.append(output.shape[0] * output.shape[1])
        passes.rows.append(len(output))

    handle = layer.register_forward_hook(after)
    try:
        yield passes
    finally:
        handle.remove()


def assert_same(
    got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], rtol: float = 1e-5
) -> None:
    """Assert equal losses and gradients, the latter relative to the norm of each weight's gradient."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert value.norm() > 0, f"no gradient reaches {name}: the comparison would be empty"
        assert (got[1][name] - value).norm() <= rtol * value.norm(), name


__all__ = ["ROWS", "Passes", "assert_same", "in_a_step", "mixed_rollout", "switch", "use", "watching"]
