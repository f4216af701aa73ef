"""Tiny random Qwen3 models, with the tokenizers of the embedded models: what most tests train."""

from __future__ import annotations

from typing import Any

VOCABULARY = 512


def tiny_tokenizer(name: str = "embedded") -> Any:
    """The tokenizer of an embedded model, padding on the left as generation needs it."""
    from transformers import AutoTokenizer

    from kit.models.embedded import source_of

    return AutoTokenizer.from_pretrained(source_of(name), padding_side="left")


def tiny_qwen(tokenizer: Any, context: int = 256) -> Any:
    """Two layers, in evaluation mode; the same random weights every time, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()
