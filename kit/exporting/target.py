"""A folder that is whole or not there: written beside its place, brought to the disk, put there by one rename.

Whoever writes holds a lock in the unfinished folder, which the kernel gives back when the process dies, however it dies.
An unfinished folder that nobody holds is what an interrupted export left; the next one removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kit.errors import RunError
from kit.runs.files import disk_errors, free_bytes, human_size
from kit.runs.lock import try_lock

PARTIAL, OLD, HOLDER = ".partial-", ".old-", ".holder"


def check_free(target: Path, *, force: bool) -> None:
    """Refuses a place that is taken. Raises `RunError`."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target} is no folder; an export needs one of its own. Give another with --out.")
    if target.exists() and not force and any(target.iterdir()):
        raise RunError(f"{target} exists already. Replace it with --force, or give another folder with --out.")


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
    """Removes what interrupted exports to `target` left. Raises `RunError` while another one is under way."""
    for path in target.parent.glob(f".{target.name}{PARTIAL}*"):
        with disk_errors(path):
            handle = try_lock(path / HOLDER) if path.is_dir() else None
        if handle is None:
            raise RunError(
                f"{target} is being written by another process. Wait for it, or give another folder with --out."
            )
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)
    for path in target.parent.glob(f".{target.name}{OLD}*"):
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # the process died between two renames
            path.rename(target)


def publish(place: Path, target: Path) -> None:
    """Puts a written folder in its place, in that of an old one too. Raises `RunError` when the disk refuses."""
    with disk_errors(target):
        (place / HOLDER).unlink(missing_ok=True)
        for path in sorted(place.rglob("*"), reverse=True):  # files before the folders that they lie in
            to_disk(path)
        to_disk(place)
        old = target.with_name(f".{target.name}{OLD}{os.getpid()}")
        if target.exists():
            target.rename(old)
        place.rename(target)
        to_disk(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Waits until the disk has a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems have no fsync of folders
            raise
    finally:
        os.close(handle)
