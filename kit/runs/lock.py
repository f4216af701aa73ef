"""File locks (flock(2)). The kernel releases a lock when the process that holds it ends, even by SIGKILL.

Each physical GPU of this machine has one lock file per user. The supervisor locks it through an open file, which the training
process inherits: the GPU stays locked if only the supervisor dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.runs.files import read_json


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a mutex between processes, one per folder. It has no effect on a file system without locks."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield  # a write to this folder raises the error
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(handle)
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """Lock the file `path` and return its handle, or None if it is locked already. Closing all copies releases the lock.

    Raises `OSError` if the file cannot be opened or the file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def gpus(environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that a run started in this environment may use, as in CUDA_VISIBLE_DEVICES; without torch.

    [] without an NVIDIA device or if all are hidden. Without the variable only the first GPU, as in the training process.
    """
    environment = os.environ if environment is None else environment
    numbered = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if not numbered and not (devices / "dxg").exists():  # dxg: the GPU in WSL
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        if name in ("", "-1"):
            break  # CUDA, too, ignores everything after the first invalid name
        is_only_gpu = len(numbered) == 1 and name.startswith("GPU-")  # its UUID and its number share one lock
        chosen.append("0" if is_only_gpu else name)
    return sorted(set(chosen))


class GpuLock:
    """A lock on all GPUs in `names`, or on none. `handles`: the open lock files, which the training process inherits."""

    def __init__(self, names: list[str], folder: Path | None = None) -> None:
        self.names, self.folder = names, folder or (cache_folder() / "locks" if names else Path())
        self.handles: list[int] = []

    def take(self, holder: Mapping[str, Any]) -> str | None:
        """Take the lock and return None, or return its current holder: `GPU 0, which run 'a' (process 12) uses`.

        `holder` (run or what, and pid) is written to the lock file. Without locks of the file system it counts as taken.
        """
        for name in self.names:
            path = self.folder / f"gpu-{re.sub(r'[^A-Za-z0-9_-]+', '-', f'{socket.gethostname()}-{name}')}.lock"
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                handle = try_lock(path)
            except OSError:
                continue
            if handle is None:
                self.release()
                record = read_json(path)
                task = f"run '{record['run']}'" if "run" in record else record.get("what", "another run")
                process = f" (process {record['pid']})" if "pid" in record else ""
                return f"GPU {name}, which {task}{process} uses"
            self.handles.append(handle)
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(dict(holder)).encode(), 0)
        return None

    def release(self) -> None:
        """Release the lock, also for processes that inherited it."""
        while self.handles:
            handle = self.handles.pop()
            _unlock(handle)
            os.close(handle)


@contextlib.contextmanager
def held_gpu(what: str) -> Iterator[None]:
    """Lock this process's GPUs for a task `what` (e.g. "an evaluation"). Raises `RunError` if another process has one.

    A task on the GPU of a run could use up its memory and make the run fail.
    """
    lock = GpuLock(gpus())
    holder = lock.take({"what": what, "pid": os.getpid()})
    if holder is not None:
        raise RunError(
            f"There is no GPU for {what}: it would share {holder}. Wait until that has ended or stop it, or name another GPU "
            "with CUDA_VISIBLE_DEVICES (empty: the CPU)."
        )
    try:
        yield
    finally:
        lock.release()


def gpu_holder() -> str | None:
    """Name the holder of a GPU that this process would use; None if all are free."""
    lock = GpuLock(gpus())
    holder = lock.take({"what": "a look at who has it", "pid": os.getpid()})
    lock.release()
    return holder


def cache_folder() -> Path:
    """The folder of GPU locks and compiled code: `$GRPO_KIT_CACHE`, `$XDG_CACHE_HOME/grpo-kit` or `~/.cache/grpo-kit`.

    For a user without a home folder it is `grpo-kit-UID` in the folder for temporary files.
    """
    if folder := os.environ.get("GRPO_KIT_CACHE"):
        return Path(folder)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry among the system's users
        return Path(tempfile.gettempdir()) / f"grpo-kit-{os.getuid()}"
    return Path(cache) / "grpo-kit"


def _unlock(handle: int) -> None:
    """Unlock explicitly: closing the file is not enough while a forked process has a copy of the handle."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
