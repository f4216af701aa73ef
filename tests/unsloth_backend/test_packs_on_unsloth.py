"""Packs and shared prompts through Unsloth's forward functions equal padded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker import recipes

pytestmark = [pytest.mark.unsloth, pytest.mark.timeout(900)]
WITH_KL = "grpo with kl"
PACKED = {"packing": "packed", "share_prompts": True, "reason": ""}
Worked = dict[str, Any]


def assert_same_gradients(packed: dict[str, torch.Tensor], padded: dict[str, torch.Tensor]) -> None:
    assert packed.keys() == padded.keys() != set()
    for name, want in padded.items():
        assert want.norm() > 0, f"no gradient reaches {name}: the comparison would be empty"
        assert (packed[name] - want).norm() <= 1e-4 * want.norm(), name


def assert_same_scores(result: Worked) -> None:
    (logps, entropy, gradients), (want, want_entropy, want_gradients) = result["packed"], result["padded"]
    assert want.abs().max() > 0.1
    torch.testing.assert_close(logps, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients, want_gradients)


@pytest.mark.parametrize("recipe", [*recipes(), WITH_KL])
def test_every_recipe_has_the_loss_and_gradients_of_padded_rows(worked: Worked, recipe: str) -> None:
    result = worked["packs"]["recipes"][recipe]
    packed, padded = result["packed"], result["padded"]
    torch.testing.assert_close(packed["losses"], padded["losses"], rtol=1e-4, atol=1e-4)
    assert_same_gradients(packed["gradients"], padded["gradients"])
    assert result["report"] == PACKED
    assert packed["tokens"] < 0.6 * padded["tokens"]


def test_every_saving_is_on(worked: Worked) -> None:
    assert worked["packs"]["recipes"]["dapo"]["savings"] == {
        "token_budget": "on", "skip_flat_groups": "on",
    }  # fmt: skip
    trained = worked["unsloth"]["savings"]
    assert [ratio < 1e-3 for ratio in trained["ratios"]] == [True, False]  # in the first step on a rollout, old = new


@pytest.mark.parametrize(
    "family",
    [
        "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma4_text", "qwen3_5_text", "qwen3_moe", "gpt_oss",
    ],
)  # fmt: skip
def test_the_families_are_packed_and_share_prompts(worked: Worked, family: str) -> None:
    result = worked["packs"]["families"][family]
    assert_same_scores(result)
    assert result["report"] == PACKED


def test_an_attention_that_is_out_of_reach_is_scored_in_padded_rows_and_says_why(worked: Worked) -> None:
    result = worked["packs"]["planted in Gemma"]["gemma3_text", "out of reach"]
    assert_same_scores(result)
    assert (result["report"]["packing"], result["report"]["share_prompts"]) == ("plain", False)
    assert "do not call the packed attention as expected (windows []" in result["report"]["reason"]
    assert "attention is computed by unsloth_zoo.temporary_patches.gemma" in result["report"]["reason"]
    assert result["savings"]["skip_flat_groups"] == "on"


def test_what_passes_between_completions_of_a_gemma_is_found(worked: Worked) -> None:
    result = worked["packs"]["planted in Gemma"]["gemma3_text", "leak"]
    assert_same_scores(result)
    assert (result["report"]["packing"], result["report"]["share_prompts"]) == ("plain", False)
    assert "one completion changes the scores of another" in result["report"]["reason"]


def test_no_decoder_layer_is_compiled(worked: Worked) -> None:
    """Dynamo would recompile at each attention call that a pack counts: 16, 28, 40 graphs for a Gemma 3 of 2, 6, 10 layers."""
    assert worked["packs"]["compiled"] == [[], ["Gemma3DecoderLayer"]]


@pytest.mark.parametrize("case", ["triton", "four_bit", "after generation"])
def test_with_every_kernel_of_unsloth_and_with_4_bit_weights(worked: Worked, case: str) -> None:
    assert_same_scores(worked["packs"][case])
    assert worked["packs"][case]["report"] == PACKED


@pytest.mark.parametrize(
    ("defect", "packing", "shared"),
    [
        ("none", "packed", True),
        ("completions of a prompt see each other", "packed", False),
        ("all texts see each other", "plain", False),
    ],
)
def test_what_passes_between_completions_is_found(worked: Worked, defect: str, packing: str, shared: bool) -> None:
    result = worked["packs"]["planted"][defect]
    assert_same_scores(result)
    report = result["report"]
    assert (report["packing"], report["share_prompts"]) == (packing, shared)
    assert ("one completion changes the scores of another" in report["reason"]) == (defect != "none")
