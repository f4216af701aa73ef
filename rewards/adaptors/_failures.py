"""Trainers that take numbers alone: what failed is said in the log, once for each component and reason."""

import logging
import threading

from rewards.evaluation import Evaluation
from rewards.protocol import FAILURES

__all__ = ["FailureLog"]

_LOG = logging.getLogger("rewards")
_MOST = 100  # kinds of failure that are told apart


class FailureLog:
    """Warns of completions that a component failed to score, each component and reason once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

    def look_at(self, evaluation: Evaluation) -> None:
        """Logs what failed in this batch and was not told before."""
        for name, statuses in evaluation.statuses.items():
            for status, info in zip(statuses, evaluation.infos[name], strict=True):
                if status in FAILURES:
                    self._tell(name, status, str(info.get("reason", "no reason given")))

    def _tell(self, name: str, status: str, reason: str) -> None:
        with self._lock:
            kind = (name, status, reason[:80])
            if kind in self._told or len(self._told) >= _MOST:
                return
            self._told.add(kind)
        _LOG.warning(
            "Reward %r could not score a completion, which counts as its lowest value: %s: %s", name, status, reason
        )
