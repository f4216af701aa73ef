"""Stopping a run from outside, escalating as needed: sentinel file, SIGTERM, second SIGTERM, SIGKILL of the whole group.

At `control/stop` or a first SIGTERM the trainer finishes its step, saves a checkpoint and ends. A second SIGTERM ends it at
once, without a checkpoint. How long each stage waits depends on how long the run's steps take.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.errors import RunError
from kit.runs.lock import try_lock
from kit.runs.process import kill_all, runs, send_signal
from kit.runs.store import ALIVE, RunDir, is_copy, is_elsewhere

POLL_SECONDS = 0.1
GRACE_UNKNOWN = 120.0
"""Seconds for a run that has not shown yet how long a step takes: it may be in its first one."""
GRACE_STARTING = 10.0
"""Seconds for a run that does not train yet: there is nothing to save, and a download does not poll the sentinel."""
GRACE_LEAST = 30.0
STEPS_OF_GRACE = 3
SAVING_SECONDS = 15.0
"""If no checkpoint file has changed for so long, nothing is being saved."""
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
        timeout: seconds to let it finish its step and save; None: by the time that its steps take, and as long as
            files of checkpoints change.
        now: do not wait for the step: what was learned since the last checkpoint is lost.

    Raises:
        RunError: the run lives on another machine and does not end, or belongs to another user.
    """
    status = run.status()
    if status["state"] not in ALIVE:
        return status
    escalation, patience = StopEscalation(run, on_message), grace(run, status) if timeout is None else timeout
    requested = ask(run)
    if requested and not now and escalation.wait(patience, patient=timeout is None):
        return run.status()
    if is_elsewhere(status):
        raise RunError(
            f"Run '{run.id}' lives on {status['host']}. It was asked to stop and will after its step; to kill it, run "
            f"grpo-kit stop {run.id} there."
        )
    while True:
        with escalation.alone(now) as first:
            if first:
                return escalation.escalate(
                    (NOW_SECONDS, NOW_SECONDS) if now else (TERM_SECONDS if requested else patience, TERM_SECONDS)
                )
        if escalation.wait(1.0):  # another stop is at it: a second SIGTERM from here would cost the checkpoint
            return run.status()


def what_is_saved(status: Mapping[str, Any]) -> str:
    """Whether a live run saves before it stops, as a sentence."""
    if status["state"] in ("queued", "starting"):
        return "it has not begun to train, so there is nothing to save"
    return "its step is finished and saved first"


def grace(run: RunDir, status: dict[str, Any]) -> float:
    """Seconds within which a healthy run ends after a request to stop: a few times its longest recent step."""
    if status["state"] == "queued":
        return GRACE_STARTING
    if status["state"] == "starting" and not (run.eval.is_dir() or run.metrics_file.exists()):
        return GRACE_STARTING
    try:
        lines = list(itertools.islice(run.last_metrics(), 20))
    except RunError:
        return GRACE_UNKNOWN
    times = [line["step_time"] for line in lines if isinstance(line.get("step_time"), (int, float))]
    stamps = [line["time"] for line in lines if isinstance(line.get("time"), (int, float))]
    times += [later - earlier for later, earlier in itertools.pairwise(stamps)]
    known = [seconds for seconds in times if 0 < seconds < 86400]  # a clock that was set makes others
    return max(GRACE_LEAST, STEPS_OF_GRACE * max(known)) if known else GRACE_UNKNOWN


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


@dataclass
class StopEscalation:
    """Stop one run: request, SIGTERM, SIGTERM again, SIGKILL."""

    run: RunDir
    on_message: Callable[[str], object]

    def wait(self, seconds: float | None, *, patient: bool = False) -> bool:
        """Waits, and returns True once the run has ended. `patient` goes on beyond `seconds` as long as a checkpoint grows."""
        begun = changed = time.monotonic()
        saved = _saved(self.run)
        while (state := self.run.status()["state"]) in ALIVE:
            now = time.monotonic()
            if patient and (saved_now := _saved(self.run)) != saved:
                saved, changed = saved_now, now
            saving = patient and changed > begun and now - changed < SAVING_SECONDS
            if seconds is not None and now - begun >= seconds and not saving:
                return False
            time.sleep(POLL_SECONDS)
        return state != "interrupted" or self._settled()

    def escalate(self, pauses: tuple[float, float]) -> dict[str, Any]:
        """Sends ever stronger signals until the run has ended; returns its status. `pauses`: seconds after each SIGTERM.

        The process that only starts the run is never signalled; it gets `FACE_SECONDS` to hand the run over.
        """
        begun = time.monotonic()
        while self.run.status()["state"] in ALIVE and self.run.record().get("face"):
            if time.monotonic() >= begun + FACE_SECONDS:
                return self.run.status()
            time.sleep(POLL_SECONDS)
        begun = time.monotonic()
        stages = (
            (signal.SIGTERM, "it did not stop at its sentinel", pauses[0]),
            (signal.SIGTERM, "interrupted at once", pauses[1]),
            (signal.SIGKILL, "it did not end by itself", SETTLE_SECONDS),
        )
        for number, why, pause in stages:
            target = self.run.record()
            if target.get("state") not in ALIVE or target.get("face") or is_copy(target, self.run.path):
                break
            if not runs(target):
                break
            self.on_message(f"{number.name} for process {target['pid']}, after {time.monotonic() - begun:.0f} s")
            stop = {"how": f"{number.name}: {why}"}
            with contextlib.suppress(RunError):
                self.run.change_status(
                    lambda record, stop=stop: {"stop": stop} if record.get("state") in ALIVE else None  # type: ignore[misc]
                )
            try:
                kill_all(target) if number == signal.SIGKILL else send_signal(target, number)
            except PermissionError:
                raise RunError(
                    f"Process {target['pid']} of run '{self.run.id}' belongs to another user, who has to stop it."
                ) from None
            if self.wait(pause):
                return self.run.status()
        self._settled()
        return self.run.status()

    def _settled(self) -> bool:
        """Sees to it that a run whose process died of the stop says so: by its supervisor, else from here."""

        def killed(record: dict[str, Any]) -> dict[str, Any] | None:
            how = (record.get("stop") or {}).get("how")
            if record.get("state") not in ALIVE or runs(record) or how is None:
                return None
            ending = {"ended": time.time(), "eta_seconds": None, "exit": 128 + signal.SIGKILL}
            return {"state": "stopped", "reason": how, **ending}

        if self.run.settled()["state"] == "interrupted":
            with contextlib.suppress(RunError):
                self.run.change_status(killed)
        return True

    @contextlib.contextmanager
    def alone(self, now: bool) -> Any:
        """Yields whether no other stop of this run is beyond waiting; `now` does not ask."""
        handle: int | None = None
        first = True
        with contextlib.suppress(OSError):
            handle = try_lock(self.run.control / "stopping.lock")
            first = handle is not None
        try:
            yield first or now
        finally:
            if handle is not None:
                os.close(handle)


def _saved(run: RunDir) -> tuple[int, int]:
    """Number and bytes of the files of checkpoints and of the result, finished or not."""
    count = size = 0
    for folder in (*run.path.glob("*checkpoint-*"), run.adapter):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
                count += 1
    return count, size
