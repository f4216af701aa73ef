"""Is every hook alive? The gradient of an objective, and of the same one with a single hook changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
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
    values = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch) if item.init}
    held: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
    }
    with torch.enable_grad():
        loss = objective.loss(TokenBatch(**held | {"logps": leaf}), scale).loss
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    objective.load_state_dict(state)
    return torch.zeros_like(leaf) if gradient is None else gradient


def dead_hooks(objective: Objective, batch: TokenBatch, scale: LossScale) -> list[Hook]:
    """Hooks that could be changed without changing d loss / d logps: whatever they compute is ignored.

    Left out are those that cannot act in this batch: regularizers with coefficient 0 or on the weights alone, the clip and
    the advantages where weights leave no token open, weights where the clip has no gradient. A gradient with NaN tells
    nothing: then none is named.
    """
    state = copy.deepcopy(objective.state_dict())
    before = logps_gradient(objective, batch, scale)
    dead = []
    if before.isfinite().all():
        acting = [(part, hook) for part, hook in objective.hooks if _acts(objective, hook, batch, scale)]
        dead = [hook for part, hook in acting if not _matters(objective, part, hook, batch, scale, before)]
    objective.load_state_dict(state)
    return dead


def open_tokens(objective: Objective, batch: TokenBatch, *, of_the_kit: bool = False) -> Tensor:
    """(B, T) bool: live tokens that no weight masks; `of_the_kit` looks at the kit's own weights alone."""
    with torch.no_grad():
        live = batch.mask
        for hook in objective.weights:
            if not (of_the_kit and hook.factory.custom):
                live = live & (hook(batch) != 0)
    return live


def _matters(objective: Objective, part: str, hook: Hook, batch: TokenBatch, scale: LossScale, before: Tensor) -> bool:
    """Whether some change of the hook changes the gradient by more than rounding."""
    least = 1e-6 * before.abs().max()
    if hook.kind == "advantage":
        sign = torch.where(batch.advantages < 0, -1.0, 1.0)
        farther = batch.advantages + sign * _pattern(batch.advantages)
        for changed in (farther, -farther):  # a clip may use nothing but the sign
            after = logps_gradient(objective, dataclasses.replace(batch, advantages=changed), scale)
            if (after - before).abs().max() > least:
                return True
        return False
    change = _CHANGES[hook.kind]
    if hook.kind == "regularizer":  # as large in the loss as a change of the clip, whatever the coefficient
        change = functools.partial(change, size=1.0 / hook.coef_at(batch.step))
    after = logps_gradient(_with(objective, part, _Changed(hook, change)), batch, scale)
    return bool((after - before).abs().max() > least)


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


def _add_logps(out: Tensor, batch: TokenBatch, size: float = 1.0) -> Tensor:
    return out + size * _pattern(batch.logps) * batch.logps


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


def _acts(objective: Objective, hook: Hook, batch: TokenBatch, scale: LossScale) -> bool:
    if hook.kind == "reduction":
        return True
    if hook.kind == "regularizer":
        with torch.no_grad():
            return hook.coef_at(batch.step) != 0.0 and hook(batch).dim() > 0
    if not open_tokens(objective, batch).any():
        return False
    if hook.kind == "weight":
        alone = copy.copy(objective)
        alone.regularizers = ()
        return bool(logps_gradient(alone, batch, scale).any())
    return True


def _with(objective: Objective, part: str, hook: Hook) -> Objective:
    clone = copy.copy(objective)
    kind, _, index = part.partition(".")
    if not index:
        setattr(clone, kind, hook)
    else:
        hooks = list(getattr(objective, kind))
        hooks[int(index)] = hook
        setattr(clone, kind, tuple(hooks))
    return clone
