"""The supervisor of a training process: waits for a GPU, spawns the process, watches it, and records how it ended.

A caller that waits for the run supervises it itself (`supervise`). For a run that continues after its caller has ended,
`detach` starts `python -m kit.runs.supervisor RUN_DIR`: a session without a terminal, all output in the run's log.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.runs.lock import GpuLock, gpus
from kit.runs.process import identity
from kit.runs.store import ALIVE, RunDir
from kit.runs.worker import CRASHED, STOPPED, USER_ERROR, Outcome, call, environment

HEARTBEAT_SECONDS = 5.0
QUEUE_POLL_SECONDS = 0.5
HANDOVER_POLL_SECONDS = 0.02
QUEUE_HEARTBEATS = 20
"""Number of polls of a lock between two heartbeats, while another run holds it."""
REQUEST = "control/request.json"


def supervise(
    run: RunDir,
    request: dict[str, Any],
    *,
    module: str,
    quiet: bool = False,
    on_message: Callable[[str], object] = lambda text: None,
    face: bool = True,
    on_line: Callable[[str], object] | None = None,
) -> Outcome:
    """Runs the job of `module` as the training process of `run`, which this process has created or claimed.

    Returns the outcome, which the run's status records too. While another run uses its GPU, the run is `queued`.

    face: this process belongs to the user (a notebook, a shell) and must not be signalled.
    on_line: called with each line of output of the job.
    """
    lock = GpuLock(gpus())
    try:
        given_up = _queue(run, lock, on_message, face)
        if given_up is None and (run.control / "stop").exists():
            given_up = "control/stop, before training"
        if given_up is not None:
            run.write_status("stopped", reason=given_up, exit=STOPPED)
            return Outcome(STOPPED)
        watch = Heartbeat(run)
        try:
            with watch:
                outcome = call(
                    module,
                    request | {"adopt": True},
                    quiet=quiet,
                    inherit=lock.handles,
                    started=watch.started,
                    on_line=on_line,
                )
        except BaseException as error:  # the job could not be started, or this process is interrupted
            settle(run, watch.pid, cut_short(error))
            raise
        settle(run, watch.pid, outcome)
        return outcome
    finally:
        lock.release()


def _queue(run: RunDir, lock: GpuLock, on_message: Callable[[str], object], face: bool) -> str | None:
    """Waits for the lock. Returns what stopped the run in the meantime (its sentinel, Ctrl-C or SIGTERM), or None."""
    announced, looks = None, 0
    try:
        while (holder := lock.take({"run": run.id, "pid": os.getpid()})) is not None:
            if holder != announced or looks % QUEUE_HEARTBEATS == 0:
                run.write_status("queued", reason=f"waits for {holder}", supervisor=identity(), face=face)
            if holder != announced:
                announced = holder
                on_message(f"Waiting for {holder}. To cancel: Ctrl-C or grpo-kit stop {run.id}")
            if (run.control / "stop").exists():
                return "control/stop, while waiting for a GPU"
            time.sleep(QUEUE_POLL_SECONDS)
            looks += 1
    except KeyboardInterrupt:
        return "an interrupt, while waiting for a GPU"
    if announced is not None:
        run.write_status("starting", supervisor=identity(), face=face)
    return None


class Heartbeat:
    """Updates heartbeat and supervisor in status.json while the job runs. The job itself reports progress."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.pid: int | None = None
        self._me = identity()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._update, name="heartbeat", daemon=True)

    def started(self, pid: int) -> None:
        """Records the job's process in the status of the run."""
        self.pid = pid
        who = identity(pid)
        with contextlib.suppress(RunError):  # the job writes the same, or fails with the same error
            self.run.change_status(
                lambda record: (
                    who | {"supervisor": self._me, "face": False, "reason": None}
                    if record.get("pid") == self._me["pid"] and not record.get("adopted")
                    else None
                )
            )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _update(self) -> None:
        def alive(record: dict[str, Any]) -> dict[str, Any] | None:
            if record.get("state") not in ALIVE or record.get("pid") != self.pid:
                return None  # the run belongs to another process now
            return {"heartbeat": time.time(), "supervisor": self._me}

        while not self._done.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(RunError):
                self.run.change_status(alive, durable=False)


def cut_short(error: BaseException) -> Outcome:
    """The outcome of a job whose supervisor was interrupted by `error`."""
    if isinstance(error, KeyboardInterrupt):
        return Outcome(STOPPED)
    return Outcome(CRASHED, RunError(f"the supervisor failed: {error!r}"), exit=CRASHED)


def settle(run: RunDir, pid: int | None, outcome: Outcome) -> None:
    """Records how the run ended if its process could not. On a full disk its status remains `interrupted`."""

    def end(record: dict[str, Any]) -> dict[str, Any] | None:
        if record.get("state") not in ALIVE or record.get("pid") not in (pid, os.getpid()):
            return None
        before = record.get("before")
        if outcome.code == USER_ERROR and before and not record.get("adopted"):
            # The resume was refused, so the earlier end remains.
            ending = {**before, "before": None, "refused": str(outcome.error)}
        else:
            ending = ending_of(run, record, outcome)
        # Before the status, because readers of the log stop at the end of the run.
        _log(run, f"supervisor: the run is {ending['state']}: {outcome.error or ending['reason']}")
        return ending

    with contextlib.suppress(OSError):  # makes room, and removes half-written status files of the process
        (run.path / ".reserve").unlink(missing_ok=True)
        for half in run.path.glob(f".*.{pid}-*.tmp"):
            half.unlink(missing_ok=True)
    with contextlib.suppress(RunError):
        run.change_status(end)


def ending_of(run: RunDir, record: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """State, reason and exit code of a run whose process has not recorded them."""
    ended = {"ended": time.time(), "eta_seconds": None, "exit": outcome.exit, "before": None}
    stop = record.get("stop") or {}
    if outcome.code == STOPPED or stop:
        how = stop.get("how") or "interrupted before training"
        return ended | {"state": "stopped", "reason": how, "exit": outcome.exit or STOPPED}
    if outcome.error is not None:
        kind = "" if outcome.code == CRASHED else f"{type(outcome.error).__name__}: "
        return ended | {"state": "failed", "reason": f"{kind}{outcome.error}"}
    return ended | {"state": "failed", "reason": f"the process ended with code {outcome.exit} and no message"}


def _log(run: RunDir, line: str) -> None:
    with contextlib.suppress(OSError), open(run.log, "a", encoding="utf-8") as log:
        log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n")


def detach(run: RunDir, request: dict[str, Any], *, module: str) -> None:
    """Starts a supervisor process for a run that this process has claimed, and waits until it has taken the run over.

    Raises `RunError` if it could not be started. The state of the run is then `failed`, or the one before the claim.
    """
    try:
        run.write_json(REQUEST, request)
        command = [sys.executable, "-P", "-m", "kit.runs.supervisor", str(run.path.resolve()), "--module", module]
        command += ["--claimed-by", str(os.getpid())]
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        while run.record().get("pid") == os.getpid():
            if process.poll() is not None:
                raise RunError(f"The supervisor of run '{run.id}' could not be started. See {run.log}.")
            time.sleep(HANDOVER_POLL_SECONDS)
    except (OSError, RunError) as error:
        settle(run, os.getpid(), Outcome(USER_ERROR, RunError(str(error)), exit=USER_ERROR))
        raise error if isinstance(error, RunError) else RunError(f"{run.path}: {error}") from error
    except BaseException:  # Ctrl-C: the supervisor does not take over an ended run
        settle(run, os.getpid(), Outcome(STOPPED))
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m kit.runs.supervisor`: takes over a run from the process that claimed it, and supervises it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--module", required=True)
    parser.add_argument("--claimed-by", type=int, required=True)
    arguments = parser.parse_args(argv)
    run, me = RunDir(arguments.run_dir), identity()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the job inherits it, since there is no terminal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    taken = run.change_status(
        lambda record: (
            me | {"supervisor": me, "face": False}
            if record.get("pid") == arguments.claimed_by and record.get("state") in ALIVE
            else None
        )
    )
    if not taken:
        raise RunError(f"{run.path} was not claimed by process {arguments.claimed_by}.")
    request = json.loads((run.path / REQUEST).read_text(encoding="utf-8"))
    (run.path / REQUEST).unlink()
    try:
        outcome = supervise(
            run, request, module=arguments.module, quiet=True, on_message=lambda text: _log(run, text), face=False
        )
    except KeyboardInterrupt:  # while no job runs
        settle(run, os.getpid(), Outcome(STOPPED))
        return STOPPED
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
