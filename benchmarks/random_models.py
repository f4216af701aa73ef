"""Model folders with random weights, in the shapes of models that are in use. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "kind": "Qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "kind": "Qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "kind": "Llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "tiny": {
        "kind": "Qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


def build_model(name: str, folder: Path, four_bit: bool) -> Path:
    """A model folder with random weights of this shape and the kit's tokenizer; bfloat16 on disk where it is large."""
    import torch
    import transformers

    from kit.training.embedded import source_of

    place = folder / name
    if (place / "config.json").is_file():
        return place
    shape = dict(SHAPES[name])
    kind = shape.pop("kind")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source_of("embedded"))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=4096, **shape, **ids)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if four_bit else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
