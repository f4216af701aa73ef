"""Trackers (`run.report_to`): transformers' callbacks, which send metrics and held-out scores to wandb and others.

A tracker that raises is removed with a warning and an `alert` event, and the run continues. One that hangs blocks the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from transformers import TrainerCallback

from kit.errors import RunError
from kit.runs.files import read_result
from kit.runs.metrics import is_number
from kit.runs.secrets import redact
from kit.runs.store import RunDir

if TYPE_CHECKING:
    from kit.config import RunConfig

log = logging.getLogger("kit")
ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_PROJECT": "grpo-kit",
    "MLFLOW_EXPERIMENT_NAME": "grpo-kit",
}
"""Environment variables of trackers, with defaults."""


class Trackers(TrainerCallback):  # type: ignore[misc]
    """The trackers of a run: a context manager that starts and ends them, and a callback that forwards events."""

    def __init__(self, run: RunDir, config: RunConfig, on_message: Callable[[str], object] = log.warning) -> None:
        self.run, self.config, self.on_message = run, config, on_message
        self.callbacks: dict[str, Any] = {}
        self._last: tuple[Any, Any, Any] | None = None  # arguments, state and control of the last event
        resumed = bool(config.run.report_to and run.metrics())
        self._sent = {path.stem for path in run.eval.glob("*.json")} if resumed else set[str]()

    def __enter__(self) -> Self:
        """Creates the trackers of `run.report_to`. They start with the training. Failures are reported, not raised."""
        from transformers.integrations import get_reporting_integration_callbacks

        for name in dict.fromkeys(self.config.run.report_to):
            os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
            with self._dropping(name, 0):
                (kind,) = get_reporting_integration_callbacks([name])
                callback = self.callbacks[name] = kind()
                if name == "tensorboard":
                    callback.logging_dir = callback.logging_dir or str(self.run.path / "tensorboard")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._last is not None:
            self._send_scores(*self._last)
            self._call("on_train_end", *self._last)

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._last = (args, state, control)
        self._call("on_train_begin", args, state, control, **keywords)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **keywords: Any) -> None:
        if logs and "train_runtime" not in logs:  # not for the closing summary of the trainer
            self._send_scores(args, state, control)
            self._call("on_log", args, state, control, logs=dict(logs), **keywords)

    def _send_scores(self, args: Any, state: Any, control: Any) -> None:
        """Sends new held-out scores as `eval/NAME`. MLflow does not allow `@` in a name."""
        for path in sorted(self.run.eval.glob("*.json")) if self.callbacks else ():
            if path.stem not in self._sent:
                self._sent.add(path.stem)
                logs = {
                    f"eval_{name.replace('@', '_at_')}": float(estimate["value"])
                    for name, estimate in read_result(path).items()
                    if isinstance(estimate, dict) and is_number(estimate.get("value"))
                }
                self._call("on_log", args, state, control, logs=logs)

    def _call(self, event: str, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for name, callback in list(self.callbacks.items()):
            with self._dropping(name, state.global_step):
                getattr(callback, event)(args, state, control, **keywords)

    @contextlib.contextmanager
    def _dropping(self, name: str, step: int) -> Iterator[None]:
        """Removes a tracker that raises, with one warning. Errors in writing the warning are ignored."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.callbacks.pop(name, None)
            reason = f"{type(error).__name__}: {error}"[:500].rstrip(".")
            message = redact(
                f"The tracker {name} failed and was removed: {reason}. The run continues; its own "
                "files have everything."
            )
            log.warning("the tracker %s failed", name, exc_info=error)
            with contextlib.suppress(RunError, RuntimeError):
                self.on_message(f"Warning: {message}")
                self.run.append_event("alert", step=step, name=f"tracker {name}", message=message, severity="warning")
