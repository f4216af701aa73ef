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
from kit.runs.files import disk_errors, free_bytes, human_size, to_disk
from kit.runs.lock import try_lock

PARTIAL, OLD, HOLDER = ".partial-", ".old-", ".holder"
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


def check_space(target: Path, needed: int) -> None:
    """Raises `RunError` unless `needed` bytes are free where `target` lies."""
    free = free_bytes(target)
    if free is not None and free < needed:
        raise RunError(
            f"{human_size(needed)} are needed for this export where {target} lies, and {human_size(free)} are free. Free "
            "some space, or give a folder on another disk with --out."
        )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, removed at the end unless it was moved away. Raises `RunError`."""
    clean(target)
    place = target.with_name(f".{target.name}{PARTIAL}{os.getpid()}")
    with disk_errors(target):
        place.mkdir(parents=True)
        handle = try_lock(place / HOLDER)
    try:
        yield place
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(place, ignore_errors=True)


def clean(target: Path) -> None:
    """Removes the remains of interrupted exports to `target`. Raises `RunError` while another export to it is running."""
    for path in _left(target, PARTIAL):
        with disk_errors(path):
            handle = try_lock(path / HOLDER) if path.is_dir() else None
        if handle is None:
            raise RunError(
                f"{target} is being written by another process. Wait for it, or give another folder with --out."
            )
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)
    for path in _left(target, OLD):
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # the process died between two renames
            path.rename(target)


def _left(target: Path, kind: str) -> list[Path]:
    """Hidden folders that this module made beside `target`: their names end with a pid."""
    begin = f".{target.name}{kind}"
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    return [path for path in beside if path.name.startswith(begin) and path.name.removeprefix(begin).isdecimal()]


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
        old = target.with_name(f".{target.name}{OLD}{os.getpid()}")
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
