"""Fresh prompts: rows of the training data in orders of its own, one permutation after the other.

The trainer's sampler draws as it would without: a run is resumed to the same batches, and nothing is drawn from torch's
random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

from kit.trainer.selection.memory import key_of


class Pool:
    """The training rows. `rows`: a `datasets.Dataset` or a list."""

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.passed = 0  # rows drawn so far
        self._order: tuple[int, list[int]] | None = None  # of an epoch

    def draw(self, taken: Collection[str]) -> dict[str, Any] | None:
        """The next row whose key is not among `taken`; None when no row has another."""
        for _ in range(2 * len(self.rows)):  # the end of one order and the whole of the next: every row
            epoch, place = divmod(self.passed, len(self.rows))
            self.passed += 1
            row: dict[str, Any] = self.rows[self._of(epoch)[place]]
            if key_of(row) not in taken:
                return row
        return None

    def _of(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"fresh prompts {self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passed = int(state["passed"])
