"""A call that may hang, made in a thread of its own so that waiting for it can end.

A thread cannot be stopped from outside: one that hangs is left behind, and is given no more work. It holds no lock of
ours, and as a daemon it does not keep the process from ending.
"""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")
LAST_RESORT_SECONDS = 60.0
"""How long after the timeout the process ends itself where not even the waiting thread gets to run: native code that hangs
may keep Python's lock."""


class Hung(TimeoutError):
    """The call had not ended in time."""


@dataclass
class _Call:
    do: Callable[[], Any]
    before: Callable[[], None] = lambda: None
    ended: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Watchdog:
    """One thread that makes calls one after the other, each within `timeout` seconds.

    `prepare` runs first in the thread: what torch keeps by thread (device, number of threads) is set there.
    """

    def __init__(self, timeout: float, prepare: Callable[[], None] = lambda: None) -> None:
        self.timeout, self.prepare = timeout, prepare
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, do: Callable[[], Result]) -> Result:
        """What `do()` returns or raises. Raises `Hung` after `timeout` seconds; the thread is then given up."""
        asked = _Call(do)
        if self._thread is None:
            asked.before = self.prepare
            self._thread = threading.Thread(target=self._work, args=(self._calls,), name="engine", daemon=True)
            self._thread.start()
        last = _stderr()
        if last is not None:
            faulthandler.dump_traceback_later(self.timeout + LAST_RESORT_SECONDS, exit=True, file=last)
        try:
            self._calls.put(asked)
            if not asked.ended.wait(self.timeout):
                self._thread, self._calls = None, queue.SimpleQueue()
                raise Hung(f"no answer within {self.timeout:g} s")
        finally:
            if last is not None:
                faulthandler.cancel_dump_traceback_later()
        if asked.error is not None:
            raise asked.error
        result: Result = asked.result
        return result

    def _work(self, calls: queue.SimpleQueue[_Call]) -> None:
        while True:
            asked = calls.get()
            try:
                asked.before()
                asked.result = asked.do()
            except BaseException as error:
                asked.error = error
            asked.ended.set()
            del asked  # else a waiting thread keeps the last call alive, and what it was about


def _stderr() -> Any | None:
    """The process's own stderr, to which a traceback can be written without Python; None where it was closed."""
    try:
        return sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.fileno() >= 0 else None
    except (OSError, ValueError):
        return None
