"""The command line of a fork server: its interpreter, and the files that programs may read."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rewards.sandbox.records import Job, SandboxError
from rewards.sandbox.seccomp import filter_program

_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache")
_OPEN_FILES = 64
_THREADS = 16


@functools.cache
def python() -> str:
    """Return the interpreter for generated programs: the system's, else the base interpreter of this process."""
    for candidate in _PYTHONS:
        if os.access(candidate, os.X_OK):
            return candidate
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


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


def resource_limits(job: Job, uid: int | None) -> dict[str, int]:
    """Return the limits of a program's process, by their names in the module `resource`.

    The number of threads is limited only for a slot's own user: for anyone else it would count all that the user runs
    outside too.
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

    It runs in the interpreter at `path` and as the user `uid`, until the process of the descriptor `trainer_fd` ends.

    Raises:
        OSError: `isolated`, on a machine whose system calls are not known.
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
