"""The last hidden states of a scoring pass, for what is computed from them besides log-probabilities.

TRL's fused head hands its hidden states to the function that this package installs below it; inside `capturing()` they
are kept. So the value head and the full KL need no forward pass of their own, whatever the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kit.scoring.full_kl import Projection


class _Sinks(threading.local):
    def __init__(self) -> None:
        self.open: list[list[Projection]] = []
        self.apart = False


_sinks = _Sinks()


@contextmanager
def capturing(wanted: bool = True) -> Iterator[list[Projection]]:
    """Collects the projections of every scoring call inside the block (in this thread), in order."""
    taken: list[Projection] = []
    if wanted:
        _sinks.open.append(taken)
    try:
        yield taken
    finally:
        if wanted:
            _sinks.open[:] = [other for other in _sinks.open if other is not taken]  # not by value: lists may be equal


@contextmanager
def apart() -> Iterator[None]:
    """Keeps what is recorded inside from the blocks around it: a scoring pass that is nobody's, as of a check."""
    outer = _sinks.open, _sinks.apart
    _sinks.open, _sinks.apart = [], True
    try:
        yield
    finally:
        _sinks.open, _sinks.apart = outer


def is_apart() -> bool:
    """Whether scoring is done for a check at the moment, and not for the run."""
    return _sinks.apart


@contextmanager
def in_order_of(places: Sequence[Tensor]) -> Iterator[None]:
    """Shows the scoring calls inside as a single one, whose rows stand in the order of `places`.

    places: of each call, where its rows stand, (N,) each; read at the end, so that it may grow inside the block.
    """
    outer = _sinks.open
    with apart(), capturing(bool(outer)) as taken:
        yield
    if taken:
        order = torch.cat(list(places)).argsort()
        hidden = torch.cat([projection.hidden for projection in taken])
        record(replace(taken[0], hidden=hidden[order.to(hidden.device)]))


def record(projection: Projection) -> None:
    """Called by the scorer with what it projects."""
    for taken in _sinks.open:
        taken.append(projection)


@dataclass(frozen=True)
class ScoringPass:
    """One scoring of (B, T) completions: its log-probabilities, and what went through the head.

    The head sees the rows of live tokens only, of the first completions first.
    """

    logps: Tensor  # (B, T) nats
    projections: list[Projection]  # hidden (N, H) each, N live tokens of one chunk of completions

    @property
    def head(self) -> Projection:
        """A projection with the head of this pass; its hidden states are those of the first chunk."""
        return self.projections[0]

    def hidden(self) -> Tensor:
        """(N, H) of all live tokens."""
        return torch.cat([projection.hidden for projection in self.projections])


def spread(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows (N,) or (N, H) of live tokens to (B, T) or (B, T, H); 0 elsewhere. Differentiable."""
    live = mask.bool()
    out = rows.new_zeros((*live.shape, *rows.shape[1:]))
    if rows.dim() > 1:
        live = live.unsqueeze(-1).expand(out.shape)
    return out.masked_scatter(live, rows)
