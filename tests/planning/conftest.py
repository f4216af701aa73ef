"""A model shape with round numbers, for tests of planning."""

from __future__ import annotations

from typing import Any

import pytest

from kit.models.shape import ModelShape

LAYER = [("q_proj", 128, 192), ("k_proj", 128, 64), ("v_proj", 128, 64), ("o_proj", 192, 128)]
LAYER += [("gate_proj", 128, 352), ("up_proj", 128, 352), ("down_proj", 352, 128)]


@pytest.fixture
def tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The shared run with completions of 12 tokens, which the arithmetic of these tests assumes."""
    tree["generation"]["max_completion_tokens"] = 12
    return tree


@pytest.fixture
def shape() -> ModelShape:
    """A Qwen3 of two layers: hidden 128, 6 heads of 32 (2 for keys), feed-forward 352, vocabulary 512."""
    return ModelShape(
        parameters=512 * 128 + 2 * sum(a * b for _, a, b in LAYER),
        linear=2 * sum(a * b for _, a, b in LAYER),
        largest=512 * 128,
        layers=2,
        hidden=128,
        intermediate=352,
        query=192,
        key=64,
        heads=6,
        vocab=512,
        qk_norm=True,
        modules=tuple(LAYER * 2),
    )


@pytest.fixture
def seven_billion(tmp_path: Any) -> Any:
    """A folder with only the config.json of a 7B model."""
    folder = tmp_path / "seven"
    folder.mkdir()
    folder.joinpath("config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, '
        '"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, '
        '"max_position_embeddings": 32768, "tie_word_embeddings": false}'
    )
    return folder
