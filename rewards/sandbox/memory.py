"""What all processes of a program hold together: bounded by the kernel where it lets us, and watched in any case.

The kernel's way is a control group (version 2) with `memory.max`. It needs a group that this process may write in and whose
children have the memory controller: a systemd session's, or a container's to which its tree was delegated. Elsewhere the watcher
alone has to do, which looks some forty times a second.
"""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["ControlGroup", "memory_of_tree"]

_MOUNTS, _OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
_GONE_SECONDS = 1.0  # how long killed processes may take to leave their group
_ENTER = 'echo 0 >"$0" && exec "$@"'  # 0 is the process that writes
_numbers = itertools.count()


class ControlGroup:
    """A control group for one program, removed at the end; without effect where there can be none.

    >>> with ControlGroup(512 << 20) as group:
    ...     command = group.joined(["python3", "-c", "pass"])
    >>> command[-3:], group.overran()
    (['python3', '-c', 'pass'], False)
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.path: Path | None = None

    def __enter__(self) -> "ControlGroup":
        if (parent := group_for_children()) is not None:
            with contextlib.suppress(OSError):
                self.path = _made(parent, self.memory_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None:
            _remove(self.path)

    def joined(self, command: Sequence[str]) -> list[str]:
        """The command, which enters the group before it does anything else: a shell writes itself there, and becomes it."""
        if self.path is None:
            return list(command)
        return ["/bin/sh", "-c", _ENTER, str(self.path / "cgroup.procs"), *command]

    def add(self, pid: int) -> None:
        """Puts a process into the group, in place of `joined`."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(f"{pid}\n")

    def overran(self) -> bool:
        """Whether the kernel ended a process of the group for its memory."""
        if self.path is None:
            return False
        with contextlib.suppress(OSError):
            return re.search(r"^oom_kill [1-9]", (self.path / "memory.events").read_text(), re.MULTILINE) is not None
        return False


@functools.cache
def group_for_children() -> Path | None:
    """A group in which groups with a bound on memory can be made, tried once: this process's own, or the one above."""
    own = re.search(r"^0::(/.*)$", _read(_OWN), re.MULTILINE)
    mounted = re.search(r"^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup2 ", _read(_MOUNTS), re.MULTILINE)
    if own is None or mounted is None:
        return None
    root, top = mounted.groups()
    at = Path(top) / os.path.relpath(own[1], root)
    for parent in (at, at.parent):
        if parent.is_relative_to(top) and "memory" in _read(parent / "cgroup.subtree_control").split():
            with contextlib.suppress(OSError):
                path = _made(parent, 1 << 30)
                entered = subprocess.run(
                    ["/bin/sh", "-c", _ENTER, str(path / "cgroup.procs"), "true"], capture_output=True
                )
                _remove(path)
                if entered.returncode == 0:
                    return parent
    return None


def _made(parent: Path, memory_bytes: int) -> Path:
    """A new group with its bound, in which processes are ended together.

    Raises:
        OSError: it cannot be made, or not be bounded.
    """
    path = parent / f"rewards-sandbox-{os.getpid()}-{next(_numbers)}"
    path.mkdir()
    try:
        (path / "memory.max").write_text(f"{memory_bytes}\n")
        (path / "memory.oom.group").write_text("1\n")
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            (path / "memory.swap.max").write_text("0\n")
    except OSError:
        path.rmdir()
        raise
    return path


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1\n")
    end = time.monotonic() + _GONE_SECONDS
    while True:
        try:
            path.rmdir()
            return
        except OSError:  # a process is not quite gone yet
            if time.monotonic() > end:
                return
            time.sleep(0.005)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def memory_of_tree(root: int, limit: int) -> int:
    """Bytes in use by a process and all that descend from it; less than `limit` as soon as that is certain.

    Pages that several share by a fork are counted once where the kernel tells (Pss), which takes longer and is asked only
    when the plain sum is over the limit.
    """
    pids, found = [root], []
    while pids:
        pid = pids.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
    total = sum(_resident(pid) for pid in found)
    if total <= limit:
        return total
    # One that has just ended has neither: what it held when it was first looked at no longer counts.
    return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss:") or _resident(pid) for pid in found)


def _resident(pid: int) -> int:
    return _field(f"/proc/{pid}/status", "VmRSS:") or 0


def _field(path: str, name: str) -> int | None:
    """Bytes that a line of a file in /proc gives in kB; None where that cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return None
