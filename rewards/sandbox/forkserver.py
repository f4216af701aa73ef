"""Warm interpreters in their own namespaces, which fork a restricted process for each program, see `launcher.serve`.

A program costs a fork and its namespaces, and neither the start of an interpreter nor its imports: a third of the time to
start one. The seed of hashes and the layout of addresses are the server's. Each server has a user id of its own if this
process is root, and runs one program at a time.
"""

import atexit
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from rewards.sandbox import commands
from rewards.sandbox.process import Ended, Watched, close_all, output_pipes, sealed_file
from rewards.sandbox.records import Job
from rewards.sandbox.slots import give_slot, take_slot

_START_SECONDS = 20.0  # until a server is ready; a busy machine may take seconds
_ANSWER_SECONDS = 10.0  # until it says that a process was forked
_GONE_SECONDS = 1.0  # how long a killed program holds up its caller, and a server that is closed
_MESSAGE = 4096
_MOST_IDLE = 2 * (os.cpu_count() or 1)  # each holds some 10 MiB

_lock = threading.Lock()
_idle: dict[str | None, list["_Server"]] = {}
_live: set["_Server"] = set()  # idle or in use
_going: list["_Server"] = []  # killed, and not gone yet: they keep their slots


def run_forked(job: Job, program: bytes, contents: Mapping[str, bytes]) -> Ended:
    """Run a program in a process that a server of its interpreter forks, until it ends or passes a limit.

    Raises:
        OSError: no server can be started, or it ended.
    """
    ended = Ended()
    with _server(job.python) as server, ExitStack() as stack:
        start = time.monotonic()  # not before: a server that has to be started is no time of the program's
        request = {
            "size": len(program),
            "files": [(name, len(text)) for name, text in contents.items()],
            "disk_mb": job.disk_mb,
            "limits": commands.resource_limits(job) | {"nproc": job.processes + 3},
        }
        # In a file that the server does not read: the next program would find it in the server's memory.
        body = b"".join((repr(request).encode(), b"\n", program, *contents.values()))
        stdin, content = (
            stack.enter_context(sealed_file(part)) for part in (job.stdin.encode("utf-8", "replace"), body)
        )
        outputs, writes = output_pipes()
        try:
            process = server.fork((stdin, *writes, content), ended)
        except BaseException:
            close_all(outputs)
            raise
        finally:
            close_all(writes)
        with closing(_Forked(server, process, outputs, job, ended)) as forked:
            forked.follow(start + job.seconds)
        ended.seconds = time.monotonic() - start
    return ended


class _Server:
    """A fork server; `control` is the socket to it. It is `lost` when one of its programs does not end."""

    lost = False

    def __init__(self, python: str | None) -> None:
        _free_slots()
        self.slot = take_slot()
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        trainer = os.pidfd_open(os.getpid())
        try:
            with server_end, sealed_file(b"") as nothing:
                # Its streams are of the same kinds as a program's, since Python inspects them at its start.
                self.process = subprocess.Popen(
                    commands.server_command(python, self.slot and self.slot[0], server_end.fileno(), trainer),
                    env=commands.environment(python),
                    cwd="/",
                    stdin=nothing,
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                    pass_fds=[server_end.fileno(), trainer],
                )
        except BaseException:
            os.close(read)
            self.control.close()
            give_slot(self.slot)
            raise
        finally:
            os.close(write)
            os.close(trainer)
        _live.add(self)
        with open(read, "rb") as errors:
            try:
                answer, _ = self.answer(_START_SECONDS)
                if answer != b"ready":
                    raise OSError(answer.decode("utf-8", "replace"))
            except BaseException as failure:
                self.process.kill()
                self.close()
                if not isinstance(failure, OSError):
                    raise
                written = errors.read(_MESSAGE).decode("utf-8", "replace").strip()
                raise OSError(f"{failure} {written[-200:]}".strip()) from None

    def fork(self, fds: Sequence[int], ended: Ended) -> int:
        """Fork a process for a program and return its descriptor."""
        socket.send_fds(self.control, [b"fork"], fds)
        while True:
            answer, process = self.answer(_ANSWER_SECONDS)
            if process:
                return process[0]
            ended.status += answer + b"\n"  # the process itself may be the first to say something

    def answer(self, seconds: float) -> tuple[bytes, list[int]]:
        """Receive the next message and its descriptors.

        Raises:
            OSError: it ended, or says nothing in time.
        """
        with selectors.PollSelector() as heard:
            heard.register(self.control, selectors.EVENT_READ)
            if not heard.select(seconds):
                raise OSError(f"the sandbox's fork server did not answer within {seconds:g} s")
        message, fds, _, _ = socket.recv_fds(self.control, _MESSAGE, 1)
        if not message:
            raise OSError("the sandbox's fork server ended")
        return message, fds

    def close(self) -> None:
        """End the server, also when a process forked from this one holds its socket too."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        _live.discard(self)
        if not (self._ended(kill=self.lost) or self._ended(kill=True)):
            _going.append(self)

    def _ended(self, kill: bool) -> bool:
        """Wait a second for the server's end; free its slot and return True if it has ended, its programs with it."""
        if kill:
            # The innermost process: this one waits for it, and ends. An orphan would stay a zombie in a container whose first
            # process reaps nothing, and would go on counting as a process of its user.
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            with suppress(OSError):
                for pid in map(int, children.read_text().split() or [str(self.process.pid)]):
                    os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GONE_SECONDS)
            give_slot(self.slot)
            return True
        return False


class _Forked(Watched):
    """A process that a server forked."""

    def __init__(self, server: _Server, process: int, outputs: Sequence[int], job: Job, ended: Ended) -> None:
        self.server = server
        self.process = process
        self.code: int | None = None
        info = Path(f"/proc/self/fdinfo/{process}").read_text()
        pid = int(next(line for line in info.splitlines() if line.startswith("Pid:")).split()[1])
        super().__init__(pid, outputs, [server.control.fileno()], job, ended)
        self.owned.append(process)

    def hear(self, fd: int, seconds: float = _ANSWER_SECONDS) -> bool:
        answer, _ = self.server.answer(seconds)
        if not answer.startswith(b"ended "):
            self.ended.status += answer + b"\n"
            return False
        self.code = int(answer.split()[1])
        return True

    def finish(self) -> int | None:
        if self.code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process, signal.SIGKILL)
            end = time.monotonic() + _GONE_SECONDS
            try:
                while not self.hear(self.process, max(0.0, end - time.monotonic())):
                    pass
            except OSError:
                self.server.lost = True
                if not self.ended.stopped:
                    raise
                # The verdict stays: how long a program takes to go away is in its own hands.
        return self.code


def _free_slots() -> None:
    """Free the slots of killed servers that have ended by now."""
    with _lock:
        for server in [each for each in _going if each.process.poll() is not None]:
            _going.remove(server)
            give_slot(server.slot)


@contextmanager
def _server(python: str | None) -> Iterator[_Server]:
    """Lend a server to one caller at a time; one that fails is not used again."""
    while True:
        with _lock:
            waiting = _idle.get(python)
            server = waiting.pop() if waiting else None
        if server is None:
            server = _Server(python)
        if server.process.poll() is None:
            break
        server.close()
    try:
        yield server
    except BaseException:
        server.close()
        raise
    over = server if server.lost else None
    with _lock:
        if over is None:
            _idle.setdefault(python, []).append(server)
            if sum(map(len, _idle.values())) > _MOST_IDLE:
                over = max(_idle.values(), key=len).pop(0)
    if over is not None:
        over.close()


def idle_processes() -> list[int]:
    """Return the process ids of the servers that wait for a program."""
    with _lock:
        return [server.process.pid for servers in _idle.values() for server in servers]


@atexit.register
def close_idle() -> None:
    """End the servers that wait for a program."""
    with _lock:
        servers = [server for servers in _idle.values() for server in servers]
        _idle.clear()
    for server in servers:
        server.close()


def _forget() -> None:
    """Drop the servers in a forked child: they are its parent's."""
    global _lock
    _lock = threading.Lock()
    for server in _live:
        server.control.close()  # a copy: while one is open, the server does not see its parent's close
    _going.clear()
    _live.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
