"""Metrics of a micro-batch: sums with their counts, which add up exactly over micro-batches and processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective.batch import TokenBatch, as_numbers
from kit.objective.hook import Hook, attribute, remedy, report_of
from kit.objective.schedules import Controller, Schedule


@dataclass(frozen=True)
class Mean:
    """A mean as total and count, two detached scalars. They add up exactly over micro-batches and processes."""

    total: Tensor
    count: Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor:
        """total / count; 0 if the count is 0."""
        return self.total / self.count.clamp(min=1.0)


class Sums:
    """Sums of means over micro-batches, in few operations for any number of names."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def copy(self) -> Sums:
        """An independent copy of the sums."""
        other = Sums()
        other._sums = dict(self._sums)
        return other

    @torch.no_grad()
    def add(self, means: Mapping[str, Mean]) -> None:
        """Add the means of one micro-batch. All are on one device."""
        if not means:
            return
        names = tuple(means)
        stacked = torch.stack([half for mean in means.values() for half in (mean.total, mean.count)]).double()
        self._sums[names] = self._sums[names] + stacked if names in self._sums else stacked

    def take(self) -> dict[str, Tensor]:
        """The total and count of each name, (2,) float64. The sums then start again at 0."""
        halves: dict[str, Tensor] = {}
        for names, stacked in self._sums.items():
            for name, pair in zip(names, stacked.view(-1, 2), strict=True):
                halves[name] = halves[name] + pair.to(halves[name].device) if name in halves else pair
        self._sums = {}
        return halves


SAMPLED_TOKENS = 1024
"""Maximum number of tokens of a micro-batch for quantiles, evenly spaced over the batch."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
RATIO_QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Quantiles of the log ratio. The page draws them under the curve of the clip."""


class Meter:
    """Collects the masked means of one micro-batch. Two terms of one name get `_2`, `_3`, ... in order.

    Means of the policy's values (entropy, ratios, penalties, weights) are over the completions that were scored. Means of the
    clip's loss, of its clip fractions and of the advantages are over all completions.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self.means: dict[str, Mean] = {}
        self.observed: dict[str, Mean] = {}  # for controllers, by part
        self.samples: dict[str, Tensor] = {}  # values of individual tokens, for quantiles
        self._batch = batch
        self._scored = batch.live if batch.scored is None else batch.live * as_numbers(batch.scored, batch.live.dtype)
        self._tokens = self._scored.sum()

    def log(self, name: str, values: Tensor, *, filled: bool = False, of_all: bool = False) -> str:
        """Log the mean of (B, T) over live tokens, of (B, 1) over completions with live tokens, or a scalar ().

        `filled`: the values are already 0 at padding. `of_all`: completions that were not scored count too. Returns the key.
        """
        everything = of_all or self._batch.scored is None
        values, live = values.detach(), self._batch.live if everything else self._scored
        if values.dtype == torch.bool:
            values = as_numbers(values, live.dtype)
        elif values.dtype != live.dtype:
            values = values.to(live.dtype)
        if values.dim() == 0:
            total, count = values, torch.ones_like(values)
        elif values.shape == live.shape:
            masked = values if filled and everything else values * live
            total, count = masked.sum(), self._tokens if live is self._scored else live.sum()
        else:
            scored = self._batch.scored
            rows = self._rows if of_all or scored is None else self._rows * as_numbers(scored, live.dtype)
            total, count = (values * rows).sum(), rows.sum()
        key = self._unique(name)
        self.means[key] = Mean(total, count)
        return key

    @functools.cached_property
    def _rows(self) -> Tensor:
        """(B, 1): 1 for completions that have live tokens."""
        return self._batch.live.amax(-1, keepdim=True) if self._batch.live.numel() else self._batch.live[:, :1]

    def log_term(self, part: str, hook: Hook, values: Tensor, coef: float) -> None:
        """Log a regularizer (0 at padding), unscaled, as `objective/<name>` and as its function's `label`, if it has one.

        A coefficient that changes is logged as `coef/<name>`; the mean that its controller observes is stored as `part`.
        """
        name = self.log(f"objective/{hook.short_name}", values, filled=True)
        label = attribute(hook.at(self._batch.step), "label")
        if label is not None:
            self.means[self._unique(str(label))] = self.means[name]
        setting = hook.values["coef"]
        if isinstance(setting, Schedule):
            self.log(f"coef/{hook.short_name}", values.new_tensor(coef))
        if isinstance(setting, Controller):
            self.observed[part] = self.means[name] if setting.observes == "term" else self._entropy(hook)

    @torch.no_grad()
    def log_reports(self, hook: Hook) -> None:
        """Log the reports of the hook's function: `clipped` as fractions, `metrics` under their names."""
        if clipped := report_of(hook, "clipped", self._batch):
            where = {name: self._prepared(hook, inside) for name, inside in clipped.items()}
            keys = [self.log(f"clip_fraction/{name}", inside, of_all=True) for name, inside in where.items()]
            if hook.factory.custom:
                self.log("clip_fraction/region", functools.reduce(torch.maximum, where.values()), of_all=True)
            else:  # a token is in one region at most, since its advantage has one sign
                fractions = [self.means[key] for key in keys]
                total = functools.reduce(torch.add, (mean.total for mean in fractions))
                self.means["clip_fraction/region"] = Mean(total, fractions[0].count)
        for name, values in report_of(hook, "metrics", self._batch).items():
            self.log(name, self._prepared(hook, values))

    def log_batch(self) -> None:
        """Log the metrics of every objective: ratio, advantage, and the entropy if the batch has it.

        Means of ratios are logged only if a hook computed the ratios: otherwise the exponentials would cost the most.
        """
        batch = self._batch
        # A user's own hooks read the fields of the shielded batch.
        read = vars(batch).keys() | vars(vars(batch).get("shielded", batch)).keys()
        if "ratio" in read and batch.scored is not None:
            self.log("ratio/mean", batch.ratio.detach())
        elif "ratio" in read:
            excess = batch.ratio.detach().sum() - (batch.mask.numel() - self._tokens)  # the ratio is 1 at padding
            self.means["ratio/mean"] = Mean(excess, self._tokens)
        if "sequence_ratio" in read:
            self.log("ratio/sequence_mean", batch.sequence_ratio.detach())
        self.log("ratio/abs_log", batch.log_ratio.detach().abs(), filled=True)
        self.log("advantage/abs_mean", batch.advantages.detach().abs(), filled=True, of_all=True)
        if batch.entropy is not None:
            self.log("entropy", batch.entropy, filled=True)
        every = -(-batch.mask.numel() // SAMPLED_TOKENS) or 1
        drawn = batch.log_ratio.detach().reshape(-1)[::every]
        scored = batch.mask if batch.scored is None else batch.mask & batch.scored
        self.samples["log_ratio"] = torch.where(scored.reshape(-1)[::every], drawn, torch.nan)

    def _prepared(self, hook: Hook, values: Tensor) -> Tensor:
        """A report in the dtype of the batch. The values of a user's own hook are set to 0 at padding."""
        if hook.factory.custom and values.shape == self._batch.mask.shape:
            values = torch.where(self._batch.mask, values, torch.zeros_like(values))
        return as_numbers(values, self._batch.live.dtype) if values.dtype == torch.bool else values

    def _entropy(self, hook: Hook) -> Mean:
        if self._batch.entropy is None:
            raise ObjectiveError(
                f"The coef of {hook.title} follows the entropy, but {remedy('entropy')}, or use this controller for "
                "entropy_bonus, which needs the entropy."
            )
        return Mean((self._batch.entropy.detach() * self._scored).sum(), self._tokens)

    def _unique(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.means:
            number += 1
            candidate = f"{name}_{number}"
        return candidate
