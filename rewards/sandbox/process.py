"""Watch a sandboxed program from outside: limited output, a deadline, and no process left behind."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from rewards.sandbox.records import Job

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.025  # between two looks at the memory in use


@dataclass
class Ended:
    """Outcome of a process. `stopped` is the limit at which it was stopped: "timeout", "output", "memory", or "" if it ended
    by itself."""

    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    status: bytearray = field(default_factory=bytearray)
    stopped: str = ""
    returncode: int | None = None
    seconds: float = 0.0


@contextmanager
def sealed_file(content: bytes) -> Iterator[int]:
    """Open an anonymous file that nobody can change any more, for reading only."""
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
    """Open pipes for stdout and stderr: return the ends to read from, and those to write to."""
    (first, second), (third, fourth) = os.pipe(), os.pipe()
    return [first, third], [second, fourth]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class Watched(ABC):
    """A started program, whose output is read until it ends or passes a limit.

    Args:
        pid: the process that all others of the program descend from.
        outputs: descriptors to read its stdout and stderr from; closed at the end.
        signals: descriptors that can be read when the sandbox has something to say, or the program has ended.
    """

    def __init__(self, pid: int, outputs: Sequence[int], signals: Sequence[int], job: Job, ended: Ended) -> None:
        self.pid = pid
        self.job = job
        self.ended = ended
        self.outputs = dict(zip(outputs, ("stdout", "stderr"), strict=True))
        self.owned = list(outputs)
        self.selector = selectors.PollSelector()
        for fd in (*outputs, *signals):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)

    @abstractmethod
    def hear(self, fd: int) -> bool:
        """Read one of `signals`; return whether the program has ended."""

    @abstractmethod
    def finish(self) -> int | None:
        """Kill what is left of the program and wait for its end; return the exit code, as in `Result`."""

    def follow(self, deadline: float) -> None:
        """Read until the program ends, time is up, it has written too much, or its processes hold too much memory."""
        look = time.monotonic() + _LOOK_SECONDS
        most = self.job.memory_mb << 20
        over = False
        while not over and not self.ended.stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                self.ended.stopped = "timeout"
                return
            ready = [key.fd for key, _ in self.selector.select(min(left, _LOOK_SECONDS))]
            if time.monotonic() >= look:
                look = time.monotonic() + _LOOK_SECONDS
                if memory_of_tree(self.pid, most) > most:
                    self.ended.stopped = "memory"
                    return
            for fd in ready:
                if fd in self.outputs:
                    self._read(fd)
                else:
                    over |= self.hear(fd)

    def close(self) -> None:
        """End what is left of the program, and read what it had written before."""
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
        """Read once; return whether there may be more."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            del self.outputs[fd]
            return False
        output = self.ended.output[self.outputs[fd]]
        room = self.job.output_bytes - len(output)
        output += data[:room]
        if len(data) > room:
            self.ended.stopped = "output"
        return True


def watch(
    command: Sequence[str],
    *,
    stdin: int,
    status: tuple[int, int] | None,
    job: Job,
    cwd: str = "/",
) -> Ended:
    """Run `command` in its own session without an environment, until it ends or passes a limit.

    `status` is a pipe (read, write): the sandbox says there whether it got as far as starting the program. Both ends are
    closed here. None: it says nothing.

    Raises:
        OSError: the command cannot be started.
    """
    ended = Ended()
    start = time.monotonic()
    reads, writes = ([status[0]], [status[1]]) if status else ([], [])
    outputs, written = output_pipes()
    try:
        process = subprocess.Popen(
            command,
            env={},
            cwd=cwd,
            stdin=stdin,
            stdout=written[0],
            stderr=written[1],
            start_new_session=True,
            pass_fds=writes,
        )
    except BaseException:
        close_all([*outputs, *reads])
        raise
    finally:
        close_all([*written, *writes])
    with closing(_Started(process, outputs, reads, job, ended)) as started:
        started.follow(start + job.seconds)
    ended.seconds = time.monotonic() - start
    return ended


class _Started(Watched):
    """A child process, which reports the start of the sandbox on a pipe."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outputs: Sequence[int],
        status: Sequence[int],
        job: Job,
        ended: Ended,
    ) -> None:
        self.process = process
        self.exit = os.pidfd_open(process.pid)
        self.status = status
        super().__init__(process.pid, outputs, (*status, self.exit), job, ended)
        self.owned += [*status, self.exit]

    def hear(self, fd: int) -> bool:
        if fd == self.exit:
            return True
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, _CHUNK)
            self.ended.status += data
            if not data:
                self.selector.unregister(fd)
        return False

    def finish(self) -> int | None:
        for fd in self.status:
            if fd in self.selector.get_map():
                self.hear(fd)  # it may have started just now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet reaped, so that the number is still its own
        return self.process.wait()


def memory_of_tree(root: int, limit: int) -> int:
    """Return the bytes in use by a process and its descendants; an upper bound if that is not over `limit`.

    Pages that several share by a fork are counted once where the kernel tells (Pss), which takes longer and is asked only
    when the plain sum is over the limit.
    """
    pids, tree = [root], []
    while pids:
        pid = pids.pop()
        tree.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
    total = sum(_resident(pid) for pid in tree)
    if total <= limit:
        return total
    # One that has just ended has neither: what it held when it was first looked at no longer counts.
    return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss:") or _resident(pid) for pid in tree)


def _resident(pid: int) -> int:
    return _field(f"/proc/{pid}/status", "VmRSS:") or 0


def _field(path: str, name: str) -> int | None:
    """Return the bytes that a line of a file in /proc gives in kB; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return None
