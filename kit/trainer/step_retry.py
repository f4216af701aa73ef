"""A micro-batch again, in smaller parts, after running out of memory: the same gradient.

What an aborted attempt has left in gradients, metrics and hooks is taken back before the next one: the micro-batches of the
optimiser step that had come through are done again, from gradients of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kit.models.failures import BatchSizeBackoff, is_out_of_memory, release, rng_state, set_rng_state


@dataclass(frozen=True)
class _Start:
    """A micro-batch as it was before its first attempt: inputs, random numbers, and all that counts what was seen."""

    inputs: dict[str, Any]
    random: Any
    books: Any


class StepRetry:
    """Repeats the micro-batches of one run that ran out of memory.

    backoff: how many completions go through the model at once. snapshot, restore: whatever a micro-batch adds to, beside
    gradients. again: does an earlier micro-batch of the step once more, gradient included. zero_grad: of all that trains.
    """

    def __init__(
        self,
        backoff: BatchSizeBackoff,
        *,
        snapshot: Callable[[], Any],
        restore: Callable[[Any], None],
        again: Callable[[dict[str, Any]], None],
        zero_grad: Callable[[], None],
    ) -> None:
        self.backoff, self.snapshot, self.restore, self.again, self.zero_grad = (
            backoff,
            snapshot,
            restore,
            again,
            zero_grad,
        )
        self._window: list[_Start] = []  # the micro-batches of this optimiser step that came through
        self._replaying = False

    def reset(self) -> None:
        """A training begins: what another one left is forgotten."""
        self._window = []

    def run(
        self,
        inputs: dict[str, Any],
        rows: int,
        attempt: Callable[[int], Tensor],
        at_once: Callable[[], int],
        *,
        last: bool,
    ) -> Tensor:
        """`attempt(rows at once)` of a micro-batch of `rows`, which leaves its gradient, until it comes through.

        at_once: completions of the largest pass of the last attempt, which is the number that is halved. last: it is the last
        micro-batch of its optimiser step. Raises `ModelError` when smaller parts do not help.
        """
        if self._replaying:
            return attempt(self.backoff.rows("training", rows))
        start, failed = _Start(inputs, rng_state(), self.snapshot()), False
        while True:
            try:
                if failed:
                    self._take_back(start)
                loss = attempt(self.backoff.rows("training", rows))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.backoff.halve("training", at_once(), error)
                failed = True
            self.zero_grad()
            release()
        self._window = [] if last else [*self._window, start]
        return loss

    def _take_back(self, start: _Start) -> None:
        """Does the earlier micro-batches of this optimiser step again, and leaves all as it was before this one."""
        self.zero_grad()
        self._replaying = True
        try:
            for done in self._window:
                self._return_to(done)
                self.again(done.inputs)
        finally:
            self._replaying = False
        self._return_to(start)

    def _return_to(self, start: _Start) -> None:
        self.restore(start.books)
        set_rng_state(start.random)
