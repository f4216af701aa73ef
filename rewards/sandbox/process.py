"""A sandboxed program, watched from outside: capped output, a deadline, and nothing left behind."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from rewards.sandbox.memory import ControlGroup, memory_of_tree
from rewards.sandbox.records import Job

__all__ = ["Ended", "Limits", "Watched", "close_all", "output_pipes", "sealed_file", "watch"]

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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a program is ended from outside: after so many seconds, after so many bytes of stdout or of stderr, and when its
    processes hold so many bytes of memory together."""

    seconds: float
    output_bytes: int
    memory_bytes: int

    @classmethod
    def of(cls, job: Job) -> "Limits":
        """Those of a job."""
        return cls(seconds=job.seconds, output_bytes=job.output_bytes, memory_bytes=job.memory_mb << 20)


@contextmanager
def sealed_file(content: bytes) -> Iterator[int]:
    """A descriptor, open for reading only, of an anonymous file that nobody can change any more."""
    import fcntl

    written = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(written, view) :]
        fcntl.fcntl(written, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)
    try:
        yield fd
    finally:
        os.close(fd)


def output_pipes() -> tuple[list[int], list[int]]:
    """Two pipes, for stdout and stderr: the ends to read from, and those to write to."""
    (first, second), (third, fourth) = os.pipe(), os.pipe()
    return [first, third], [second, fourth]


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)


class Watched(ABC):
    """A program that was started: reads what it writes until it ends or passes a limit.

    Args:
        pid: the process that all others of the program descend from.
        outputs: descriptors to read its stdout and stderr from; closed at the end.
        told: descriptors that can be read when the sandbox has something to say, or the program has ended.
    """

    def __init__(self, pid: int, outputs: Sequence[int], told: Sequence[int], limits: Limits, ended: Ended) -> None:
        self.pid = pid
        self.limits = limits
        self.ended = ended
        self.outputs = dict(zip(outputs, ("stdout", "stderr"), strict=True))
        self.owned = list(outputs)
        self.selector = selectors.PollSelector()
        for fd in (*outputs, *told):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)

    @abstractmethod
    def hear(self, fd: int) -> bool:
        """Takes in what one of `told` says; whether the program has ended."""

    @abstractmethod
    def finish(self) -> int | None:
        """Kills whatever is left and waits until it is gone; the exit code, as `Result` has it."""

    def follow(self, deadline: float) -> None:
        """Reads until the program ends, time is up, it has written too much, or its processes hold too much memory."""
        look = time.monotonic() + _LOOK_SECONDS
        over = False
        while not over and not self.ended.stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                self.ended.stopped = "timeout"
                return
            ready = [key.fd for key, _ in self.selector.select(min(left, _LOOK_SECONDS))]
            if time.monotonic() >= look:
                look = time.monotonic() + _LOOK_SECONDS
                if memory_of_tree(self.pid, self.limits.memory_bytes) > self.limits.memory_bytes:
                    self.ended.stopped = "memory"
                    return
            for fd in ready:
                if fd in self.outputs:
                    self._read(fd)
                else:
                    over |= self.hear(fd)

    def close(self) -> None:
        """Ends what is left of the program, and reads what had been written before."""
        try:
            code = self.finish()
            if not self.ended.stopped:
                self.ended.returncode = code
                for fd in list(self.outputs):
                    while not self.ended.stopped and self._read(fd):
                        pass
        finally:
            self.selector.close()
            close_all(self.owned)

    def _read(self, fd: int) -> bool:
        """Takes in what there is; whether there may be more."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            del self.outputs[fd]
            return False
        kept = self.ended.output[self.outputs[fd]]
        room = self.limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.ended.stopped = "output"
        return True


def watch(
    command: Sequence[str],
    *,
    stdin: int,
    pass_fds: Sequence[int],
    status: tuple[int, int] | None,
    limits: Limits,
    cwd: str = "/",
) -> Ended:
    """Runs `command` in a session of its own without an environment, until it ends or passes a limit; memory is bounded by a
    control group where one can be had, and looked at from here in either case.

    `status` is a pipe (read, write): the sandbox says there whether it got as far as starting the program, and under
    which process id its innermost process can be reached. Both ends are closed here. None: it says nothing.

    Raises:
        OSError: the command cannot be started.
    """
    ended = Ended()
    start = time.monotonic()
    reads, writes = ([status[0]], [status[1]]) if status else ([], [])
    outputs, written = output_pipes()
    with ControlGroup(limits.memory_bytes) as group:
        try:
            process = subprocess.Popen(
                group.joined(command),
                env={},
                cwd=cwd,
                stdin=stdin,
                stdout=written[0],
                stderr=written[1],
                start_new_session=True,
                pass_fds=(*pass_fds, *writes),
            )
        except BaseException:
            close_all([*outputs, *reads])
            raise
        finally:
            close_all([*written, *writes])
        with closing(_Started(process, outputs, reads, limits, ended)) as started:
            started.follow(start + limits.seconds)
        ended.seconds = time.monotonic() - start
        if not ended.stopped and group.overran():
            ended.stopped, ended.returncode = "memory", None
    return ended


class _Started(Watched):
    """A process of ours, which says on a pipe what the sandbox is at."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outputs: Sequence[int],
        status: Sequence[int],
        limits: Limits,
        ended: Ended,
    ) -> None:
        self.process = process
        self.exit = os.pidfd_open(process.pid)
        self.inner: int | None = None
        self.status = status
        super().__init__(process.pid, outputs, (*status, self.exit), limits, ended)
        self.owned += [*status, self.exit]

    def hear(self, fd: int) -> bool:
        return fd == self.exit or self._read_status(fd)

    def _read_status(self, fd: int) -> bool:
        """Takes in what the sandbox says, and holds on to the process that all others of it die with."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, _CHUNK)
            self.ended.status += data
            if not data:
                self.selector.unregister(fd)
        line = bytes(self.ended.status).partition(b"\n")[0]
        if self.inner is None and b"child-pid" in line:
            with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
                self.inner = os.pidfd_open(int(json.loads(line)["child-pid"]))
        return False

    def finish(self) -> int | None:
        for fd in self.status:
            if fd in self.selector.get_map():
                self._read_status(fd)  # the inner process may have been announced just now
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
        return self.process.wait()


def _await_end(pidfd: int) -> None:
    with selectors.PollSelector() as gone:
        gone.register(pidfd, selectors.EVENT_READ)
        gone.select(_GONE_SECONDS)
