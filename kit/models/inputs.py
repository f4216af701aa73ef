"""Model inputs beside ids and mask, divided by completions: which part of each tensor belongs to which sample.

Processors lay pictures out in many ways: a row a sample, a row a picture, rows of patches whose number a grid tells, tiles.
`pieces` finds the way by counting, so that a batch can be taken apart, shuffled and scored in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError
from kit.models.family import TOKEN_FIELD

COUNTS = ("num_images", "num_tiles")
"""Lists with an entry a sample that say how much of other fields is its."""


def pieces(name: str, value: Any, samples: int, counts: Mapping[str, Any]) -> list[Any]:
    """The part of `value` of each sample, in order; a sample without pictures has an empty one.

    counts: what is known of the batch: `num_images` (a number a sample), `num_tiles`, `image_grid_thw` (pictures, 3). Raises
    `ModelError` where no count fits.
    """
    total, options = len(value), []
    images = [int(count) for count in counts.get("num_images") or ()]
    if not TOKEN_FIELD.fullmatch(name) and len(images) == samples:
        if counts.get("num_tiles") is not None:
            options.append([int(count) for count in counts["num_tiles"]])
        if (grid := counts.get("image_grid_thw")) is not None and len(grid) == sum(images) and name != "image_grid_thw":
            patches = grid.prod(dim=-1).tolist()
            options.append([int(sum(patches[start:end])) for start, end in _ends(images)])
        options.append(images)
    options.append([1] * samples)
    for sizes in options:
        if sum(sizes) == total:
            return [value[start:end] for start, end in _ends(sizes)]
    raise ModelError(
        f"The processor gives '{name}' with {total} rows for {samples} prompts and {sum(images)} pictures, and nothing says "
        "which belong to which. Train this model on text alone (data.image_column: none)."
    )


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends, start = [], 0
    for size in sizes:
        ends.append((start, start + size))
        start += size
    return ends


def extended(rows: Sequence[Sequence[int]], width: int, completion: int) -> list[Tensor]:
    """Token fields of prompts, unpadded, as tensors (1, width + completion): zeros over padding (left) and completion."""
    return [torch.nn.functional.pad(torch.as_tensor(list(row))[None], (width - len(row), completion)) for row in rows]


def joined(parts: Sequence[Any], device: Any = None) -> Any:
    """The pieces of some samples as one tensor; None where all are empty."""
    tensors = [torch.as_tensor(part) for part in parts]
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    tensor = torch.cat(filled)
    return tensor if device is None else tensor.to(device)


def take(fields: Mapping[str, Any], rows: Sequence[int], samples: int) -> dict[str, Any]:
    """Model inputs of the chosen samples alone, in that order. `fields` as a micro-batch holds them; None is left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    taken: dict[str, Any] = {}
    for name, value in present.items():
        if name in COUNTS or isinstance(value, list):  # a list is in pieces already
            taken[name] = [value[row] for row in rows]
        else:
            parts = pieces(name, value, samples, present)
            tensor = joined([parts[row] for row in rows])
            if tensor is not None:
                taken[name] = tensor
    if "pixel_values" in present and "pixel_values" not in taken:  # no picture among them
        return {name: value for name, value in taken.items() if name.endswith("token_type_ids")}
    return taken
