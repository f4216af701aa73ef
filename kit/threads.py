"""Settings with which OpenMP threads sleep while they wait. They must be set before torch is loaded.

OpenMP threads wait at a barrier after every parallel loop. By default they spin, which is fast on idle cores. On a busy machine
they occupy the core of the thread for which they wait, and a step takes up to thirty times as long.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SLEEPY = {
    "GOMP_SPINCOUNT": "10000",  # libgomp: torch's wheels for Linux, including MKL; default 300,000, about 14 ms
    "KMP_BLOCKTIME": "1",  # LLVM's and Intel's libomp: torch's wheels for macOS and Windows; default 200 ms
}
"""Rounds (GOMP) and milliseconds (KMP) for which a thread spins before it sleeps. Each runtime reads one of them.

A lower count is faster on busy cores and slower on idle ones, where threads then sleep at every barrier of small layers.
GPU work has no such barriers.
"""

WAIT_POLICY = {"OMP_WAIT_POLICY", "KMP_LIBRARY", *SLEEPY}
"""All variables with which a user sets how threads wait."""


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets `SLEEPY` in `environment`, unless the user has set a variable of `WAIT_POLICY`, even to an empty text.

    OpenMP reads its environment once, when torch is loaded. Later calls only affect child processes.
    """
    if not WAIT_POLICY & environment.keys():
        environment.update(SLEEPY)
