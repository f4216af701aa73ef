"""Run calls in threads that wait for processes, slow calls last."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FIRST_TRY = 1 / 8
"""Share of its time that an item gets in the first pass over all items."""

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def concurrently(function: Callable[[T], R], items: Sequence[T], workers: int | None = None) -> list[R]:
    """Apply `function` to every item in `workers` threads (default: the number of CPUs) and return results in order."""
    threads = min(len(items), workers or cores())
    if threads <= 1:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(threads)
    try:
        return list(pool.map(function, items))
    finally:  # on an interrupt, do not wait for running calls
        pool.shutdown(wait=False, cancel_futures=True)


def slow_last(
    attempt: Callable[[T, float], R | None], items: Sequence[T], workers: int | None, patient: bool
) -> list[R | None]:
    """Return `attempt(item, share)` for every item, in order; `share` is the share of its time that the item gets.

    A first pass gives every item the share `FIRST_TRY`. A second pass gives items without a result (None) the share 1.
    `patient` skips the first pass.
    """
    results: list[R | None] = [None] * len(items)
    for share in (1.0,) if patient else (FIRST_TRY, 1.0):
        open_items = [index for index, result in enumerate(results) if result is None]
        outcomes = concurrently(lambda index: attempt(items[index], share), open_items, workers)  # noqa: B023
        for index, outcome in zip(open_items, outcomes, strict=True):
            results[index] = outcome
    return results
