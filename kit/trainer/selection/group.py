"""A group of completions of one prompt, made and scored, as it is handed from one method to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kit.trainer.selection.memory import is_flat


@dataclass(frozen=True)
class Group:
    """g completions of one prompt."""

    key: str
    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[list[int]]  # (g,)
    completions: list[Any]  # (g,) decoded
    components: list[list[float]]  # (g, K) rewards, NaN where one does not apply
    totals: list[float]  # (g,) weighted sums, NaN without a score
    extra: dict[str, list[Any]] = field(default_factory=dict)  # (g,) each, as reward functions logged them
    sampler_logps: list[list[float]] | None = None  # (g,) as an engine apart from the trainer reported them, nats

    @property
    def flat(self) -> bool:
        """Whether no two rewards differ: nothing can be learned from it by comparison."""
        return is_flat(self.totals)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(map(len, self.completion_ids))

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
        )
