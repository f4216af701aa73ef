"""Micro-batches in which the completions of a prompt stand together, so that the prompt is read once for all of them.

TRL shuffles a generation batch before it is split into the micro-batches of one optimiser step. Their gradients are added up,
so which completion is in which of them does not matter, unless the objective looks across a micro-batch
(`kit.objective.objective.to_regrouping`); but completions of one prompt that are spread over several make each of these
forward the prompt again. Here they are put together again: prompts in the order in which the shuffle brought them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kit.objective import Objective
from kit.objective.objective import to_regrouping

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
Batch = dict[str, Any]


class GroupedBatches(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, behind what calls `_prepare_inputs`. Does nothing where prompts are not shared."""

    objective: Objective | None
    share_prompts: bool
    _buffered_inputs: list[Batch] | None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        made: list[Batch] | None = self._buffered_inputs
        if not self.model.training or made is None or made is before or not self._wants_groups():
            return inputs
        if self._fields_of_model(made[0]):  # scored plainly, and not every field has a row for each completion
            return inputs
        self._buffered_inputs = regrouped(made)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _wants_groups(self) -> bool:
        """Whether prompts are shared, and all micro-batches of a rollout make one step, in any division."""
        one_step = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        shared = self.packing and self.share_prompts and self.packing_report["packing"] in (None, "packed")
        if self.aux_loss_enabled:  # the load balance is one of each micro-batch
            return False
        return shared and one_step and self.objective is not None and to_regrouping(self.objective) is None


def regrouped(batches: Sequence[Batch]) -> list[Batch]:
    """The rows of equal micro-batches in as many again, those of a prompt next to each other.

    As they came where a value is neither one for each row nor the same for all.
    """
    size, names = len(batches[0]["prompt_ids"]), list(batches[0])
    whole: Batch = {}
    for name in names:
        values: list[Any] = [batch.get(name) for batch in batches]
        if all(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values):
            whole[name] = torch.cat(values)
        elif all(isinstance(value, list) and len(value) == size for value in values):
            whole[name] = [one for value in values for one in value]
        elif not all(value is None or (isinstance(value, Tensor) and not value.dim()) for value in values):
            return list(batches)
    order = torch.tensor(together(whole["prompt_ids"], whole["prompt_mask"]))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [
        batch | {name: _taken(value, part) for name, value in whole.items()}
        for batch, part in zip(batches, parts, strict=True)
    ]


def together(prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
    """Indices of the rows (B, P), prompt by prompt, each in its order."""
    keys = prompt_ids.masked_fill(prompt_mask == 0, -1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key.tobytes(), []).append(row)
    return [row for group in groups.values() for row in group]


def _taken(value: Any, rows: Tensor) -> Any:
    return value[rows.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]
