"""kit.models.embedded: the models that come with the kit, and their integrity."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.config import EMBEDDED_MODELS
from kit.errors import ModelError
from kit.models import embedded
from kit.models.embedded import MODELS, source_of

# --- the folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_a_model_lies_in_the_package_and_loads_in_float32(name: str) -> None:
    folder = Path(source_of(name))
    assert folder == MODELS / name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package of which files can be spoilt."""
    monkeypatch.setattr(embedded, "MODELS", tmp_path)
    shutil.copytree(MODELS / "embedded", tmp_path / "embedded")
    assert source_of("embedded") == str(tmp_path / "embedded")
    return tmp_path / "embedded"


def flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(flip, "model.safetensors"), (cut, "tokenizer.json"), (Path.unlink, "config.json"), (replace, "SHA256SUMS")],
)
def test_a_file_that_is_not_as_it_was_shipped_is_named_with_what_to_do(
    shipped: Path, spoil: Callable[[Path], None], name: str
) -> None:
    spoil(shipped / name)
    with pytest.raises(ModelError) as caught:
        source_of("embedded")
    said = str(caught.value)
    assert str(shipped) in said
    assert "Install grpo-kit again" in said
    if name != "SHA256SUMS":
        assert f"{shipped / name}" in said
