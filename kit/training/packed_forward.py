"""The forward pass over packs, and their values laid over completions again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError
from kit.training.hidden_states import in_order_of
from kit.training.packed_attention import KEYWORD, Layout
from kit.training.packing import NO_LABEL, Pack


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
    with in_order_of([pack.places for pack in packs]):
        for pack in packs:
            layout, labels = Layout(pack.groups), pack.labels.to(device)
            if layouts is not None:
                layouts.append(layout)
            tally(pack.tokens)
            with trainer.accelerator.autocast():
                found = whole(
                    input_ids=pack.ids.to(device),
                    # What has four dimensions is taken for a mask that is finished; the layout is looked at instead.
                    attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                    position_ids=pack.positions.to(device),
                    shift_labels=labels,
                    fused_lm_head=True,
                    **{KEYWORD: layout},
                )
            if getattr(found, "log_probs", None) is None:
                raise ModelError(
                    f"{type(model).__name__} gave no log-probabilities for fused_lm_head=True: TRL's "
                    "head was lost on the way (a wrapper replaced the model's forward). Set optimisation.packing: false."
                )
            logps.append(found.log_probs[labels != NO_LABEL])
            if compute_entropy:
                entropies.append(found.entropy[labels != NO_LABEL])
    places = torch.cat([pack.places for pack in packs]).to(device)
    return _spread(logps, places, shape), _spread(entropies, places, shape) if compute_entropy else None


def _spread(values: Sequence[Tensor], places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Values of all packs (N,) to (B, T), 0 elsewhere. Differentiable."""
    joined = torch.cat(list(values))
    empty = joined.new_zeros(shape[0] * shape[1])
    return empty.index_copy(0, places.to(joined.device), joined).view(shape)
