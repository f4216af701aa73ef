"""Start and end of a run: its directory, its final status, and requests to stop by signal or by file."""

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
from kit.runner.distributed import world_size
from kit.runs.store import MANIFEST, RunDir, RunStore, is_complete
from kit.trainer.checkpoint_writer import clear_staging

if TYPE_CHECKING:
    from kit.runner.console import LogCapture, Reporter

SPACE_AT_START = 200 * 1024 * 1024
"""Bytes that must be free at the start of a run."""
RESERVE = 64 * 1024
"""Size of a placeholder file. It is removed at the end, so that a full disk has space for the final status."""


def create_run_directory(config: RunConfig, *, resume: bool = False, adopt: bool = False) -> RunDir:
    """Creates the run's directory, or claims an existing one to resume, and returns it.

    `adopt`: the caller has created or claimed the directory for this process. Raises `RunError` if the id is taken, if another
    process runs it, or if the disk is not writable or nearly full.
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
    """On Ctrl-C, stops the run after its step. However the run ends, writes its report and its final status."""
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
        with suppress(RunError):  # raise the original error; without a final status the run is `interrupted`
            _end(folder, write_report, stop, "failed", f"{type(error).__name__}: {error}", code)
        raise
    state, code = ("stopped", 130) if stop.reason else ("finished", 0)
    _end(folder, write_report, stop, state, stop.reason or stop.ended, code)


def _end(
    folder: RunDir, write_report: Callable[..., Path], stop: StopSignal, state: str, reason: str | None, code: int
) -> None:
    """Clears up, writes the report, and then the final status, so that an ended run always has its report."""
    from kit.runner.console import draw_report

    clear_up(folder)
    ending: dict[str, Any] = {"state": state, "reason": reason}
    if stop.step is not None:  # the last heartbeat may be some steps behind
        ending["step"] = stop.step
    try:
        draw_report(folder, write_report, **ending)
    finally:
        folder.write_status(**ending, exit=code)


def clear_up(folder: RunDir) -> None:
    """Removes the placeholder file and incomplete files and checkpoints of interrupted writes."""
    (folder.path / ".reserve").unlink(missing_ok=True)
    for partial in folder.completions.glob("*.partial"):
        partial.unlink(missing_ok=True)
    clear_staging(folder.path)
    for checkpoint in folder.checkpoints:
        if not is_complete(checkpoint) and not (checkpoint / MANIFEST).exists():  # it was never complete
            shutil.rmtree(checkpoint, ignore_errors=True)


LAUNCHER_SECONDS = 5.0
"""Seconds within which a parent, e.g. torchrun, may forward a signal that this process has received already."""


class Stopped(KeyboardInterrupt):
    """Raised on a request to stop, by work that has nothing to save."""


class StopSignal:
    """A request to stop: Ctrl-C, SIGTERM or the run's `control/stop` file. The trainer polls it between steps."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.run = run
        self.reason: str | None = None
        self.ended: str | None = None  # why training ended early without a request to stop
        self.step: int | None = None  # the last completed step, for the final status

    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        if self.reason is None and self.run is not None and (self.run.control / "stop").exists():
            self.reason = "control/stop"
        return self.reason is not None

    def check(self) -> None:
        """Raises `Stopped` if a stop was requested; for work that has nothing to save."""
        if self.is_requested():
            raise Stopped

    @contextmanager
    def listening(self, on_message: Callable[[str], None]) -> Iterator[None]:
        """Treats the first Ctrl-C or SIGTERM inside the block as a request to stop. A second one interrupts immediately.

        A SIGTERM soon after it, or the first one after `control/stop`, changes nothing.
        """
        heard, first = 0.0, 0

        def on_signal(number: int, frame: Any) -> None:
            nonlocal heard, first
            now = time.monotonic()
            if self.reason is not None:
                # Slurm sends SIGTERM to the parent too, which forwards it. Jupyter sends it after SIGINT to restart a kernel.
                forwarded = number == signal.SIGTERM or (world_size() > 1 and number == first)
                if forwarded and (not heard or now - heard < LAUNCHER_SECONDS):
                    heard, first = heard or now, first or number
                    return
                raise KeyboardInterrupt
            self.reason, heard, first = signal.Signals(number).name, now, number
            with suppress(RuntimeError):  # "reentrant call": the signal interrupted another print
                on_message("Stopping after the current step, which is saved first. Press Ctrl-C again to stop at once.")

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
