"""Identity of processes: whether the process that wrote a status still runs. A pid alone does not tell, as pids are reused.

A process is identified by its pid and its creation time. Creation times are counted from the boot, whose time of day moves
when the clock is set; so the boot time that was read stands beside them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

import psutil

TICK_TOLERANCE = 0.05
"""Seconds by which two readings of a creation time, counted from the boot, may differ: they are whole ticks of about 10 ms."""


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{pid, create_time, boot: {time}}` of process `pid` (default: this one); None for what the system hides."""
    created = None
    with contextlib.suppress(psutil.Error):
        created = psutil.Process(pid).create_time()
    boot = {"time": psutil.boot_time()}
    return {"pid": os.getpid() if pid is None else pid, "create_time": created, "boot": boot}


def runs(who: Mapping[str, Any] | None) -> bool:
    """Whether the process of an `identity` runs on this machine. False for None and for what is no identity.

    A zombie does not run. The answer does not depend on the clock.
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
