"""Stopping a run from outside: a request, and where that is not waited for SIGTERM, a second SIGTERM, SIGKILL of the whole group.

At `control/stop` or a first SIGTERM the trainer finishes its step, saves a checkpoint and ends. A second SIGTERM ends it at
once, without a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from kit.errors import RunError
from kit.runs.process import kill_all, runs, send_signal
from kit.runs.store import ALIVE, RunDir, is_elsewhere

POLL_SECONDS = 0.1
STARTING_SECONDS = 10.0
"""For a run that does not train yet: there is nothing to save, and a download does not poll the sentinel."""
TERM_SECONDS = 10.0
NOW_SECONDS = 1.0
FACE_SECONDS = 30.0
"""For the process that starts the run (a notebook, a web server) to hand it over or to see the sentinel: no signals."""
SETTLE_SECONDS = 5.0
"""What a supervisor gets to write the end of a process that was killed."""


def stop(
    run: RunDir,
    *,
    timeout: float | None = None,
    now: bool = False,
    on_message: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Stops the run, waits until it has ended, and returns its status; of a run that has ended, the status as it is.

    Args:
        timeout: seconds to let it finish its step and save before signals follow; None: as long as it takes.
        now: do not wait for the step: what was learned since the last checkpoint is lost.

    Raises:
        RunError: the run lives on another machine and does not end, or belongs to another user.
    """
    status = run.status()
    if status["state"] not in ALIVE:
        return status
    patience = STARTING_SECONDS if timeout is None and status["state"] in ("queued", "starting") else timeout
    requested = ask(run)
    if requested and not now and _has_ended(run, patience):
        return run.status()
    if is_elsewhere(status):
        raise RunError(
            f"Run '{run.id}' lives on {status['host']}. It was asked to stop and will after its step; to kill it, run "
            f"grpo-kit stop {run.id} --now there."
        )
    first = NOW_SECONDS if now else TERM_SECONDS if requested else patience
    return escalate(run, (first, NOW_SECONDS if now else TERM_SECONDS), on_message)


def what_is_saved(status: Mapping[str, Any]) -> str:
    """Whether a live run saves before it stops, as a sentence."""
    if status["state"] in ("queued", "starting"):
        return "it has not begun to train, so there is nothing to save"
    return "its step is finished and saved first"


def ask(run: RunDir) -> bool:
    """Leaves the sentinel, and returns at once. False where the disk is full or read-only: a first SIGTERM does for it."""
    try:
        run.write_text("control/stop", f"{os.getpid()}\n")
    except RunError:
        return False
    with contextlib.suppress(RunError):
        run.change_status(
            lambda record: {"state": "stopping"} if record.get("state") in ("starting", "running") else None
        )
    return True


def escalate(run: RunDir, pauses: tuple[float | None, float], on_message: Callable[[str], object]) -> dict[str, Any]:
    """Sends ever stronger signals until the run has ended; returns its status. `pauses`: seconds after each SIGTERM.

    The process that only starts the run is never signalled; it gets `FACE_SECONDS` to hand the run over.
    """
    begun = time.monotonic()
    while run.status()["state"] in ALIVE and run.record().get("face"):
        if time.monotonic() >= begun + FACE_SECONDS:
            return run.status()
        time.sleep(POLL_SECONDS)
    begun = time.monotonic()
    stages = (
        (signal.SIGTERM, "it did not stop at its sentinel", pauses[0]),
        (signal.SIGTERM, "interrupted at once", pauses[1]),
        (signal.SIGKILL, "it did not end by itself", SETTLE_SECONDS),
    )
    for number, why, pause in stages:
        target = run.record()
        if target.get("state") not in ALIVE or target.get("face") or not runs(target):
            break
        on_message(f"{number.name} for process {target['pid']}, after {time.monotonic() - begun:.0f} s")
        stop = {"how": f"{number.name}: {why}"}
        with contextlib.suppress(RunError):
            run.change_status(
                lambda record, stop=stop: {"stop": stop} if record.get("state") in ALIVE else None  # type: ignore[misc]
            )
        try:
            kill_all(target) if number == signal.SIGKILL else send_signal(target, number)
        except PermissionError:
            raise RunError(
                f"Process {target['pid']} of run '{run.id}' belongs to another user, who has to stop it."
            ) from None
        if _has_ended(run, pause):
            return run.status()
    _settle(run)
    return run.status()


def _has_ended(run: RunDir, seconds: float | None) -> bool:
    """Waits for the end of the run, at most so many seconds. Returns whether it has ended."""
    begun = time.monotonic()
    while (state := run.status()["state"]) in ALIVE:
        if seconds is not None and time.monotonic() - begun >= seconds:
            return False
        time.sleep(POLL_SECONDS)
    if state == "interrupted":
        _settle(run)
    return True


def _settle(run: RunDir) -> None:
    """Sees to it that a run whose process died of the stop says so: by its supervisor, else from here."""

    def killed(record: dict[str, Any]) -> dict[str, Any] | None:
        how = (record.get("stop") or {}).get("how")
        if record.get("state") not in ALIVE or runs(record) or how is None:
            return None
        ending = {"ended": time.time(), "eta_seconds": None, "exit": 128 + signal.SIGKILL}
        return {"state": "stopped", "reason": how, **ending}

    if run.settled()["state"] == "interrupted":
        with contextlib.suppress(RunError):
            run.change_status(killed)
