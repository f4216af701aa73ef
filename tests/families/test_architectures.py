"""Architectures as tiny random models: the scorer equals plain logits, padded or not, and a GRPO step changes the adapter.

Packs equal padded rows, with every gradient, and the check of packing detects texts that are not separated. Three architectures
run by default; `pytest -m families` runs all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
from peft import get_peft_model
from tiny_qwen import tiny_tokenizer
from training.packs import plainly, read_as_one_text, rows_of, score
from transformers import AutoConfig

from kit.config import ModelConfig
from kit.model_check.check import fuse, grpo_step, score_three_ways
from kit.model_check.tiny import tiny_config, tiny_model
from kit.models.family import adapter_of
from kit.models.loading import adapter
from kit.models.shape import shape_of
from kit.scoring import packing
from kit.scoring.scorer import ExtraOutputs, Rows, Scorer

# Attributes of published models that the default configuration lacks: logit transforms with an effect, and a hybrid
# with both kinds of layers.
SETTINGS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "gemma4_text": {"final_logit_softcapping": 2.0, "num_kv_shared_layers": 12},
    "mistral3": {"text_config": {"model_type": "ministral3"}},
    "ministral": {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4, "num_dense_layers": 1},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4, "logits_scaling": 4.0,
        "residual_multiplier": 0.5, "num_key_value_heads": 8, "position_embedding_type": "nope",
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
}  # fmt: skip
FAST = ("llama", "gemma2", "qwen3_moe")
SLOW = (
    "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3", "phi3", "olmo2", "granite", "cohere", "falcon_h1", "gpt_oss",
    "smollm3", "qwen2_5_vl", "gpt2", "lfm2", "deepseek_v3", "mixtral", "gemma", "starcoder2", "stablelm",
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma4_text", "gemma4", "ministral", "mistral3", "lfm2_moe",
    "olmo3", "olmo_hybrid", "granitemoehybrid", "nemotron_h",
)  # fmt: skip
MATRIX = [*FAST, *(pytest.param(name, marks=pytest.mark.families) for name in SLOW)]
ELSEWISE = {
    "stablelm": ("plain", "do not call the packed attention as expected"),  # has its own attention function
}
"""Layout and reason of the architectures that are not packed."""


def tiny(name: str) -> Any:
    settings = SETTINGS.get(name, {})
    config = AutoConfig.for_model(name, **settings)
    for key in settings.keys() - {"text_config"}:
        assert hasattr(config.get_text_config(), key)
    return tiny_config(config, 512)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.mark.parametrize("name", MATRIX)
def test_an_architecture_is_scored_rightly_and_trains(name: str, tokenizer: Any) -> None:
    config = tiny(name)
    model = tiny_model(config)
    family = adapter_of(model, tokenizer)
    shape = shape_of(config)
    assert shape is not None
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    scores = score_three_ways(model, family, 512)
    assert scores.padded < 1e-4  # a misread row differs by tenths
    assert scores.head < 1e-5
    assert scores.scorer < 1e-4
    step = grpo_step(tiny_model(config), tokenizer, adapter(ModelConfig(name="x"), family))
    assert math.isfinite(step.loss)
    assert 0 < step.grad_norm < math.inf
    assert step.moved > 1e-5
    assert step.adapted
    assert len(step.completion_ids) == 8
    assert all(step.completion_ids)
    assert step.scored["packing"] == ELSEWISE.get(name, ("packed",))[0]


class Scored:
    """A tiny model with non-zero adapters and a scorer, in place of a trainer for the functions of `training.packs`."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        base = tiny_model(tiny(name))
        family = adapter_of(base, tokenizer)
        fuse(base)
        lora = adapter(ModelConfig.model_validate({"name": "x", "lora": {"rank": 2, "alpha": 2}}), family)
        lora.init_lora_weights = False
        torch.manual_seed(0)
        self.base, self.model = base, get_peft_model(base, lora).eval()  # disables GPT-2's dropout
        self.scorer = Scorer(family, autocast=contextlib.nullcontext, unwrap=lambda model: model)

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, completion: int, compute_entropy: bool
    ) -> Any:
        outputs = ExtraOutputs(entropy=compute_entropy, entropy_gradient=True)
        result = self.scorer.score(model, Rows(ids, mask, completion), outputs)
        return result.logps, result.entropy


@pytest.mark.parametrize("name", MATRIX)
def test_packs_give_the_padded_rows_scores_and_gradients(name: str, tokenizer: Any) -> None:
    scored, rows = Scored(name, tokenizer), rows_of()
    actual, expected = score(scored, rows), plainly(scored, rows)
    by_norm = 3e-4  # float32 rounding of sums over padded rows; a misread token differs by hundredths
    largest = max(gradient.norm() for gradient in expected[2].values())
    for value, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, other, atol=2e-4, rtol=0)
    for weight, gradient in expected[2].items():  # an expert without tokens has no gradient
        assert (actual[2][weight] - gradient).norm() <= by_norm * gradient.norm() + 1e-7 * largest, weight
    way, reason = ELSEWISE.get(name, ("packed", ""))
    report = scored.scorer.report
    assert report["packing"] == way
    assert reason in report["reason"]
    assert report["share_prompts"] == (way == "packed")


RECURRENT = (
    "lfm2", "lfm2_moe", "falcon_h1", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "granitemoehybrid",
    "nemotron_h",
)  # fmt: skip


@pytest.mark.families
@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_goes_on_into_the_next_text_is_found(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant recurrent layers that read a pack as one text, as transformers' own functions do."""
    scored, rows = Scored(name, tokenizer), rows_of()
    read_as_one_text(scored.base, monkeypatch)
    assert_same_scores(scored, rows)
    assert scored.scorer.report["packing"] == "plain"
    assert "one completion changes the scores of another" in scored.scorer.report["reason"]


@pytest.mark.parametrize("name", MATRIX)
def test_attention_that_looks_into_another_text_is_found(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant attention in which completions see earlier texts of the pack."""
    if name in ELSEWISE:
        return
    right = packing._attend_group

    def looking_back(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        leak = 0.5 * value.cumsum(2)
        return right(query, key, value + leak, *rest)

    monkeypatch.setattr(packing, "_attend_group", looking_back)
    scored = Scored(name, tokenizer)
    assert_same_scores(scored, rows_of())
    assert scored.scorer.report["packing"] == "plain"
    assert "one completion changes the scores of another" in scored.scorer.report["reason"]


def assert_same_scores(scored: Scored, rows: Rows) -> None:
    for value, other in zip(score(scored, rows)[:2], plainly(scored, rows)[:2], strict=True):
        torch.testing.assert_close(value, other, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt_neo", marks=pytest.mark.families)])
def test_learned_positions_are_counted_from_the_mask(name: str, tokenizer: Any) -> None:
    """If positions are not counted from the mask, the check reports a large difference."""
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
    fuse(model)
    model.config.final_logit_softcapping = None  # plain logits are not capped, but the head's are
    assert score_three_ways(model, family, 512).head > 0.01


def test_adapters_leave_the_tower_for_pictures_and_refused_layers_alone(tokenizer: Any) -> None:
    for name, outside in (("qwen2_5_vl", "visual"), ("falcon_h1", "out_proj")):
        model = tiny_model(tiny(name))
        peft = get_peft_model(model, adapter(ModelConfig(name="x"), adapter_of(model, tokenizer)))
        adapted = [name for name, _ in peft.named_parameters() if "lora_A" in name]
        assert adapted
        assert not [name for name in adapted if outside in name]
