"""Properties read from models: chat templates, end tokens, treatment of inputs, and the Auto class."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from tiny_qwen import tiny_tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from kit.config import ModelConfig
from kit.errors import ModelError
from kit.model_check.tiny import tiny_config
from kit.models.family import (
    adapter_of,
    end_ids,
    read_template,
)
from kit.models.loading import find_model, load_model
from kit.scoring.scorer import pieces
from kit.trainer.policy_loss import MicroBatch


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer()


def config_of(name: str) -> Any:
    return tiny_config(AutoConfig.for_model(name), 512)


def test_a_template_is_read_by_rendering_it(tokenizer):
    chatml = tokenizer.chat_template
    template = read_template(tokenizer)
    assert (template.system, template.tools) == (True, False)
    assert template.turn_end == "<|im_end|>"
    tokenizer.chat_template = chatml.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert read_template(tokenizer).opens_thinking
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + chatml
    assert not read_template(tokenizer).system
    tokenizer.chat_template = chatml + "{% if tools %}{{ tools | tojson }}{% endif %}"
    assert read_template(tokenizer).tools
    tokenizer.chat_template = None
    assert read_template(tokenizer) is None


def test_the_end_of_a_turn_ends_a_completion_where_the_tokenizer_says_otherwise(tokenizer):
    turn = tokenizer.eos_token_id
    tokenizer.eos_token = "<|endoftext|>"  # the end token of base models
    text = tokenizer.eos_token_id
    assert text != turn
    declared = GenerationConfig(eos_token_id=[text, 7])
    assert end_ids(declared, tokenizer, read_template(tokenizer)) == (text, 7, turn)
    assert end_ids(declared, tokenizer, None) == (text, 7)


def test_a_base_model_stops_at_the_end_of_a_turn(model_folder, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    words = AutoTokenizer.from_pretrained(folder)
    turn, words.eos_token = words.eos_token_id, "<|endoftext|>"
    words.save_pretrained(folder)
    section = ModelConfig(name=str(folder), backend="transformers")
    assert turn in load_model(find_model(section, chat=True), section).model.generation_config.eos_token_id
    assert load_model(find_model(section, chat=False), section).model.generation_config.eos_token_id != turn


def test_inputs_are_extended_sliced_or_dropped(tokenizer):
    gemma = adapter_of(config_of("gemma3"), tokenizer)
    assert gemma.rule("token_type_ids") == "extend"
    assert gemma.rule("pixel_values") == "slice"
    assert gemma.rule("aspect_ratio_ids") == "drop"
    assert gemma.fills == ("token_type_ids",)
    llama = adapter_of(config_of("llama"), tokenizer)
    assert llama.rule("token_type_ids") == "drop"
    assert llama.fills == ()
    assert llama.decoder is None


def test_pieces_are_found_by_counting():
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])  # 4, 8 and 4 patches
    counts = {"num_images": [1, 0, 2], "image_grid_thw": grid}
    assert [len(part) for part in pieces("pixel_values", torch.zeros(16, 5), 3, counts)] == [4, 0, 12]
    assert [len(part) for part in pieces("image_grid_thw", grid, 3, counts)] == [1, 0, 2]
    # With three pictures and three samples, `image_sizes` has a row per picture and `token_type_ids` a row per sample.
    flat = torch.arange(3)[:, None]
    assert [part.flatten().tolist() for part in pieces("image_sizes", flat, 3, {"num_images": [2, 0, 1]})] == [
        [0, 1],
        [],
        [2],
    ]
    assert [part.flatten().tolist() for part in pieces("token_type_ids", flat, 3, {"num_images": [2, 0, 1]})] == [
        [0],
        [1],
        [2],
    ]
    with pytest.raises(ModelError, match="'odd' with 5 rows for 3 prompts and 3 pictures"):
        pieces("odd", torch.zeros(5), 3, counts)


def test_a_micro_batch_is_divided_with_its_pictures():
    inputs = {
        "prompt_ids": torch.arange(3)[:, None],
        "prompt_mask": torch.ones(3, 1),
        "completion_ids": torch.arange(3)[:, None],
        "completion_mask": torch.ones(3, 1),
        "num_items_in_batch": torch.tensor(3.0),
        "pixel_values": torch.arange(16.0)[:, None],
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]]),
        "num_images": [1, 0, 2],
        "mm_token_type_ids": torch.arange(6).reshape(3, 2),
        "extra_inputs.more": [torch.tensor([0]), torch.tensor([1]), torch.tensor([2])],
    }
    batch = MicroBatch(inputs)
    first, second = (batch.select(chosen) for chosen in ([0, 1], [2]))
    assert [first.share, second.share] == [2 / 3, 1 / 3]
    assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3]
    assert first["num_images"] == [1, 0]
    assert second["pixel_values"].flatten().tolist() == list(range(4, 16))
    assert second["mm_token_type_ids"].tolist() == [[4, 5]]
    assert [int(row) for row in second["extra_inputs.more"]] == [2]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 3


def test_what_a_family_refuses_is_refused_before_the_run(tree, attempt, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + tiny_tokenizer().chat_template
    )
    tree["model"]["chat_template"] = str(template)
    refused = attempt("data.system_prompt=Be brief.")
    assert refused.code == 2
    assert "ignores" in refused.message
    refused = attempt("model.lora.targets=[q_prj]")
    assert refused.code == 2
    assert "no linear layer called 'q_prj'" in refused.message
    assert "q_proj" in refused.message
