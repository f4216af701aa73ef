"""Recurrent layers over a pack: every text from an empty state, in a row of its own.

State-space layers, gated delta nets and short convolutions carry a state from token to token; in a pack it would go on from
one text into the next. Kernels that are told where a text begins (`cu_seqlens`, `seq_idx`) are CUDA's alone, transformers'
own functions ignore those arguments, and none continues several completions from one prompt. So for such a layer, and for
it alone, a pack is laid out in rows:

    pack    p p p | c c c | d        a prompt that two completions share
    rows    p p p c c c              padding stands behind, where no token before it sees it
            p p p d . .
    back    the prompt of the first row, and of every row its own tokens

Everything else of the model (attention, experts, norms, the head) sees each token once. The forward of a layer's class is
wrapped once, for the life of the process, as gradient checkpointing calls it again in the backward pass; a call without a
`Layout` goes through as it came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.scoring.packed_attention import KEYWORD, Layout, in_batches, tokens_of_segments
from kit.scoring.packing import NotPackable

TEXT_OF_TOKEN = "seq_idx"
"""The keyword by which short convolutions are told of texts. The layers that hand on nothing else hand on this one."""
CACHES = ("cache_params", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class Rows:
    """Rows of like length. K is the number of a pack's keys: every segment with its prompt, behind one another."""

    keys: Tensor  # (n, L) index of K; the last one of a row again, where it is padding
    kept: Tensor  # (m,) index of n * L whose result is taken
    places: Tensor  # (m,) of the pack, where it goes


def recurrent_layers(model: Any) -> list[Any]:
    """The layers of a language model that carry a state: those that hold a depthwise convolution over time."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [
        module
        for module in decoder.modules()
        if any(isinstance(part, torch.nn.Conv1d) and part.groups == part.in_channels > 1 for part in module.children())
    ]


def install_recurrent_packs(model: Any) -> int:
    """Wraps the classes of `recurrent_layers`; calling it again changes nothing. How many layers there are."""
    found = recurrent_layers(model)
    for kind in {type(layer) for layer in found}:
        if not hasattr(kind.forward, "unpacked"):
            kind.forward = _in_rows(kind.forward)
    return len(found)


def _in_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *given: Any, **keywords: Any) -> Any:
        layout = keywords.pop(KEYWORD, None) or keywords.get(TEXT_OF_TOKEN)
        if not isinstance(layout, Layout):
            return original(self, *given, **keywords)
        if any(keywords.get(name) is not None for name in CACHES) or len(given) > 1:
            raise NotPackable("a recurrent layer with a state from before")
        hidden = given[0] if given else keywords["hidden_states"]
        keywords |= {name: None for name in ("attention_mask", TEXT_OF_TOKEN) if name in keywords}
        keywords.pop("hidden_states", None)
        keys, found, places = tokens_of_segments(hidden[0], layout), [], []
        for rows in _rows(layout, hidden.device):
            row = keys.index_select(0, rows.keys.flatten()).view(*rows.keys.shape, -1)
            out = original(self, row, **keywords)
            if not isinstance(out, Tensor):
                raise NotPackable(f"a recurrent layer that gives {type(out).__name__}")
            found.append(out.flatten(0, 1).index_select(0, rows.kept))
            places.append(rows.places)
        order = torch.cat(places).argsort()
        return torch.cat(found).index_select(0, order)[None]

    forward.unpacked = original  # type: ignore[attr-defined]
    return forward


def _rows(layout: Layout, device: torch.device) -> list[Rows]:
    """The rows of a pack, computed once for each device."""
    known: dict[torch.device, list[Rows]] = layout.__dict__.setdefault("recurrent_rows", {})
    if device not in known:
        known[device] = [
            Rows(*(one.to(device, non_blocking=True) for one in (rows.keys, rows.kept, rows.places)))
            for rows in _laid_out(layout)
        ]
    return known[device]


def _laid_out(layout: Layout) -> list[Rows]:
    segments = []  # keys before it, keys, the first of them whose result is its own, and where in the pack that goes
    before = 0
    for group in layout.groups:
        start = group.start
        for number, length in enumerate(group.lengths):
            keys, own = group.prompt + length, group.prompt if number else 0
            segments.append((before, keys, own, start))
            before, start = before + keys, start + keys - own
    segments.sort(key=lambda one: -one[1])
    made, done = [], 0
    for lengths in in_batches([one[1] for one in segments]):
        batch, done = segments[done : done + len(lengths)], done + len(lengths)
        columns = torch.arange(lengths[0])
        made.append(
            Rows(
                torch.stack([first + columns.clamp(max=keys - 1) for first, keys, _, _ in batch]),
                torch.cat([row * lengths[0] + columns[own:keys] for row, (_, keys, own, _) in enumerate(batch)]),
                torch.cat([start + torch.arange(keys - own) for _, keys, own, start in batch]),
            )
        )
    return made
