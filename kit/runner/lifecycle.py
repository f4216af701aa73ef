"""Start and end of a run: its directory, its final status whatever ends it, and requests to stop by signal or by file."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.errors import RunError
from kit.runs.store import MANIFEST, RunDir, RunStore, is_whole
from kit.trainer.checkpoint_writer import clear_staging

if TYPE_CHECKING:
    from kit.runner.console import LogCapture, Reporter

SPACE_AT_START = 200 * 1024 * 1024
"""Bytes that must be free before a run is begun."""
RESERVE = 64 * 1024
"""Bytes of a placeholder file that is removed at the end, so that the final status can be written on a full disk."""


def create_run_directory(config: RunConfig, *, resume: bool = False, adopt: bool = False) -> RunDir:
    """Creates the run's directory, or takes over the one to resume, and returns it.

    `adopt`: the caller has created or claimed it for this process; otherwise `resume` claims it. Raises `RunError` if the id
    is taken, if another process runs it, or if the disk is not writable or nearly full.
    """
    store, run_id = RunStore(config.run.root), str(config.run.id)
    RunDir(store.root / run_id).check_free_space(SPACE_AT_START)
    if not (resume or adopt):
        return store.create(run_id, config=config.to_yaml(), step=0, total_steps=config.optimisation.steps)
    folder = store.open(run_id)
    if adopt:
        folder.adopt()
    else:
        folder.claim("starting")
    return folder


@contextmanager
def lifecycle(
    folder: RunDir, logs: LogCapture, reporter: Reporter, write_report: Callable[..., Path]
) -> Iterator[StopSignal]:
    """Stops the run after its step on Ctrl-C, and writes report and final status at the end, whatever ended the run."""
    from kit.models.failures import explained

    stop, reserve = StopSignal(folder), folder.path / ".reserve"
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
        _end(folder, write_report, stop, "stopped", stop.reason or "interrupted at once, without a checkpoint", 130)
        raise
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        with suppress(RunError):  # the error itself matters more; without a last word the run reads `interrupted`
            _end(folder, write_report, stop, "failed", f"{type(error).__name__}: {error}", code)
        raise
    state, code = ("stopped", 130) if stop.reason else ("finished", 0)
    _end(folder, write_report, stop, state, stop.reason or stop.ended, code)


def _end(
    folder: RunDir, write_report: Callable[..., Path], stop: StopSignal, state: str, reason: str | None, code: int
) -> None:
    """Clears up, and writes the report, then the final status: whoever reads that the run has ended finds its report."""
    from kit.runner.console import draw_report

    clear_up(folder)
    ending: dict[str, Any] = {"state": state, "reason": reason}
    if stop.step is not None:  # that of the last heartbeat may be some steps behind
        ending["step"] = stop.step
    try:
        draw_report(folder, write_report, **ending)
    finally:
        folder.write_status(**ending, exit=code)


def clear_up(folder: RunDir) -> None:
    """Removes the reserve and the remains of interrupted writes, above all incomplete checkpoints."""
    (folder.path / ".reserve").unlink(missing_ok=True)
    for partial in folder.completions.glob("*.partial"):
        partial.unlink(missing_ok=True)
    clear_staging(folder.path)
    for checkpoint in folder.checkpoints:
        if not is_whole(checkpoint) and not (checkpoint / MANIFEST).exists():  # one that was whole is not removed
            shutil.rmtree(checkpoint, ignore_errors=True)


LAUNCHER_SECONDS = 5.0
"""Seconds within which torchrun and accelerate may pass on a signal that this process has already received."""


class Stopped(KeyboardInterrupt):
    """Raised to abandon work that has nothing to save, because the run was asked to stop."""


class StopSignal:
    """A request to stop: Ctrl-C, SIGTERM or the run's `control/stop` file. The trainer polls it between steps."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.run = run
        self.reason: str | None = None
        self.echo = 0.0  # seconds in which a launcher passes on a signal that this process has heard itself
        self.ended: str | None = None  # why training ended before its last step, although nobody asked
        self.step: int | None = None  # the last one that was done, for the final status

    def is_requested(self) -> bool:
        """Whether the run was asked to stop."""
        if self.reason is None and self.run is not None and (self.run.control / "stop").exists():
            self.reason = "control/stop"
        return self.reason is not None

    def check(self) -> None:
        """Raises `Stopped` if the run was asked to stop; for work that has nothing to save."""
        if self.is_requested():
            raise Stopped

    @contextmanager
    def listening(self, on_message: Callable[[str], None]) -> Iterator[None]:
        """Takes the first Ctrl-C or SIGTERM inside the block as a request to stop; a second one interrupts at once."""

        heard = 0.0

        def on_signal(number: int, frame: Any) -> None:
            nonlocal heard
            if self.reason is not None:
                if time.monotonic() - heard < self.echo:
                    return
                raise KeyboardInterrupt
            self.reason, heard = signal.Signals(number).name, time.monotonic()
            with suppress(RuntimeError):  # "reentrant call": the signal came in the middle of another line
                on_message("Stopping: a step in progress is finished and saved first. Once more to stop at once.")

        def terminal_closed(number: int, frame: Any) -> None:
            """The run continues, and its output goes to its log."""
            assert self.run is not None
            with suppress(OSError), open(self.run.log, "ab") as log:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.run is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, terminal_closed)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
