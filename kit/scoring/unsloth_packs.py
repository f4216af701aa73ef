"""Compute packs on models whose layers run Unsloth's own forward functions (Llama, Mistral, Qwen2, Qwen3 ...).

These functions do not call transformers' attention but Unsloth's `run_attention`, and pass the caller's `prefix_seg_info` on
to it. The kit passes its `Layout` in that argument:

    no shared prompt     Unsloth's kernels compute the pack, whose texts they know from `packed_seq_lengths`
    a shared prompt      `packed_attention` computes it from the queries, keys and values of the call

Layers of transformers whose forward method unsloth_zoo has replaced (Gemma 3) look up their attention function under one name
only; their forward methods are wrapped. Gemma 2 is scored in padded rows, because Unsloth computes its capped scores in
functions of their own where flash attention is missing.

Unsloth's fused LoRA, norms, rotary embeddings and checkpointing remain in use. This module does not import Unsloth, which must
be imported before TRL (`kit.models.backend`); it only wraps functions of an Unsloth that is loaded.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kit.scoring.packing import BY_NAME, KEYWORD, Layout, NotPackable, packed_attention

DISPATCH = "unsloth.utils.attention_dispatch"
NAME = "run_attention"
TABLE = "prefix_seg_info"
"""The keyword argument that Unsloth's layers pass on to their attention."""


def has_unsloth_layers(bare: Any) -> bool:
    """Whether Unsloth's functions compute the backbone of a model. bare: The model without accelerate's wrappers."""
    base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    backbone = getattr(base, "base_model", base)
    forward = type(backbone).forward
    # Unsloth replaces the method of the class. Models that it has not loaded, e.g. a teacher, still run the original.
    original = hasattr(forward, "_unsloth_gated") and not getattr(backbone, "_unsloth_fast_path", False)
    return str(forward.__module__).startswith("unsloth.models.") and not original


def pack_inputs(layout: Layout) -> dict[str, Any]:
    """Keyword arguments with which a model of Unsloth computes a pack, in addition to token ids and positions."""
    lengths = torch.tensor([group.tokens for group in layout.groups], dtype=torch.int32)
    return {"packed_seq_lengths": lengths, TABLE: layout}


def install() -> None:
    """Wrap Unsloth's attention dispatch if Unsloth is loaded. Calling it again changes nothing."""
    dispatch = sys.modules.get(DISPATCH)
    original = getattr(dispatch, NAME, None)
    if original is None or hasattr(original, "unpacked"):
        return
    wrapped = _with_packs(original)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "unsloth" and vars(module).get(NAME) is original:
            setattr(module, NAME, wrapped)


def install_in_layers(model: Any) -> None:
    """Wrap the forward methods of attention layers that unsloth_zoo has replaced. Calling it again changes nothing."""
    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("Attention")}:
        original = kind.forward
        module_name = str(original.__module__)
        replaced = module_name.startswith("unsloth") and not module_name.startswith("unsloth.models.")
        if replaced and not hasattr(original, "unpacked"):
            kind.forward = _by_name(original)


def _by_name(original: Any) -> Any:
    """Wrap a forward method so that it looks up `packed_attention` in a call with a layout."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        if keywords.get(KEYWORD) is None:
            return original(self, *args, **keywords)
        implementation = self.config._attn_implementation
        self.config._attn_implementation = BY_NAME
        try:
            return original(self, *args, **keywords)
        finally:
            self.config._attn_implementation = implementation

    forward.unpacked = original  # type: ignore[attr-defined]
    return forward


def _with_packs(original: Any) -> Any:
    @functools.wraps(original)
    def attend(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        layout = context.prefix_seg_info
        if not isinstance(layout, Layout):
            return original(config=config, context=context, Q=Q, K=K, V=V)  # type: ignore[no-any-return]
        _check(Q, K, layout)
        flash = config.flash_varlen_kwargs or {}
        # Flash attention's window is the number of tokens before a token; the layout counts the token itself, too.
        window = flash["window_size"][0] + 1 if "window_size" in flash else context.sliding_window
        window = window if window is not None and window > 0 else None
        layout.windows.append(window)
        if all(len(group.lengths) == 1 for group in layout.groups):
            without_layout = replace(context, prefix_seg_info=None)
            return original(config=config, context=without_layout, Q=Q, K=K, V=V)  # type: ignore[no-any-return]
        if flash.get("softcap"):
            raise NotPackable("attention with softcap over a shared prompt, which flash attention does not compute")
        return packed_attention(Q, K, V, layout, flash.get("softmax_scale"), window=window)

    attend.unpacked = original  # type: ignore[attr-defined]
    return attend


def _check(Q: Tensor, K: Tensor, layout: Layout) -> None:
    """Raise `NotPackable` for a call over other tokens than those of the pack."""
    if not Q.shape[2] == K.shape[2] == layout.tokens or len(Q) != 1:
        raise NotPackable(f"attention over {tuple(K.shape)} keys in a pack of {layout.tokens} tokens")
