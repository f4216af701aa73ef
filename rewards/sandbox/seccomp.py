"""A filter of system calls as a classic BPF program, for prctl.

Denied calls return EPERM instead of killing the program, so that it sees an ordinary failure. Numbers come from the kernel's
tables for x86-64 and 64-bit ARM; there is no filter for other machines.
"""

import errno
import platform
import struct
from typing import NamedTuple


class _Machine(NamedTuple):
    """The AUDIT_ARCH constant of a machine, and its column in the tables."""

    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_CLONE_THREAD = 0x00010000
_ACCESS_AND_TRUNCATE, _TRUNCATE = 0o1003, 0o1000  # O_ACCMODE | O_TRUNC, and O_RDONLY | O_TRUNC
_SOCKET_TYPE, _STREAM = 0xF, 1
_ALL_BITS = 0xFFFFFFFF

_CLONE, _PRLIMIT, _PRCTL, _OPEN, _OPENAT = (56, 220), (302, 261), (157, 167), (2, -1), (257, 56)
_SOCKETPAIR = (53, 199)
_FCNTL, _IOCTL = (72, 25), (16, 29)
# F_SETOWN, F_SETSIG, F_SETOWN_EX and FIOSETOWN, SIOCSPGRP: they could make a pipe send any signal to any process.
_SETTING_OWNERS = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902)}

# A filter cannot read their arguments; the C library falls back to the older call.
_NOT_IMPLEMENTED = {"clone3": (435, 435), "openat2": (437, 437)}

# name: (x86-64, arm64), -1 if the machine has no such call. They access other processes' memory, mounts, namespaces, kernel
# interfaces, and memory that RLIMIT_AS does not count; then new processes, signals and settings of other processes of the same
# user, and changes of files that Landlock does not restrict (sizes before Linux 6.2, modes, owners, times, attributes, watches).
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "truncate": (76, 45),
    "fork": (57, -1),
    "vfork": (58, -1),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    # System V objects and message queues of the machine, which can be used without being opened.
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "inotify_add_watch": (254, 27),
}

# BPF opcodes on constants
_LOAD, _AND, _JUMP_EQUAL, _JUMP_ATLEAST, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32  # offsets in struct seccomp_data; the low halves of arguments
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter as an array of `struct sock_filter`, or None for a machine with unknown call numbers.

    A program may start threads but no processes, send no signals, open no sockets and change no file's size, mode or owner.
    """
    arch = _MACHINES.get(machine or platform.machine())
    if arch is None:
        return None
    code = [_op(_LOAD, _ARCH), _op(_JUMP_EQUAL, arch.audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NR)]
    if arch.column == 0:
        code += [_op(_JUMP_ATLEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL)]
    for table, error in ((_DENIED, errno.EPERM), (_NOT_IMPLEMENTED, errno.ENOSYS)):
        for numbers in table.values():
            if (number := numbers[arch.column]) >= 0:
                code += [_op(_JUMP_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | error)]
    conditions = [
        (_CLONE, _ARG0, _ALL_BITS, _JUMP_SET, _NEW_NAMESPACES, True),
        (_CLONE, _ARG0, _ALL_BITS, _JUMP_SET, _CLONE_THREAD, False),
        (_PRLIMIT, _ARG0, _ALL_BITS, _JUMP_EQUAL, 0, False),  # pid 0: only itself
        (_PRCTL, _ARG0, _ALL_BITS, _JUMP_EQUAL, 1, True),  # PR_SET_PDEATHSIG, which ends the program with its server
        (_OPEN, _ARG1, _ACCESS_AND_TRUNCATE, _JUMP_EQUAL, _TRUNCATE, True),
        (_OPENAT, _ARG2, _ACCESS_AND_TRUNCATE, _JUMP_EQUAL, _TRUNCATE, True),
        (_SOCKETPAIR, _ARG1, _SOCKET_TYPE, _JUMP_EQUAL, _STREAM, False),  # a datagram may go to any other socket
    ]
    for numbers, commands in _SETTING_OWNERS.items():
        conditions += [(numbers, _ARG1, _ALL_BITS, _JUMP_EQUAL, command, True) for command in commands]
    for numbers, argument, mask, test, constant, denied_if in conditions:
        if (number := numbers[arch.column]) >= 0:
            code += [
                _op(_JUMP_EQUAL, number, 0, 5),
                _op(_LOAD, argument),
                _op(_AND, mask),
                _op(test, constant, *((0, 1) if denied_if else (1, 0))),
                _op(_RETURN, _ERRNO | errno.EPERM),
                _op(_LOAD, _NR),
            ]
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)
