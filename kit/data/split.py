"""Train and held-out rows by a hash of the prompt: the same rows whatever their order, no prompt on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kit.errors import DataError


@dataclass(frozen=True)
class Sides:
    """Row indices. `train` in source order; `heldout` by hash, one a prompt; `doubles`: other rows of those prompts."""

    train: list[int]
    heldout: list[int]
    doubles: list[int]
    notes: list[str] = field(default_factory=list)


def split_rows(keys: Sequence[str], contents: Sequence[str], heldout: int, seed: int) -> Sides:
    """Sets `heldout` rows apart: those whose prompt has the smallest hash salted with `seed`.

    keys: what identifies the prompt of each row; contents: what identifies the row. A prompt that occurs several times
    stays on one side: all its rows are trained on, or one (smallest hash of its content) is held out and the others are
    dropped. At most half of the different prompts are held out. Raises `DataError` if none could be left to train on.
    """
    by_key: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        by_key.setdefault(key, []).append(index)
    if heldout and len(by_key) < 2:
        raise DataError(
            f"data.heldout: {heldout} rows cannot be set apart: there is only {len(by_key)} different prompt, and none "
            "would be left to train on. Bring more prompts (for a generated task: other data.task_params), or set "
            "data.heldout: 0 and evaluation.before and evaluation.after: false."
        )
    count = min(heldout, len(by_key) // 2)
    chosen = sorted(by_key, key=lambda key: _salted(key, seed))[:count]
    kept = [min(by_key[key], key=lambda index: (_salted(contents[index], seed), index)) for key in chosen]
    doubles = sorted({index for key in chosen for index in by_key[key]} - set(kept))
    away = {*kept, *doubles}
    notes = []
    if count < heldout:
        notes.append(
            f"data.heldout asks for {heldout} rows; there are {len(by_key)} different prompts, and half of them, "
            f"{count}, were set apart."
        )
    if doubles:
        notes.append(f"{len(doubles)} rows repeat the prompt of a held-out row and are left out.")
    return Sides([index for index in range(len(keys)) if index not in away], kept, doubles, notes)


def _salted(text: str, seed: int) -> str:
    return hashlib.sha256(f"heldout {seed} {text}".encode()).hexdigest()
