"""Identity of processes: whether the process that wrote a status still runs. A pid alone does not tell, as pids are reused.

A process is identified by its pid, its creation time, and the boot it belongs to. Creation times are counted from
the boot, whose time of day moves when the clock is set; so the boot time that was read stands beside them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

CLOCK_TOLERANCE = 2.0
"""Seconds by which two readings of one process's creation time may differ where the boot time was not noted."""
TICK_TOLERANCE = 0.05
"""The same, in seconds since the boot: creation times are whole ticks, most often of 10 ms."""


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{pid, create_time, boot: {id, time}}` of process `pid` (default: this one); None for what the system hides."""
    boot = {"id": _boot_id(), "time": psutil.boot_time()}
    return {"pid": os.getpid() if pid is None else pid, "create_time": create_time(pid), "boot": boot}


def create_time(pid: int | None = None) -> float | None:
    """Seconds since the epoch at which process `pid` (default: this one) began; None where the system does not tell."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def runs(who: Mapping[str, Any] | None) -> bool:
    """Whether the process of an `identity` runs on this machine. False for None and for what is no identity."""
    pid = (who or {}).get("pid")
    if who is None or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return False
    return is_alive(pid, who.get("create_time"), who.get("boot"))


def is_alive(pid: int, created: float | None, boot: Mapping[str, Any] | None = None) -> bool:
    """Whether `pid` runs and, where that is known on both sides, began at `created`. A zombie does not run.

    With `boot`, as `identity` gives it, the answer does not depend on the clock, and is False after a reboot.
    """
    boot = boot or {}
    if boot.get("id") is not None and _boot_id() not in (None, boot["id"]):
        return False
    now = psutil.boot_time()
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        began = process.create_time()
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError):
        return False
    then: float | None = boot.get("time")
    if created is None:
        return True
    if then is None:
        return abs(began - created) <= CLOCK_TOLERANCE
    return abs((began - now) - (created - then)) <= TICK_TOLERANCE


def send_signal(who: Mapping[str, Any], number: int) -> bool:
    """Signals the process of an `identity`, and never another that got its pid. False if it does not run (any more).

    Raises `PermissionError` for a process of another user.
    """
    try:
        process = psutil.Process(who["pid"])
        if not runs(who):
            return False
        process.send_signal(number)  # to the process that it was when it was looked up, or to none
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from error
    return True


def kill_all(who: Mapping[str, Any]) -> None:
    """Sends SIGKILL to the process of an `identity`, the group it leads, and all descendants.

    Raises `PermissionError` for a process of another user.
    """
    if not runs(who):
        return
    offspring = [identity(pid) for pid in descendants(who["pid"])]
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(who["pid"]) == who["pid"]:
            kill_group(who["pid"])
    send_signal(who, signal.SIGKILL)
    for each in offspring:
        send_signal(each, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Sends SIGKILL to all that is left of a process group; call it while its leader is alive or not yet collected."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Pids of children, grandchildren and so on, in whatever group or session; empty where the process is gone."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None
