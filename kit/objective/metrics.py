"""What is logged about a micro-batch: sums with their counts, which add up exactly over micro-batches and processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hook import Hook, attribute


@dataclass(frozen=True)
class Mean:
    """A mean as its two halves, detached scalars. Means add up exactly over micro-batches and processes."""

    total: Tensor
    count: Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor:
        """total / count; 0 when nothing was counted."""
        return self.total / self.count.clamp(min=1.0)


class Meter:
    """Collects the masked means of one micro-batch. Two terms of one name get `_2`, `_3`, ... in order."""

    def __init__(self, batch: TokenBatch) -> None:
        self.means: dict[str, Mean] = {}
        self._batch = batch
        self._live = batch.mask.to(batch.logps.dtype)  # (B, T)
        self._tokens = self._live.sum()

    @torch.no_grad()
    def log(self, name: str, values: Tensor) -> str:
        """Log the mean of (B, T) over live tokens, or of (B, 1) over completions that have some. Returns the key."""
        values = values.detach()
        if values.shape == self._live.shape:
            # A product would carry NaN over from padding: select instead.
            total, count = values.to(self._live.dtype).masked_fill(~self._batch.mask, 0.0).sum(), self._tokens
        else:
            rows = self._batch.mask.any(-1, keepdim=True).to(self._live.dtype)
            total, count = (values.to(self._live.dtype) * rows).sum(), rows.sum()
        key = self._free(name)
        self.means[key] = Mean(total, count)
        return key

    def log_term(self, hook: Hook, values: Tensor) -> None:
        """Log a regularizer, unscaled, as `objective/<name>`, and under its function's `label` if it has one."""
        name = self.log(f"objective/{hook.short_name}", values)
        label = attribute(hook.at(self._batch.step), "label")
        if label is not None:
            self.means[self._free(str(label))] = self.means[name]

    @torch.no_grad()
    def log_clip_fractions(self, hook: Hook) -> None:
        """Log how often each bound of the clip was active, and either of them (`region`), if the clip reports it."""
        report = attribute(hook.at(self._batch.step), "clipped")
        if report is None:
            return
        clipped: dict[str, Tensor] = report(self._batch)
        for name, where in clipped.items():
            self.log(f"clip_fraction/{name}", where)
        self.log("clip_fraction/region", torch.stack(list(clipped.values())).any(0))

    @torch.no_grad()
    def log_batch(self) -> None:
        """Log what holds for every objective: ratio, advantage, and the entropy if there is one."""
        batch = self._batch
        self.log("ratio/mean", batch.ratio)
        self.log("ratio/abs_log", batch.log_ratio.abs())
        self.log("advantage/abs_mean", batch.advantages.abs())
        if batch.entropy is not None:
            self.log("entropy", batch.entropy)

    def _free(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.means:
            number += 1
            candidate = f"{name}_{number}"
        return candidate
