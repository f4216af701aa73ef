"""A run from its directory to its last word: whatever ends it stands in status.json."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.errors import RunError

if TYPE_CHECKING:
    from kit.runs.store import RunDir
    from kit.training.callbacks import Stop
    from kit.training.console import Reporter
    from kit.training.quiet import LogBook

SPACE_AT_START = 200 * 1024 * 1024
"""Bytes that must be free before a run is begun."""
RESERVE = 64 * 1024
"""Bytes set aside, so that the end of a run can be told on a disk that is full."""


def check_run_id(config: RunConfig) -> None:
    """Refuses a taken id before any work is done for it. Raises `RunError`."""
    from kit.runs.store import RunStore

    assert config.run.id is not None, "every face gives a run its id"
    RunStore(config.run.root).check_free(config.run.id)


def create_run_directory(config: RunConfig) -> RunDir:
    """A new run directory. Raises `RunError` if the id is taken, or the disk refuses or is nearly full."""
    from kit.runs.store import RunDir, RunStore

    assert config.run.id is not None, "every face gives a run its id"
    store = RunStore(config.run.root)
    RunDir(store.root / config.run.id).check_free_space(SPACE_AT_START)
    folder = store.create(config.run.id)
    folder.write_status("starting", total_steps=config.optimisation.steps, step=0)
    return folder


@contextmanager
def lifecycle(folder: RunDir, logs: LogBook, reporter: Reporter) -> Iterator[Stop]:
    """Writes how the run ends, whatever ends it, and lets Ctrl-C end it in order."""
    from kit.training.callbacks import Stop
    from kit.training.failures import explained

    stop, reserve = Stop(folder), folder.path / ".reserve"
    try:
        with explained(), stop.listening(reporter.say):
            reserve.write_bytes(bytes(RESERVE))
            with logs.written_to(folder.log):
                try:
                    yield stop
                except Exception:
                    logging.getLogger("kit").exception("the run failed")
                    raise
    except KeyboardInterrupt:
        clear_up(folder)
        folder.write_status("stopped", reason=stop.reason or "interrupted at once, without a checkpoint", exit=130)
        raise
    except BaseException as error:
        clear_up(folder)
        code = getattr(error, "exit_code", 1)
        with suppress(RunError):  # the error itself matters more; without a last word the run reads `interrupted`
            folder.write_status("failed", reason=f"{type(error).__name__}: {error}", exit=code)
        raise
    clear_up(folder)
    folder.write_status("stopped" if stop.reason else "finished", reason=stop.reason, exit=130 if stop.reason else 0)


def clear_up(folder: RunDir) -> None:
    """Gives the reserve back, and removes what an interrupted write left: half a checkpoint must not look like one."""
    (folder.path / ".reserve").unlink(missing_ok=True)
    for partial in folder.completions.glob("*.partial"):
        partial.unlink(missing_ok=True)
    for checkpoint in folder.checkpoints:
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: trainer_state.json is what transformers writes last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
