"""The inside of a worker process: a script that reads chunks of calls, makes them, and writes plain results.

Run by path, never imported by it: it knows nothing of the parent's main module and of this library. Frames to the
parent are a header (kind, item, number, payload length) and a JSON payload.
"""

import importlib
import json
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import IO, Any

HEADER = struct.Struct("<cIdI")
LENGTH = struct.Struct("<Q")  # before each chunk that comes from the parent
READY = b"H"  # booted; functions that were named in advance are loaded
LOADING = b"L"  # importing the item's function; number: monotonic seconds
STARTED = b"S"  # number: monotonic seconds at which the item began
RESULT = b"R"  # number: seconds the item took; payload: its JSON
FAILED = b"E"  # number: seconds the item took; payload: the reason as JSON
LATE = b"T"  # the function was interrupted, its time was over (an exception with a true `overrun`); as FAILED
MAX_RESULT = 16_000_000  # bytes of JSON


class Overrun(BaseException):
    """The item's time is over. No `Exception`, which libraries catch in many places."""

    overrun = True


class Worker:
    """Calls functions by name, one item after the other, each under a limit of address space."""

    def __init__(self, requests: IO[bytes], replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self.functions: dict[str, Callable[..., Any]] = {}
        self.baseline = 0  # bytes of address space that loaded code takes
        self.memory = 0  # bytes that an item may take beside it
        self.end: float | None = None  # monotonic seconds after which what can be interrupted is, however short it ran

    def serve(self) -> None:
        """Until the parent closes the pipe, or this process has grown so much that a fresh one is better."""
        while len(header := self.requests.read(LENGTH.size)) == LENGTH.size:
            memory, self.end, items = pickle.loads(self.requests.read(*LENGTH.unpack(header)))
            self.memory = memory
            self.limit(memory)
            waiting = b""  # the reply before goes out with the next start: one write an item
            for item, function, arguments, alarm in items:
                waiting, exhausted = self.answer(item, function, arguments, alarm, waiting)
                if exhausted:
                    self.write(waiting)
                    return
            self.write(waiting)
            if address_space() > self.baseline + memory // 2:
                return

    def answer(self, item: int, function: str, arguments: bytes, alarm: float, waiting: bytes) -> tuple[bytes, bool]:
        """The item's reply, and whether memory ran out, after which nothing in this process can be relied on."""
        start = time.monotonic()
        try:
            if function not in self.functions:
                self.write(waiting + HEADER.pack(LOADING, item, start, 0))
                waiting = b""
                self.load(function)
                start = time.monotonic()
            self.write(waiting + HEADER.pack(STARTED, item, start, 0))
            payload = json.dumps(self.called(function, pickle.loads(arguments), alarm), allow_nan=False).encode()
            if len(payload) > MAX_RESULT:
                raise ValueError(f"the result is {len(payload)} bytes of JSON, more than {MAX_RESULT}")
        except BaseException as failure:  # SystemExit and timeouts derived from BaseException too
            reason = json.dumps(describe(failure)).encode()
            kind = LATE if getattr(failure, "overrun", False) is True else FAILED
            reply = HEADER.pack(kind, item, time.monotonic() - start, len(reason)) + reason
            return reply, isinstance(failure, MemoryError)
        return HEADER.pack(RESULT, item, time.monotonic() - start, len(payload)) + payload, False

    def called(self, function: str, arguments: tuple[Any, ...], alarm: float) -> Any:
        """What the function returns; after `alarm` seconds, if that is not 0, or at the chunk's end, `Overrun` is raised in
        it, between two steps of the interpreter. What that cannot stop is for the parent to kill."""
        if not alarm:
            return self.functions[function](*arguments)
        if self.end is not None:
            alarm = min(alarm, max(self.end - time.monotonic(), 1e-6))  # 0 would be no alarm at all
        signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, alarm)
        try:
            return self.functions[function](*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def load(self, function: str) -> None:
        """Imports without a limit, and calls the module's `warm_up()` if it has one."""
        self.limit(None)
        module = importlib.import_module(function.partition(":")[0])
        called: Any = module
        for part in function.partition(":")[2].split("."):
            called = getattr(called, part)
        if callable(warm_up := getattr(module, "warm_up", None)):
            warm_up()
        self.functions[function] = called
        self.baseline = address_space()
        self.limit(self.memory or None)

    def limit(self, memory: int | None) -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = resource.RLIM_INFINITY if memory is None else self.baseline + memory
        if hard != resource.RLIM_INFINITY and (memory is None or wanted > hard):
            wanted = hard
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))

    def write(self, frames: bytes) -> None:
        view = memoryview(frames)
        while view:
            view = view[os.write(self.replies, view) :]


def _ring(*_: object) -> None:
    raise Overrun


def describe(failure: BaseException) -> str:
    try:
        message = str(failure)
    except Exception:
        message = "(no message)"
    return f"{type(failure).__name__}: {message}"[:300]


def address_space() -> int:
    """Bytes of virtual memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def die_with_parent(lifeline: int) -> None:
    """Has the kernel end this process when the parent's end of a pipe closes, even while it hangs in C code.

    Not PR_SET_PDEATHSIG: that follows the thread that started this process, which may end long before the parent.
    """
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which terminates
    if os.getppid() == 1:  # it went before we listened
        os._exit(0)


def private_pipes() -> tuple[IO[bytes], int]:
    """Our ends of the pipes under new numbers; what a function reads or prints goes nowhere."""
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    return os.fdopen(requests, "rb"), replies


def main() -> None:
    import resource

    requests, replies = private_pipes()
    path, preload, lifeline = json.loads(sys.argv[1])
    die_with_parent(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [""]
    sys.path[:] = path
    worker = Worker(requests, replies)
    worker.baseline = address_space()
    for function in preload:
        try:
            worker.load(function)
        except BaseException:  # said again, with its reason, by the item that needs it
            continue
    worker.write(HEADER.pack(READY, 0, time.monotonic(), 0))
    worker.serve()


if __name__ == "__main__":
    main()
    os._exit(0)  # no clean-up of libraries that could hang or print
