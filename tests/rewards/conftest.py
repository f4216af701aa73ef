import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rewards import Context, Sample, Score, build_samples

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


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    def build(*completions: Any, **columns: Any) -> list[Sample]:
        spread = {name: [value] * len(completions) for name, value in columns.items()}
        return build_samples(["6 x 12?"] * len(completions), list(completions), **spread)

    return build


@pytest.fixture(scope="session", autouse=True)
def _cheap_collections():
    """What other tests of the session left in memory is not looked through again: a full collection would take half a
    second, within whatever is being timed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
