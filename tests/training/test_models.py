"""kit.models.loading and embedded: finding models, counting weights, and refusals. Broken folders: tests/test_errors.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Phi3Config

from kit.config import EMBEDDED_MODELS, ModelConfig
from kit.errors import ModelError
from kit.model_check.tiny import tiny_config, tiny_model
from kit.models import loading as models
from kit.models.embedded import MODELS, source_of
from kit.models.family import is_remote
from kit.models.loading import find_model, load_model
from kit.models.shape import shape_of


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": str(folder), "dtype": "float32"} | changes)


def test_a_folder_is_found_and_loaded_in_the_precision_asked_for(model_folder: Path) -> None:
    config = config_of(model_folder, dtype="bfloat16")
    files = find_model(config, chat=True)
    loaded = load_model(files, config)
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.tokenizer.pad_token_id is not None
    assert files.parameters == sum(weight.numel() for weight in loaded.model.parameters())


def test_capped_scores_are_capped(tmp_path: Path, tokenizer: Any) -> None:
    capped = tiny_config(Gemma2Config(attn_logit_softcapping=0.05), len(tokenizer))
    model = tiny_model(capped)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.arange(5, 25)[None]
    logits = {}
    for attention in (None, "sdpa"):
        config = config_of(tmp_path, attention=attention)
        with torch.no_grad():
            logits[attention] = load_model(find_model(config, chat=False), config).model.eval()(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(logits[None], model(ids).logits, atol=1e-5, rtol=0)
    assert (logits["sdpa"] - logits[None]).abs().max() > 0.01  # transformers' default attention ignores it


def test_weights_are_counted_without_being_made(model_folder: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    small = shape_of(config)
    config.vocab_size += 1_000_000_000  # 256 GB of float32, if it were made
    large = shape_of(config)
    assert small is not None
    assert large is not None
    assert large.parameters == small.parameters + 64 * 1_000_000_000


def test_a_tokenizer_without_an_end_is_refused(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        models.load_tokenizer(str(tmp_path), chat=True)


def test_padding_falls_back_on_the_end_token(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert models.load_tokenizer(str(tmp_path), chat=True).pad_token == "<|im_end|>"


def test_an_adapters_folder_is_no_model(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match="it contains only an adapter; merge it into its base model first"):
        find_model(config_of(tmp_path), chat=True)


def test_code_of_the_models_own_is_not_run_unasked(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **keywords: Any) -> None:
        assert keywords["trust_remote_code"] is False
        raise ValueError("The repository contains custom code. Pass `trust_remote_code=True` to allow it.")

    monkeypatch.setattr(models, "_auto", lambda name: refuse)
    with pytest.raises(ModelError, match=r"Read that code.*model\.trust_remote_code: true"):
        find_model(config_of(Path("someone/model")), chat=True)


def test_a_native_architecture_whose_config_names_code_is_known_all_the_same() -> None:
    """The configuration has `auto_map` although transformers has the architecture, as in uploads of Phi-3."""
    config = Phi3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert not is_remote(config)
    assert shape_of(config) is not None


def test_all_weights_in_half_precision_are_refused(model_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"would lose most updates in rounding\. Set model.dtype: auto"):
        find_model(config_of(model_folder, dtype="bfloat16", lora=None), chat=True)


def test_a_misspelt_name_of_the_kits_models_is_pointed_out() -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2'"):
        find_model(ModelConfig(name="smolm2"), chat=True)


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_a_model_lies_in_the_package_and_loads_in_float32(name: str) -> None:
    folder = Path(source_of(name))
    assert folder == MODELS / name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
