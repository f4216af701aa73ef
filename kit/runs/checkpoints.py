"""Which folders of a run are checkpoints, and which of them are whole. `kit.trainer.checkpoint_writer` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
"""Sizes (bytes) of the files of a checkpoint."""
STATE = "trainer_state.json"
PREFIX = "checkpoint-"


def numbered(root: Path) -> list[Path]:
    """Folders `checkpoint-STEP` in `root`, whole or not, the earliest first."""
    found = [path for path in root.glob(f"{PREFIX}*") if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimiser steps made before a folder `checkpoint-STEP` was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def is_whole(checkpoint: Path) -> bool:
    """Whether nothing of a checkpoint is missing: trainer_state.json reads, and all files have their noted sizes."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        noted = checkpoint / MANIFEST
        sizes = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def whole_checkpoints(checkpoints: Iterable[Path]) -> list[Path]:
    """Those that training can go on from, the earliest first."""
    return sorted(filter(is_whole, checkpoints), key=step_of)
