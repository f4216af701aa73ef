"""What stands in a notebook for a hub's model and data with `KIT_SMOKE=1`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_model_is_a_folder_that_loads_in_the_architecture_that_was_asked_for() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kit.notebook import smoke_model

    assert AutoModelForCausalLM.from_pretrained(smoke_model()).config.model_type == "qwen3"
    folder = smoke_model("olmo2", "unlisted")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (folder, model.config.model_type) == ("unlisted", "olmo2")
    assert model.num_parameters() < 1e6
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)
