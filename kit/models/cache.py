"""The kit's cache of models made from other files: each is built once, in a folder named by what it is made from."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from kit.runs.lock import cache_folder, exclusive


def built_once(kind: str, stamp: str, build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, below `KIND` in the kit's cache folder; built at the first call for this `stamp`.

    The folder appears whole or not at all: an interrupted build leaves nothing that is used, and of two processes that
    ask at once the second waits for the first.
    """
    root = cache_folder() / kind
    folder = root / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        if folder.is_dir():
            return folder
        half = folder.with_name(f"{folder.name}.half")
        shutil.rmtree(half, ignore_errors=True)  # left by a process that was killed
        half.mkdir()
        try:
            build(half)
            half.rename(folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder
