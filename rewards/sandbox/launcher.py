"""Locks its own process up and becomes the program: for machines without bwrap.

Runs on its own (`python3 -I -S -c SOURCE CONFIG`), under a user id that may not even read this file: nothing but the
standard library, and of that as little as possible. Reports on the status pipe: `{"child-pid": n}`, then `ready` right
before the program starts, or a line that begins with `failed`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds in front of every program
if TYPE_CHECKING:
    from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_ARM = os.uname().machine == "aarch64"
_PIVOT_ROOT, _CAPSET, _MOUNT_SETATTR = (41, 91, 442) if _ARM else (155, 126, 442)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 24, 38, 22
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 4, 0x8000, -100
# CLONE_NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
_NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
_MNT_DETACH = 2
_SIGKILL = 9
# Rights of Landlock ABI 3: execute 1, write 2, read file 4, read directory 8, then making, removing, moving, truncating.
_ALL_RIGHTS = (1 << 15) - 1
_READ_AND_RUN, _READ, _READ_WRITE_FILE = 1 | 4 | 8, 4 | 8, 2 | 4


def call(name: str, result: int) -> int:
    """The result of a system call, or OSError when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *args: Any) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return call(name, _LIBC.syscall(ctypes.c_long(number), *wide))


def prctl(name: str, option: int, *args: Any) -> None:
    wide = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*args, 0, 0, 0, 0)[:4]]
    call(name, _LIBC.prctl(option, *wide))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind, options)]
    result = _LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    call(f"mount {kind or source} on {target}", result)


def read_only(path: str, recursive: bool = True) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, 32)


def enter_namespaces(status: int) -> None:
    """Goes on in the first process of new namespaces; this one waits for it and ends as it does."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", _LIBC.unshare(_NEW_NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)  # again: new credentials have cleared it
    child = os.fork()
    if child:
        os.write(status, b'{"child-pid": %d}\n' % child)
        os.close(status)
        _, ended = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(ended)
        os._exit(code if code >= 0 else 128 - code)
    os.setsid()  # out of the group of the process that waits: a group is signalled across namespaces
    prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)


def build_root(config: dict[str, Any]) -> None:
    """A root of its own: system directories, the program in /box and a sized /tmp, all but the last read-only."""
    root = "/proc"  # any directory that exists everywhere; the new root is mounted over it
    mount("", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir(root + "/tmp")
    mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={config['disk_mb']}m,mode=700")
    for link, target in config["links"]:
        os.symlink(target, root + link)
    for path in config["binds"]:
        _bind(path, root + path)
    _bind(config["box"], root + "/box")
    for device in ("/dev/null", "/dev/urandom"):
        _bind(device, root + device, locked=False)
    os.mkdir(root + "/old")
    syscall("pivot_root", _PIVOT_ROOT, root.encode(), (root + "/old").encode())
    os.chdir("/")
    call("umount", _LIBC.umount2(b"/old", _MNT_DETACH))
    os.rmdir("/old")
    read_only("/", recursive=False)
    os.chdir("/tmp")
    for name in config["files"]:
        with open(f"/box/{name}", "rb") as source, open(f"/tmp/{name}", "wb") as copy:
            copy.write(source.read())


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
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last one that this kernel knows
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall("capset", _CAPSET, header, (ctypes.c_uint32 * 6)())


def restrict_files(config: dict[str, Any]) -> None:
    """Landlock: read and run system directories, read the box, write nothing but /dev/null."""
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
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    prctl("seccomp", _PR_SET_SECCOMP, 2, ctypes.byref(loaded))


def main(config: dict[str, Any]) -> None:
    status = config["status_fd"]
    try:
        prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)
        if config["namespaces"]:
            enter_namespaces(status)
            build_root(config)
            drop_capabilities()
            resource.setrlimit(resource.RLIMIT_NPROC, (config["processes"],) * 2)
            prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
        else:
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


if __name__ == "__main__":
    main(eval(sys.argv[1]))  # a repr that the library wrote; importing json would double the time
