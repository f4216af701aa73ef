"""Threads that wait for processes: many calls at once, slow ones last."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FIRST_TRY = 1 / 8
"""Share of its time that an item gets before all others were tried."""

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def concurrently(function: Callable[[T], R], items: Sequence[T], workers: int | None = None) -> list[R]:
    """Apply `function` to every item in `workers` threads (as many as there are CPUs) and return results in order."""
    threads = min(len(items), workers or cores())
    if threads <= 1:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(threads)
    try:
        return list(pool.map(function, items))
    finally:  # on an interrupt, nobody waits for calls that are under way
        pool.shutdown(wait=False, cancel_futures=True)


def slow_last(
    attempt: Callable[[T, float], R | None], items: Sequence[T], workers: int | None, patient: bool
) -> list[R | None]:
    """Return `attempt(item, share)` of every item, in order.

    A first pass gives each the share `FIRST_TRY` of its time, a second one all of it to those for which the first gave None.
    `patient` leaves the first pass out.
    """
    results: list[R | None] = [None] * len(items)
    for share in (1.0,) if patient else (FIRST_TRY, 1.0):
        waiting = [at for at, result in enumerate(results) if result is None]
        made = concurrently(lambda at: attempt(items[at], share), waiting, workers)  # noqa: B023
        for at, result in zip(waiting, made, strict=True):
            results[at] = result
    return results
