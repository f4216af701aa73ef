"""Files that a browser brings: into `.uploads` below the folder of runs and nowhere else, with a name and a size that are taken.

Gradio receives a file into `.uploads/.arriving` (`GRADIO_TEMP_DIR`); `take` moves it to its place. Nothing of it is read here:
that is done by a child process, as rows of any source are, once the configuration names it.
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
"""Bytes of one file, at most. Whatever is larger is named by its path, below the folder that the page was started in."""
MOST_BYTES = 2 * 1024**3
"""Bytes of all files together."""
LEFTOVER_SECONDS = 3600.0
"""What has arrived and was not taken within that time is thrown away: its browser has gone."""
MULTIPART = 64 * 1024
"""What a request has beside the file."""
_placing = threading.Lock()


def folder(root: Path) -> Path:
    """Where they are kept: no run can have that name."""
    return root / ".uploads"


def arriving(root: Path) -> Path:
    """Where Gradio puts what is under way."""
    return folder(root) / ".arriving"


def has_room(root: Path) -> bool:
    """Whether another file may come. Leftovers do not count."""
    clear(root)
    sizes = []
    for path in folder(root).rglob("*"):
        with suppress(OSError):
            sizes.append(path.lstat().st_size)
    return sum(sizes) + LARGEST <= MOST_BYTES


def kept(root: Path) -> list[str]:
    """The files as `data.source` names them, the latest first."""
    files = []
    with suppress(OSError):
        for path in folder(root).iterdir():
            if path.suffix.lower() in READERS and path.is_file() and not path.name.startswith("."):
                files.append((path.stat().st_mtime, str(path)))
    return [name for _, name in sorted(files, reverse=True)]


def take(root: Path, sent: Any) -> str:
    """Moves the file that has arrived to its place, and returns it as `data.source` names it.

    Raises `ConfigError` for what did not arrive there, or is of a kind that is not read. The same content under the same name
    is one file.
    """
    clear(root)
    place, name = (sent.get("place"), sent.get("name")) if isinstance(sent, dict) else (None, None)
    if not isinstance(place, str) or not isinstance(name, str) or "\0" in place:
        raise ConfigError("No file has arrived. Drop it again.")
    base, path = arriving(root).resolve(), Path(place)
    if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(base) or not path.is_absolute():
        raise ConfigError("No such file has arrived. Drop it again.")
    try:
        with _placing:  # else two of one name, or two of one content, could not see each other
            target = _place(root, safe(name), path)
    except OSError as error:
        raise ConfigError(f"{name[:80]} could not be kept in {folder(root)}: {error.strerror or error}.") from None
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
    return str(target)


def safe(name: str) -> str:
    """A plain file name of a kind that is read. Raises `ConfigError`."""
    base = Path(name.replace("\\", "/")).name
    suffix = Path(base).suffix.lower()
    if suffix not in READERS:
        raise ConfigError(
            f"{base[:80]}: files of kind '{suffix[:20] or 'no suffix'}' are not read.{did_you_mean(suffix, READERS)} "
            f"Kinds: {', '.join(READERS)}."
        )
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(base).stem).strip("-")[:60] or "data"
    return stem + suffix


def _place(root: Path, name: str, fresh: Path) -> Path:
    """Moved under its name, or with a number behind it where another file has that."""
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
    """Throws away what has arrived and was never taken, which Gradio keeps in a folder each, and what was cancelled."""
    before = time.time() - LEFTOVER_SECONDS
    with suppress(OSError):
        for path in arriving(root).iterdir():
            with suppress(OSError):
                if path.lstat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
