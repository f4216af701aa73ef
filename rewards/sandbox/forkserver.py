"""Warm interpreters that fork a restricted process for each program, see `launcher.serve`.

A fork takes a fifth of the time to start an interpreter with its imports. Programs share the hash seed and the address layout
of their server. Each server runs one program at a time, and has a separate user id if this process is root.
"""

import atexit
import fcntl
import functools
import itertools
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from rewards.errors import RewardsError
from rewards.sandbox.seccomp import filter_program

_CHUNK = 1 << 16
_START_SECONDS = 20.0  # time limit for the start of a server, which may take seconds on a busy machine
_ANSWER_SECONDS = 10.0  # time limit for a fork
_GONE_SECONDS = 1.0  # longest wait for the end of a killed program or a closed server
_MESSAGE = 4096
_MOST_IDLE = 2 * (os.cpu_count() or 1)  # servers; each uses about 10 MiB

# Debian and systemd (UIDS-GIDS) do not assign 60578-61183, and containers with mapped ids include them.
_FIRST_UID, _SLOTS = 60578, 600
# Numerical packages would start a thread per core, whose stacks count as memory.
_SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache")
_OPEN_FILES = 64
_THREADS = 16

_lock = threading.Lock()
_idle: dict[tuple[str | None, bool], list["_Server"]] = {}  # by interpreter, and whether programs are isolated
_live: set["_Server"] = set()  # idle or in use
Slot: TypeAlias = tuple[int, socket.socket]  # a user id, and the socket that claims it
_free: list[Slot] = []
_claims: list[socket.socket] = []  # of all slots of this process, free or in use


class SandboxError(RewardsError):
    """The system cannot isolate programs, or an interpreter cannot be run; the message says why."""


RunStatus: TypeAlias = Literal["ok", "failed", "timeout", "output", "infra"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run, with its limits.

    Args:
        program: Python source.
        stdin: input of the program, as text.
        seconds: limit of wall time and, rounded up, of CPU time.
        memory_mb: limit of the address space in MiB.
        output_bytes: limit of stdout and of stderr in bytes, at which the program is stopped.
        python: path of an interpreter with packages, such as that of a virtual environment, whose files the program may read;
            by default the system's Python with the standard library only.
    """

    program: str
    stdin: str = ""
    seconds: float = 5.0
    memory_mb: int = 512
    output_bytes: int = 1 << 20
    python: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Status and output of a program.

    `status`: `ok` for exit code 0; `failed` for another end, or a program that cannot start; `timeout` and `output` if it was
    stopped at that limit; `infra` if the sandbox did not start, which says nothing about the program. `stdout` and `stderr`
    are the output up to the end, with undecodable bytes replaced. `returncode` is negative for a signal, and None if the
    program was stopped. `seconds` is wall time.
    """

    status: RunStatus
    stdout: str = ""
    stderr: str = ""
    returncode: int | None = None
    seconds: float = 0.0
    reason: str = ""


_PROBE = Job(program="print(input()[::-1])", stdin="ko", seconds=10.0)


@functools.cache
def problem() -> str:
    """Run a small program and return why the system cannot isolate programs; an empty text if it can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    result = run_job(True, _PROBE)
    if result.status == "ok" and result.stdout == "ok\n":
        return ""
    return (result.reason or result.stderr.strip() or f"the trial program printed {result.stdout!r}")[-300:]


def isolates(allow_unsafe: bool = False) -> bool:
    """Return whether `run` isolates programs. Raises SandboxError if it cannot and `allow_unsafe` is not set."""
    if not (reason := problem()):
        return True
    if allow_unsafe:
        return False
    raise SandboxError(
        f"This system cannot isolate generated programs: {reason}. Run on Linux 5.13 or later with Landlock, or pass "
        "allow_unsafe=True to run them with resource limits only."
    )


def run(program: str, stdin: str = "", *, allow_unsafe: bool = False, **limits: Any) -> Result:
    """Run a Python program and wait until it ends.

    Args:
        program: Python source.
        stdin: input of the program, as text.
        allow_unsafe: run the program with resource limits only if the system cannot isolate it; it then has access to your
            files and your network.
        limits: other fields of `Job`.

    Raises:
        SandboxError: the system cannot isolate programs, and `allow_unsafe` is not set.
    """
    return run_job(isolates(allow_unsafe), Job(program=program, stdin=stdin, **limits))


def run_job(isolated: bool, job: Job) -> Result:
    """Run a job, isolated or with resource limits only. Never raises: failures become the status of the result."""
    try:
        return run_forked(job, isolated)
    except UnicodeEncodeError:
        return Result(status="failed", reason="the program is not valid Unicode text")
    except OSError as failure:
        return Result(status="infra", reason=f"{failure}"[:300])


def run_forked(job: Job, isolated: bool) -> Result:
    """Run a program in a process that a server of its interpreter forks, until it ends or reaches a limit.

    Raises:
        OSError: no server can be started, or the server ended.
        UnicodeEncodeError: the program is not valid Unicode text.
    """
    source = job.program.encode()
    with _server(job.python, isolated) as server, ExitStack() as stack:
        start = time.monotonic()  # without the time to start a server
        limits = resource_limits(job, server.slot and server.slot[0])
        # In files that the server does not read, so that the next program cannot find them in its memory.
        contents = job.stdin.encode("utf-8", "replace"), repr(limits).encode() + b"\n" + source
        stdin, request = (stack.enter_context(sealed_file(content)) for content in contents)
        (read_out, write_out), (read_err, write_err) = os.pipe(), os.pipe()
        try:
            process, status = server.fork((stdin, write_out, write_err, request))
        except BaseException:
            os.close(read_out)
            os.close(read_err)
            raise
        finally:
            os.close(write_out)
            os.close(write_err)
        program = _Program(server, process, (read_out, read_err), job, status)
        with closing(program):
            program.follow(start + job.seconds)
        return program.result(time.monotonic() - start)


@functools.cache
def python() -> str:
    """Return the path of the system's interpreter, else of the base interpreter of this process."""
    for candidate in _PYTHONS:
        if os.access(candidate, os.X_OK):
            return candidate
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class Interpreter(NamedTuple):
    """A Python interpreter that the user chose: its path, version and directories outside of /usr."""

    path: str
    version: str
    directories: tuple[str, ...]


@functools.cache
def interpreter(path: str) -> Interpreter:
    """Return the version and directories of the interpreter at `path`.

    Raises:
        SandboxError: the interpreter cannot be run.
    """
    code = (
        "import platform, sys; print(platform.python_version(), sys.executable, sys.prefix, sys.base_prefix, sep='\\n')"
    )
    try:
        output = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
        version, executable, *prefixes = output.splitlines()
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        raise SandboxError(
            f"python is {path!r}, which cannot be run: {failure}. Pass the path of an interpreter."
        ) from None
    outside = [each for each in dict.fromkeys(prefixes) if not f"{os.path.realpath(each)}/".startswith("/usr/")]
    return Interpreter(executable, version, tuple(outside))


def resource_limits(job: Job, uid: int | None) -> dict[str, int]:
    """Return the limits of a program's process, by their names in the module `resource`.

    The number of threads is limited only for the user of a slot. For other users, the limit would count their processes
    outside of the sandbox.
    """
    limits = {
        "cpu": math.ceil(job.seconds) + 1,
        "as": job.memory_mb << 20,
        "fsize": 0,
        "nofile": _OPEN_FILES,
        "core": 0,
        "msgqueue": 0,
    }
    return limits if uid is None else limits | {"nproc": _THREADS + 2}  # with the server and the program itself


def server_command(path: str | None, isolated: bool, uid: int | None, control_fd: int, trainer_fd: int) -> list[str]:
    """Return the command of the launcher, which forks a process for each program.

    It runs in the interpreter at `path` as user `uid`, until the process of the descriptor `trainer_fd` ends.

    Raises:
        OSError: `isolated` is set, and the numbers of the machine's system calls are not known.
    """
    code = filter_program() if isolated else b""
    if code is None:
        raise OSError(f"no filter of system calls for {os.uname().machine} (x86_64 and aarch64 are known)")
    readable = [each for each in _SYSTEM_PATHS if os.path.exists(each)]
    if path is not None:
        readable += interpreter(path).directories
    elif not python().startswith("/usr/"):
        readable.append(os.path.realpath(sys.base_prefix))
    config = {
        "readable": readable,
        "seccomp": code.hex(),
        "uid": uid,
        "control_fd": control_fd,
        "trainer_fd": trainer_fd,
    }
    flags = [python(), "-X", "utf8", "-I", "-S"] if path is None else [interpreter(path).path, "-X", "utf8", "-I", "-B"]
    return [*flags, "-c", _launcher_source(), repr(config)]


@functools.cache
def _launcher_source() -> str:
    return Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")


@contextmanager
def sealed_file(content: bytes) -> Iterator[int]:
    """Open an anonymous file with `content`, read-only and sealed against changes; yield its descriptor."""
    writable = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(writable, view) :]
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
    try:
        yield fd
    finally:
        os.close(fd)


def take_slot() -> Slot | None:
    """Return a free user id of this process, or a new one; None if this process is not root.

    Programs of different slots cannot signal each other, and thread limits count per slot. The name of a socket claims a slot
    across processes; the kernel frees it when the owner ends, and no file remains.

    Raises:
        OSError: all slots are taken.
    """
    if os.geteuid() != 0:
        return None
    with _lock:
        if _free:
            return _free.pop()
        for number in itertools.chain(range(os.getpid() % _SLOTS, _SLOTS), range(os.getpid() % _SLOTS)):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0rewards-sandbox-{_FIRST_UID + number}")
            except OSError:
                claim.close()
                continue
            _claims.append(claim)
            return _FIRST_UID + number, claim
    raise OSError(f"all {_SLOTS} sandbox user ids are taken; run fewer programs at the same time")


def give_slot(slot: Slot | None) -> None:
    """Free a slot for the next server, after all processes of its user id have ended."""
    if slot is not None:
        with _lock:
            _free.append(slot)


class _Server:
    """A fork server. `control` is the socket to it; `lost` says that one of its programs did not end."""

    lost = False

    def __init__(self, python: str | None, isolated: bool) -> None:
        self.slot = take_slot()
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        trainer = os.pidfd_open(os.getpid())
        try:
            with server_end, sealed_file(b"") as empty:
                # Streams of the same kinds as those of programs, because Python inspects them at its start.
                self.process = subprocess.Popen(
                    server_command(python, isolated, self.slot and self.slot[0], server_end.fileno(), trainer),
                    env={} if python is None else _SINGLE_THREADED,
                    cwd="/",
                    stdin=empty,
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
                output = errors.read(_MESSAGE).decode("utf-8", "replace").strip()
                raise OSError(f"{failure} {output[-200:]}".strip()) from None

    def fork(self, fds: Sequence[int]) -> tuple[int, list[bytes]]:
        """Fork a process for a program; return its descriptor, and the messages that arrived before."""
        socket.send_fds(self.control, [b"fork"], fds)
        status: list[bytes] = []
        while True:
            answer, process = self.answer(_ANSWER_SECONDS)
            if process:
                return process[0], status
            status.append(answer)  # a message of the process may arrive before its descriptor

    def answer(self, seconds: float) -> tuple[bytes, list[int]]:
        """Receive the next message and its descriptors.

        Raises:
            OSError: the server ended, or sends nothing within `seconds`.
        """
        with selectors.PollSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise OSError(f"the sandbox's fork server did not answer within {seconds:g} s")
        message, fds, _, _ = socket.recv_fds(self.control, _MESSAGE, 1)
        if not message:
            raise OSError("the sandbox's fork server ended")
        return message, fds

    def close(self) -> None:
        """End the server, even if a fork of this process holds its socket as well."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        _live.discard(self)
        try:
            self.process.wait(_GONE_SECONDS)
            give_slot(self.slot)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the slot is not freed, because a program of it may still run
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GONE_SECONDS)


class _Program:
    """A process that a server forked; reads its output until it ends or reaches a limit.

    Args:
        process: descriptor of the process; `close` closes it and `outputs`.
        outputs: descriptors from which to read stdout and stderr.
        status: messages about its start so far.
    """

    def __init__(self, server: _Server, process: int, outputs: tuple[int, int], job: Job, status: list[bytes]) -> None:
        self.server, self.process, self.job, self.status = server, process, job, status
        self.descriptors = [*outputs, process]
        self.output = {fd: bytearray() for fd in outputs}
        self.code: int | None = None
        self.stopped: RunStatus | None = None
        self.selector = selectors.PollSelector()
        for fd in (*outputs, server.control.fileno()):
            self.selector.register(fd, selectors.EVENT_READ)
        for fd in outputs:
            os.set_blocking(fd, False)

    def follow(self, deadline: float) -> None:
        """Read output until the program ends, reaches the deadline, or exceeds the limit of output."""
        while self.code is None and self.stopped is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.stopped = "timeout"
                return
            for key, _ in self.selector.select(left):
                if key.fd in self.output:
                    self._read(key.fd)
                else:
                    self._receive(_ANSWER_SECONDS)

    def close(self) -> None:
        """End the program if it still runs, and read the rest of its output."""
        try:
            if self.code is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.process, signal.SIGKILL)
                end = time.monotonic() + _GONE_SECONDS
                try:
                    while self.code is None:
                        self._receive(max(0.0, end - time.monotonic()))
                except OSError:
                    self.server.lost = True
                    if self.stopped is None:
                        raise
                    # The status stays, although the kernel has not removed the program yet.
            for fd in self.output:
                while self.stopped is None and self._read(fd):
                    pass
        finally:
            self.selector.close()
            for fd in self.descriptors:
                os.close(fd)

    def result(self, seconds: float) -> Result:
        """Return the result of the program, which took `seconds`."""
        stdout, stderr = (text.decode("utf-8", "replace") for text in self.output.values())
        status: RunStatus = self.stopped or "failed"
        if self.stopped == "timeout":
            reason = f"stopped after {self.job.seconds:g} s"
        elif self.stopped == "output":
            reason = f"stopped after {self.job.output_bytes} bytes of output"
        elif b"ready" not in self.status:
            failure = b" ".join(self.status).decode("utf-8", "replace").partition("failed ")[2] or stderr
            status, reason = "infra", f"the sandbox did not start: {failure.strip()[-200:] or 'no reason given'}"
        elif self.code == 0:
            status, reason = "ok", ""
        else:
            reason = f"exit code {self.code}"
        code = None if self.stopped else self.code
        return Result(status=status, stdout=stdout, stderr=stderr, returncode=code, seconds=seconds, reason=reason)

    def _receive(self, seconds: float) -> None:
        """Process the next message of the server or the process."""
        answer, _ = self.server.answer(seconds)
        if answer.startswith(b"ended "):
            self.code = int(answer.split()[1])
        else:
            self.status.append(answer)

    def _read(self, fd: int) -> bool:
        """Read output once; return whether there may be more output."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            return False
        room = self.job.output_bytes - len(self.output[fd])
        self.output[fd] += data[:room]
        if len(data) > room:
            self.stopped = "output"
        return True


@contextmanager
def _server(python: str | None, isolated: bool = True) -> Iterator[_Server]:
    """Yield a server for one caller; a server that fails is not used again."""
    while True:
        with _lock:
            waiting = _idle.get((python, isolated))
            server = waiting.pop() if waiting else None
        if server is None:
            server = _Server(python, isolated)
        if server.process.poll() is None:
            break
        server.close()
    try:
        yield server
    except BaseException:
        server.close()
        raise
    surplus = server if server.lost else None
    with _lock:
        if surplus is None:
            _idle.setdefault((python, isolated), []).append(server)
            if sum(map(len, _idle.values())) > _MOST_IDLE:
                surplus = max(_idle.values(), key=len).pop(0)
    if surplus is not None:
        surplus.close()


@atexit.register
def close_idle() -> None:
    """End the idle servers."""
    with _lock:
        servers = [server for servers in _idle.values() for server in servers]
        _idle.clear()
    for server in servers:
        server.close()


def _forget() -> None:
    """Drop the servers and slots in a forked child; they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for copy in (*_claims, *(server.control for server in _live)):
        copy.close()  # an open copy would hide from the server that the parent closed the socket
    _live.clear()
    _idle.clear()
    _free.clear()
    _claims.clear()


os.register_at_fork(after_in_child=_forget)
