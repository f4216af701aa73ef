"""kit.models.embedded: the models in the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.config import EMBEDDED_MODELS
from kit.models.embedded import MODELS, source_of


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_a_model_lies_in_the_package_and_loads_in_float32(name: str) -> None:
    folder = Path(source_of(name))
    assert folder == MODELS / name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
