"""Command lines of the levels: user id, limits, and the files that a program may read."""

import functools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rewards.sandbox.records import Job, SandboxError
from rewards.sandbox.seccomp import filter_program

_TOOL_DIRECTORIES = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_OPEN_FILES = 64
_MIB = 1 << 20


class MissingTool(OSError):
    """A command that a level needs is not installed; the message names it."""


@functools.cache
def tool(name: str) -> str:
    """Return the absolute path of a command; PATH does not matter."""
    path = shutil.which(name, path=_TOOL_DIRECTORIES)
    if path is None:
        raise MissingTool(f"{name} is not installed (apt-get install util-linux)")
    return path


@functools.cache
def python() -> str:
    """Return the interpreter for generated programs: the system's, else the base interpreter of this process."""
    for candidate in _PYTHONS:
        if os.access(candidate, os.X_OK):
            return candidate
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def system_paths() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return directories and files that a program may read, and symbolic links (path, target) into them."""
    binds, links = ["/usr"], []
    for path in ("/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            binds.append(path)
    if os.path.exists("/etc/ld.so.cache"):
        binds.append("/etc/ld.so.cache")
    if not python().startswith("/usr/"):
        binds.append(os.path.realpath(sys.base_prefix))
    return tuple(binds), tuple(links)


class Interpreter(NamedTuple):
    """A Python chosen by the user: its path and version, and the directories that it lies in and reads."""

    path: str
    version: str
    directories: tuple[str, ...]


@functools.cache
def interpreter(path: str) -> Interpreter:
    """Ask the interpreter at `path` for its version and directories.

    Raises:
        SandboxError: it cannot be run.
    """
    ask = (
        "import platform, sys; print(platform.python_version(), sys.executable, sys.prefix, sys.base_prefix, sep='\\n')"
    )
    try:
        output = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True).stdout
        version, executable, *prefixes = output.splitlines()
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        raise SandboxError(
            f"python is {path!r}, which cannot be run: {failure}. Give the path of an interpreter."
        ) from None
    outside = [each for each in dict.fromkeys(prefixes) if not f"{os.path.realpath(each)}/".startswith("/usr/")]
    return Interpreter(executable, version, tuple(outside))


def resource_limits(job: Job) -> dict[str, int]:
    """Return the limits of each process, by their names in prlimit."""
    return {
        "cpu": math.ceil(job.seconds) + 1,
        "as": job.memory_mb * _MIB,
        "fsize": job.disk_mb * _MIB,
        "nofile": _OPEN_FILES,
        "core": 0,
        "msgqueue": 0,
    }


def _as_user(uid: int | None) -> list[str]:
    """Return the setpriv command for a slot's user id; nothing without a slot."""
    if uid is None:
        return []
    return [tool("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]


def _limited(job: Job, uid: int | None, helpers: int) -> list[str]:
    """setpriv, then prlimit.

    The number of processes is limited here only for a slot's own user: for anyone else it would count all that the user
    runs outside too. `helpers` are the sandbox's own processes.
    """
    limits = resource_limits(job)
    if uid is not None:
        limits["nproc"] = job.processes + helpers
    return [*_as_user(uid), tool("prlimit"), *(f"--{name}={value}" for name, value in limits.items())]


def environment(python: str | None) -> dict[str, str]:
    """Environment of an interpreter with packages: numerical ones would start a thread a core, whose stacks count as memory."""
    if python is None:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _interpreter(path: str | None) -> list[str]:
    if path is None:
        return [python(), "-X", "utf8", "-I", "-S"]
    single = [f"{name}={value}" for name, value in environment(path).items()]
    return [tool("env"), *single, interpreter(path).path, "-X", "utf8", "-I", "-B"]


def _binds(path: str | None) -> tuple[str, ...]:
    """Return what a program may read: the system's directories, and those of its own interpreter."""
    return system_paths()[0] + (() if path is None else interpreter(path).directories)


def server_command(path: str | None, uid: int | None, control_fd: int, trainer_fd: int) -> list[str]:
    """setpriv → python3 launcher, which forks a process for each program, in the interpreter at `path`, until the process of
    the descriptor `trainer_fd` ends."""
    config = {"binds": _binds(path), "links": system_paths()[1], "control_fd": control_fd, "trainer_fd": trainer_fd}
    return [*_as_user(uid), *_interpreter(path), "-c", _launcher_source(), repr(config | _filter(namespaces=True))]


def landlock_command(job: Job, uid: int | None, *, box: str, status_fd: int) -> list[str]:
    """setpriv → prlimit → python3 launcher → python3; `box` is a directory with main.py and the files."""
    config = {
        # Landlock looks behind symbolic links: these are already below the directories that may be read.
        "binds": [path for path in _binds(job.python) if not os.path.islink(path)],
        "box": box,
        "status_fd": status_fd,
        "argv": [*_interpreter(job.python), f"{box}/main.py"],
    }
    launcher = [python(), "-I", "-S", "-c", _launcher_source(), repr(config | _filter(namespaces=False))]
    return [*_limited(job, uid, helpers=3), *launcher]


def _filter(namespaces: bool) -> dict[str, object]:
    code = filter_program(namespaces=namespaces)
    if code is None:
        raise MissingTool(f"no filter of system calls for {os.uname().machine} (x86_64 and aarch64 are known)")
    return {"namespaces": namespaces, "seccomp": code.hex()}


def unsafe_command(job: Job, uid: int | None, *, box: str) -> list[str]:
    """prlimit → python3: limits, and nothing that keeps the program from the machine."""
    return [*_limited(job, uid, helpers=0), *_interpreter(job.python), f"{box}/main.py"]


@functools.cache
def _launcher_source() -> str:
    return Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
