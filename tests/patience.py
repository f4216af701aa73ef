"""Wait for results of processes, and end the processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from kit.runs.process import runs


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until `what()` is true, and return its value."""
    end = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)
    return result


def dead(who: Mapping[str, Any] | None) -> bool:
    return not runs(who)


def kill(who: Mapping[str, Any]) -> None:
    """Send SIGKILL to one process, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(who["pid"], signal.SIGKILL)
    wait_for(lambda: dead(who))
