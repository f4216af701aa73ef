"""Fork a restricted process for each requested program: the script of a fork server, see `serve`.

Runs on its own (`python3 -I -S -c SOURCE CONFIG`): nothing but the standard library, and of that as little as possible.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds in front of every program
if TYPE_CHECKING:
    import socket
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
    known = (1 << (12 + min(abi, 3))) - 1  # all rights of this kernel: links across folders since 2, truncation since 3
    net = 3 if abi >= 4 else 0  # bind and connect TCP
    scope = 3 if abi >= 6 else 0  # abstract sockets, signals
    device = 1 << 15 if abi >= 5 else 0  # ioctl on devices
    attributes = (ctypes.c_uint64 * 3)(known | device, net, scope)
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
    """Fork a restricted process for each program and return its source in that process, to be run.

    Ends when the other end of the socket is shut, and with the process that started it, whose forked children may hold that end
    too.

    A program is asked for by a message with four descriptors: its stdin, stdout, stderr, and a file with its limits and its
    source. The answers: `pid` with a descriptor of the process, `ready` from that process when it is locked up or `failed` and
    why it could not be, and `ended` with its exit code. Nothing of a program is ever read by the process that forks: the next
    one would inherit it. Only one runs at a time.
    """
    import contextlib
    import gc
    import select
    import socket

    control, trainer = socket.socket(fileno=config["control_fd"]), config["trainer_fd"]
    code = bytes.fromhex(config["seccomp"])
    try:
        if (uid := config["uid"]) is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
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
        with contextlib.suppress(OSError):
            os.killpg(child, _SIGKILL)  # what it left, without isolation; not yet reaped, so that the number is its own
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
    """Run a program as `__main__` and end this process.

    It ends as the interpreter does, but without taking apart the modules that were there before: they lie in memory that is
    shared with the server, and each page that is written to would be copied, which costs as much as all the rest of a short
    program. Ends that are out of the ordinary (a text as exit code, a stream that cannot be flushed) are left to the
    interpreter. A source with a NUL byte is an error, as from Python 3.12 on; before, the interpreter drops the rest of a file's
    line there.
    """
    import atexit
    import gc
    import io

    def flush() -> None:  # whoever holds them, such as a module that is not taken apart
        for stream in [*streams, *(each for each in gc.get_objects() if issubclass(type(each), files))]:
            stream.flush()

    files = io.TextIOWrapper, io.BufferedWriter
    path, before, code = "/main.py", set(sys.modules) - {"__main__"}, 0
    program = sys.modules["__main__"] = type(sys)("__main__")
    program.__dict__.update(__file__=path, __cached__=None, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.argv = [path]
    # The frames of this function and of the module that calls it; the call of exec counted until Python 3.12.
    sys.setrecursionlimit(sys.getrecursionlimit() + 2 + (sys.version_info < (3, 12)))
    try:
        exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)
    except SystemExit as end:
        if end.code is not None and (type(end.code) is not int or abs(end.code) > 0xFF):
            raise
        code = (end.code or 0) & 0xFF
    except Exception as failure:
        code, trace = 1, failure.__traceback__
        failure.__traceback__ = trace and trace.tb_next  # without the frame of this function
        sys.excepthook(type(failure), failure, failure.__traceback__)
        del trace
    try:
        del program
        streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        flush()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        for name in {*sys.modules} - before:
            del sys.modules[name]
        gc.collect()  # a program's objects end while its globals still stand
        flush()
        os._exit(code)
    except BaseException:
        sys.exit(code)


if __name__ == "__main__":
    run(serve(eval(sys.argv[1])))  # a repr that the library wrote; importing json would double the time
