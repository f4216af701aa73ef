"""The parent's side of one worker process: its pipes, and what it is doing right now."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rewards.isolation.worker import FAILED, HEADER, LATE, LENGTH, LOADING, MAX_RESULT, READY, RESULT, STARTED

LOADING_SECONDS = 120.0  # for a worker to boot, and to import a function's module: not on the item's account
_WORKER = Path(__file__).with_name("worker.py")
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class Call(NamedTuple):
    """One item as it travels: its number, `module:function`, pickled arguments, and the seconds after which it is
    interrupted (0: never)."""

    item: int
    function: str
    arguments: bytes
    alarm: float = 0.0


class Reply(NamedTuple):
    """What a worker said about one item."""

    item: int
    failed: bool
    value: Any
    seconds: float
    late: bool = False


class WorkerProcess:
    """One worker. Its pipes do not block; whoever owns it polls `replies` and, while `unsent`, `requests`.

    Attributes:
        waiting: items sent and not answered yet, in order.
        running: the item being worked on, or None.
        since: monotonic seconds at which the current phase began.
        loading: whether that phase is booting or importing rather than an item's own time.
        dead: whether its end of the pipe was found closed.
        answered: whether it has ever answered anything.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        inside, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    str(_WORKER),
                    json.dumps([_import_path(), list(preload), inside]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[inside],
                env=os.environ | _SINGLE_THREADED,
                start_new_session=True,  # Ctrl-C is for us; and its children can be killed with it
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(inside)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests = self._process.stdin.fileno()
        self.replies = self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self.waiting: deque[int] = deque()
        self.running: int | None = None
        self.since = time.monotonic()
        self.loading = True
        self.dead = False
        self.answered = False
        self.unsent = memoryview(b"")
        self._received = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, memory: int, calls: Sequence[Call], end: float | None = None) -> None:
        """Hands over a chunk, and when (monotonic seconds) what can be interrupted of it is; only for a worker with nothing
        waiting."""
        message = pickle.dumps((memory, end, [tuple(call) for call in calls]))
        self.waiting.extend(call.item for call in calls)
        self.since, self.loading = time.monotonic(), True  # until it says that it has begun
        self.unsent = memoryview(LENGTH.pack(len(message)) + message)
        self.flush()

    def flush(self) -> None:
        """Writes as much as the pipe takes; a broken one shows when replies are read."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.unsent = memoryview(b"")

    def receive(self) -> list[Reply] | None:
        """Answers that have come in; None when the process has ended or talks nonsense."""
        try:
            data = os.read(self.replies, 1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        return self._parse()

    def _parse(self) -> list[Reply] | None:
        replies: list[Reply] = []
        position = 0
        while len(self._received) - position >= HEADER.size:
            kind, item, number, length = HEADER.unpack_from(self._received, position)
            end = position + HEADER.size + length
            if length > MAX_RESULT or kind not in (READY, LOADING, STARTED, RESULT, FAILED, LATE):
                return None
            if len(self._received) < end:
                break
            payload = self._received[position + HEADER.size : end]
            position = end
            if kind == READY:
                self.since = time.monotonic()
            elif not self.waiting or item != self.waiting[0]:
                return None
            elif kind in (LOADING, STARTED):
                self.running, self.since, self.loading = item, number, kind == LOADING
            else:
                self.waiting.popleft()
                self.answered = True
                self.running, self.since, self.loading = None, time.monotonic(), True
                replies.append(_reply(item, kind, payload, number))
        del self._received[:position]
        return replies

    def deadline(self, seconds: float) -> float:
        """Monotonic time at which the current phase has taken too long; `seconds` is what an item may take."""
        return self.since + (LOADING_SECONDS if self.loading else seconds)

    def end(self) -> int | None:
        """Kills it and what it started, closes the pipes; returns the exit code it had, if it was dead already."""
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # before it became the leader of its session
                self._process.kill()
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # SIGKILL waits for nothing but the kernel
            self._process.wait(timeout=5)
        return code

    def close(self) -> None:
        """Closes our ends only: in a forked child, the process is the parent's."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def is_alive(self) -> bool:
        return not self.dead and self._process.poll() is None

    def exit_code(self, patience: float = 0.5) -> int | None:
        """How it ended, for a message; None when it has not."""
        try:
            return self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            return None


def _import_path() -> list[str]:
    """`sys.path` with the folder that this process works in behind all others: a folder there that is named like a package,
    beside one's data, is then no package."""
    return sorted(sys.path, key=lambda entry: entry in ("", os.getcwd()))


def _reply(item: int, kind: bytes, payload: bytearray, seconds: float) -> Reply:
    try:
        return Reply(item, kind != RESULT, json.loads(payload), seconds, kind == LATE)
    except (ValueError, RecursionError) as failure:
        return Reply(item, True, f"the result cannot be read: {failure}"[:300], seconds)
