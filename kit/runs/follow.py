"""Reading a log as it grows: `tail -n` and `tail -F`, until the run has ended."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kit.errors import RunError
from kit.runs.store import ALIVE, RunDir

BLOCK = 65536
POLL_SECONDS = 0.25


def follow(run: RunDir, lines: int, sleep: Callable[[float], Any] = time.sleep) -> Iterator[str]:
    """The last lines of the run's log, then whatever is added to it, until the run has ended and all is told.

    A log that was replaced or cut is read from its start. Raises `RunError` when it cannot be read.
    """
    log = Log(run.log)
    yield log.tail(lines)
    while True:
        ended = run.settled()["state"] not in ALIVE  # asked before reading: the last words come before the end
        yield log.added()
        if ended:
            return
        sleep(POLL_SECONDS)


class Log:
    """A text file and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def tail(self, lines: int) -> str:
        """The last `lines` lines; nothing where there is no file. What follows is `added`."""
        return self._read(lambda file: self._last(file, lines))

    def added(self) -> str:
        """What was added since the last look."""
        return self._read(self._rest)

    def _read(self, part: Callable[[BinaryIO], bytes]) -> str:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._position:
                    self._inode, self._position = found.st_ino, 0
                    self._decoder.reset()
                return self._decoder.decode(part(file))
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _rest(self, file: BinaryIO) -> bytes:
        file.seek(self._position)
        data = file.read()
        self._position = file.tell()
        return data

    def _last(self, file: BinaryIO, lines: int) -> bytes:
        start = self._position = file.seek(0, os.SEEK_END)
        data = b""
        while start > 0 and data.count(b"\n") <= lines:  # one more than wanted: the first may be a part of a line
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            data = file.read(size) + data
        return b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""
