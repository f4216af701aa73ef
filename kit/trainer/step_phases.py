"""What the phases of a training step take by the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("generation", "rewards", "scoring", "update", "other")
"""`generation`: completions, tools included. `rewards`: waiting for reward functions. `scoring`: log-probabilities of the
rollout. `update`: forward and backward passes. `other`: the rest of making a batch (tokenizing, advantages, selection)."""


class StepPhases:
    """Seconds of each phase since they were last taken. A second counts once: for the innermost phase that is open.

    A GPU is not waited for: work that is queued on it counts for the phase that first needs its result.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Inside, time counts for `phase`, except while another is open within."""
        self._count()
        self._open.append(phase)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def taken(self) -> dict[str, float]:
        """Seconds by phase; they start again from nothing."""
        self._count()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
