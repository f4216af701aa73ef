"""Fork a restricted process for each requested program: the script of a fork server, see `serve`.

Runs on its own (`python3 -I -S -c SOURCE CONFIG`), under a user id that may not even read this file: nothing but the
standard library, and of that as little as possible.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds in front of every program
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

# A copy for the functions below: a program may change the names that it shares with them.
globals()["__builtins__"] = dict(vars(sys.modules["builtins"]))

_LIBC = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SIGKILL = 9
_POLLIN, _POLLRDHUP = 1, 0x2000
# Rights of Landlock: execute 1, write 2, read file 4, read directory 8, then making, removing, moving, truncating.
_READ_AND_RUN, _READ, _READ_WRITE_FILE = 1 | 4 | 8, 4 | 8, 2 | 4
# What programs import most: loaded once, before the first fork.
_PRELOADED = ["atexit", "bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "json", "math"]
_PRELOADED += ["operator", "random", "re", "string", "typing"]


def call(name: str, result: int) -> int:
    """Return the result of a system call. Raises `OSError` if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *args: Any) -> int:
    """Call the kernel by number and return its result. Raises `OSError` that names the call."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return call(name, _LIBC.syscall(ctypes.c_long(number), *wide))


def prctl(name: str, option: int, *args: Any) -> None:
    """Call prctl(2). Raises `OSError` that names the call."""
    wide = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*args, 0, 0, 0, 0)[:4]]
    call(name, _LIBC.prctl(option, *wide))


def restrict_files(readable: list[str]) -> None:
    """Restrict files by Landlock: read and run what is below these paths, write nothing but /dev/null."""
    abi = syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    rights = (
        1 << (12 + min(abi, 3))
    ) - 1  # all that this kernel knows: links across folders since 2, truncation since 3
    net = 3 if abi >= 4 else 0  # bind and connect TCP
    scope = 3 if abi >= 6 else 0  # abstract sockets, signals
    device = 1 << 15 if abi >= 5 else 0  # ioctl on devices
    attributes = (ctypes.c_uint64 * 3)(rights | device, net, scope)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = syscall("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, size, 0)
    allowed = [(path, _READ_AND_RUN) for path in readable]
    for path, rights in [*allowed, ("/dev/null", _READ_WRITE_FILE), ("/dev/urandom", _READ)]:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= 1 | 2 | 4
        rule = (rights).to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
        syscall(f"landlock_add_rule {path}", _LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(handle)
    syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter, given as compiled BPF. Raises `OSError`."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    prctl("seccomp", _PR_SET_SECCOMP, 2, ctypes.byref(loaded))


def serve(config: dict[str, Any]) -> bytes:
    """Forks a process for each program, which is locked up and returns the program's source, to be run as if it had just
    been started. Ends when the other end of the socket is shut, and with the process that started it, whose forked children
    may hold that end too.

    A program is asked for by a message with four descriptors: its stdin, stdout, stderr, and a file with its limits and its
    source. The answers: `pid` with a descriptor of the process, `ready` from that process when it is locked up or `failed` and
    why it could not be, and `ended` with its exit code. Nothing of a program is ever read by the process that forks: the next
    one would inherit it. Only one runs at a time.
    """
    import gc
    import select
    import socket

    control, trainer = socket.socket(fileno=config["control_fd"]), config["trainer_fd"]
    code = bytes.fromhex(config["seccomp"])
    try:
        for name in _PRELOADED:
            __import__(name)
        prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
        if code:
            restrict_files(config["readable"])
    except BaseException as failure:
        _report(control, failure)
        os._exit(125)
    control.send(b"ready")
    gc.collect()
    gc.freeze()
    requests = select.poll()
    requests.register(control, _POLLIN)
    requests.register(trainer, _POLLIN)
    while True:
        if trainer in [fd for fd, _ in requests.poll()]:
            os._exit(0)
        message, rights, _, _ = control.recvmsg(16, socket.CMSG_SPACE(4 * 4))
        if not message:
            os._exit(0)
        fds = [int.from_bytes(rights[0][2][at : at + 4], sys.byteorder) for at in range(0, 16, 4)]
        child = os.fork()
        if not child:
            try:
                return lock_up(fds, control, code)
            except BaseException as failure:
                _report(control, failure)
                os._exit(125)
        for fd in fds:
            os.close(fd)
        process = syscall("pidfd_open", _PIDFD_OPEN, child, 0)
        control.sendmsg([b"pid"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, process.to_bytes(4, sys.byteorder))])
        ends = select.poll()
        ends.register(process, _POLLIN)
        ends.register(control, _POLLRDHUP)
        ends.register(trainer, _POLLIN)
        if process not in [fd for fd, _ in ends.poll()]:
            os.kill(child, _SIGKILL)  # nobody waits for it any more
        os.close(process)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        # What it left, without isolation. It is not yet reaped, so that the number is still its own.
        _done(lambda: os.killpg(child, _SIGKILL))  # noqa: B023
        _, status = os.waitpid(child, 0)
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        control.send(b"ended %d" % ended)


def lock_up(fds: list[int], control: socket.socket, filter_code: bytes) -> bytes:
    """Restrict this process, just forked, for a program and return the program's source."""
    prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)
    os.setsid()
    with open(fds[3], "rb") as content:
        limits = eval(content.readline())
        source = content.read()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for kind, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind.upper()}"), (limit, limit))
    if filter_code:
        filter_calls(filter_code)
    control.send(b"ready")
    control.detach()
    os.closerange(3, 1 << 16)
    return source


def _report(control: socket.socket, failure: BaseException) -> None:
    control.send(f"failed {type(failure).__name__}: {failure}".encode("utf-8", "replace")[:500])


def run(source: bytes) -> None:
    """Runs a program as `__main__` and ends this process, step by step as Py_FinalizeEx does, but does not take apart the
    modules that were there before: they lie in memory that is shared with the server, and each page that is written to would
    be copied, which costs as much as all the rest of a short program. So an object that the program hangs into one of them is
    never deleted, and what its `__del__` would print is not printed. A source with a NUL byte is an error, as from Python 3.12
    on; before, the interpreter drops the rest of a file's line there.

    What the end needs is bound before the program runs, which may change any name that it can reach.
    """
    import atexit
    import gc
    import io

    modules, leave, exits, collect, objects = sys.modules, os._exit, atexit._run_exitfuncs, gc.collect, gc.get_objects
    hook, streams = sys.__excepthook__, (sys.stdout, sys.stderr)
    files = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair
    path, fflush = "/main.py", _LIBC.fflush
    before = {*modules} - {"__main__"}
    program = modules["__main__"] = type(sys)("__main__")
    program.__dict__.update(__file__=path, __cached__=None, __annotations__={}, __builtins__=modules["builtins"])
    sys.argv = [path]
    # The frames of this function and of the module that calls it; the call of exec counted until Python 3.12.
    sys.setrecursionlimit(sys.getrecursionlimit() + 2 + (sys.version_info < (3, 12)))

    def flush_files() -> None:  # whoever holds them, such as a module that is not taken apart
        for each in [*streams, *objects()]:
            if issubclass(type(each), files):
                _done(each.flush)

    code = 0
    try:
        try:
            exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)
        finally:
            _flushed("stderr"), _flushed("stdout")
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as failure:
        code = 130 if isinstance(failure, KeyboardInterrupt) else 1
        trace = failure.__traceback__
        failure.__traceback__ = trace and trace.tb_next  # without the frame of this function
        details = type(failure), failure, failure.__traceback__
        if not _done(lambda: sys.excepthook(*details)):
            _done(lambda: hook(*details))
        del details, trace
    del program
    _done(lambda: modules["threading"]._shutdown())  # waits for threads
    _done(exits)
    if [_flushed("stdout"), _flushed("stderr")] != [True, True]:
        code = code or 120
    sys.stdout, sys.stderr = streams
    _done(flush_files)
    for name in {*modules} - before:
        modules.pop(name)
    _done(collect)  # a program's objects end while its globals still stand
    _done(flush_files)
    fflush(None)
    leave(code)


def _done(step: Callable[[], object]) -> bool:
    """Take a step; return whether it raised no exception."""
    try:
        step()
    except BaseException:
        return False
    return True


def _flushed(name: str) -> bool:
    """Flush a standard stream; return False if that fails. A missing or closed stream has nothing to flush."""
    stream: Any = getattr(sys, name, None)
    closed = []
    _done(lambda: closed.append(bool(stream.closed)))
    return stream is None or closed == [True] or _done(lambda: stream.flush())


def _exit_code(value: Any) -> int:
    """Return the exit code of sys.exit(value), and print a text, as the interpreter does."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF if -(1 << 63) <= (value or 0) < 1 << 63 else 255
    _done(lambda: print(value, file=sys.stderr))
    return 1


if __name__ == "__main__":
    run(serve(eval(sys.argv[1])))  # a repr that the library wrote; importing json would double the time
