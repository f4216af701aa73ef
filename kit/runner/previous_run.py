"""The run that is gone on with, as its directory tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import RunConfig
from kit.runs.store import RunDir


@dataclass(frozen=True)
class Past:
    """What a run directory tells of the run so far, and what is `asked` for now.

    `checkpoint` is the last whole one; without one `step` is 0, and the run starts again from the beginning.
    """

    run: RunDir
    state: str
    reason: str | None
    asked: RunConfig
    config: RunConfig | None
    data: Mapping[str, Any]
    env: Mapping[str, Any]
    checkpoint: Path | None
    step: int
    over: bool  # nothing is left to learn; what comes after the last step may be
    longer: bool  # it had made all its steps, and is to make more

    @property
    def threads(self) -> int | None:
        """CPU threads that the run computed with: another number adds in another order."""
        threads = self.env.get("threads")
        return threads if isinstance(threads, int) else None


@dataclass(frozen=True)
class Resumption:
    """A run to go on with: where from, and what is not as it was."""

    past: Past
    changes: list[str]
    forced: bool
