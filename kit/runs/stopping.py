"""Stops a run from outside: a request, then SIGTERM, SIGINT, and SIGKILL of the process group.

At `control/stop` or a first SIGTERM, the trainer finishes its step, saves a checkpoint and ends. At the SIGINT after it, it ends
at once, without a checkpoint.
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
"""Wait for a run that does not train yet: there is nothing to save, and a download does not poll the sentinel."""
TERM_SECONDS = 10.0
NOW_SECONDS = 1.0
FACE_SECONDS = 30.0
"""Wait for the process that starts the run (a notebook, a web server), which is never signalled, to hand it over or end."""
SETTLE_SECONDS = 5.0
"""Wait for the supervisor of a killed process to record how it ended."""


def stop(
    run: RunDir,
    *,
    timeout: float | None = None,
    now: bool = False,
    on_message: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Stop the run, wait until it has ended, and return its status. A run that has ended already is left unchanged.

    Args:
        timeout: seconds to let it finish its step and save before signals follow; None: no limit.
        now: do not wait for the step: the steps since the last checkpoint are lost.

    Raises:
        RunError: the run is on another machine and does not end, or belongs to another user.
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
    """A clause that says whether a live run saves before it stops."""
    if status["state"] in ("queued", "starting"):
        return "it has not begun to train, so there is nothing new to save"
    return "its step is finished and saved first"


def ask(run: RunDir) -> bool:
    """Write the sentinel `control/stop` without waiting. False if the disk is full or read-only; then send SIGTERM."""
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
    """Send SIGTERM, SIGINT, then SIGKILL, until the run has ended; return its status. `pauses`: seconds after the first two.

    The process that only starts the run is never signalled; it has `FACE_SECONDS` to hand the run over.
    """
    begun = time.monotonic()
    while run.status()["state"] in ALIVE and run.record().get("face"):
        if time.monotonic() >= begun + FACE_SECONDS:
            return run.status()
        time.sleep(POLL_SECONDS)
    begun = time.monotonic()
    stages = (
        (signal.SIGTERM, "it did not stop at its sentinel", pauses[0]),
        (signal.SIGINT, "interrupted at once", pauses[1]),
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
    """Wait at most `seconds` for the end of the run. Return whether it has ended."""
    begun = time.monotonic()
    while (state := run.status()["state"]) in ALIVE:
        if seconds is not None and time.monotonic() - begun >= seconds:
            return False
        time.sleep(POLL_SECONDS)
    if state == "interrupted":
        _settle(run)
    return True


def _settle(run: RunDir) -> None:
    """Record `stopped` for a run whose process was killed, unless its supervisor records the end."""

    def killed(record: dict[str, Any]) -> dict[str, Any] | None:
        how = (record.get("stop") or {}).get("how")
        if record.get("state") not in ALIVE or runs(record) or how is None:
            return None
        ending = {"ended": time.time(), "eta_seconds": None, "exit": 128 + signal.SIGKILL}
        return {"state": "stopped", "reason": how, **ending}

    if run.settled()["state"] == "interrupted":
        with contextlib.suppress(RunError):
            run.change_status(killed)
