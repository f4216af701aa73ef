"""What happens at each step besides learning: the record on disk, the progress bar, stopping, evaluation in between."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from kit.runner.console import Advance
from kit.runner.distributed import Onlooker, Processes
from kit.runner.stop import LAUNCHER_SECONDS, Stop
from kit.runs.store import RunDir

HEARTBEAT_SECONDS = 1.0


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
