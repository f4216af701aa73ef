"""Scoring with as little padding as rows can have: where the tokens of a model cannot be packed (`kit.scoring.packing`).

Rows of like length make a batch, and columns that are padding in all of its rows are cut off on both sides. Exact for every
causal model that leaves padding out by the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kit.scoring.hidden_states import in_order_of

Scores = tuple[Tensor, Tensor | None, Tensor | None]
FILLED = 0.8
"""Least share of tokens in a batch, unless it would have a single row."""


def score_trimmed(
    score: Callable[..., Any],
    model: Any,
    ids: Tensor,
    mask: Tensor,
    completion: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    tally: Callable[[int], None] = lambda tokens: None,
    as_they_come: bool = False,
) -> Scores:
    """What `score` (TRL's scorer) gives for (B, L) rows: values (B, T) of the last `completion` columns, in the rows' order.

    batch_size: rows at a time, at most. as_they_come: in the batches of TRL, as always with the balancing loss of a mixture of
    experts, which is a mean over them. tally: is told the tokens of each batch.
    """
    width, live = ids.shape[1] - completion, mask.bool().cpu()  # which a device would be asked for again and again
    given = (compute_entropy, compute_aux_loss)
    found: list[tuple[Tensor, Scores]] = []
    places: list[Tensor] = []
    with in_order_of(places):
        for rows in _batches(live, width, batch_size or len(ids), as_they_come=as_they_come or compute_aux_loss):
            columns = torch.nonzero(live[rows].any(0)).flatten()
            start = min(int(columns[0]), width - 1) if len(columns) else width - 1
            stop = max(int(columns[-1]), width) + 1 if len(columns) else width + 1
            tally(len(rows) * (stop - start))
            part = ids[rows, start:stop], mask[rows, start:stop], stop - width
            found.append((rows, _widened(score(model, *part, None, *given), completion)))
            scored = live[rows, width:].nonzero()
            places.append(rows[scored[:, 0]] * completion + scored[:, 1])
    order = torch.cat([rows for rows, _ in found]).argsort()
    logps, entropies, losses = zip(*(scores for _, scores in found), strict=True)
    return (
        torch.cat(logps)[order],
        torch.cat(entropies)[order] if compute_entropy else None,
        torch.stack(losses).mean() if compute_aux_loss else None,
    )


def _batches(live: Tensor, width: int, size: int, *, as_they_come: bool) -> Iterator[Tensor]:
    """Indices of rows: neighbours by length, of which each batch holds enough tokens."""
    if as_they_come:
        yield from torch.split(torch.arange(len(live)), size)
        return
    prompts, completions = live[:, :width].sum(1).tolist(), live[:, width:].sum(1).tolist()
    order = sorted(range(len(live)), key=lambda row: (-prompts[row] - completions[row], row))
    batch: list[int] = []
    for row in order:
        wider = [*batch, row]
        room = max(prompts[one] for one in wider) + max(completions[one] for one in wider)
        tokens = sum(prompts[one] + completions[one] for one in wider)
        if batch and (len(batch) == size or tokens < FILLED * room * len(wider)):
            yield torch.tensor(batch)
            batch = []
        batch.append(row)
    yield torch.tensor(batch)


def _widened(scores: Scores, completion: int) -> Scores:
    logps, entropies, loss = scores
    more = (0, completion - logps.shape[1])
    return pad(logps, more), pad(entropies, more) if entropies is not None else None, loss
