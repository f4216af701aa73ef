"""What is logged about a micro-batch: sums with their counts, which add up exactly over micro-batches and processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hook import Hook, attribute
from kit.objective.schedules import Controller, Schedule


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


SAMPLED_TOKENS = 2048
"""Tokens of a micro-batch that quantiles are taken from, at most; evenly spaced over the batch."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Meter:
    """Collects the masked means of one micro-batch. Two terms of one name get `_2`, `_3`, ... in order."""

    def __init__(self, batch: TokenBatch) -> None:
        self.means: dict[str, Mean] = {}
        self.observed: dict[str, Mean] = {}  # for controllers, by part
        self.samples: dict[str, Tensor] = {}  # values of single tokens, for quantiles
        self._batch = batch
        self._live = batch.mask.to(batch.logps.dtype)  # (B, T)
        self._tokens = self._live.sum()

    @torch.no_grad()
    def log(self, name: str, values: Tensor) -> str:
        """Log the mean of (B, T) over live tokens, of (B, 1) over completions that have some, or of one value ().

        Returns the key.
        """
        values = values.detach()
        if values.dim() == 0:
            total, count = values.to(self._live.dtype), torch.ones_like(self._tokens)
        elif values.shape == self._live.shape:
            # A product would carry NaN over from padding: select instead.
            total, count = values.to(self._live.dtype).masked_fill(~self._batch.mask, 0.0).sum(), self._tokens
        else:
            rows = self._batch.mask.any(-1, keepdim=True).to(self._live.dtype)
            total, count = (values.to(self._live.dtype) * rows).sum(), rows.sum()
        key = self._free(name)
        self.means[key] = Mean(total, count)
        return key

    def log_term(self, part: str, hook: Hook, values: Tensor, coef: float) -> None:
        """Log a regularizer, unscaled, as `objective/<name>`, and under its function's `label` if it has one.

        A coefficient that changes is logged as `coef/<name>`; what its controller observes is kept under `part`.
        """
        name = self.log(f"objective/{hook.short_name}", values)
        label = attribute(hook.at(self._batch.step), "label")
        if label is not None:
            self.means[self._free(str(label))] = self.means[name]
        setting = hook.values["coef"]
        if isinstance(setting, Schedule):
            self.log(f"coef/{hook.short_name}", values.new_tensor(coef))
        if isinstance(setting, Controller):
            self.observed[part] = self.means[name] if setting.observes == "term" else self._entropy()

    def log_weight(self, hook: Hook, multiplier: Tensor) -> None:
        """Log the mean of a weight, and the share of tokens that it masks."""
        self.log(f"weight/{hook.short_name}", multiplier)
        self.log(f"masked/{hook.short_name}", multiplier == 0)

    @torch.no_grad()
    def log_reports(self, hook: Hook) -> None:
        """Log what the hook's function reports of itself: `clipped` as fractions, `metrics` under their names."""
        function = hook.at(self._batch.step)
        clipped = attribute(function, "clipped")
        if clipped is not None:
            where: dict[str, Tensor] = clipped(self._batch)
            for name, inside in where.items():
                self.log(f"clip_fraction/{name}", inside)
            region = functools.reduce(torch.logical_or, where.values())
            self.log("clip_fraction/region", region)
        report = attribute(function, "metrics")
        if report is not None:
            for name, values in report(self._batch).items():
                self.log(name, values)

    @torch.no_grad()
    def log_batch(self) -> None:
        """Log what holds for every objective: ratio, advantage, and the entropy if there is one."""
        batch = self._batch
        self.log("ratio/mean", batch.ratio)
        self.log("ratio/abs_log", batch.log_ratio.abs())
        self.log("advantage/abs_mean", batch.advantages.abs())
        if batch.entropy is not None:
            self.log("entropy", batch.entropy)
        every = -(-batch.mask.numel() // SAMPLED_TOKENS) or 1
        live = batch.mask.flatten()[::every]
        self.samples["ratio"] = batch.ratio.detach().flatten()[::every][live]

    def _entropy(self) -> Mean:
        assert self._batch.entropy is not None, "the hook declares a need for it"
        entropy = self._batch.entropy.detach()
        return Mean(entropy.masked_fill(~self._batch.mask, 0.0).sum(), self._tokens)

    def _free(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.means:
            number += 1
            candidate = f"{name}_{number}"
        return candidate
