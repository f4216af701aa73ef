"""Atomic export folders: written next to the target, synced to disk, and moved to the target by one rename.

The writing process holds a lock in the unfinished folder. The kernel releases the lock when the process dies. The next export
removes an unfinished folder that nobody locks.
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
"""A file in every export that lists the export's files. Only listed files are ever replaced."""


def check_free(target: Path, *, force: bool, keep: Path | None = None) -> None:
    """Raise `RunError` if the target exists, or contains `keep` or the working directory.

    With `force`, a target that is an export may exist.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target} is no folder; an export needs its own folder. Choose another with --out.")
    for inside, name in ((keep, "the run"), (Path.cwd(), "the working directory")):
        if inside is not None and inside.resolve().is_relative_to(target.resolve()):
            raise RunError(
                f"{target} is or contains {name}, and an export replaces the complete folder. Choose another folder with "
                f"--out, for example {target / 'exported'}."
            )
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise RunError(f"{target} exists already. Replace it with --force, or choose another folder with --out.")
    check_export(target)


def check_export(folder: Path) -> None:
    """Raise `RunError` for a folder that is not empty and no export, or that has files of others."""
    if not any(folder.iterdir()):
        return
    try:
        written = set(json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(
            f"{folder} is no export of grpo-kit (it has no readable {MARKER}), so it is not replaced. Choose another "
            "folder with --out, or remove this one yourself."
        ) from None
    if others := sorted(set(_names(folder)) - written - {MARKER, ".DS_Store"}):
        raise RunError(
            f"{folder} has {len(others)} files that the export did not write, for example {others[0]}, so it is not replaced. "
            "Move them away, or choose another folder with --out."
        )


def _names(folder: Path) -> list[str]:
    """Relative paths of everything except folders, sorted."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target` and remove it at the end unless `publish` moved it.

    Removes the files of an interrupted export. Raises `RunError` while another process exports to `target`.
    """
    folder, old = _siblings(target)
    with disk_errors(target):
        folder.mkdir(parents=True, exist_ok=True)
        handle = try_lock(folder / HOLDER)
    if handle is None:
        raise RunError(f"Another process is writing {target}. Wait for it, or choose another folder with --out.")
    try:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != HOLDER:
                path.unlink()
        if old.is_dir() and not target.exists():  # the process died between two renames
            old.rename(target)
        yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _siblings(target: Path) -> tuple[Path, Path]:
    """Two hidden folders: the one in which an export is written, and the one of a previous export before its removal."""
    return target.with_name(f".{target.name}.grpo-kit-partial"), target.with_name(f".{target.name}.grpo-kit-old")


def publish(folder: Path, target: Path) -> None:
    """Move a written folder to `target`, replacing an old export. Raises `RunError` for other folders and disk errors."""
    with disk_errors(target):
        if target.exists():  # it may have changed during the export
            check_export(target)
        (folder / HOLDER).unlink(missing_ok=True)
        (folder / MARKER).write_text(json.dumps({"files": _names(folder)}, indent=2) + "\n", encoding="utf-8")
        for path in sorted(folder.rglob("*"), reverse=True):  # files before their folders
            to_disk(path)
        to_disk(folder)
        _, old = _siblings(target)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        folder.rename(target)
        to_disk(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def listing(folder: Path) -> list[dict[str, Any]]:
    """Name, size in bytes and sha256 of every file, sorted by name."""
    return [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
