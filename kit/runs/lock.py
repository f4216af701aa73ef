"""File locks (flock(2)), which the kernel releases when their holder dies, for whatever reason.

One lock file stands for one physical GPU of this machine, for this user. A lock is held by open files: the supervisor's,
and the training process's, which inherits it, so that a GPU stays taken when the supervisor alone has died.
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


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """A mutex between processes, one per folder. On a file system without locks it excludes nobody."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield  # whoever wants to write there hears of it from the writing
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(handle)
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """A handle on `path`, locked; None while another holds it. Closing it (all copies of it) gives the lock back.

    Raises `OSError` where the file cannot be opened or the file system has no locks.
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
    """The GPUs that a run started in this environment may use, as CUDA_VISIBLE_DEVICES names them; torch is not imported.

    None without an NVIDIA device, or where all are hidden. Without a choice it is the first, as the trainer is shown.
    """
    environment = os.environ if environment is None else environment
    numbered = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if not numbered and not (devices / "dxg").exists():  # dxg: the GPU below Windows' Linux
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        if name in ("", "-1"):
            break  # CUDA, too, looks no further than the first that is invalid
        alone = len(numbered) == 1 and name.startswith("GPU-")  # the only GPU by its UUID: one lock for both names
        chosen.append("0" if alone else name)
    return sorted(set(chosen))


class GpuLock:
    """Locks all of `names` or none. `handles`: the open files while it is held, which the training process inherits."""

    def __init__(self, names: list[str], folder: Path | None = None) -> None:
        self.names, self.folder = names, folder or (cache_folder() / "locks" if names else Path())
        self.handles: list[int] = []

    def take(self, holder: Mapping[str, Any]) -> str | None:
        """Takes the lock and returns None, or says who has it: `GPU 0, which run 'a' (process 12) uses`.

        `holder` is what others are told: run, pid. Where nothing can be locked the lock counts as taken.
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
                who = "another run"
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                    known = json.loads(path.read_text(encoding="utf-8"))
                    what = f"run '{known['run']}'" if "run" in known else known["what"]
                    who = f"{what} (process {known['pid']})"
                return f"GPU {name}, which {who} uses"
            self.handles.append(handle)
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(dict(holder)).encode(), 0)
        return None

    def release(self) -> None:
        """Releases the lock, also for processes that have inherited it."""
        while self.handles:
            handle = self.handles.pop()
            _unlock(handle)
            os.close(handle)


@contextlib.contextmanager
def held_gpu(what: str) -> Iterator[None]:
    """Holds this process's GPUs while `what` (e.g. "an evaluation") uses them. Raises `RunError` where another has one.

    What shared a card with a run unasked could push it out of memory, and so change the run for good.
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
    """Names the holder of a GPU that this process would use; None: nobody holds one."""
    lock = GpuLock(gpus())
    holder = lock.take({"what": "a look at who has it", "pid": os.getpid()})
    lock.release()
    return holder


def cache_folder() -> Path:
    """`$GRPO_KIT_CACHE`, else `$XDG_CACHE_HOME/grpo-kit`, else `~/.cache/grpo-kit`: GPUs' locks, and what Unsloth compiles.

    For a user without a home it is `grpo-kit-UID` in the folder for temporary files.
    """
    if folder := os.environ.get("GRPO_KIT_CACHE"):
        return Path(folder)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry among the system's users
        return Path(tempfile.gettempdir()) / f"grpo-kit-{os.getuid()}"
    return Path(cache) / "grpo-kit"


def _unlock(handle: int) -> None:
    """Unlocks explicitly: closing is not enough while a forked process holds a copy of the file."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
