"""Uploaded files: they are stored in `.uploads` below the folder of runs, with checked names and sizes.

Gradio receives a file into `.uploads/.arriving` (`GRADIO_TEMP_DIR`), and `take` moves it to its place. Only a child process
reads its contents, once a configuration names it.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.data.sources import READERS
from kit.errors import ConfigError
from kit.registry import did_you_mean

LARGEST = 100 * 1024**2
"""The most bytes of one file. Larger files must be named by path."""
MOST_BYTES = 2 * 1024**3
"""The most bytes of all files together."""
LEFTOVER_SECONDS = 3600.0
"""A file that arrived and was not taken within this time is deleted: its browser was closed."""
MULTIPART = 64 * 1024
"""Bytes of an upload request besides the file."""
_placing = threading.Lock()


def folder(root: Path) -> Path:
    """Return the folder of uploads. No run can have its name."""
    return root / ".uploads"


def arriving(root: Path) -> Path:
    """Return the folder of Gradio's unfinished uploads."""
    return folder(root) / ".arriving"


def has_room(root: Path) -> bool:
    """Whether another file fits. Old leftovers are deleted first."""
    clear(root)
    sizes = []
    for path in folder(root).rglob("*"):
        with suppress(OSError):
            sizes.append(path.lstat().st_size)
    return sum(sizes) + LARGEST <= MOST_BYTES


def kept(root: Path) -> list[str]:
    """Return the files as `data.source` names them, the latest first."""
    files = []
    with suppress(OSError):
        for path in folder(root).iterdir():
            if path.suffix.lower() in READERS and path.is_file() and not path.name.startswith("."):
                files.append((path.stat().st_mtime, str(path)))
    return [name for _, name in sorted(files, reverse=True)]


def take(root: Path, sent: Any) -> str:
    """Move an uploaded file to its place. Returns its path as `data.source` names it.

    Raises `ConfigError` for a file that did not arrive, or of a kind that cannot be read. Equal content under the same name
    is stored once.
    """
    clear(root)
    place, name = (sent.get("place"), sent.get("name")) if isinstance(sent, dict) else (None, None)
    if not isinstance(place, str) or not isinstance(name, str) or "\0" in place:
        raise ConfigError("No file has arrived. Drop it again.")
    base, path = arriving(root).resolve(), Path(place)
    if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(base) or not path.is_absolute():
        raise ConfigError("No such file has arrived. Drop it again.")
    try:
        with _placing:  # one file at a time, so that equal names and contents are noticed
            target = _place(root, safe(name), path)
    except OSError as error:
        raise ConfigError(f"{name[:80]} could not be stored in {folder(root)}: {error.strerror or error}.") from None
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
    return str(target)


def safe(name: str) -> str:
    """Return a plain file name. Raises `ConfigError` for a kind of file that cannot be read."""
    base = Path(name.replace("\\", "/")).name
    suffix = Path(base).suffix.lower()
    if suffix not in READERS:
        raise ConfigError(
            f"{base[:80]}: files of kind '{suffix[:20] or 'no suffix'}' cannot be read.{did_you_mean(suffix, READERS)} "
            f"Kinds: {', '.join(READERS)}."
        )
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(base).stem).strip("-")[:60] or "data"
    return stem + suffix


def _place(root: Path, name: str, fresh: Path) -> Path:
    """Move a file to its name, with a number added if another file has it. Returns its path."""
    path = Path(name)
    for number in range(1, 1000):
        target = folder(root) / (name if number == 1 else f"{path.stem}-{number}{path.suffix}")
        if not target.exists():
            os.replace(fresh, target)
        elif not filecmp.cmp(fresh, target, shallow=False):
            continue
        return target
    raise ConfigError(f"There are a thousand files called {name} in {folder(root)}; remove some.")


def clear(root: Path) -> None:
    """Delete files that arrived and were never taken, or whose upload was cancelled. Gradio makes a folder for each."""
    oldest = time.time() - LEFTOVER_SECONDS
    with suppress(OSError):
        for path in arriving(root).iterdir():
            with suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
