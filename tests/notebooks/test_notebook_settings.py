"""GPU notebooks fit their card: no setting is refused, and the plan fits. Needs no GPU and no hub."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from kit.config import RunConfig, load_config
from kit.generation import engine
from kit.generation.engine import resolve_backend
from kit.models.backend import Machine
from kit.planning.plan import find_gpu, plan

SCRIPTS = Path(__file__).parents[2] / "notebooks" / "scripts"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "Qwen/Qwen3-4B-Instruct-2507": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 262144,
    },
}  # fmt: skip
"""As they stand in the models' config.json."""
CARDS = {"t4": ("Tesla T4", (7, 5)), "l4": ("NVIDIA L4", (8, 9)), "a100 40": ("NVIDIA A100-SXM4-40GB", (8, 0))}
CASES = [("02_gsm8k_unsloth_t4", "gsm8k", "t4"), ("09_kaggle_two_t4", "gsm8k", "t4"), ("05_long_context_vllm", "countdown", "l4"),
         ("05_long_context_vllm", "countdown", "a100 40")]  # fmt: skip


def settings(name: str, gpu: str) -> list[str]:
    """The overrides of a notebook on a machine with this GPU."""
    values: dict[str, Any] = {"GPU": gpu, "ROOT": "runs"}
    for node in ast.parse((SCRIPTS / f"{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("LARGE", "SETTINGS"):
            exec(ast.unparse(node), values)
    overrides: list[str] = values["SETTINGS"]
    return overrides


@pytest.fixture
def with_shape(tmp_path: Path) -> Any:
    """Return a function that replaces the model's name by a folder with its config.json."""

    def local(config: RunConfig) -> RunConfig:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[config.model.name]))
        return config.model_copy(update={"model": config.model.model_copy(update={"name": str(tmp_path)})})

    return local


def refused(config: RunConfig, card: str) -> list[str]:
    """The reasons why the run cannot start on this card, with the packages that the first cell installs."""
    gpu, capability = CARDS[card]
    if config.generation.engine == "vllm":
        return [str(each) for each in engine.incompatibilities(config, "cuda", engine.Installed("vllm", "0.31.0"))]
    resolve_backend(config, (), Machine(capability, gpu, "2026.10.9"))
    return []


@pytest.mark.parametrize(("name", "preset", "card"), CASES)
def test_nothing_is_refused_on_the_card_that_it_is_for(
    name: str, preset: str, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, capability = CARDS[card]
    config = load_config(preset, settings(name, gpu))
    monkeypatch.setattr(engine, "find_spec", lambda package: package)  # the extra `vllm` brings vllm_bnb_plugin
    assert refused(config, card) == []
    assert resolve_backend(config, (), Machine(capability, gpu, "2026.10.9")).model.backend == "unsloth"


@pytest.mark.parametrize(("name", "preset", "card"), CASES)
def test_it_fits_by_the_plan(name: str, preset: str, card: str, with_shape: Any) -> None:
    config = with_shape(load_config(preset, settings(name, CARDS[card][0])))
    planned = plan(config, gpu=find_gpu(card))
    assert planned["fits"], (planned["memory"], planned["fixes"])
