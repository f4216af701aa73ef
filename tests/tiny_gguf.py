"""A tiny GGUF file as llama.cpp's converter writes it: architecture llama, byte-pair tokenizer, ChatML template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = ["Ġ Ġ", "i s"]
HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96


def vocabulary() -> list[str]:
    """Return the tokens: special ones, one per byte, and two merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(seed: int = 0) -> Any:
    """Return a random Llama of 0.1M weights with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=1024, tie_word_embeddings=True,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, initializer_range=0.1,
        ))  # fmt: skip


def write_gguf(path: Path, model: Any, *, kind: str = "F32", architecture: str = "llama", **changes: Any) -> Path:
    """Write `model` with matrices of type `kind`. `changes`: other `tokens`, or ids of special tokens (None omits an id)."""
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize

    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_license("mit")
    add_sizes(writer, model.config)
    tokens = changes.pop("tokens", None) or vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    ids = {"bos": 1, "eos": 2, "pad": 2, "unk": 0} | changes
    for name, number in ids.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        short = names.get_name(name.removesuffix(".weight"))
        values = weight.detach().float()
        if short.endswith(("attn_q", "attn_k")):  # llama.cpp interleaves the two halves of rotated heads
            heads = HEADS if short.endswith("attn_q") else KV_HEADS
            values = values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        array = values.contiguous().numpy()
        if array.ndim == 2 and kind != "F32":
            quantised = GGMLQuantizationType[kind]
            writer.add_tensor(f"{short}.weight", quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(f"{short}.weight", array)
    finish(writer)
    return path


def add_sizes(writer: Any, config: Any) -> None:
    """Write the sizes of a model into the header, from transformers' configuration."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
