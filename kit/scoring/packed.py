"""The forward pass over packs, and their values laid over completions again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError
from kit.scoring.hidden_states import in_order_of
from kit.scoring.packed_attention import KEYWORD, Layout
from kit.scoring.packing import NO_LABEL, Pack


def score_packs(
    trainer: Any,
    model: Any,
    packs: Sequence[Pack],
    shape: tuple[int, int],
    device: torch.device,
    compute_entropy: bool = False,
    tally: Callable[[int], None] = lambda tokens: None,
    layouts: list[Layout] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies of completions (B, T) = `shape`, in nats, through TRL's fused head; 0 without a token.

    One forward pass a pack, all in one graph. tally: is told the tokens of each. layouts: takes those that were used.
    Raises `ModelError` where the head is not there.
    """
    whole = trainer.family.completed(model)
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    # Before the first pass: copies to a device wait for what it is doing.
    given = [
        (pack.ids.to(device), pack.positions.to(device), pack.labels.to(device), _labelled(pack).to(device))
        for pack in packs
    ]
    places = torch.cat([pack.places for pack in packs]).to(device)
    with in_order_of([pack.places for pack in packs]):
        for pack, (ids, positions, labels, labelled) in zip(packs, given, strict=True):
            layout = Layout(pack.groups)
            if layouts is not None:
                layouts.append(layout)
            tally(pack.tokens)
            with trainer.accelerator.autocast():
                found = whole(
                    input_ids=ids,
                    # What has four dimensions is taken for a mask that is finished; the layout is looked at instead.
                    attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                    position_ids=positions,
                    shift_labels=labels,
                    fused_lm_head=True,
                    **{KEYWORD: layout},
                )
            if getattr(found, "log_probs", None) is None:
                raise ModelError(
                    f"{type(model).__name__} gave no log-probabilities for fused_lm_head=True: TRL's "
                    "head was lost on the way (a wrapper replaced the model's forward). Set optimisation.packing: false."
                )
            logps.append(_at(found.log_probs, labelled))
            if compute_entropy:
                entropies.append(_at(found.entropy, labelled))
    return _spread(logps, places, shape), _spread(entropies, places, shape) if compute_entropy else None


def _labelled(pack: Pack) -> Tensor:
    """(N,) where the tokens stand that predict one."""
    return torch.nonzero(pack.labels[0] != NO_LABEL).flatten()


def _at(values: Tensor, places: Tensor) -> Tensor:
    """(1, S) -> (N,). Differentiable."""
    return values[0].index_select(0, places.to(values.device))


def _spread(values: Sequence[Tensor], places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Values of all packs (N,) to (B, T), 0 elsewhere. Differentiable."""
    joined = torch.cat(list(values))
    empty = joined.new_zeros(shape[0] * shape[1])
    return empty.index_copy(0, places.to(joined.device), joined).view(shape)
