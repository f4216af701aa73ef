"""Faster generation on a CPU: transformers' `generate` with another loop over tokens.

Inside `fast_decoding(model)`, `model.generate(...)` prepares its inputs as usual and calls `decode`. Greedy tokens are the same,
and samples have the same distribution, but with other random draws. The differences:

    prompts      consecutive copies of a prompt are computed once; their keys and values are then copied
    rows         a completion that has ended leaves the batch; `generate` computes it until the longest one has ended
    draws        one random number per completion, looked up in the cumulated probabilities; `torch.multinomial` draws one for
                 every token of the vocabulary
    attention    keys and values are in buffers with space for further tokens, and grouped queries read them in place;
                 transformers copies both for every token
    adapters     LoRA in float32 is merged into copies of the weights, if these are small; the original weights are restored
                 afterwards

transformers' loop handles everything else: pictures, linear attention, beams, stateful logits processors, and models with
their own `generate`. It also handles everything on a GPU, where kernel launches and not rows take the time, and everything
with KIT_FAST_DECODING=0 in the environment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

FOLDED_BYTES = 256 * 2**20
"""Maximum number of weights that are copied to merge adapters. In larger models adapters are a small part of the work."""
DROPPED_SHARE = 1 / 16
"""Ended rows leave when there are this many, because removing rows copies the cache of the others."""
ROOM = 32
"""Number of tokens by which a full buffer of keys and values grows."""
ROW_WISE = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinLengthLogitsProcessor",
}
"""Logits processors that handle rows separately and have no state."""
ENDINGS = {"MaxLengthCriteria", "EosTokenCriteria"}
INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


@contextmanager
def as_in_training(model: Any, half: torch.dtype | None) -> Iterator[None]:
    """Uses the precision of a training pass inside the block: autocast to `half`, float32 logits of a 16-bit head on a GPU.

    Quantised weights keep their precision, because bitsandbytes' product for decoding must not run under autocast. Logits that
    are rounded to 16 bits would sample from another policy than the scorer's, whose logits are float32.
    """
    head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
    plain = type(head) is torch.nn.Linear and "forward" not in vars(head)
    exact = plain and head.weight.dtype.itemsize == 2 and head.weight.device.type == "cuda"
    if exact:
        head.forward = functools.partial(float32_logits, head)
    try:
        with torch.autocast(weight.device.type, half) if half and weight.dtype == torch.float32 else nullcontext():
            yield
    finally:
        if exact:
            del head.forward


def float32_logits(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    """(..., H) -> (..., V): a 16-bit linear head with float32 accumulation and output; on GPUs only."""
    rows = hidden.to(head.weight.dtype).flatten(0, -2)
    logits = torch.mm(rows, head.weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias


@contextmanager
def fast_decoding(model: Any) -> Iterator[None]:
    """Makes `model.generate` use the loop of this module inside the block. `model` may have adapters."""
    from transformers import GenerationMixin

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if os.environ.get("KIT_FAST_DECODING") == "0":
        yield
        return
    if (
        base.device.type != "cpu"
        or getattr(type(base), "generate", None) is not GenerationMixin.generate
        or "generate" in vars(base)
    ):
        yield
        return
    base.generate = functools.partial(_generate, base.generate)
    try:
        with folded_adapters(model):
            yield
    finally:
        del base.generate


def _generate(generate: Any, *args: Any, **keywords: Any) -> Any:
    """`generate` with the kit's loop, for sampling and greedy decoding."""
    settings = keywords.get("generation_config")
    mode = settings.get_generation_mode(keywords.get("assistant_model")) if settings is not None else None
    known = mode in ("sample", "greedy_search") and "custom_generate" not in keywords
    known = known and keywords.get("streamer") is None  # a streamer needs transformers' loop
    return generate(*args, **keywords, **({"custom_generate": decode} if known else {}))


def decode(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> Any:
    """The loop over tokens: (B, P) prompts, padded on the left -> (B, P + T), padded on the right.

    `generate` calls it with prepared inputs. Calls transformers' loop if the inputs are not `_suited`.
    """
    if streamer is not None or not _suited(model, logits_processor, stopping_criteria, generation_config, inputs):
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **inputs,
        )
    with shared_keys():
        return _decode(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs)


def _decode(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, settings: Any, inputs: dict[str, Any]
) -> Tensor:
    (batch, width), longest = input_ids.shape, settings.max_length
    mask, positions, cache = inputs.pop("attention_mask"), inputs.pop("position_ids"), inputs["past_key_values"]
    use_buffers(cache)
    first, copy_of = distinct(input_ids, mask)
    out = input_ids.new_full((batch, longest), int(settings._pad_token_tensor))
    out[:, :width] = input_ids

    logits = model(
        input_ids=input_ids[first], attention_mask=mask[first], position_ids=positions[first], **inputs
    ).logits
    logits = logits[copy_of, -1]
    if int(first.sum()) < batch:
        cache.batch_select_indices(copy_of)
    rows, next_position = torch.arange(batch, device=input_ids.device), positions[:, -1:] + 1
    live = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
    for length in range(width, longest):
        prefix = out[rows, :length]
        scores = logits_processor(prefix, logits.to(copy=True, dtype=torch.float32))
        tokens = draw(scores) if settings.do_sample else scores.argmax(dim=-1)
        tokens = torch.where(live, tokens, out[rows, length])
        out[rows, length] = tokens
        live = live & ~stopping_criteria(out[rows, : length + 1], None)
        left = int(live.sum())
        if left == 0:
            return out[:, : length + 1]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if len(rows) - left >= max(1, len(rows) * DROPPED_SHARE):
            cache.batch_select_indices(live.nonzero()[:, 0])
            rows, mask, next_position, tokens = rows[live], mask[live], next_position[live], tokens[live]
            live = live[live]
        logits = model(input_ids=tokens[:, None], attention_mask=mask, position_ids=next_position, **inputs).logits[
            :, -1
        ]
        next_position = next_position + 1
    return out


def distinct(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, P) prompts and mask -> (B,) whether a row differs from the previous one, and (B,) the index among distinct rows."""
    _, copy_of = torch.unique_consecutive(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    first = torch.ones_like(copy_of, dtype=torch.bool)
    first[1:] = copy_of[1:] != copy_of[:-1]
    return first, copy_of


def draw(scores: Tensor) -> Tensor:
    """(B, V) logits -> (B,) tokens, each drawn from the softmax of its row by one uniform number from torch's generator."""
    cumulated = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    uniforms = torch.rand(len(scores), dtype=torch.float64, device=scores.device)[:, None] * cumulated[:, -1:]
    # A token of probability 0 is never drawn: its cumulated probability equals that of the token before.
    return torch.searchsorted(cumulated, uniforms, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


@functools.cache
def _buffered_layer() -> type:
    """A layer of transformers' `DynamicCache` that copies keys and values only if its buffer is full."""
    from transformers.cache_utils import DynamicLayer

    class BufferedLayer(DynamicLayer):  # type: ignore[misc]  # untyped
        buffers: tuple[Tensor, ...]

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            length = self.get_seq_length()
            end = length + key_states.shape[-2]
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.buffers = (key_states[:, :, :0], value_states[:, :, :0])
            if end > self.buffers[0].shape[-2]:
                self.buffers = tuple(
                    torch.cat([held[:, :, :length], new, new.new_empty(*new.shape[:2], ROOM, new.shape[3])], dim=-2)
                    for held, new in zip(self.buffers, (key_states, value_states), strict=True)
                )
            else:
                for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
                    buffer[:, :, length:end] = new
            self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
            return self.keys, self.values

        def batch_select_indices(self, indices: Tensor) -> None:
            length = self.get_seq_length()
            self.buffers = tuple(buffer[indices] for buffer in self.buffers)
            self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    return BufferedLayer


def use_buffers(cache: Any) -> None:
    """Replaces layers of an empty `DynamicCache` that store all tokens by layers with buffers."""
    from transformers.cache_utils import DynamicLayer

    cache.layers = [_buffered_layer()() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = _buffered_layer()


@contextmanager
def shared_keys() -> Iterator[None]:
    """Makes transformers' `sdpa` attention read the keys of grouped queries in place inside the block, with equal results.

    With a mask, transformers copies the keys for each query, because a GPU has no kernel for grouped queries with a mask.
    """
    from transformers.integrations import sdpa_attention

    original = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_: True
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = original


def _suited(model: Any, processors: Any, criteria: Any, settings: Any, inputs: dict[str, Any]) -> bool:
    """Whether rows of this batch can be removed: it contains only text, with a cache of keys and values per row."""
    from transformers import DynamicCache, GenerationMixin
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    mask: Any = inputs.get("attention_mask")
    cache: Any = inputs.get("past_key_values")
    if type(cache) is not DynamicCache or cache.get_seq_length() or mask is None or mask.dim() != 2:
        return False
    kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    own = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    return (
        kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        and all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in own)
        and set(inputs) <= INPUTS
        and inputs.get("position_ids") is not None
        and inputs["position_ids"].shape == mask.shape
        and bool(inputs.get("use_cache"))
        and {type(item).__name__ for item in processors} <= ROW_WISE
        and {type(item).__name__ for item in criteria} <= ENDINGS
        and settings._pad_token_tensor is not None
        and settings.prefill_chunk_size is None
        and not settings.return_dict_in_generate
    )


# --- adapters ---------------------------------------------------------------------------------------------------------


@contextmanager
def folded_adapters(model: Any) -> Iterator[None]:
    """Merges LoRA adapters into copies of the weights inside the block, so that a layer needs one product.

    Layers for which this would not be exact up to rounding are not merged: quantised or half-precision weights, dropout in
    training mode, several adapters, variants such as DoRA. The original weight tensors are restored, not computed by subtraction.
    """
    layers = _foldable(model)
    size = sum(layer.base_layer.weight.nbytes for layer, _ in layers)
    originals: list[tuple[Any, Tensor]] = []
    try:
        if size <= FOLDED_BYTES:
            with torch.no_grad():
                for layer, name in layers:
                    weight = layer.base_layer.weight
                    originals.append((layer, weight.data))
                    weight.data = weight.data + layer.get_delta_weight(name)
                    layer.merged_adapters.append(name)
        yield
    finally:
        for layer, original in originals:
            layer.base_layer.weight.data = original
            layer.merged_adapters.clear()


def _foldable(model: Any) -> list[tuple[Any, str]]:
    """LoRA layers whose adapter can be merged, each with the name of its adapter."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora.layer import Linear

    folding: list[tuple[Any, str]] = []
    for layer in (module for module in model.modules() if type(module) is Linear):
        names, base = layer.active_adapters, layer.base_layer
        if len(names) != 1 or names[0] not in layer.lora_A or layer.disable_adapters or layer.merged_adapters:
            continue
        (name,) = names
        dropout = layer.lora_dropout[name]
        if (
            type(base) is torch.nn.Linear
            and base.weight.dtype == torch.float32 == layer.lora_A[name].weight.dtype
            and name not in getattr(layer, "lora_variant", {})
            and not layer.lora_bias.get(name, False)
            and (isinstance(dropout, torch.nn.Identity) or not dropout.training)
        ):
            folding.append((layer, name))
    return folding
