"""Fork a restricted process for each requested program: the script of a fork server, see `serve`.

The source of this module runs as a program (`python3 -I -S -c SOURCE CONFIG`) and imports few modules of the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # importing typing would delay every program by milliseconds
if TYPE_CHECKING:
    import socket
    from typing import Any

# The functions below use a copy of the builtins, because a program may change the shared ones.
globals()["__builtins__"] = dict(vars(sys.modules["builtins"]))

_LIBC = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SIGKILL = 9
_POLLIN, _POLLRDHUP = 1, 0x2000
# Rights of Landlock: execute 1, write 2, read file 4, read directory 8, then making, removing, moving, truncating.
_READ_AND_RUN, _READ, _READ_WRITE_FILE = 1 | 4 | 8, 4 | 8, 2 | 4
# The modules that programs import most, loaded once before the first fork.
_PRELOADED = ["atexit", "bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "json", "math"]
_PRELOADED += ["operator", "random", "re", "string", "typing"]


def call(name: str, result: int) -> int:
    """Return the result of a system call. Raises `OSError` if the result is negative."""
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
    """Restrict files by Landlock: reading and executing below these paths, and writing to /dev/null."""
    abi = syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    known = (1 << (12 + min(abi, 3))) - 1  # rights of this kernel: links across folders from ABI 2, truncation from 3
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
    """Install a seccomp filter, a compiled BPF program. Raises `OSError`."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    prctl("seccomp", _PR_SET_SECCOMP, 2, ctypes.byref(loaded))


def serve(config: dict[str, Any]) -> bytes:
    """Fork a restricted process for each program, and return the program's source in that process.

    The server ends when the other end of the socket is shut down, and with the process that started it, whose forked children
    may hold that end as well.

    A request is a message with four descriptors: stdin, stdout, stderr, and a file with limits and source. The replies are
    `pid` with a descriptor of the process, `ready` from that process when it is restricted, or `failed` and the reason, and
    `ended` with the exit code. The forking process never reads a program, because the next program would inherit its content.
    One program runs at a time.
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
                return restrict_process(fds, control, code)
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
            os.kill(child, _SIGKILL)  # the requester has ended or does not wait any more
        os.close(process)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(OSError):
            os.killpg(child, _SIGKILL)  # processes that it left; before the reaping, nobody else can have its id
        _, status = os.waitpid(child, 0)
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        control.send(b"ended %d" % ended)


def restrict_process(fds: list[int], control: socket.socket, filter_code: bytes) -> bytes:
    """Restrict this process after the fork, and return the program's source."""
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

    It ends like the interpreter, but does not clear the modules that were loaded before. Their memory is shared with the
    server, and writing to it would copy pages, which takes as long as the rest of a short program. Unusual ends (a text as
    exit code, a stream that cannot be flushed) are left to the interpreter. A source with a NUL byte is an error, as in Python
    3.12 and later; earlier interpreters drop the rest of the line.
    """
    import atexit
    import gc
    import io

    def flush() -> None:  # also files in modules that are not cleared
        for stream in [*streams, *(each for each in gc.get_objects() if issubclass(type(each), files))]:
            stream.flush()

    files = io.TextIOWrapper, io.BufferedWriter
    path, preloaded, code = "/main.py", set(sys.modules) - {"__main__"}, 0
    program = sys.modules["__main__"] = type(sys)("__main__")
    program.__dict__.update(__file__=path, __cached__=None, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.argv = [path]
    # The frames of this function and of the module that calls it; before Python 3.12, the call of exec counts as well.
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
        for name in {*sys.modules} - preloaded:
            del sys.modules[name]
        gc.collect()  # finalises the program's objects while its globals still exist
        flush()
        os._exit(code)
    except BaseException:
        sys.exit(code)


if __name__ == "__main__":
    run(serve(eval(sys.argv[1])))  # a repr from the library; importing json would double the time
