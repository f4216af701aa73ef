"""A micro-batch: the only place that indexes its rows, and what says which of them go through the model together.

TRL hands tensors and lists by name, prompts padded in front, completions behind. `MicroBatch` gives them types, and parts
of them as micro-batches of their own. `split_by_tokens` plans the parts: at most so many tokens, or so many rows, each.
Completions of one prompt stay together as long as they fit, because their prompt may then be read once. Within a prompt,
and among prompts, neighbours are of like length, so that little padding is left, and what is left is cut off.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kit.scoring.layouts import Rows, take, to_device

MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Inputs of the model beside ids and masks that TRL 1.15 has a place for."""
EXTRA = "extra_inputs."
"""Prefix of those that it has none for: each a list with a tensor a completion."""


@dataclass(frozen=True)
class HostCopy:
    """The values of B rows that lengths and layouts depend on, on the host, so that a step does not wait for the device."""

    ids: Tensor  # (B, P + T)
    mask: Tensor  # (B, P + T) bool
    advantage: Tensor  # (B,) bool: with an advantage that is not 0 at some token that trains


@dataclass(frozen=True)
class MicroBatch:
    """B completions of T columns behind prompts of P, under TRL's names.

    inputs: tensors (B, ...) and lists of B, what the model takes beside text (`MODEL_INPUTS`, laid out in ways of their own),
    and whatever is one for all of them. TRL's own dictionary: what is noted in it is there in the next iteration. share: these
    completions over those of the whole micro-batch that they are a part of.
    """

    inputs: dict[str, Any]
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.inputs["completion_ids"])

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def get(self, name: str) -> Any:
        """The value of that name, or None."""
        return self.inputs.get(name)

    @property
    def completion_ids(self) -> Tensor:
        """(B, T) token ids of the completions, padded."""
        ids: Tensor = self.inputs["completion_ids"]
        return ids

    @property
    def completion_mask(self) -> Tensor:
        """(B, T) 1 for tokens of the completion, those of tools included."""
        mask: Tensor = self.inputs["completion_mask"]
        return mask

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool: tokens that train; those that tools wrote do not."""
        mask = self.completion_mask
        return (mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask).bool()

    @property
    def advantages(self) -> Tensor:
        """(B, 1) or (B, T) advantages."""
        advantages: Tensor = self.inputs["advantages"]
        return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages

    @property
    def fields(self) -> dict[str, Any]:
        """The model's inputs beside ids and masks, by the names of the micro-batch."""
        names = (name for name in self.inputs if name in MODEL_INPUTS or name.startswith(EXTRA))
        return {name: self.inputs[name] for name in names if self.inputs[name] is not None}

    @property
    def rows(self) -> Rows:
        """The rows as the scorer takes them."""
        return Rows(
            torch.cat([self.inputs["prompt_ids"], self.completion_ids], dim=1),
            torch.cat([self.inputs["prompt_mask"], self.completion_mask], dim=1),
            self.completion_ids.shape[1],
            {name.removeprefix(EXTRA): value for name, value in self.fields.items()},
            (self.on_host.ids, self.on_host.mask),
        )

    @cached_property
    def on_host(self) -> HostCopy:
        """The copy on the host, made at the first call; the host waits for it."""
        ids = [self.inputs["prompt_ids"], self.completion_ids]
        advantage = torch.zeros_like(ids[0][:, 0])
        if "advantages" in self.inputs:
            advantage = ((self.advantages != 0) & self.loss_mask).any(1)
        masks = [self.inputs["prompt_mask"], self.completion_mask, advantage[:, None]]
        columns = torch.cat([*ids, *(mask.to(ids[0].dtype) for mask in masks)], dim=1).cpu()
        width = (columns.shape[1] - 1) // 2
        live = columns[:, width:].bool()
        return HostCopy(columns[:, :width], live[:, :-1], live[:, -1])

    @property
    def prompts(self) -> list[bytes]:
        """A key for each completion, the same for the same prompt."""
        width, held = self.inputs["prompt_ids"].shape[1], self.on_host
        keys = held.ids[:, :width].masked_fill(~held.mask[:, :width], -1).numpy()
        return [key.tobytes() for key in keys]

    def lengths(self, *, trimmed: bool) -> list[SequenceLengths]:
        """Lengths of every row. `trimmed`: without the padding that a part of the rows alone would not have."""
        width, length = self.inputs["prompt_ids"].shape[1], self.completion_ids.shape[1]
        live, mask = torch.split(self.on_host.mask, [width, length], dim=1)
        prompts = (live * torch.arange(width, 0, -1)).amax(1) if width else live.sum(1)
        completions = (mask * torch.arange(1, length + 1)).amax(1) if length else mask.sum(1)
        sizes = torch.stack([prompts, completions], dim=1).tolist()
        return [
            SequenceLengths(key, prompt if trimmed else width, max(1, completion if trimmed else length))
            for key, (prompt, completion) in zip(self.prompts, sizes, strict=True)
        ]

    def select(self, rows: Sequence[int], lengths: Sequence[SequenceLengths] | None = None) -> MicroBatch:
        """The completions `rows`, in that order. lengths: of all of them, to cut off the columns that none of these needs."""
        size, fields = len(self), self.fields
        width, length = self.inputs["prompt_ids"].shape[1], self.completion_ids.shape[1]
        prompt = width if lengths is None else max(lengths[row].prompt for row in rows)
        completion = length if lengths is None else max(lengths[row].completion for row in rows)
        chosen, held = torch.as_tensor(rows), self.on_host
        index = to_device(chosen, self.completion_ids.device)

        def some(name: str, value: Any) -> Any:
            if isinstance(value, list) and len(value) == size:
                return [value[row] for row in rows]
            if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
                return value
            own = value[index if value.device == index.device else chosen.to(value.device)]
            if name in ("prompt_ids", "prompt_mask"):
                return own[:, width - prompt :]
            return own[:, :completion] if own.dim() > 1 and own.shape[1] == length else own

        own = {name: some(name, value) for name, value in self.inputs.items() if name not in fields}
        part = MicroBatch(own | take(fields, rows, size), self.share * len(rows) / size)
        columns = slice(width - prompt, width + completion)
        vars(part)["on_host"] = HostCopy(held.ids[chosen, columns], held.mask[chosen, columns], held.advantage[chosen])
        return part


def grouped_by_prompt(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of equal micro-batches in as many again, those of a prompt next to each other, prompts in their order.

    TRL shuffles a generation batch before it is split into the micro-batches of one optimiser step. Their gradients are
    added up, so which completion is in which of them does not matter, unless the objective looks across a micro-batch
    (`kit.objective.objective.to_regrouping`); but completions of one prompt that are spread over several make each of these
    forward the prompt again. As they came where a value is neither one for each row nor the same for all.
    """
    size = len(batches[0]["prompt_ids"])
    joined: dict[str, Any] = {}
    for name in batches[0]:
        values: list[Any] = [batch.get(name) for batch in batches]
        if all(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values):
            joined[name] = torch.cat(values)
        elif all(isinstance(value, list) and len(value) == size for value in values):
            joined[name] = [item for value in values for item in value]
        elif not all(value is None or (isinstance(value, Tensor) and not value.dim()) for value in values):
            return list(batches)
    everything = MicroBatch(joined)
    groups: dict[bytes, list[int]] = {}
    if everything.fields:  # not every one of them has a row for each completion
        return list(batches)
    for row, key in enumerate(everything.prompts):
        groups.setdefault(key, []).append(row)
    order = [row for group in groups.values() for row in group]
    return [
        batch | everything.select(order[start : start + size]).inputs
        for batch, start in zip(batches, range(0, len(order), size), strict=True)
    ]


@dataclass(frozen=True)
class SequenceLengths:
    """The columns that prompt and completion of one row take up in a batch, and a key for its prompt."""

    key: Hashable
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class TokenBudget:
    """Limits of one part. None: any number.

    padded: padding goes through the model, and counts as tokens. shared: if not, a prompt goes once for its completions.
    """

    tokens: int | None = None
    rows: int | None = None
    padded: bool = True
    shared: bool = False

    def cost(self, part: Sequence[SequenceLengths]) -> int:
        """Tokens that go through the model."""
        if not self.padded and self.shared:
            prompts = {row.key: row.prompt for row in part}
            return sum(prompts.values()) + sum(row.completion for row in part)
        if not self.padded:
            return sum(row.tokens for row in part)
        return len(part) * (max(row.prompt for row in part) + max(row.completion for row in part)) if part else 0

    def admits(self, part: Sequence[SequenceLengths]) -> bool:
        """Whether a part is within the budget; one row always is."""
        if len(part) <= 1:
            return True
        fits = self.tokens is None or self.cost(part) <= self.tokens
        return fits and (self.rows is None or len(part) <= self.rows)


def split_by_tokens(rows: Sequence[SequenceLengths], chosen: Sequence[int], budget: TokenBudget) -> list[list[int]]:
    """Parts of the `chosen` rows, each of them in exactly one; as few as comes of taking long prompts' groups first.

    Everything in one part, in its order, where that is within the budget.
    """
    if budget.admits([rows[number] for number in chosen]):
        return [list(chosen)] if chosen else []
    groups: dict[Hashable, list[int]] = {}
    for number in chosen:
        groups.setdefault(rows[number].key, []).append(number)
    pieces: list[list[int]] = []
    for group in groups.values():  # the completions of a prompt, the longest first, in stretches that fit
        cut: list[list[int]] = []
        for number in sorted(group, key=lambda number: -rows[number].tokens):
            if cut and budget.admits([rows[n] for n in (*cut[-1], number)]):
                cut[-1].append(number)
            else:
                cut.append([number])
        pieces += cut
    pieces.sort(key=lambda piece: -max(rows[number].tokens for number in piece))
    parts: list[list[int]] = []
    for piece in pieces:
        home = next((part for part in parts if budget.admits([rows[n] for n in part + piece])), None)
        if home is None:
            parts.append(list(piece))
        else:
            home += piece
    return parts
