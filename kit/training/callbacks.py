"""What happens at each step besides learning: the record on disk, the progress bar, stopping, evaluation in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback

from kit.runs.store import RunDir
from kit.training.console import Advance
from kit.training.processes import Onlooker, Processes

HEARTBEAT_SECONDS = 1.0
LAUNCHER_SECONDS = 5.0
"""How long after a signal torchrun and accelerate may pass on the same one."""


class Stopped(KeyboardInterrupt):
    """Work that has nothing to save was given up, because somebody wants the run to end."""


class Stop:
    """A wish to end soon, by Ctrl-C, SIGTERM or the run's `control/stop` file. The work looks at it between steps."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.run = run
        self.reason: str | None = None
        self.echo = 0.0  # seconds in which a launcher passes on a signal that this process has heard itself
        self.ended: str | None = None  # why training ended before its last step, although nobody asked

    def asked(self) -> bool:
        """Whether somebody wants the run to end."""
        if self.reason is None and self.run is not None and (self.run.control / "stop").exists():
            self.reason = "control/stop"
        return self.reason is not None

    def check(self) -> None:
        """Raises `Stopped` if somebody wants the run to end; for work that has nothing to save."""
        if self.asked():
            raise Stopped

    @contextmanager
    def listening(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Turns the first Ctrl-C or SIGTERM into a wish; a second one interrupts at once."""

        heard = 0.0

        def wish(number: int, frame: Any) -> None:
            nonlocal heard
            if self.reason is not None:
                if time.monotonic() - heard < self.echo:
                    return
                raise KeyboardInterrupt
            self.reason, heard = signal.Signals(number).name, time.monotonic()
            with suppress(RuntimeError):  # "reentrant call": the signal came in the middle of another line
                tell("Stopping: a step in progress is finished and saved first. Once more to stop at once.")

        before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.run is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._terminal_closed)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _terminal_closed(self, number: int, frame: Any) -> None:
        """The run goes on; what it still prints goes to its log."""
        assert self.run is not None
        with suppress(OSError):
            log = os.open(self.run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes metrics, heartbeat and events, moves the bar, and passes on the wish to stop."""

    def __init__(self, run: RunDir, stop: Stop, advance: Advance) -> None:
        self.run, self.stop, self.advance = run, stop, advance
        self.started = self.beat = time.monotonic()
        self.first_step = 0
        self.note = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        state.compute_steps(
            args, state.max_steps
        )  # in a resumed run these are the checkpoint's: run.save_every may be new
        self.run.write_status("running", step=state.global_step, total_steps=state.max_steps)
        self.advance(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "train_runtime" in logs:  # the closing summary of the trainer is no step
            return
        self.run.append_metrics({"step": state.global_step, "time": time.time(), **logs})
        if logs.get("reward") is not None:  # absent from steps that learn again from the same completions
            self.note = (
                f"reward {logs['reward']:.3f}  length {logs.get('completions/mean_length') or 0:.0f}  "
                f"entropy {logs.get('entropy') or 0:.2f}"
            )
        self.advance(state.global_step, state.max_steps, self.note)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, done = time.monotonic(), state.global_step - self.first_step
        if now - self.beat >= HEARTBEAT_SECONDS or state.global_step >= state.max_steps:
            self.beat = now
            eta = (now - self.started) / max(done, 1) * (state.max_steps - state.global_step)
            self.run.write_status(
                "running", step=state.global_step, total_steps=state.max_steps, eta_seconds=round(eta, 1)
            )
        if (self.run.control / "save").exists():
            (self.run.control / "save").unlink(missing_ok=True)
            control.should_save = True
        if self.stop.asked():
            self.run.write_status("stopping", step=state.global_step)
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.append_event("checkpoint", step=state.global_step)


class Agreement(TrainerCallback):  # type: ignore[misc]
    """The last callback of every process: what one of them has found at this step, all of them do now."""

    def __init__(self, processes: Processes, stop: Stop, run: RunDir) -> None:
        self.processes, self.stop, self.run = processes, stop, run
        stop.echo = LAUNCHER_SECONDS if processes.size > 1 else 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.processes.size == 1:
            return
        wish = self.stop.reason if self.stop.asked() else None
        events: list[dict[str, Any]] = self.run.pending if isinstance(self.run, Onlooker) else []
        found = self.processes.everyone((control.should_save, control.should_training_stop, wish, list(events)))
        reasons = [reason for *_, reason, _ in found if reason is not None]
        control.should_save = any(save for save, *_ in found) or bool(reasons)
        control.should_training_stop = any(ends for _, ends, *_ in found) or bool(reasons)
        if reasons:
            self.stop.reason = reasons[0]
            self.run.write_status("stopping", step=state.global_step)
        events.clear()
        for process, told in enumerate(events_of for *_, events_of in found):
            for event in told:
                self.run.append_event(event.pop("kind"), process=process, **event)
