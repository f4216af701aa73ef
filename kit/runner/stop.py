"""Asking a run to end: by signal, by file, by a limit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kit.runs.store import RunDir

LAUNCHER_SECONDS = 5.0
"""How long after a signal torchrun and accelerate may pass on the same one."""


class Stopped(KeyboardInterrupt):
    """Work that has nothing to save was given up, because somebody wants the run to end."""


class Stop:
    """A wish to end soon, by Ctrl-C, SIGTERM or the run's `control/stop` file. The work looks at it between steps."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.run = run
        self.reason: str | None = None
        self.echo = 0.0  # seconds in which a launcher passes on a signal that this process has heard itself
        self.ended: str | None = None  # why training ended before its last step, although nobody asked

    def asked(self) -> bool:
        """Whether somebody wants the run to end."""
        if self.reason is None and self.run is not None and (self.run.control / "stop").exists():
            self.reason = "control/stop"
        return self.reason is not None

    def check(self) -> None:
        """Raises `Stopped` if somebody wants the run to end; for work that has nothing to save."""
        if self.asked():
            raise Stopped

    @contextmanager
    def listening(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Turns the first Ctrl-C or SIGTERM into a wish; a second one interrupts at once."""

        heard = 0.0

        def wish(number: int, frame: Any) -> None:
            nonlocal heard
            if self.reason is not None:
                if time.monotonic() - heard < self.echo:
                    return
                raise KeyboardInterrupt
            self.reason, heard = signal.Signals(number).name, time.monotonic()
            with suppress(RuntimeError):  # "reentrant call": the signal came in the middle of another line
                tell("Stopping: a step in progress is finished and saved first. Once more to stop at once.")

        before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.run is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._terminal_closed)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _terminal_closed(self, number: int, frame: Any) -> None:
        """The run goes on; what it still prints goes to its log."""
        assert self.run is not None
        with suppress(OSError):
            log = os.open(self.run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
