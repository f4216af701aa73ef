"""A tiny model of any architecture: the structure of a configuration with small sizes and random weights.

Properties that determine whether an architecture trains are kept: kinds and order of layers, masks, logit transforms, experts,
vision towers. Sizes are reduced: width, depth, heads, vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN, HEADS, HEAD_SIZE, MAX_LAYERS, EXPERTS = 64, 4, 16, 8, 4
_LAYER_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_HEAD_COUNT = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num")
# Complete name -> size; the first matching rule applies. Ratios that models check (heads x head size, groups) are kept.
_SIZES: tuple[tuple[str, int], ...] = (
    (
        r"hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|out_hidden_size|projection_dim|vision_output_dim",
        HIDDEN,
    ),
    (r"word_embed_proj_dim|text_hidden_size|proj_dim|lru_width|attention_hidden_size|hidden_dim", HIDDEN),
    (r"global_head_dim|(attention_|attn_|swa_)?head_dim|kv_channels|v_head_dim|qk_nope_head_dim|head_size", HEAD_SIZE),
    (r"qk_rope_head_dim|rotary_dim", HEAD_SIZE),  # some configurations call this their head_dim
    (r"qk_head_dim", 2 * HEAD_SIZE),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"(moe|shared_expert|expert|routed_expert|moe_shared_expert)_(intermediate_size|ffn_hidden_size)|expert_dim", 32),
    (
        r"intermediate_size(_mlp)?|n_inner|ffn_dim|d_ff|ffn_hidden_size|shared_intermediate_size|block_ff_dim",
        2 * HIDDEN,
    ),
    (r"(num_|n_)?(local_|routed_)?experts|moe_num_experts|num_experts", EXPERTS),
    (
        r"num_experts_per_tok|num_experts_per_token|top_k_experts|moe_topk|moe_k|experts_per_token|num_selected_experts",
        2,
    ),
    (r"n_group|topk_group|num_expert_group|n_groups_experts", 1),
    (r"(num_|n_)shared_experts", 1),
    (r"mamba_d_ssm|mamba_intermediate_size", HIDDEN),
    (r"mamba_(d_head|head_dim)|mamba_headdim", HEAD_SIZE),
    (r"mamba_(d_state|n_groups|ngroups)|ssm_state_size|state_size|mamba_d_state", 4),
    (r"(mamba_)?chunk_size", 16),
    (r"linear_(key|value)_head_dim", HEAD_SIZE),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"hidden_size_per_layer_input|laurel_rank|altup_.*dim", 16),
    (r"num_position_embeddings", 64),
)


def tiny_config(config: Any, vocab: int | None = None, *, pictures: bool = True) -> Any:
    """A small copy of `config`: hidden size 64, 4 heads, a layer of each kind (at most 8), 4 experts, `vocab` tokens.

    config: a transformers configuration; all its parts (text, vision) are reduced. vocab: None keeps the vocabulary.
    pictures: also reduce pictures to 4 x 4 patches and 4 tokens; not if the model's own processor is used.
    """
    small = copy.deepcopy(config)
    for part in parts_of(small):
        _cut(part)
        if pictures:
            _cut_pictures(part)
    text = small.get_text_config()
    if vocab is not None:
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if hasattr(text, name):
                setattr(text, name, vocab)
        if small is not text and isinstance(getattr(small, "vocab_size", None), int):
            small.vocab_size = vocab
        moved: dict[int, int] = {}
        for part in parts_of(small):
            _fit_tokens(part, vocab, moved)
    return small


def parts_of(config: Any) -> Iterator[Any]:
    """The configuration and its nested ones, innermost first."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict") and hasattr(value, "model_type") and not name.startswith("_"):
            yield from parts_of(value)
    yield config


def _cut(part: Any) -> None:
    uneven = _take_uneven(part)
    before = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    layers = next((before[name] for name in _LAYER_COUNT if isinstance(before.get(name), int)), None)
    heads = next((before[name] for name in _HEAD_COUNT if isinstance(before.get(name), int)), None)
    old_size = before.get("head_dim") or before.get("kv_channels")
    if not isinstance(old_size, int) and heads:
        width = next((before[n] for n in ("hidden_size", "n_embd", "d_model", "embed_dim") if before.get(n)), 0)
        old_size = width // heads if isinstance(width, int) else 0
    for name, value in before.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
        if size is not None:
            _set(part, name, min(size, value) if value > 0 else value)
    _cut_heads(part, before, heads)
    if layers:
        layers_left = _cut_layers(part, before, layers)
        _put_uneven(part, {place: uneven[index] for place, index in enumerate(layers_left) if index in uneven})
    _cut_rope(part, old_size or 0)
    _cut_mamba(part)


def _cut_pictures(part: Any) -> None:
    patch, size = getattr(part, "patch_size", None), getattr(part, "image_size", None)
    if isinstance(patch, int) and isinstance(size, int):
        _set(part, "image_size", min(size, 4 * patch))
    if isinstance(getattr(part, "mm_tokens_per_image", None), int):
        _set(part, "mm_tokens_per_image", 4)


def _cut_heads(part: Any, before: Mapping[str, Any], heads: int | None) -> None:
    if not heads:
        return
    count = min(HEADS, heads)
    for name in _HEAD_COUNT:
        if isinstance(before.get(name), int):
            _set(part, name, count)
    for name in (*_KEY_HEADS, "num_global_key_value_heads", "swa_num_key_value_heads"):
        keys = before.get(name)
        if isinstance(keys, int):
            _set(part, name, count if keys >= heads else 1 if keys == 1 else min(2, keys))


def _take_uneven(part: Any) -> dict[int, dict[str, Any]]:
    """Removes and returns sizes that differ between layers (e.g. Gemma 4's head size), by layer."""
    if not getattr(part, "is_heterogeneous", False):
        return {}
    names = part.per_layer_attributes
    values_by_layer = {
        index: {name: getattr(layer, name) for name in names if getattr(layer, name, None) is not None}
        for index, layer in enumerate(part.per_layer_config)
    }
    part.per_layer_config = None
    usual = {name: getattr(part, name, None) for name in names}
    different = {i: {n: v for n, v in values.items() if v != usual[n]} for i, values in values_by_layer.items()}
    return {index: values for index, values in different.items() if values}


def _put_uneven(part: Any, uneven: dict[int, dict[str, Any]]) -> None:
    """Restores them for the remaining layers: head sizes twice the others', fewer keys."""
    if uneven:
        sizes = {"head_dim": 2 * HEAD_SIZE, "num_key_value_heads": 1}
        part.per_layer_config = {
            index: {name: sizes.get(name, value) for name, value in own.items()} for index, own in uneven.items()
        }


def _cut_layers(part: Any, before: Mapping[str, Any], layers: int) -> list[int]:
    """Reduces to a layer of each kind, in order, with all lists per layer. Returns the remaining layers."""
    shared = before.get("num_kv_shared_layers") or 0  # the last layers, which use keys and values of an earlier one
    lists = [*_per_layer(before, layers).values()]
    if 0 < shared < layers:
        lists.append([index >= layers - shared for index in range(layers)])
    kinds = [tuple(map(str, row)) for row in zip(*lists, strict=True)]
    chosen_layers = sorted({kinds.index(kind) for kind in kinds}) if kinds else []
    periods = [value for name, value in before.items() if "period" in name or name.endswith(("interval", "_pattern"))
               if isinstance(value, int) and not isinstance(value, bool)]  # fmt: skip
    count = max([2, len(chosen_layers), *(value for value in periods if 1 < value <= MAX_LAYERS)])
    dense = before.get("first_k_dense_replace")
    if isinstance(dense, int) and dense:
        _set(part, "first_k_dense_replace", 1)
    chosen_layers = _fill(chosen_layers, min(count, layers, MAX_LAYERS), layers)
    for name in _LAYER_COUNT:
        if isinstance(before.get(name), int):
            _set(part, name, len(chosen_layers))
    for name, values in _per_layer(before, layers).items():
        _set(part, name, type(values)(values[index] for index in chosen_layers))
    for name, values in before.items():
        chosen = re.search(r"(index|idx|layers|indexes|indices)(s|es)?$", name) and isinstance(values, (list, tuple))
        if chosen and values and len(values) != layers and all(type(value) is int for value in values):
            _set(
                part,
                name,
                type(values)([chosen_layers.index(value) for value in values if value in chosen_layers] or [0]),
            )
    if shared:
        _set(part, "num_kv_shared_layers", sum(index >= layers - shared for index in chosen_layers))
    window = before.get("max_window_layers")
    if isinstance(window, int):
        _set(part, "max_window_layers", min(window, len(chosen_layers)))
    return chosen_layers


def _per_layer(before: Mapping[str, Any], layers: int) -> dict[str, Any]:
    lists = {name: value for name, value in before.items() if isinstance(value, (list, tuple)) and len(value) == layers}
    plain = (str, int, bool, float, type(None))
    return {name: value for name, value in lists.items() if all(isinstance(item, plain) for item in value)}


def _fill(layers_kept: list[int], count: int, layers: int) -> list[int]:
    """The chosen layers, and the first others up to `count`."""
    chosen = list(layers_kept[:MAX_LAYERS])
    for index in range(layers):
        if len(chosen) >= count:
            break
        if index not in chosen:
            chosen.append(index)
    return sorted(chosen)


def _cut_rope(part: Any, old_size: int) -> None:
    """Scales sections of a rotary embedding (M-RoPE) and long-range factors to the new head size."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(part, name, None)
        for place, section in enumerate([rope, *(rope.values() if isinstance(rope, dict) else ())]):
            if not isinstance(section, dict):
                continue
            known = getattr(type(part), "ignore_keys_at_rope_validation", None) or ()
            if place == 0 and "mrope_section" in known:
                section.setdefault("mrope_section", [2, 3, 3])  # the models' default is too large for a small head
            if "mrope_section" in section and sum(section["mrope_section"]):
                section["mrope_section"] = _share(section["mrope_section"], HEAD_SIZE // 2)
            half = int(HEAD_SIZE * section.get("partial_rotary_factor", 1.0)) // 2
            for key in ("long_factor", "short_factor"):
                if isinstance(section.get(key), (list, tuple)):
                    section[key] = list(section[key])[:half]


def _share(sections: list[int], total: int) -> list[int]:
    scaled = [value * total // sum(sections) for value in sections]
    scaled[0] += total - sum(scaled)
    return scaled


def _cut_mamba(part: Any) -> None:
    """Sets the heads of a state-space layer by its inner width."""
    head = next(
        (getattr(part, n) for n in ("mamba_d_head", "mamba_head_dim", "mamba_headdim") if hasattr(part, n)), None
    )
    if not isinstance(head, int):
        return
    inner = getattr(part, "mamba_d_ssm", None) or int(
        getattr(part, "mamba_expand", getattr(part, "expand", 2)) * HIDDEN
    )
    for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        if hasattr(part, name):
            _set(part, name, max(1, inner // head) if name != "n_mamba_heads" else 2)
    for name in ("mamba_n_groups", "mamba_ngroups", "n_groups"):
        if hasattr(part, name):
            _set(part, name, 1)


def _fit_tokens(part: Any, vocab: int, moved: dict[int, int]) -> None:
    """Moves token ids beyond a smaller vocabulary to its end, each to a different id, equal in all parts."""

    def place(value: int) -> int:
        return value if value < vocab else moved.setdefault(value, vocab - 1 - len(moved))

    for name in sorted(vars(part)):
        if not re.search(r"(token_id|token_index|_token)s?$", name):
            continue
        value = getattr(part, name)
        if type(value) is int:
            _set(part, name, place(value))
        elif isinstance(value, list) and all(type(token) is int for token in value):
            _set(part, name, [place(token) for token in value])


def _set(part: Any, name: str, value: Any) -> None:
    """Sets a field, unless the configuration computes or checks it."""
    try:
        setattr(part, name, value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A float32 model on the CPU with random weights, large enough that logits differ."""
    import torch

    from kit.models.family import auto_class

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() >= 2 and "norm" not in name:
                    width = weight.shape[-1] if weight.dim() <= 3 else weight[0].numel()
                    weight.normal_(0.0, width**-0.5)
    return model.eval()
