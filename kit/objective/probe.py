"""The gradient that a trainer's backward pass must bring to the log-probabilities, and whether advantages move it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.objective import Objective
from kit.objective.reduction import LossScale


def logps_gradient(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    """d loss / d logps, (B, T): what a trainer's backward pass must bring to the log-probabilities.

    Everything else in the batch is held constant. State that hooks keep is left as it was.
    """
    state = copy.deepcopy(objective.state_dict())
    leaf = batch.logps.detach().requires_grad_()
    values = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch) if item.init}
    held: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
    }
    with torch.enable_grad():
        loss = objective.loss(TokenBatch(**held | {"logps": leaf}), scale).loss
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    objective.load_state_dict(state)
    return torch.zeros_like(leaf) if gradient is None else gradient


def ignores_advantages(objective: Objective, batch: TokenBatch, scale: LossScale) -> bool:
    """Whether no change of the advantages changes d loss / d logps by more than rounding: the clip does not use them.

    False where nothing can be told: weights leave no token open, or the gradient has NaN.
    """
    before = logps_gradient(objective, batch, scale)
    if not before.isfinite().all() or not open_tokens(objective, batch).any():
        return False
    least, numbers = 1e-6 * before.abs().max(), torch.arange(batch.advantages.numel(), device=batch.advantages.device)
    amounts = (1.0 + (numbers * 0.6180339887) % 1.0).view(batch.advantages.shape)  # between 1 and 2, nowhere the same
    farther = batch.advantages + torch.where(batch.advantages < 0, -amounts, amounts)
    for changed in (farther, -farther):  # a clip may use nothing but the sign
        after = logps_gradient(objective, dataclasses.replace(batch, advantages=changed), scale)
        if (after - before).abs().max() > least:
            return False
    return True


def open_tokens(objective: Objective, batch: TokenBatch, *, of_the_kit: bool = False) -> Tensor:
    """(B, T) bool: live tokens that no weight masks; `of_the_kit` looks at the kit's own weights alone."""
    state = copy.deepcopy(objective.state_dict())
    with torch.no_grad():
        live = batch.mask
        for hook in objective.weights:
            if not (of_the_kit and hook.factory.custom):
                live = live & (hook(batch) != 0)
    objective.load_state_dict(state)
    return live
