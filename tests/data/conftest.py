"""Fixtures of the data tests: files from one line of code, a temporary cache, no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.config import DataConfig


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets.config
    import huggingface_hub.constants

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes objects (or raw lines) to a JSONL file and returns its path."""

    def write(*lines: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def config() -> Callable[..., DataConfig]:
    """Return a factory of data configurations, by default without held-out rows."""

    def make(source: Any, **fields: Any) -> DataConfig:
        return DataConfig(**{"source": str(source), "heldout": 0, **fields})

    return make
