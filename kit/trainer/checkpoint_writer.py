"""Atomic checkpoints: written to a staging folder, synced to disk, and moved into place by one rename.

A reader never sees an incomplete checkpoint, whenever the process dies, and after a power failure the files of a checkpoint
have their content. An interrupted write leaves files in `.saving`, which the next write removes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import RunError
from kit.runs.files import disk_errors, to_disk, write_atomic
from kit.runs.store import MANIFEST, PREFIX, STATE, complete_checkpoints, is_complete, numbered, step_of

if TYPE_CHECKING:
    from trl import GRPOTrainer

log = logging.getLogger("kit")
STAGING = ".saving"
"""Folder next to the checkpoints in which they are written and removed. Its content may be deleted at any time."""


def clear_staging(root: Path) -> None:
    """Remove the files of an interrupted write in `root`."""
    shutil.rmtree(root / STAGING, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Move a written checkpoint into place atomically, and sync it and the run's *.jsonl files to disk.

    Raises `RunError` if the disk fails; the checkpoint then does not exist.
    """
    root = final.parent
    files = sorted(path for path in staged.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {path.relative_to(staged).as_posix(): path.stat().st_size for path in files}
    write_atomic(staged / MANIFEST, json.dumps(sizes, indent=1) + "\n")
    with disk_errors(final):
        # Metrics must reach the disk no later than their checkpoint.
        for path in [*files, *root.glob("*.jsonl")]:
            to_disk(path)
        for folder in {staged, *(path.parent for path in files)}:
            to_disk(folder)
        _put_aside(final)
        staged.rename(final)
        to_disk(root)


def rotate(checkpoints: Iterable[Path], limit: int | None, best: str | None) -> None:
    """Remove the earliest checkpoints beyond `limit`. The last one and `best` stay, as in transformers."""
    in_order = sorted(checkpoints, key=step_of)
    if limit is None or limit <= 0 or len(in_order) <= limit:
        return
    protected = {in_order[-1], *(path for path in in_order if best and path.name == Path(best).name)}
    removable = [path for path in in_order if path not in protected]
    for path in removable[: len(in_order) - max(limit, len(protected))]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one does not look like a checkpoint."""
    try:
        _put_aside(checkpoint)
    except OSError as error:
        log.warning("%s cannot be removed: %s", checkpoint, error)
        return
    clear_staging(checkpoint.parent)


def _put_aside(path: Path) -> None:
    if not path.exists():
        return
    discarded = path.parent / STAGING / f"old-{path.name}"
    shutil.rmtree(discarded, ignore_errors=True)
    discarded.parent.mkdir(exist_ok=True)
    path.rename(discarded)


def save_aside(trainer: GRPOTrainer, root: Path, write: Callable[[], None]) -> None:
    """Call `write` to write the checkpoint of this step to `.saving`, move it into place, and remove old ones.

    `write` is the trainer's method, called while its output folder is `.saving`. Every process of a run calls this function.
    """
    name, first = f"{PREFIX}{trainer.state.global_step}", trainer.args.should_save
    staged, final = root / STAGING / name, root / name
    if first:
        clear_staging(root)
    trainer.accelerator.wait_for_everyone()
    write()
    trainer.accelerator.wait_for_everyone()
    if first:
        if not is_complete(staged):
            raise RunError(f"The checkpoint of step {trainer.state.global_step} was not written completely.")
        best = trainer.state.best_model_checkpoint
        if best is not None and Path(best) == staged:
            trainer.state.best_model_checkpoint = str(final)
            trainer.state.save_to_json(str(staged / STATE))
        publish(staged, final)
        rotate(complete_checkpoints(numbered(root)), trainer.args.save_total_limit, trainer.state.best_model_checkpoint)
        clear_staging(root)
    trainer.accelerator.wait_for_everyone()
