"""Tiny multimodal models with processors, created once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the named tiny multimodal model with its processor once, and returns its folder."""
    import tiny_processors

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            getattr(tiny_processors, name)(made[name])
        return made[name]

    return folder
