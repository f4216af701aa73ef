"""Out of memory: how many rows go through the model at once, halved whenever that turns out to be too many.

Each kind of work (`training`, `generation`, `scoring`, `evaluation`) has a size of its own. It starts as large as was
asked for, and stays as small as it has become.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from kit.errors import ModelError
from kit.models.failures import MEMORY_ADVICE, first_line, is_out_of_memory

if TYPE_CHECKING:
    from kit.runs.store import RunDir

log = logging.getLogger("kit")
LIMIT = 3
"""Times in a row, without a finished step in between, after which a run ends."""
KINDS = ("training", "generation", "scoring", "evaluation")
FIRST_ADVICE = {
    "training": "optimisation.micro_batch_size",
    "scoring": "optimisation.micro_batch_size",
    "generation": "optimisation.batch_size",
    "evaluation": "evaluation.batch_size",
}
SHARE = "share"
"""Key of a part of a micro-batch: its completions / those of the whole."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Halved:
    """What was halved: kind of work, rows at once from now on, and what the allocator said."""

    work: str
    rows: int
    reason: str
    step: int  # optimiser steps made so far
    micro_batch_size: int  # rows of a training pass from now on


class Memory:
    """The sizes of one run, and how often in a row they were too large.

    `micro_batch_size` is that of a training pass at the start; `tell` hears of every halving.
    """

    def __init__(self, tell: Callable[[Halved], None] | None = None, micro_batch_size: int = 0) -> None:
        self.tell = tell or _log
        self.micro_batch_size = micro_batch_size
        self.sizes: dict[str, int] = {}
        self.in_a_row = 0
        self.step = 0

    def rows(self, work: str, whole: int) -> int:
        """Rows of this kind of work that go through the model at once, of `whole`."""
        return max(1, min(whole, self.sizes.get(work, whole)))

    def attempt(self, work: str, whole: int, do: Callable[[int], Result]) -> Result:
        """`do(rows at once)`, again with half as many rows and the same random numbers when memory runs out.

        Raises `ModelError` when that does not help.
        """
        state = rng_state()
        while True:
            try:
                return do(self.rows(work, whole))
            except Exception as error:
                self.halve(work, whole, error)
            release()
            set_rng_state(state)

    def halve(self, work: str, whole: int, error: Exception) -> None:
        """Takes in a failure. Raises it again if it is another one, and `ModelError` when halving helps no more."""
        if not is_out_of_memory(error):
            raise error
        self.in_a_row += 1
        size, reason = self.rows(work, whole), first_line(error)
        if self.in_a_row >= LIMIT or size == 1:
            often = f"{self.in_a_row} times in a row, at last " if self.in_a_row > 1 else ""
            first = f"Lower {FIRST_ADVICE[work]}, to {size // 2} for example. " if size > 1 else ""
            raise ModelError(
                f"The run is out of memory: {often}in {work}, with {size} completion{'s' * (size > 1)} at once "
                f"({reason}). {first}{MEMORY_ADVICE}"
            ) from error
        self.sizes[work] = (size + 1) // 2
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
        self.tell(Halved(work, self.sizes[work], reason, self.step, self.sizes.get("training", self.micro_batch_size)))

    def finished(self, step: int | None = None) -> None:
        """An optimiser step, or a batch of an evaluation, came through: what happens next is not in a row with it."""
        self.in_a_row = 0
        self.step = self.step if step is None else step

    def state_dict(self) -> dict[str, int]:
        """The sizes that are no longer as asked for."""
        return dict(self.sizes)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on with the sizes of `state_dict()`."""
        self.sizes = {work: int(state[work]) for work in KINDS if work in state}


def tell_halved(run: RunDir, say: Callable[[str], None], halved: Halved) -> None:
    """Files the event, and says what changes and what does not."""
    run.append_event(
        "out_of_memory",
        step=halved.step,
        work=halved.work,
        rows=halved.rows,
        micro_batch_size=halved.micro_batch_size,
        reason=halved.reason,
    )
    same = "the same step in smaller parts" if halved.work == "training" else "the same number of completions"
    say(
        f"Out of memory in {halved.work} after step {halved.step}: from here on {halved.rows} completions at once ({same})."
    )


def _log(halved: Halved) -> None:
    log.warning("out of memory in %s; %d rows at once from now on (%s)", halved.work, halved.rows, halved.reason)


def release() -> None:
    """Gives back what an attempt left, to the allocator and from it to the device."""
    gc.collect()
    if _on_gpu():
        torch.cuda.empty_cache()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def rng_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generators, on the CPU and on the GPU that is used."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _on_gpu() else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Goes back to a `rng_state()`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
