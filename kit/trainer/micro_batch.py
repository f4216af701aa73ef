"""Which completions of a micro-batch go through the model together: parts of at most so many tokens, or so many rows.

Completions of one prompt stay together as long as they fit, because their prompt may then be read once. Within a prompt,
and among prompts, neighbours are of like length, so that little padding is left, and what is left is cut off.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.models.failures import SHARE
from kit.models.inputs import take
from kit.scoring.packing_proof import STRETCHED


@dataclass(frozen=True)
class Row:
    """One completion: its prompt, and the columns that prompt and completion take up in a batch."""

    key: Hashable
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Limits:
    """What one part may hold. None: any number. `padded`: padding goes through the model, and counts as tokens."""

    tokens: int | None = None
    rows: int | None = None
    padded: bool = True

    def cost(self, part: Sequence[Row]) -> int:
        """Tokens that go through the model."""
        if not self.padded:
            return sum(row.tokens for row in part)
        return len(part) * (max(row.prompt for row in part) + max(row.completion for row in part)) if part else 0

    def admit(self, part: Sequence[Row]) -> bool:
        """Whether a part is within the limits; one row always is."""
        if len(part) <= 1:
            return True
        fits = self.tokens is None or self.cost(part) <= self.tokens
        return fits and (self.rows is None or len(part) <= self.rows)


def divide(rows: Sequence[Row], chosen: Sequence[int], limits: Limits) -> list[list[int]]:
    """Parts of the `chosen` rows, each of them in exactly one; as few as comes of taking long prompts' groups first.

    Everything in one part, in its order, where that is within the limits.
    """
    if limits.admit([rows[number] for number in chosen]):
        return [list(chosen)] if chosen else []
    groups: dict[Hashable, list[int]] = {}
    for number in chosen:
        groups.setdefault(rows[number].key, []).append(number)
    pieces = [piece for group in groups.values() for piece in _cut(rows, group, limits)]
    pieces.sort(key=lambda piece: -max(rows[number].tokens for number in piece))
    parts: list[list[int]] = []
    for piece in pieces:
        home = next((part for part in parts if limits.admit([rows[n] for n in part + piece])), None)
        if home is None:
            parts.append(list(piece))
        else:
            home += piece
    return parts


def _cut(rows: Sequence[Row], group: Sequence[int], limits: Limits) -> list[list[int]]:
    """The completions of one prompt, the longest first, in stretches that fit."""
    pieces: list[list[int]] = []
    for number in sorted(group, key=lambda number: -rows[number].tokens):
        if pieces and limits.admit([rows[n] for n in (*pieces[-1], number)]):
            pieces[-1].append(number)
        else:
            pieces.append([number])
    return pieces


def measured(inputs: Mapping[str, Any], *, trimmed: bool) -> list[Row]:
    """The rows of a micro-batch. `trimmed`: without the padding that a part of them alone would not have."""
    ids, live, mask = inputs["prompt_ids"], inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
    width, length = live.shape[1], mask.shape[1]
    prompts = (live * torch.arange(width, 0, -1, device=live.device)).amax(1) if width else live.sum(1)
    completions = (mask * torch.arange(1, length + 1, device=mask.device)).amax(1) if length else mask.sum(1)
    keys = ids.masked_fill(~live, -1).cpu().numpy()
    sizes = torch.stack([prompts, completions], dim=1).tolist()
    return [
        Row(key.tobytes(), prompt if trimmed else width, max(1, completion if trimmed else length))
        for key, (prompt, completion) in zip(keys, sizes, strict=True)
    ]


def may_be_trimmed(model: Any) -> bool:
    """Whether columns of padding can go: positions are relative, and do not depend on the width of the batch."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rotary = getattr(text, "rope_parameters", None)
    if not isinstance(rotary, Mapping) or not rotary:
        return False
    kinds = rotary.values() if all(isinstance(value, Mapping) for value in rotary.values()) else [rotary]
    return not any(kind.get("rope_type") in STRETCHED for kind in kinds)


def part_of(inputs: Mapping[str, Any], numbers: Sequence[int], rows: Sequence[Row], fields: Sequence[str]) -> Any:
    """The completions `numbers` of a micro-batch, in that order, as a micro-batch: every tensor without needless columns.

    `fields`: names of the model's inputs beside ids and masks, which are divided by what belongs to which completion.
    """
    whole = len(inputs["completion_ids"])
    prompt, completion = (max(getattr(rows[number], name) for number in numbers) for name in ("prompt", "completion"))
    width, length = inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]
    index = torch.as_tensor(numbers, device=inputs["completion_ids"].device)

    def piece(name: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == whole:
            return [value[number] for number in numbers]
        if not isinstance(value, Tensor) or not value.dim() or len(value) != whole:
            return value
        own = value[index]
        if name in ("prompt_ids", "prompt_mask"):
            return own[:, width - prompt :]
        return own[:, :completion] if own.dim() > 1 and own.shape[1] == length else own

    part = {name: piece(name, value) for name, value in inputs.items() if name not in fields}
    taken = take({name: inputs[name] for name in fields if inputs.get(name) is not None}, numbers, whole)
    return part | taken | {SHARE: len(numbers) / whole}
