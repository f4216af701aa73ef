"""Packs on models whose layers are computed by Unsloth's own forward functions (Llama, Mistral, Qwen2, Qwen3 ...).

Those functions call no attention of transformers' but `run_attention` of Unsloth's, and hand it what a caller gave as
`prefix_seg_info`. A `Layout` travels there:

    nothing is shared    Unsloth's kernels, which know a row of texts by `packed_seq_lengths`
    a shared prompt      `packed_attention`, from the queries, keys and values of that call

Layers of transformers' whose forward unsloth_zoo has replaced (Gemma 3) look into transformers' table of attention functions
under one name only, and are wrapped. Gemma 2, whose capped scores Unsloth computes apart where flash attention cannot, is
scored in padded rows there.

Unsloth's fused LoRA, norms, rotary embeddings and checkpointing stay as they are. Unsloth is called here, never imported: it
must come before TRL (`kit.models.backend`), and does where a run uses it.
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
"""The keyword that Unsloth's layers hand through to their attention."""


def has_unsloths_layers(bare: Any) -> bool:
    """Whether the backbone that TRL's head calls is computed by Unsloth's functions. bare: without accelerate's wrappers."""
    base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    backbone = getattr(base, "base_model", base)
    return str(type(backbone).forward.__module__).startswith("unsloth.models.")


def pack_inputs(layout: Layout) -> dict[str, Any]:
    """What such a model is given with a pack beside its tokens and their positions; no attention mask."""
    lengths = torch.tensor([group.tokens for group in layout.groups], dtype=torch.int32)
    return {"packed_seq_lengths": lengths, TABLE: layout}


def install() -> None:
    """Wraps Unsloth's attention dispatch, where Unsloth is in this process; calling it again changes nothing."""
    dispatch = sys.modules.get(DISPATCH)
    original = getattr(dispatch, NAME, None)
    if original is None or hasattr(original, "unpacked"):
        return
    wrapped = _with_packs(original)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "unsloth" and vars(module).get(NAME) is original:
            setattr(module, NAME, wrapped)


def install_in_layers(model: Any) -> None:
    """Wraps the forward functions of attention layers that unsloth_zoo has replaced; calling it again changes nothing."""
    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("Attention")}:
        original = kind.forward
        home = str(original.__module__)
        own = home.startswith("unsloth") and not home.startswith("unsloth.models.")
        if own and not hasattr(original, "unpacked"):
            kind.forward = _by_name(original)


def _by_name(original: Any) -> Any:
    """A forward function that finds `packed_attention` where it looks for another's, for calls that carry a layout."""

    @functools.wraps(original)
    def forward(self: Any, *given: Any, **keywords: Any) -> Any:
        if keywords.get(KEYWORD) is None:
            return original(self, *given, **keywords)
        asked = self.config._attn_implementation
        self.config._attn_implementation = BY_NAME
        try:
            return original(self, *given, **keywords)
        finally:
            self.config._attn_implementation = asked

    forward.unpacked = original  # type: ignore[attr-defined]
    return forward


def _with_packs(original: Any) -> Any:
    @functools.wraps(original)
    def attend(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        layout = context.prefix_seg_info
        if not isinstance(layout, Layout):
            return original(config=config, context=context, Q=Q, K=K, V=V)  # type: ignore[no-any-return]
        _check(Q, K, layout)
        given = config.flash_varlen_kwargs or {}
        window = _window(given, context)
        layout.windows.append(window)
        if all(len(group.lengths) == 1 for group in layout.groups):
            own = replace(context, prefix_seg_info=None)
            return original(config=config, context=own, Q=Q, K=K, V=V)  # type: ignore[no-any-return]
        if given.get("softcap"):
            raise NotPackable("attention with softcap, which only flash attention computes, and not of shared prompts")
        return packed_attention(Q, K, V, layout, given.get("softmax_scale"), window=window)

    attend.unpacked = original  # type: ignore[attr-defined]
    return attend


def _check(Q: Tensor, K: Tensor, layout: Layout) -> None:
    """Raises `NotPackable` for a call that is not of this pack."""
    if not Q.shape[2] == K.shape[2] == layout.tokens or len(Q) != 1:
        raise NotPackable(f"attention over {tuple(K.shape)} keys, of a pack of {layout.tokens} tokens")


def _window(given: dict[str, Any], context: Any) -> int | None:
    """How far back a token sees, itself included. Flash attention counts the tokens before it."""
    behind = given["window_size"][0] + 1 if "window_size" in given else context.sliding_window
    return behind if behind is not None and behind > 0 else None
