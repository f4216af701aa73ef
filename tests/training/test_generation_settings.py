"""A model's generation_config.json affects neither evaluation nor rollouts; the configuration's settings do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationMixin

from kit.config import ModelConfig
from kit.models.loading import find_model, load_model

OWN = {"repetition_penalty": 1.5, "top_k": 2, "top_p": 0.5, "min_p": 0.3, "no_repeat_ngram_size": 2, "do_sample": True}
NEUTRAL = {"repetition_penalty": (None, 1.0), "min_p": (None,), "no_repeat_ngram_size": (None, 0)}


@pytest.fixture
def opinionated(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with sampling settings in its `generation_config.json`."""
    folder = tmp_path / "opinionated"
    shutil.copytree(model_folder, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OWN))
    return folder


@pytest.fixture
def effective(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the settings that transformers uses in each call of `generate`; return the list."""
    configs: list[Any] = []
    prepare = GenerationMixin._prepare_generation_config

    def spied(self: Any, *rest: Any, **keywords: Any) -> Any:
        result = prepare(self, *rest, **keywords)
        configs.append(result[0])
        return result

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", spied)
    return configs


def is_neutral(settings: Any) -> None:
    for name, allowed in NEUTRAL.items():
        assert getattr(settings, name) in allowed, (name, getattr(settings, name))


def test_evaluation_and_rollouts_sample_what_the_configuration_says(
    opinionated: Path, attempt: Callable[..., Any], effective: list[Any]
) -> None:
    result = attempt(f"model.name={opinionated}", "evaluation.before=true", "optimisation.steps=1")
    assert result.code == 0, result.message
    assert len(effective) == 3  # greedy, sampled, rollout
    assert [settings.do_sample for settings in effective] == [False, True, True]
    for settings in effective:
        is_neutral(settings)
    assert [(settings.top_p, settings.top_k) for settings in effective[1:]] == [(1.0, 0)] * 2
    assert "no_repeat_ngram_size" in (result.folder.path / "log.txt").read_text()


def test_token_ids_stay_and_what_is_dropped_is_told(opinionated: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = opinionated / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 5], "bos_token_id": 1}))
    config = ModelConfig(name=str(opinionated), dtype="float32")
    with caplog.at_level(logging.INFO, logger="kit"):
        model = load_model(find_model(config, chat=True), config).model
    assert model.generation_config.eos_token_id == [2, 5]
    assert model.generation_config.bos_token_id == 1
    assert "no_repeat_ngram_size" in caplog.text
