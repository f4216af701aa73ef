"""Atomic export folders: written beside their place, synced to disk, and moved there by one rename.

Whoever writes holds a lock in the unfinished folder, which the kernel gives back when the process dies, however it dies.
An unfinished folder that nobody holds is what an interrupted export left; the next one removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.runs.files import disk_errors, to_disk
from kit.runs.lock import try_lock

HOLDER = ".holder"
MARKER = ".grpo-kit-export.json"
"""A file in every export with the names of its files: only files that it lists are ever replaced."""


def check_free(target: Path, *, force: bool, keep: Path | None = None) -> None:
    """Raises `RunError` for a place that is taken, or that contains `keep` or the working directory.

    With `force` the place of an export may be taken, and no other.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target} is no folder; an export needs one of its own. Give another with --out.")
    for inside, what in ((keep, "the run itself"), (Path.cwd(), "the directory that you are in")):
        if inside is not None and inside.resolve().is_relative_to(target.resolve()):
            raise RunError(
                f"{target} is or holds {what}, and an export takes the place of the whole folder. Give one of its own with "
                f"--out, {target / 'exported'} for example."
            )
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise RunError(f"{target} exists already. Replace it with --force, or give another folder with --out.")
    check_export(target)


def check_export(folder: Path) -> None:
    """Raises `RunError` for a folder that is not empty and is no export, or holds files beside the export's."""
    if not any(folder.iterdir()):
        return
    try:
        written = set(json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(
            f"{folder} is no export of grpo-kit's (there is no readable {MARKER} in it), so it is not replaced. Give another "
            "folder with --out, or remove this one yourself."
        ) from None
    if other := sorted(set(_names(folder)) - written - {MARKER, ".DS_Store"}):
        raise RunError(
            f"{folder} holds {len(other)} files that the export did not write ({other[0]}, for example), so it is not replaced. "
            "Move them away, or give another folder with --out."
        )


def _names(folder: Path) -> list[str]:
    """Everything but folders, by path."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, removed at the end unless it was moved away.

    Removes what an interrupted export left there. Raises `RunError` while another export to `target` is running.
    """
    place, old = _beside(target)
    with disk_errors(target):
        place.mkdir(parents=True, exist_ok=True)
        handle = try_lock(place / HOLDER)
    if handle is None:
        raise RunError(f"{target} is being written by another process. Wait for it, or give another folder with --out.")
    try:
        for path in place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != HOLDER:
                path.unlink()
        if old.is_dir() and not target.exists():  # the process died between two renames
            old.rename(target)
        yield place
    finally:
        os.close(handle)
        shutil.rmtree(place, ignore_errors=True)


def _beside(target: Path) -> tuple[Path, Path]:
    """The hidden folders in which an export is written, and in which an earlier one waits to be removed."""
    return target.with_name(f".{target.name}.grpo-kit-partial"), target.with_name(f".{target.name}.grpo-kit-old")


def publish(place: Path, target: Path) -> None:
    """Moves a written folder to its place, replacing an old export. Raises `RunError` for what is no export, and disk errors."""
    with disk_errors(target):
        if target.exists():  # however long the writing took
            check_export(target)
        (place / HOLDER).unlink(missing_ok=True)
        (place / MARKER).write_text(json.dumps({"files": _names(place)}, indent=2) + "\n", encoding="utf-8")
        for path in sorted(place.rglob("*"), reverse=True):  # files before the folders that they lie in
            to_disk(path)
        to_disk(place)
        _, old = _beside(target)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        place.rename(target)
        to_disk(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def listing(folder: Path) -> list[dict[str, Any]]:
    """Name, size in bytes and sha256 of every file, by name."""
    return [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
