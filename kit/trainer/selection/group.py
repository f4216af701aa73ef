"""A group of completions of one prompt, made and scored, as it is handed from one method to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kit.trainer.selection.memory import is_flat


@dataclass(frozen=True)
class Group:
    """g completions of one prompt. A completion that was not made (early abort) has no ids and the rewards NaN."""

    key: str
    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[list[int]]  # (g,)
    completions: list[Any]  # (g,) decoded
    components: list[list[float]]  # (g, K) rewards, NaN where one does not apply
    totals: list[float]  # (g,) weighted sums, NaN without a score
    extra: dict[str, list[Any]] = field(default_factory=dict)  # (g,) each, as reward functions logged them
    sampler_logps: list[list[float]] | None = None  # (g,) as an engine apart from the trainer reported them, nats
    old_logps: list[list[float]] | None = None  # (g,) of the policy that made them, nats; of replayed groups only
    step: int = 0  # optimiser steps made before it was rolled out

    @property
    def flat(self) -> bool:
        """Whether no two rewards differ: nothing can be learned from it by comparison."""
        return is_flat(self.totals)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(map(len, self.completion_ids))

    @property
    def made(self) -> int:
        """Completions that were made."""
        return sum(1 for ids in self.completion_ids if ids)

    def take(self, places: Sequence[int]) -> Group:
        """Some of its completions."""

        def some(values: list[Any]) -> list[Any]:
            return [values[place] for place in places]

        return replace(
            self,
            completion_ids=some(self.completion_ids),
            completions=some(self.completions),
            components=some(self.components),
            totals=some(self.totals),
            extra={name: some(values) for name, values in self.extra.items()},
            sampler_logps=None if self.sampler_logps is None else some(self.sampler_logps),
            old_logps=None if self.old_logps is None else some(self.old_logps),
        )

    def joined(self, other: Group) -> Group:
        """With further completions of the same prompt, made at the same step. Of columns those that both have."""
        names = [name for name in self.extra if name in other.extra]
        both = self.sampler_logps is not None and other.sampler_logps is not None
        return replace(
            self,
            completion_ids=self.completion_ids + other.completion_ids,
            completions=self.completions + other.completions,
            components=self.components + other.components,
            totals=self.totals + other.totals,
            extra={name: self.extra[name] + other.extra[name] for name in names},
            sampler_logps=(self.sampler_logps or []) + (other.sampler_logps or []) if both else None,
        )

    def padded(self, size: int) -> Group:
        """With places for completions that were not made, up to `size`."""
        lack = size - len(self.completion_ids)
        if lack <= 0:
            return self
        width = len(self.components[0]) if self.components else 0
        return replace(
            self,
            completion_ids=self.completion_ids + [[] for _ in range(lack)],
            completions=self.completions + [None] * lack,
            components=self.components + [[math.nan] * width for _ in range(lack)],
            totals=self.totals + [math.nan] * lack,
            extra={name: values + [None] * lack for name, values in self.extra.items()},
            sampler_logps=None if self.sampler_logps is None else self.sampler_logps + [[] for _ in range(lack)],
        )
