"""kit.models.libraries: what is freed leaves the process; small models are left alone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kit.models.libraries import SMALL_MODEL, return_freed_memory

HOLES = """
import ctypes, sys
from kit.models.libraries import return_freed_memory
if sys.argv[1] == "yes":
    assert return_freed_memory(10**9)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
MIB = 1024**2
def fill(size):
    block = libc.malloc(size); ctypes.memset(block, 1, size); return block
libc.free(fill(30 * MIB))  # glibc raises its own threshold to what was freed
kept = []
for _ in range(10):
    hole = fill(20 * MIB); kept.append(fill(65536)); libc.free(hole); kept.append(fill(8 * MIB))
holes = [fill(16 * MIB) for _ in range(5)]
for block in holes[:-1]: libc.free(block)
print(int(open("/proc/self/statm").read().split()[1]) * 4096 // MIB)
"""


def resident(asked: str) -> int:
    done = subprocess.run([sys.executable, "-c", HOLES, asked], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the switch is glibc's")
def test_freed_blocks_leave_the_process() -> None:
    # 64 MiB of freed blocks lie below a live one: glibc keeps them by itself
    assert resident("no") - resident("yes") > 32


def test_small_models_are_left_alone() -> None:
    assert not return_freed_memory(SMALL_MODEL - 1)
