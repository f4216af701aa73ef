"""OpenMP threads that sleep while they wait, set before torch is loaded.

Threads of OpenMP meet at a barrier after every parallel loop. Left alone they spin there, which is quick on idle cores; on
a crowded machine they burn the very core that the thread they wait for needs, and a step takes up to thirty times as long.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SLEEPY = {
    "GOMP_SPINCOUNT": "10000",  # libgomp: torch's wheels for Linux, MKL in them included; of itself 300,000, about 14 ms
    "KMP_BLOCKTIME": "1",  # LLVM's and Intel's libomp: torch's wheels for macOS and Windows, an LD_PRELOAD; of itself 200 ms
}
"""Rounds (GOMP) and milliseconds (KMP) for which a thread spins before it sleeps; each runtime ignores the other's.

A lower count helps more on crowded cores and costs more on idle ones, where small layers then sleep at every barrier.
On a GPU the setting is the same: only what the CPU computes comes to such barriers.
"""

WAIT_POLICY = {"OMP_WAIT_POLICY", "KMP_LIBRARY", *SLEEPY}
"""Every variable by which a user says how threads wait."""


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets `SLEEPY` in `environment`, and nothing where the user has set any variable of `WAIT_POLICY`, even an empty one.

    OpenMP reads its environment once, when torch is loaded: later calls reach only processes that are started from here.
    """
    if not WAIT_POLICY & environment.keys():
        environment.update(SLEEPY)
