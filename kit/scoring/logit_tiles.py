"""Tiles of the (N, V) logits: the projection, the logit transform and the walk over vocabulary and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 1024
TILE_ELEMENTS = 1 << 21  # 8 MiB of float32 per buffer, two buffers (three with a softcap)


@dataclass(frozen=True)
class Head:
    """The projection and the logit transform: z = softcap(scale * (h @ w.T + b)) / temperature."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V)
    temperature: float
    softcap: float | None
    scale: float
    compute_dtype: torch.dtype  # of the projection
    stat_dtype: torch.dtype  # of everything after it

    @property
    def slope(self) -> float:
        """dz / d(projection), up to the softcap's own slope."""
        return self.scale / self.temperature

    def columns(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.bias[cols].to(self.compute_dtype)
        return self.weight[cols].to(self.compute_dtype), bias

    def rows_of(self, targets: Tensor) -> Tensor:
        """(N) -> (N, H), rounded like the columns are."""
        return self.weight[targets].to(self.compute_dtype).to(self.stat_dtype)

    def logits_(self, out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slope: Tensor | None) -> None:
        """Fill `out` (n, k) with z, and `slope` (n, k), if given, with the softcap's slope 1 - tanh^2."""
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight.t(), out=out)
            if bias is not None:
                out.add_(bias)
        else:
            projected = torch.mm(hidden, weight.t())
            out.copy_(projected if bias is None else projected.add_(bias))
        if self.softcap is None:
            if self.slope != 1.0:
                out.mul_(self.slope)
            return
        out.mul_(self.scale / self.softcap).tanh_()
        if slope is not None:
            torch.mul(out, out, out=slope).neg_().add_(1.0)
        out.mul_(self.softcap / self.temperature)


class Tiles:
    """Walk over the (N, V) logits, vocabulary outside, so that each slice of the weight is cast once."""

    def __init__(self, head: Head, hidden: Tensor, targets: Tensor, chunk_size: int, with_slope: bool) -> None:
        self.head, self.hidden, self.targets = head, hidden, targets
        self.n, self.vocab = hidden.shape[0], head.weight.shape[0]
        self.rows = max(1, min(self.n, TILE_ROWS))
        self.width = max(1, min(self.vocab, chunk_size, TILE_ELEMENTS // self.rows))
        size = self.rows * self.width
        self.x_buffer = hidden.new_empty(size, dtype=head.stat_dtype)
        self.e_buffer = hidden.new_empty(size, dtype=head.stat_dtype)
        self.slope_buffer = hidden.new_empty(size, dtype=head.stat_dtype) if with_slope else None

    def column_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.width, self.vocab)) for start in range(0, self.vocab, self.width))

    def row_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, self.n)) for start in range(0, self.n, self.rows))

    def logits(
        self, rows: slice, cols: slice, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """z (n, k), scratch of the same shape, and the softcap's slope where there is one."""
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        count = shape[0] * shape[1]
        x, e = self.x_buffer[:count].view(shape), self.e_buffer[:count].view(shape)
        slope = None if self.slope_buffer is None else self.slope_buffer[:count].view(shape)
        self.head.logits_(x, self.hidden[rows], weight, bias, slope)
        return x, e, slope

    def hits(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Row and column indices, inside the tile, of the targets that lie in it."""
        local = self.targets[rows] - cols.start
        row = ((local >= 0) & (local < cols.stop - cols.start)).nonzero().squeeze(1)
        return row, local[row]
