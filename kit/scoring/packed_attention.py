"""Attention over a pack: within each text, and from every completion to the prompt that it shares.

The function that transformers' attention layers call is wrapped once, for the life of the process (gradient checkpointing
calls it again in the backward pass). A call that carries a `Layout` is computed here, group by group, from the same
keys and values; any other goes to the original function as it came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from kit.scoring.packing import Group, NotPackable

KEYWORD = "packed_layout"
"""Under which a `Layout` is handed through the model's layers to its attention."""
WRAPPED = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Implementations of transformers that are known to mean softmax(scaling * q k) v within the causal window."""
IGNORED_BY = {"sdpa": frozenset({"softcap", "s_aux"})}
"""Keywords of other implementations that models hand to this one too, which leaves them out."""
NOT_UNDERSTOOD = ("softcap", "s_aux", "position_bias", "sinks", "alibi_slopes", "block_table", "cu_seq_lens_q")
KERNELS_ON = "cuda"
"""The kind of device whose kernels know the causal mask of more keys than queries."""
FILLED = 0.75
"""Least share of tokens in a batch of segments of unequal lengths."""

Function = Callable[..., tuple[Tensor, Tensor | None]]


class Layout:
    """The groups of a pack, as its attention needs them, and what calls it has seen."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self.tokens = sum(group.tokens for group in groups)
        self.windows: list[int | None] = []
        """The sliding window of every call so far, in order: one a layer."""
        self._masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}

    def mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """(queries, keys) bool: which keys each of the last `queries` of `keys` tokens in a row sees.

        Without a window, on CUDA, torch's name for it, with which the flash kernel needs no mask.
        """
        if window is None and device.type == KERNELS_ON:
            return causal_lower_right(queries, keys)
        key = (queries, keys, window, device)
        if key not in self._masks:
            behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
            self._masks[key] = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        return self._masks[key]


def install_packed_attention() -> None:
    """Wraps the attention functions of transformers that are in `WRAPPED`; calling it again changes nothing."""
    from transformers import AttentionInterface

    for name in WRAPPED:
        original = AttentionInterface._global_mapping.get(name)
        if original is not None and not hasattr(original, "unpacked"):
            AttentionInterface.register(name, _with_packs(name, original))


def _with_packs(name: str, original: Function) -> Function:
    @functools.wraps(original)
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any) -> Any:
        layout = keywords.pop(KEYWORD, None)
        if layout is None:
            return original(module, query, key, value, *rest, **keywords)
        _check(name, query, key, layout, keywords)
        scaling, dropout, window = (keywords.get(one) for one in ("scaling", "dropout", "sliding_window"))
        layout.windows.append(window)
        return packed_attention(query, key, value, layout, scaling, dropout or 0.0, window), None

    attend.unpacked = original  # type: ignore[attr-defined]
    return attend


def _check(name: str, query: Tensor, key: Tensor, layout: Layout, keywords: dict[str, Any]) -> None:
    """Raises `NotPackable` for a call that means more than causal attention over this pack."""
    if not query.shape[2] == key.shape[2] == layout.tokens or query.shape[0] != 1:
        raise NotPackable(f"attention over {tuple(key.shape)} keys, of a pack of {layout.tokens} tokens")
    known = IGNORED_BY.get(name, frozenset())
    found = [one for one in NOT_UNDERSTOOD if one not in known and keywords.get(one) is not None]
    if keywords.get("is_causal") is False:
        found.append("is_causal=False")
    if keywords.get("output_attentions"):
        found.append("output_attentions")
    if found:
        raise NotPackable(f"attention with {', '.join(found)}")


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Queries (1, h, S, d), keys and values (1, h or fewer, S, d) -> (1, S, h, d), each token within its own text.

    window: how far back a token sees, itself included. dropout: share of the weights that are dropped.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    call = functools.partial(scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    done: list[Tensor] = []
    for group in layout.groups:
        done += _of_group(query, key, value, group, layout, call, window)
    return torch.cat(done, dim=2).transpose(1, 2).contiguous()


def _of_group(
    query: Tensor, key: Tensor, value: Tensor, group: Group, layout: Layout, call: Any, window: int | None
) -> Iterator[Tensor]:
    """(1, h, n, d) of the prompt with the first segment, which follows it, and then of each further one."""
    first = slice(group.start, group.start + group.prompt + group.lengths[0])
    tokens = first.stop - first.start
    seen = layout.mask(tokens, tokens, window, query.device) if window is not None and window < tokens else None
    own = query[:, :, first], key[:, :, first], value[:, :, first]
    yield call(*own, attn_mask=seen, is_causal=seen is None)
    prompt = slice(group.start, group.start + group.prompt)
    start = first.stop
    for lengths in _batches(group.lengths[1:]):
        stop, longest = start + sum(lengths), lengths[0]
        q, k, v = (_rows(whole[:, :, start:stop], lengths) for whole in (query, key, value))
        k, v = (
            torch.cat([whole[:, :, prompt].expand(len(lengths), -1, -1, -1), mine], dim=2)
            for whole, mine in ((key, k), (value, v))
        )
        found = call(q, k, v, attn_mask=layout.mask(longest, group.prompt + longest, window, query.device))
        yield from (one[None, :, :length] for one, length in zip(found, lengths, strict=True))
        start = stop


def _batches(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Neighbours, the longest first, that fill a batch well enough."""
    batch: list[int] = []
    for length in lengths:
        if batch and length < FILLED * batch[0]:
            yield tuple(batch)
            batch = []
        batch.append(length)
    if batch:
        yield tuple(batch)


def _rows(segments: Tensor, lengths: Sequence[int]) -> Tensor:
    """Segments behind one another (1, h, sum, d) -> (n, h, longest, d), with zeros behind each: no token sees them."""
    pieces = torch.split(segments[0], list(lengths), dim=1)
    return torch.stack([pad(piece, (0, 0, 0, lengths[0] - piece.shape[1])) for piece in pieces])
