"""Report failures of rewards, for trainers that accept only numbers.

Each component and reason is logged once. A reward that cannot score any completion of the first batches is an error.
"""

import logging
import re
import threading
from collections.abc import Iterable

from rewards.errors import RewardsError
from rewards.evaluation import Evaluation
from rewards.protocol import FAILURES
from rewards.samples import REFERENCE_COLUMNS

_LOG = logging.getLogger("rewards")
_MOST = 100  # pairs of component and reason that are logged


class FailureLog:
    """Log a warning for completions that a component failed to score, once for each component and reason."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, str]] = set()
        self._working: set[str] = set()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

    def log_failures(self, evaluation: Evaluation) -> None:
        """Log the failures of this batch that have not been logged before."""
        for name, statuses in evaluation.statuses.items():
            for status, info in zip(statuses, evaluation.infos[name], strict=True):
                if status not in FAILURES:
                    continue
                reason = str(info.get("reason", "no reason given"))
                kind = (name, status, reason[:80])
                with self._lock:
                    if kind in self._logged or len(self._logged) >= _MOST:
                        continue
                    self._logged.add(kind)
                counts = "is excluded" if status == "infra" else "counts as its lowest value"
                _LOG.warning("Reward %r could not score a completion, which %s: %s: %s", name, counts, status, reason)

    def raise_if_broken(self, evaluation: Evaluation, columns: Iterable[str]) -> None:
        """Raise an error for a reward that has not scored any completion yet, for example because a column is missing.

        The trainer would train on zeros. After one completion is scored, later failures are only logged.

        Raises:
            RewardsError: a component failed on completions of this batch (error, infra) and has not scored any completion of
                this batch and earlier ones. Status `format` does not count as scored.
        """
        for name, statuses in evaluation.statuses.items():
            if name in self._working or {"ok", "wrong", "timeout", "not_applicable"} & set(statuses):
                self._working.add(name)
                continue
            failed = [position for position, status in enumerate(statuses) if status in ("error", "infra")]
            if failed:
                reason = str(evaluation.infos[name][failed[0]].get("reason", "no reason given"))
                advice = (
                    f"The reference is taken from the first of {', '.join(REFERENCE_COLUMNS)}. Name another with "
                    ".trl(reference_column=...), correct the reward"
                    if re.search("reference|column|argument|KeyError|missing", reason)
                    else "Correct the reward"
                )
                raise RewardsError(
                    f"Reward {name!r} could score none of the first {len(statuses)} completions: {statuses[failed[0]]}: "
                    f"{reason}. Columns of this batch: {', '.join(columns) or 'none'}. {advice}, or continue without a score "
                    "with .trl(strict=False)."
                )
