"""A run from its directory to its last word: whatever ends it stands in status.json."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.errors import RunError
from kit.runs.checkpoints import MANIFEST, is_whole
from kit.trainer.checkpoint_writer import clear_staging

if TYPE_CHECKING:
    from kit.runner.console import Reporter
    from kit.runner.distributed import Processes
    from kit.runner.logging import LogBook
    from kit.runner.stop import Stop
    from kit.runs.store import RunDir

SPACE_AT_START = 200 * 1024 * 1024
"""Bytes that must be free before a run is begun."""
RESERVE = 64 * 1024
"""Bytes set aside, so that the end of a run can be told on a disk that is full."""


def check_run_id(config: RunConfig) -> None:
    """Refuses a taken id before any work is done for it. Raises `RunError`."""
    from kit.runs.store import RunStore

    assert config.run.id is not None, "every face gives a run its id"
    RunStore(config.run.root).check_free(config.run.id)


def create_run_directory(config: RunConfig, *, resume: bool = False, adopt: bool = False) -> RunDir:
    """The run's directory, which from here on is this process's: a new one, or the one to go on with.

    `adopt`: a face has made or claimed it for this process; otherwise `resume` claims it. Raises `RunError` if the id is
    taken, the run is live in another process, or the disk refuses or is nearly full.
    """
    from kit.runs.store import RunDir, RunStore

    assert config.run.id is not None, "every face gives a run its id"
    store = RunStore(config.run.root)
    RunDir(store.root / config.run.id).check_free_space(SPACE_AT_START)
    if not (resume or adopt):
        return store.create(config.run.id, config=config.to_yaml(), step=0, total_steps=config.optimisation.steps)
    folder = store.open(config.run.id)
    if adopt:
        folder.adopt()
    else:
        folder.claim("starting")
    return folder


@contextmanager
def lifecycle(folder: RunDir, logs: LogBook, reporter: Reporter) -> Iterator[Stop]:
    """Writes how the run ends, whatever ends it, and lets Ctrl-C end it in order."""
    from kit.models.failures import explained
    from kit.runner.distributed import clear_failures, heard
    from kit.runner.stop import Stop

    stop, reserve = Stop(folder), folder.path / ".reserve"
    try:
        with explained(), heard(folder), stop.listening(reporter.say):
            reserve.write_bytes(bytes(RESERVE))
            clear_failures(folder)
            with logs.written_to(folder.log):
                try:
                    yield stop
                except Exception:
                    logging.getLogger("kit").exception("the run failed")
                    raise
    except KeyboardInterrupt:
        clear_up(folder)
        _end(folder, "stopped", stop.reason or "interrupted at once, without a checkpoint", 130)
        raise
    except BaseException as error:
        clear_up(folder)
        code = getattr(error, "exit_code", 1)
        with suppress(RunError):  # the error itself matters more; without a last word the run reads `interrupted`
            _end(folder, "failed", f"{type(error).__name__}: {error}", code)
        raise
    clear_up(folder)
    ended = stop.reason or stop.ended
    _end(folder, "stopped" if stop.reason else "finished", ended, 130 if stop.reason else 0)


def _end(folder: RunDir, state: str, reason: str | None, code: int) -> None:
    """The last word, and before it the report, so that whoever sees that the run has ended finds it."""
    from kit.runner.console import draw_report

    try:
        draw_report(folder, state, reason)
    finally:
        folder.write_status(state, reason=reason, exit=code)


@contextmanager
def following(folder: RunDir, processes: Processes) -> Iterator[Stop]:
    """The same for the other processes of a run: they listen, and leave it to the first one to write."""
    from kit.models.failures import explained
    from kit.runner.distributed import note_failure
    from kit.runner.stop import Stop

    stop = Stop(folder)
    try:
        with explained(), stop.listening(lambda text: None):
            yield stop
    except Exception as error:
        note_failure(folder, processes, error)
        raise


def clear_up(folder: RunDir) -> None:
    """Gives the reserve back, and removes what an interrupted write left: half a checkpoint must not look like one."""
    (folder.path / ".reserve").unlink(missing_ok=True)
    for partial in folder.completions.glob("*.partial"):
        partial.unlink(missing_ok=True)
    clear_staging(folder.path)
    for checkpoint in folder.checkpoints:
        if (
            not is_whole(checkpoint) and not (checkpoint / MANIFEST).exists()
        ):  # one that was whole is not ours to remove
            shutil.rmtree(checkpoint, ignore_errors=True)
