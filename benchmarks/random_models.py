"""Model folders with random weights in the shapes of common models. The module downloads nothing.

`python benchmarks/random_models.py NAME FOLDER` builds the model NAME in FOLDER/NAME.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
CONTEXT = 32768
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "kind": "Qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
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


def build_model(name: str, folder: Path) -> Path:
    """Write a model of this shape, with random bfloat16 weights and the kit's tokenizer, unless `folder` has it."""
    path, shape = folder / name, dict(SHAPES[name])
    if (path / "tokenizer_config.json").is_file():  # written last
        return path
    import torch
    import transformers

    from kit.models.embedded import source_of

    kind = shape.pop("kind")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source_of("embedded"))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=CONTEXT, **shape, **ids)
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model_class = getattr(transformers, f"{kind}ForCausalLM")
        with torch.device("meta"):
            size = sum(weight.nbytes for weight in model_class(config).parameters())
        fits = torch.cuda.is_available() and size < 0.9 * torch.cuda.mem_get_info()[0]
        with torch.device("cuda" if fits else "cpu"):
            model = model_class(config)
    finally:
        torch.set_default_dtype(default_dtype)
    model.save_pretrained(path, max_shard_size="2GB")  # a shard is copied to main memory as a whole
    tokenizer.save_pretrained(path)
    return path


def position_weighted_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward in [0, 1) that differs between most completions: the sum of position times token id, modulo 101."""
    return [sum(position * token for position, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]


if __name__ == "__main__":
    build_model(sys.argv[1], Path(sys.argv[2]))
