"""What happens at each step besides learning: the record on disk, the progress bar, stopping, evaluation in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback

from kit.runs.store import RunDir
from kit.training.console import Advance

HEARTBEAT_SECONDS = 1.0


class Stopped(KeyboardInterrupt):
    """Work that has nothing to save was given up, because somebody wants the run to end."""


class Stop:
    """A wish to end soon, by Ctrl-C, SIGTERM or the run's `control/stop` file. The work looks at it between steps."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.run = run
        self.reason: str | None = None

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

        def wish(number: int, frame: Any) -> None:
            if self.reason is not None:
                raise KeyboardInterrupt
            self.reason = signal.Signals(number).name
            with suppress(RuntimeError):  # "reentrant call": the signal came in the middle of another line
                tell("Stopping: the step in progress is finished and saved first. Once more to stop at once.")

        before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes metrics, heartbeat and events, moves the bar, and passes on the wish to stop."""

    def __init__(self, run: RunDir, stop: Stop, advance: Advance) -> None:
        self.run, self.stop, self.advance = run, stop, advance
        self.started = self.beat = time.monotonic()
        self.first_step = 0
        self.note = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
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


class Evaluator(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out problems every `every` steps and files the result as eval/step-N.json."""

    def __init__(self, run: RunDir, every: int, score: Callable[[Any, str], dict[str, Any]]) -> None:
        self.run, self.every, self.score = run, every, score

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.every and state.global_step % self.every == 0 and state.global_step < state.max_steps:
            try:
                result = self.score(model, f"step-{state.global_step:05d}")
            except Stopped:  # the score is given up, but what was learned is saved
                self.run.write_status("stopping", step=state.global_step)
                control.should_save = control.should_training_stop = True
                return
            self.run.append_event("evaluation", step=state.global_step, seconds=result["seconds"])
