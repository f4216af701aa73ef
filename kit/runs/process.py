"""Identity of processes: whether the process that wrote a status still runs. A pid alone is not enough, as pids are reused.

A process is identified by its pid and its creation time. psutil computes the creation time from the boot time, which changes
when the clock is set; the identity therefore includes the boot time, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

import psutil

TICK_TOLERANCE = 0.05
"""Largest difference in seconds of two readings of a creation time since boot, which has a resolution of about 10 ms."""


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{pid, create_time, boot: {time}}` of process `pid` (default: this one); None for values that the system hides."""
    created = None
    with contextlib.suppress(psutil.Error):
        created = psutil.Process(pid).create_time()
    boot = {"time": psutil.boot_time()}
    return {"pid": os.getpid() if pid is None else pid, "create_time": created, "boot": boot}


def runs(who: Mapping[str, Any] | None) -> bool:
    """Whether the process of an `identity` runs on this machine. False for a zombie, for None and for any other mapping.

    The answer does not depend on the clock.
    """
    pid, created, boot = (who or {}).get("pid"), (who or {}).get("create_time"), (who or {}).get("boot") or {}
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        began = process.create_time()
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False
    if created is None or boot.get("time") is None:
        return True
    return bool(abs((began - psutil.boot_time()) - (created - boot["time"])) <= TICK_TOLERANCE)


def send_signal(who: Mapping[str, Any], number: int) -> bool:
    """Send a signal to the process of an `identity`, never to a later one with its pid. False if it does not run.

    Raises `PermissionError` for a process of another user.
    """
    try:
        process = psutil.Process(who["pid"])
        if not runs(who):
            return False
        process.send_signal(number)  # psutil checks that the pid was not reused since the look-up
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from error
    return True


def kill_all(who: Mapping[str, Any]) -> None:
    """Send SIGKILL to the process of an `identity`, the group that it leads, and all descendants.

    Raises `PermissionError` for a process of another user.
    """
    if not runs(who):
        return
    children = [identity(pid) for pid in descendants(who["pid"])]
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(who["pid"]) == who["pid"]:
            kill_group(who["pid"])
    send_signal(who, signal.SIGKILL)
    for child in children:
        send_signal(child, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Send SIGKILL to all processes of a group. The group's leader must be alive or not yet collected."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Pids of children, grandchildren and so on, in any group or session; empty if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []
