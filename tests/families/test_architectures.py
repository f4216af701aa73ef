"""Every architecture on a tiny random copy: the scorer equals plain logits, padded or not, and a GRPO step moves the adapter.

Three run by default; the rest is `pytest -m families`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_qwen import tiny_tokenizer

from kit.model_check.check import fuse, grpo_step, score_three_ways
from kit.model_check.tiny import tiny_config, tiny_model
from kit.models.family import adapter_of
from kit.models.loading import adapter
from kit.models.shape import shape_of

# Transforms of the logits that are neutral by default are given values that matter.
SETTINGS: dict[str, dict[str, float]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "gemma2": {"final_logit_softcapping": 2.0},
}
FAST = ("llama", "gemma2", "qwen3_moe")
SLOW = (
    "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3", "phi3", "olmo2", "granite", "cohere", "falcon_h1", "gpt_oss",
    "smollm3", "qwen2_5_vl", "gpt2", "lfm2", "deepseek_v3", "mixtral", "gemma", "starcoder2", "stablelm",
)  # fmt: skip
MATRIX = [*FAST, *(pytest.param(name, marks=pytest.mark.families) for name in SLOW)]


def tiny(name: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    for key, value in SETTINGS.get(name, {}).items():
        assert hasattr(config.get_text_config(), key)
        setattr(config.get_text_config(), key, value)
    return tiny_config(config, 512)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.mark.parametrize("name", MATRIX)
def test_an_architecture_is_scored_rightly_and_trains(name: str, tokenizer: Any) -> None:
    from kit.config import ModelConfig

    config = tiny(name)
    model = tiny_model(config)
    family = adapter_of(model, tokenizer)
    shape = shape_of(config)
    assert shape is not None
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    scores = score_three_ways(model, family, 512)
    assert scores.padded < 1e-4  # a row that is misread is wrong by tenths
    assert scores.head < 1e-5
    assert scores.scorer < 1e-4
    step = grpo_step(tiny_model(config), tokenizer, adapter(ModelConfig(name="x"), family))
    assert math.isfinite(step.loss)
    assert 0 < step.grad_norm < math.inf
    assert step.moved > 1e-5
    assert step.adapted


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt_neo", marks=pytest.mark.families)])
def test_learned_positions_are_counted_from_the_mask(name: str, tokenizer: Any) -> None:
    """Without that the canary is off by far: the defect that it is there for."""
    import dataclasses

    model = tiny_model(tiny(name))
    family = adapter_of(model, tokenizer)
    assert family.positions
    careless = score_three_ways(model, dataclasses.replace(family, positions=False), 512)
    assert careless.padded > 0.01
    assert careless.scorer > 0.01
    assert score_three_ways(model, family, 512).scorer < 1e-5


def test_a_logit_transform_that_the_head_leaves_out_shows(tokenizer: Any) -> None:
    model = tiny_model(tiny("gemma2"))
    family = adapter_of(model, tokenizer)
    assert family.logits["final_logit_softcapping"] == 2.0
    fuse(model)
    model.config.final_logit_softcapping = None  # plain logits are then without the cap, which the head took at first
    assert score_three_ways(model, family, 512).head > 0.01


def test_a_hybrid_keeps_a_layer_of_each_kind() -> None:
    from transformers import AutoConfig

    assert len(set(tiny_config(AutoConfig.for_model("gemma3_text")).layer_types)) == 2
    assert len(set(tiny_config(AutoConfig.for_model("gpt_oss")).layer_types)) == 2
    assert tiny_config(AutoConfig.for_model("qwen3_moe"), 300).vocab_size == 300


def test_adapters_leave_the_tower_for_pictures_and_refused_layers_alone(tokenizer: Any) -> None:
    from peft import get_peft_model

    from kit.config import ModelConfig

    for name, outside in (("qwen2_5_vl", "visual"), ("falcon_h1", "out_proj")):
        model = tiny_model(tiny(name))
        peft = get_peft_model(model, adapter(ModelConfig(name="x"), adapter_of(model, tokenizer)))
        adapted = [name for name, _ in peft.named_parameters() if "lora_A" in name]
        assert adapted
        assert not [name for name in adapted if outside in name]
