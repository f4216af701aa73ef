"""Script of a worker process, which makes the calls that it receives one after the other.

It runs by path and imports neither the parent's main module nor this library. A request is the pickle of (function,
arguments or None to only load it, bytes of memory, seconds until the interrupt or 0). A reply is the JSON of
[`ok`, `error` or `late`, value or reason, seconds, whether this process ends now].
"""

import importlib
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_RESULT = 16_000_000  # bytes of JSON


class Overrun(BaseException):
    """The time of the call is over. It is not an `Exception`, because libraries catch those in many places."""

    overrun = True


class Worker:
    """Calls functions by name, each with a limit of the address space."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.baseline = address_space()  # bytes of the loaded code

    def answer(self, request: bytes) -> tuple[bytes, bool]:
        """Return the reply, and whether this process should end because it ran out of memory or uses too much."""
        start, memory, exhausted = time.monotonic(), 0, False
        try:
            function, arguments, memory, alarm = pickle.loads(request)
            if function not in self.functions:
                self.load(function)
                start = time.monotonic()
            value = None
            if arguments is not None:
                limit(self.baseline + memory)
                value = self.call(function, arguments, alarm)
            reply = json.dumps(["ok", value, time.monotonic() - start], allow_nan=False)
            if len(reply) > MAX_RESULT:
                raise ValueError(f"the result is {len(reply)} bytes of JSON, more than {MAX_RESULT}")
        except BaseException as failure:  # SystemExit and timeouts derived from BaseException too
            kind = "late" if getattr(failure, "overrun", False) is True else "error"
            reply = json.dumps([kind, describe(failure), time.monotonic() - start])
            exhausted = isinstance(failure, MemoryError)
        limit(None)
        ends = exhausted or (memory > 0 and address_space() > self.baseline + memory // 2)
        return f"{reply[:-1]}, {json.dumps(ends)}]".encode(), ends

    def call(self, function: str, arguments: tuple[Any, ...], alarm: float) -> Any:
        """Call the function; after `alarm` seconds, if not 0, raise `Overrun` in it.

        The interpreter raises it between two bytecodes. If a call in C code does not return, the parent kills this process.
        """
        if not alarm:
            return self.functions[function](*arguments)
        signal.signal(signal.SIGALRM, _raise_overrun)
        signal.setitimer(signal.ITIMER_REAL, alarm)
        try:
            return self.functions[function](*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def load(self, function: str) -> None:
        """Import a function without a limit, and call its module's `warm_up()` if there is one."""
        module = importlib.import_module(function.partition(":")[0])
        target: Any = module
        for part in function.partition(":")[2].split("."):
            target = getattr(target, part)
        if callable(warm_up := getattr(module, "warm_up", None)):
            warm_up()
        self.functions[function] = target
        self.baseline = address_space()


def limit(memory: int | None) -> None:
    """Limit the address space to `memory` bytes; None removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if memory is None or (hard != resource.RLIM_INFINITY and memory > hard) else memory
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _raise_overrun(*_: object) -> None:
    raise Overrun


def describe(failure: BaseException) -> str:
    """Return type and message of an exception, at most 300 characters; never raises."""
    try:
        message = str(failure)
    except Exception:
        message = "(no message)"
    return f"{type(failure).__name__}: {message}"[:300]


def address_space() -> int:
    """Return the bytes of virtual memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def die_with_parent(lifeline: int) -> None:
    """Make the kernel end this process when the parent's end of a pipe closes, even if it hangs in C code.

    PR_SET_PDEATHSIG would follow the thread that started this process, which may end long before the parent.
    """
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which terminates
    if os.getppid() == 1:  # the parent ended before
        os._exit(0)


def main() -> None:
    """Run a worker process: answer requests from the pipe named on the command line until it closes."""
    path, requests, lifeline = json.loads(sys.argv[1])
    die_with_parent(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [""]
    sys.path[:] = path
    worker, pipe = Worker(), Connection(requests)
    ends = False
    while not ends:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        reply, ends = worker.answer(request)
        pipe.send_bytes(reply)


if __name__ == "__main__":
    main()
    os._exit(0)  # skips exit handlers of libraries, which could hang or print
