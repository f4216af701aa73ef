"""Restrict this process and replace it by the program, or fork a restricted process for each requested program.

Runs on its own (`python3 -I -S -c SOURCE CONFIG`), under a user id that may not even read this file: nothing but the
standard library, and of that as little as possible.

With Landlock it becomes one program, and reports on the status pipe: `ready` right before the program starts, or a line
that begins with `failed`. With namespaces it is a fork server, see `serve`, and reports on a socket.
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
_ARM = os.uname().machine == "aarch64"
_PIVOT_ROOT, _CAPSET, _MOUNT_SETATTR = (41, 91, 442) if _ARM else (155, 126, 442)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIDFD_OPEN, _OPEN_TREE, _MOVE_MOUNT = 434, 428, 429
_CLONED, _EMPTY_PATH = 1 | 0x8000 | 0x80000, 4  # OPEN_TREE_CLONE | AT_RECURSIVE | O_CLOEXEC; MOVE_MOUNT_F_EMPTY_PATH
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 24, 38, 22
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 4, 0x8000, -100
_NEW_USER, _NEW_PIDS = 0x10000000, 0x20000000
_NEW_MOUNTS_AND_MORE = (
    0x20000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
)  # NEWNS, NEWNET, NEWIPC, NEWUTS, NEWCGROUP
_MNT_DETACH = 2
_SIGKILL = 9
_POLLIN, _POLLRDHUP = 1, 0x2000
# Rights of Landlock ABI 3: execute 1, write 2, read file 4, read directory 8, then making, removing, moving, truncating.
_ALL_RIGHTS = (1 << 15) - 1
_READ_AND_RUN, _READ, _READ_WRITE_FILE = 1 | 4 | 8, 4 | 8, 2 | 4
_FILES = 1 << 14  # in /tmp: millions would take long to clear away after the program
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


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2); an empty text is passed as NULL. Raises `OSError`."""
    texts = [text.encode() or None for text in (source, target, kind, options)]
    result = _LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    call(f"mount {kind or source} on {target}", result)


def read_only(path: str, recursive: bool = True) -> None:
    """Make a mount read-only, without set-user-ID and devices, by default with all mounts below it. Raises `OSError`."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, 32)


def enter_namespaces() -> int:
    """Continue in the first process of new namespaces; the calling process waits for it and ends.

    Returns:
        A descriptor of the new process namespace.
    """
    uid, gid = os.getuid(), os.getgid()
    call("unshare", _LIBC.unshare(_NEW_USER | _NEW_PIDS | _NEW_MOUNTS_AND_MORE))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        os.closerange(0, 1 << 16)
        os.waitpid(child, 0)
        os._exit(0)
    os.setsid()  # out of the group of the process that waits: a group is signalled across namespaces
    prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)
    return os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


def build_root(config: dict[str, Any]) -> None:
    """Make a new read-only root: system directories, and mount points for a program's box and its /tmp."""
    root = "/proc"  # any directory that exists everywhere; the new root is mounted over it
    mount("", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in ("/tmp", "/box", "/old"):
        os.mkdir(root + path)
    for link, target in config["links"]:
        os.symlink(target, root + link)
    for path in config["binds"]:
        _bind(path, root + path)
    for device in ("/dev/null", "/dev/urandom"):
        _bind(device, root + device, locked=False)
    syscall("pivot_root", _PIVOT_ROOT, root.encode(), (root + "/old").encode())
    os.chdir("/")
    call("umount", _LIBC.umount2(b"/old", _MNT_DETACH))
    os.rmdir("/old")
    read_only("/", recursive=False)


def _bind(source: str, target: str, locked: bool = True) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    mount(source, target, "", _MS_BIND | _MS_REC)
    if locked:
        read_only(target)


def drop_capabilities() -> None:
    """Drop every capability of this process, and those that it could gain."""
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last one that this kernel knows
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall("capset", _CAPSET, header, (ctypes.c_uint32 * 6)())


def restrict_files(config: dict[str, Any]) -> None:
    """Restrict files by Landlock: read and run system directories, read the box, write nothing but /dev/null."""
    abi = syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    if abi < 3:
        raise OSError(f"Landlock ABI {abi}, 3 is needed (Linux 6.2)")
    net = 3 if abi >= 4 else 0  # bind and connect TCP
    scope = 3 if abi >= 6 else 0  # abstract sockets, signals
    device = 1 << 15 if abi >= 5 else 0  # ioctl on devices
    attributes = (ctypes.c_uint64 * 3)(_ALL_RIGHTS | device, net, scope)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = syscall("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, size, 0)
    allowed = [(path, _READ_AND_RUN) for path in config["binds"]] + [(config["box"], _READ)]
    allowed += [("/dev/null", _READ_WRITE_FILE), ("/dev/urandom", _READ)]
    for path, rights in allowed:
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

    A program is asked for by a message with four descriptors: its stdin, stdout, stderr, and a file with the request, its
    source and its files. The answers: `pid` with a descriptor of the process, `ready` from that process when it is locked up
    or `failed` and why it could not be, and `ended` with its exit code. Nothing of a program is ever read by the process that
    forks: the next one would inherit it. Only one runs at a time, in process, mount, network, IPC, UTS and control-group
    namespaces of its own, and without a capability in the user namespace that they share.
    """
    import gc
    import select
    import socket

    control, trainer = socket.socket(fileno=config["control_fd"]), config["trainer_fd"]
    try:
        for name in _PRELOADED:
            __import__(name)
        own_pids = enter_namespaces()
        build_root(config)
    except BaseException as failure:
        _report(control, failure)
        os._exit(125)
    control.send(b"ready")
    code = bytes.fromhex(config["seccomp"])
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
        call("setns", _LIBC.setns(own_pids, _NEW_PIDS))  # from where new ones can be made again
        call("unshare", _LIBC.unshare(_NEW_PIDS))
        child = os.fork()
        if not child:
            try:
                return lock_up(config["binds"], fds, control, code)
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
        _, status = os.waitpid(child, 0)
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        control.send(b"ended %d" % ended)


def lock_up(binds: list[str], fds: list[int], control: socket.socket, filter_code: bytes) -> bytes:
    """Restrict this process, just forked, for a program and return the program's source."""
    with open(fds[3], "rb") as content:
        job = eval(content.readline())
        source = content.read(job["size"])
        files = [(name, content.read(size)) for name, size in job["files"]]
    call("unshare", _LIBC.unshare(_NEW_MOUNTS_AND_MORE))
    os.setsid()
    mount("tmpfs", "/box", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    inside = [path for path in binds if path[:5] == "/tmp/"]
    below = {path: syscall(path, _OPEN_TREE, _AT_FDCWD, path.encode(), _CLONED) for path in inside}
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={job['disk_mb']}m,nr_inodes={_FILES},mode=700")
    for path, tree in below.items():  # of an interpreter that lies there; one may lie inside another
        os.makedirs(path, exist_ok=True)
        syscall(path, _MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _EMPTY_PATH)
    os.chdir("/tmp")
    for path, text in (("/box/main.py", source), *((f"/tmp/{name}", text) for name, text in files)):
        with open(path, "wb") as file:
            file.write(text)
    del files
    read_only("/box", recursive=False)
    drop_capabilities()
    for kind, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind.upper()}"), (limit, limit))
    prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    filter_calls(filter_code)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    control.send(b"ready")
    control.detach()
    os.closerange(3, 1 << 16)
    return source


def _report(control: socket.socket, failure: BaseException) -> None:
    control.send(f"failed {type(failure).__name__}: {failure}".encode("utf-8", "replace")[:500])


def restrict_process(config: dict[str, Any]) -> None:
    """Restrict this process by Landlock and a filter of system calls, then replace it by the program."""
    status = config["status_fd"]
    try:
        prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)
        os.chdir(config["box"])
        prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
        restrict_files(config)
        filter_calls(bytes.fromhex(config["seccomp"]))
        os.set_inheritable(status, False)
        os.write(status, b"ready\n")
        os.execve(config["argv"][0], config["argv"], {})
    except BaseException as failure:
        os.write(status, f"failed {type(failure).__name__}: {failure}\n".encode("utf-8", "replace")[:500])
        os._exit(125)


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
    path, fflush = "/box/main.py", _LIBC.fflush
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
    config = eval(sys.argv[1])  # a repr that the library wrote; importing json would double the time
    if not config["namespaces"]:
        restrict_process(config)
    run(serve(config))
