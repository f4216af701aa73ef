"""What tests of rewards are made with: an answer in its layout, and a component whose scores are given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards import Context, Sample, Score

THINK = "<think>work</think>"


def answered(answer: str) -> str:
    return f"{THINK}<answer>{answer}</answer>"


@dataclass
class Fixed:
    """A component that gives scores made beforehand, or does whatever `act` does."""

    name: str = "fixed"
    scores: list[Any] = field(default_factory=list)
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"
    act: Callable[[Sequence[Sample], Context], list[Score]] | None = None
    seen: list[list[int]] = field(default_factory=list)

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        self.seen.append([sample.index for sample in samples])
        if self.act is not None:
            return self.act(samples, ctx)
        return [self.scores[sample.index] for sample in samples]
