"""Checkpoints that are whole or not there: written aside, brought to the disk, and put in place by one rename.

A reader never sees half a checkpoint, whenever the process dies, and after a power failure every file of one that is in
place has its content. What an interrupted write left is under `.saving`, which the next writer removes.
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
from kit.runs.store import MANIFEST, PREFIX, STATE, is_whole, numbered, step_of, whole_checkpoints

if TYPE_CHECKING:
    from trl import GRPOTrainer

log = logging.getLogger("kit")
STAGING = ".saving"
"""Folder beside the checkpoints in which they are written and taken apart; nothing in it is of any worth."""


def clear_staging(root: Path) -> None:
    """Removes what an interrupted write left beside the checkpoints of `root`."""
    shutil.rmtree(root / STAGING, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Puts a written checkpoint in its place, whole or not at all, and whatever was appended to beside it on the disk.

    Raises `RunError` when the disk refuses; the checkpoint is then not there.
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
    """Removes the earliest checkpoints beyond `limit`; the last one and `best` stay, as with transformers."""
    in_order = sorted(checkpoints, key=step_of)
    if limit is None or limit <= 0 or len(in_order) <= limit:
        return
    needed = {in_order[-1], *(path for path in in_order if best and path.name == Path(best).name)}
    spare = [path for path in in_order if path not in needed]
    for path in spare[: len(in_order) - max(limit, len(needed))]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint, by a rename first: one that is taken apart must not look like one."""
    try:
        _put_aside(checkpoint)
    except OSError as error:
        log.warning("%s cannot be removed: %s", checkpoint, error)
        return
    clear_staging(checkpoint.parent)


def _put_aside(path: Path) -> None:
    if not path.exists():
        return
    rubbish = path.parent / STAGING / f"old-{path.name}"
    shutil.rmtree(rubbish, ignore_errors=True)
    rubbish.parent.mkdir(exist_ok=True)
    path.rename(rubbish)


def save_aside(trainer: GRPOTrainer, root: Path, write: Callable[[], None]) -> None:
    """Lets `write` write the checkpoint of this step below `.saving`, then puts it in place and removes old ones.

    `write` is the trainer's own, run while its output folder is `.saving`; called by every process of a run.
    """
    name, first = f"{PREFIX}{trainer.state.global_step}", trainer.args.should_save
    staged, final = root / STAGING / name, root / name
    if first:
        clear_staging(root)
    trainer.accelerator.wait_for_everyone()
    write()
    trainer.accelerator.wait_for_everyone()
    if first:
        if not is_whole(staged):
            raise RunError(f"The checkpoint of step {trainer.state.global_step} was not written to its end.")
        best = trainer.state.best_model_checkpoint
        if best is not None and Path(best) == staged:
            trainer.state.best_model_checkpoint = str(final)
            trainer.state.save_to_json(str(staged / STATE))
        publish(staged, final)
        rotate(whole_checkpoints(numbered(root)), trainer.args.save_total_limit, trainer.state.best_model_checkpoint)
        clear_staging(root)
    trainer.accelerator.wait_for_everyone()
