"""Is every hook alive? The gradient of an objective, and of the same one with a single hook changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hook import Hook, HookFunction
from kit.objective.objective import Objective
from kit.objective.reduction import LossScale


def logps_gradient(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    """d loss / d logps, (B, T): what a trainer's backward pass must bring to the log-probabilities.

    Everything else in the batch is held constant. State that hooks keep is left as it was.
    """
    state = copy.deepcopy(objective.state_dict())
    leaf = batch.logps.detach().requires_grad_()
    held = {f.name: _constant(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
    with torch.enable_grad():
        loss = objective.loss(TokenBatch(**held | {"logps": leaf}), scale).loss
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    objective.load_state_dict(state)
    return torch.zeros_like(leaf) if gradient is None else gradient


def dead_hooks(objective: Objective, batch: TokenBatch, scale: LossScale) -> list[Hook]:
    """Hooks that could be changed without changing d loss / d logps: whatever they compute is ignored.

    Left out are those that cannot act in this batch: regularizers with coefficient 0 or on the weights alone, weights
    that are 0 everywhere, and what such weights multiply.
    """
    state = copy.deepcopy(objective.state_dict())
    before = logps_gradient(objective, batch, scale)
    size = before.abs().max()
    dead = []
    for part, hook in objective._hooks():
        if not _acts(objective, part, hook, batch):
            continue
        if part == "advantage":
            # Shifted by at least 1 everywhere, away from 0, so that no sign changes.
            shifted = batch.advantages + _pattern(batch.advantages) * torch.where(batch.advantages < 0, -1.0, 1.0)
            after = logps_gradient(objective, dataclasses.replace(batch, advantages=shifted), scale)
        else:
            after = logps_gradient(_with(objective, part, _Changed(hook, _CHANGES[hook.kind])), batch, scale)
        if not (after - before).abs().max() > 1e-6 * size:
            dead.append(hook)
    objective.load_state_dict(state)
    return dead


class _Changed(Hook):
    """A hook whose function is changed by `change`, and that is the same in everything else."""

    def __init__(self, hook: Hook, change: Callable[..., Tensor]) -> None:
        self.__dict__.update(hook.__dict__)
        self._hook, self._change = hook, change

    def at(self, step: int) -> HookFunction:
        function = self._hook.at(step)

        def changed(*arguments: Any) -> Tensor:
            return self._change(function(*arguments), *arguments)

        return changed


def _add_logps(out: Tensor, batch: TokenBatch) -> Tensor:
    return out + _pattern(batch.logps) * batch.logps


_CHANGES: dict[str, Callable[..., Tensor]] = {
    "clip": _add_logps,
    "regularizer": _add_logps,
    "weight": lambda out, batch: out * (1.0 + _pattern(batch.logps)),
    "reduction": lambda out, *_: 2.0 * out,
}


def _pattern(like: Tensor) -> Tensor:
    """Numbers between 1 and 2 that differ from place to place."""
    numbers = torch.arange(like.numel(), device=like.device, dtype=like.dtype)
    return (1.0 + (numbers * 0.6180339887) % 1.0).view(like.shape)


def _acts(objective: Objective, part: str, hook: Hook, batch: TokenBatch) -> bool:
    with torch.no_grad():
        if hook.kind == "regularizer":
            return hook.coef_at(batch.step) != 0.0 and hook(batch).dim() > 0
        if hook.kind == "reduction":
            return True
        weights = [weight(batch) for weight in objective.weights]
        open_tokens = batch.mask
        for weight in weights:
            open_tokens = open_tokens & (weight != 0)
        return bool(open_tokens.any())


def _with(objective: Objective, part: str, hook: Hook) -> Objective:
    clone = copy.copy(objective)
    kind, _, index = part.partition(".")
    change: Any = hook
    if index:
        hooks = list(getattr(objective._parts, kind))
        hooks[int(index)] = hook
        change = tuple(hooks)
    clone._parts = dataclasses.replace(objective._parts, **{kind: change})
    return clone


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
