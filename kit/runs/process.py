"""Is the process that wrote this still the one that runs? A pid alone does not say: pids are used again.

A process is told by its pid, the time at which it was created, and the boot it lives in. Creation times are counted from
the boot, whose time of day moves when the clock is set; so the boot time that was read stands beside them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLOCK_TOLERANCE = 2.0
"""Seconds by which two readings of one process's creation time may differ where the boot time was not noted."""
TICK_TOLERANCE = 0.05
"""The same, in seconds since the boot: creation times are whole ticks, most often of 10 ms."""


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{pid, create_time, boot: {id, time}}` of process `pid` (default: this one); None for what the system hides."""
    pid = os.getpid() if pid is None else pid
    boot_time = _boot_time()
    boot = {"id": _boot_id(), "time": boot_time}
    return {"pid": pid, "create_time": _created(pid, boot_time), "boot": boot}


def create_time(pid: int | None = None) -> float | None:
    """Seconds since the epoch at which process `pid` (default: this one) began; None where /proc does not tell."""
    return _created(os.getpid() if pid is None else pid, _boot_time())


def runs(who: Mapping[str, Any] | None) -> bool:
    """True if the process of an `identity` runs on this machine. False for None and for what is no identity."""
    pid = (who or {}).get("pid")
    if who is None or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return False
    return is_alive(pid, who.get("create_time"), who.get("boot"))


def is_alive(pid: int, created: float | None, boot: Mapping[str, Any] | None = None) -> bool:
    """True if `pid` runs and, where that is known on both sides, began at `created`. A zombie does not run.

    With `boot`, as `identity` gives it, the answer does not depend on the clock, and is False after a reboot.
    """
    if not _exists(pid) or _stat(pid)[:1] in (["Z"], ["X"]):
        return False
    boot = boot or {}
    if boot.get("id") is not None and _boot_id() not in (None, boot["id"]):
        return False
    now = _boot_time()
    then: float | None = boot.get("time")
    began = _created(pid, now)
    if created is None or began is None:
        return True
    if then is None or now is None:
        return abs(began - created) <= CLOCK_TOLERANCE
    return abs((began - now) - (created - then)) <= TICK_TOLERANCE


def send_signal(who: Mapping[str, Any], number: int) -> bool:
    """Signals the process of an `identity`, and never another that got its pid. False if it does not run (any more).

    Raises `PermissionError` for a process of another user.
    """
    if not runs(who):
        return False
    try:
        handle = os.pidfd_open(who["pid"])
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # an old kernel, or none of Linux: signalled by its number
        return _signal_pid(who["pid"], number)
    try:
        if not runs(who):  # looked at again, now that the handle stands for one process only
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def kill_all(who: Mapping[str, Any]) -> None:
    """SIGKILL for the process of an `identity`, the group it leads, and all descendants.

    Raises `PermissionError` for a process of another user.
    """
    if not runs(who):
        return
    offspring = [identity(pid) for pid in descendants(who["pid"])]
    if _group(who["pid"]) == who["pid"]:
        kill_group(who["pid"])
    else:
        send_signal(who, signal.SIGKILL)
    for each in offspring:
        send_signal(each, signal.SIGKILL)


def kill_group(group: int) -> None:
    """SIGKILL for all that is left of a process group; call it while its leader is alive or not yet collected."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Pids of children, grandchildren and so on, in whatever group or session; empty where /proc does not tell."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(folder.name))
        if len(stat) > 1:
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except (OverflowError, ValueError):
        return False
    return True


def _signal_pid(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _created(pid: int, boot_time: float | None) -> float | None:
    try:
        return None if boot_time is None else boot_time + int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return None


def _boot_time() -> float | None:
    """Seconds since the epoch at which the system started, as it reckons now: setting the clock moves it."""
    try:
        line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return float(line.split()[1])
    except (OSError, StopIteration, IndexError, ValueError):
        return None


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (the second, the command's name, may hold blanks and brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
