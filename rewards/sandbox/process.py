"""One sandboxed process, watched from outside: capped output, a deadline, and nothing left behind."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewards.sandbox.memory import ControlGroup, memory_of_tree

__all__ = ["Ended", "sealed_file", "watch"]

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.025  # between two looks at the memory in use
_GONE_SECONDS = 5.0  # how long killed processes may take to vanish


@dataclass
class Ended:
    """What came of a process. `stopped` is why it was ended from outside: "timeout", "output", "memory", or "" when it was
    not."""

    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    status: bytearray = field(default_factory=bytearray)
    stopped: str = ""
    returncode: int | None = None
    seconds: float = 0.0


def sealed_file(content: bytes) -> int:
    """A descriptor, open for reading only, of an anonymous file that nobody can change any more."""
    import fcntl

    written = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(written, view) :]
        fcntl.fcntl(written, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)


def watch(
    command: Sequence[str],
    *,
    stdin: int,
    pass_fds: Sequence[int],
    status: tuple[int, int] | None,
    seconds: float,
    output_bytes: int,
    memory_bytes: int,
    cwd: str = "/",
) -> Ended:
    """Runs `command` in a session of its own without an environment, until it ends or passes a limit; `memory_bytes` is what
    its processes may hold together, by a control group where one can be had, and looked at from here in either case.

    `status` is a pipe (read, write): the sandbox says there whether it got as far as starting the program, and under
    which process id its innermost process can be reached. Both ends are closed here. None: it says nothing.

    Raises:
        OSError: the command cannot be started.
    """
    with ControlGroup(memory_bytes) as group:
        ended = _watch(group.joined(command), stdin, pass_fds, status, seconds, output_bytes, memory_bytes, cwd)
        if not ended.stopped and group.overran():
            ended.stopped, ended.returncode = "memory", None
    return ended


def _watch(
    command: Sequence[str],
    stdin: int,
    pass_fds: Sequence[int],
    status: tuple[int, int] | None,
    seconds: float,
    output_bytes: int,
    memory_bytes: int,
    cwd: str,
) -> Ended:
    ended = Ended()
    start = time.monotonic()
    reads, writes = ([status[0]], [status[1]]) if status else ([], [])
    try:
        process = subprocess.Popen(
            list(command),
            env={},
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(*pass_fds, *writes),
        )
    except BaseException:
        _close(reads)
        raise
    finally:
        _close(writes)
    try:
        watched = _Watched(process, reads, output_bytes, memory_bytes, ended)
    except BaseException:
        _close(reads)
        process.kill()
        process.wait()
        raise
    try:
        watched.follow(start + seconds)
    finally:
        watched.end()
        ended.seconds = time.monotonic() - start
    return ended


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class _Watched:
    """A started process and the pipes that lead to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status: Sequence[int],
        output_bytes: int,
        memory_bytes: int,
        ended: Ended,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.output_bytes = output_bytes
        self.memory_bytes = memory_bytes
        self.ended = ended
        self.pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
        self.pipes |= dict.fromkeys(status, "status")
        self.exit = os.pidfd_open(process.pid)
        self.inner: int | None = None
        self.owned = [*status, self.exit]
        self.selector = selectors.PollSelector()
        for fd in self.pipes:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)
        self.selector.register(self.exit, selectors.EVENT_READ)

    def follow(self, deadline: float) -> None:
        """Reads until the process ends, time is up, it has written too much, or its processes hold too much memory."""
        look = time.monotonic() + _LOOK_SECONDS
        while not self.ended.stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                self.ended.stopped = "timeout"
                return
            ready = [key.fd for key, _ in self.selector.select(min(left, _LOOK_SECONDS))]
            if time.monotonic() >= look:
                look = time.monotonic() + _LOOK_SECONDS
                if memory_of_tree(self.process.pid, self.memory_bytes) > self.memory_bytes:
                    self.ended.stopped = "memory"
                    return
            for fd in ready:
                if fd in self.pipes:
                    self._read(fd)
            if self.exit in ready:
                return

    def end(self) -> None:
        """Kills whatever is left, waits until it is gone, and reads what had been written before."""
        self._drain("status")  # the inner process may have been announced just now
        if self.inner is not None:
            # The inner one first, and its parent is left to reap it: an orphan would stay a zombie in a container whose
            # first process reaps nothing, and would go on counting as a process of its user.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
            _await_end(self.inner)
            _await_end(self.exit)
            os.close(self.inner)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet reaped, so that the number is still its own
        code = self.process.wait()
        if not self.ended.stopped:
            self.ended.returncode = code
            self._drain("stdout")
            self._drain("stderr")
        self.selector.close()
        _close(self.owned)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _drain(self, name: str) -> None:
        for fd in [fd for fd, pipe in self.pipes.items() if pipe == name]:
            while not self.ended.stopped and self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        """Takes in what there is; whether there may be more."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        name = self.pipes[fd]
        if not data:
            self.selector.unregister(fd)
            del self.pipes[fd]
        elif name == "status":
            self.ended.status += data
            self._reach_inner()
        else:
            kept = self.ended.output[name]
            room = self.output_bytes - len(kept)
            kept += data[:room]
            if len(data) > room:
                self.ended.stopped = "output"
        return bool(data)

    def _reach_inner(self) -> None:
        """Holds on to the process that all others of the sandbox die with."""
        line = bytes(self.ended.status).partition(b"\n")[0]
        if self.inner is None and b"child-pid" in line:
            with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
                self.inner = os.pidfd_open(int(json.loads(line)["child-pid"]))


def _await_end(pidfd: int) -> None:
    with selectors.PollSelector() as gone:
        gone.register(pidfd, selectors.EVENT_READ)
        gone.select(_GONE_SECONDS)
