"""Is the process that wrote this still the one that runs? A pid alone does not say: pids are used again."""

from __future__ import annotations

import os
from pathlib import Path

CLOCK_TOLERANCE = 2.0
"""Seconds by which two readings of one process's creation time may differ (the boot time moves with the clock)."""


def create_time(pid: int | None = None) -> float | None:
    """Seconds since the epoch at which process `pid` (default: this one) began; None where /proc does not tell."""
    stat = _stat(os.getpid() if pid is None else pid)
    try:
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        ticks = int(stat[19])
        return float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, IndexError, ValueError):
        return None


def is_alive(pid: int, created: float | None) -> bool:
    """True if `pid` runs and, where that is known on both sides, began at `created`. A zombie does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    except (OverflowError, ValueError):
        return False
    if _stat(pid)[:1] == ["Z"]:
        return False
    now = create_time(pid)
    return created is None or now is None or abs(now - created) <= CLOCK_TOLERANCE


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (the second, the command's name, may hold blanks and brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
