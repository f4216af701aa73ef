"""Freed memory goes back to the system at once, so that a run on the CPU holds what it uses.

Why: glibc keeps freed blocks of up to 32 MiB in its heap. A key-value cache that grows token by token leaves holes of
sizes that are never asked for again: the resident memory of a run was up to twice what it used. Blocks above
`LARGE_BLOCK` are mapped one by one instead, and unmapped when freed. The price is a page fault for every 4 KiB of a new
block: with small models it was felt, with larger ones matrix products outweigh it by far. Can go when torch's CPU
allocator keeps a cache of its own.
"""

from __future__ import annotations

import ctypes

LARGE_BLOCK = 4 * 1024**2
"""Bytes."""
SMALL_MODEL = 10_000_000
"""Weights below which a model's memory does not matter and its time does."""
M_MMAP_THRESHOLD = -3  # malloc.h


def return_freed_memory(parameters: int) -> bool:
    """Sets it for the rest of the process, if the model is large enough. False where the C library has no such switch."""
    if parameters < SMALL_MODEL:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return False
