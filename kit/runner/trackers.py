"""Trackers (`run.report_to`) mirror a run: its metrics, held-out scores and configuration, by the trackers' own libraries.

transformers' callbacks (`report_to` of its arguments) are not used: they put `train/` before every name, send the configuration
with its secrets, know no held-out scores, and start another run of the tracker when a run is resumed. A tracker that raises is
dropped with a warning and an `alert` event, and the run continues. One that hangs blocks the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from transformers import TrainerCallback

from kit.errors import RunError
from kit.runs.files import write_atomic
from kit.runs.metrics import ENDS, is_number, step_of
from kit.runs.secrets import redact, redacted
from kit.runs.store import RunDir

if TYPE_CHECKING:
    from kit.config import RunConfig

log = logging.getLogger("kit")
PROJECT = "grpo-kit"
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
Values = dict[str, float]


class Client(Protocol):
    """One run in one tracker. Built from the run, its configuration, whether the tracker has it already, and its id there."""

    id: str | None
    """The tracker's id of this run; None for a tracker that identifies runs by name."""

    def log(self, step: int, values: Values) -> None: ...

    def finish(self) -> None: ...


class Trackio:
    """https://github.com/gradio-app/trackio: in files of this user (TRACKIO_DIR), or on a Space if TRACKIO_SPACE_ID says so."""

    id: str | None = None

    def __init__(self, run: RunDir, config: dict[str, Any], resumed: bool, id: str | None) -> None:
        import trackio

        self._module = trackio
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=run.id, config=config,
            resume="allow" if resumed else "never", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Values) -> None:
        self._module.log(values, step=step)

    def finish(self) -> None:
        self._module.finish()


class Wandb:
    """https://docs.wandb.ai; the run's own files lie in its directory."""

    def __init__(self, run: RunDir, config: dict[str, Any], resumed: bool, id: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.id, id=id, resume="allow" if id else None,
            config=config, dir=str(run.path),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # a held-out score may arrive after a later step's line
        self.id: str | None = str(self._run.id)

    def log(self, step: int, values: Values) -> None:
        self._run.log({**values, "step": step})

    def finish(self) -> None:
        self._run.finish()


class TensorBoard:
    """Event files in the run's directory: `tensorboard --logdir runs`. A resumed run adds a file of its own."""

    id: str | None = None

    def __init__(self, run: RunDir, config: dict[str, Any], resumed: bool, id: str | None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(run.path / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```")

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class MLflow:
    """https://mlflow.org: where MLFLOW_TRACKING_URI says, else in ./mlruns."""

    def __init__(self, run: RunDir, config: dict[str, Any], resumed: bool, id: str | None) -> None:
        import mlflow

        self._module = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        made = mlflow.start_run(run_id=id, run_name=None if id else run.id)
        self.id: str | None = str(made.info.run_id)
        if not id:
            mlflow.log_dict(config, "config.json")

    def log(self, step: int, values: Values) -> None:
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def finish(self) -> None:
        self._module.end_run()


CLIENTS: dict[str, Callable[[RunDir, dict[str, Any], bool, str | None], Client]] = {
    "trackio": Trackio, "wandb": Wandb, "tensorboard": TensorBoard, "mlflow": MLflow,
}  # fmt: skip


class Mirror:
    """A run in one tracker. What was sent is recorded in trackers/NAME.json, so that a resumed run sends nothing twice."""

    def __init__(self, name: str, run: RunDir, config: dict[str, Any]) -> None:
        self.run, self.memory = run, run.path / "trackers" / f"{name}.json"
        known = json.loads(self.memory.read_text(encoding="utf-8")) if self.memory.is_file() else {}
        self.step, self.scores = int(known.get("step", 0)), set(known.get("scores", []))
        self.client = CLIENTS[name](run, config, bool(known), known.get("id"))
        self.log_scores()
        for line in run.metrics():  # of a resumed run: what an earlier process wrote and had not sent
            self.log(int(line.get("step") or 0), numbers(line))

    def log(self, step: int, values: Values) -> None:
        """Sends the line of a step, unless that step was sent before."""
        if step > self.step:
            self.client.log(step, values)
            self.step = step
            self._remember()

    def log_scores(self) -> None:
        """Sends the held-out scores on disk that were not sent before, the earliest first."""
        found = []
        for path in self.run.eval.glob("*.json"):
            if path.stem not in self.scores and step_of(path.stem, self.step) is not None:
                score = json.loads(path.read_text(encoding="utf-8"))
                step = score.get("step")
                found.append((int(step) if is_number(step) else step_of(path.stem, self.step) or 0, path.stem, score))
        for step, name, score in sorted(found, key=lambda item: item[:2]):
            self.client.log(step, estimates(score))
            self.scores.add(name)
        if found:
            self._remember()

    def _remember(self) -> None:
        sent = {"id": self.client.id, "step": self.step, "scores": sorted(self.scores)}
        write_atomic(self.memory, json.dumps(sent), durable=False)


class Trackers(TrainerCallback):  # type: ignore[misc]
    """The trackers of a run: a context manager that starts and ends them, and a trainer callback that sends every metric line."""

    def __init__(self, run: RunDir, config: RunConfig, on_message: Callable[[str], object] = log.warning) -> None:
        self.run, self.config, self.on_message = run, config, on_message
        self.mirrors: dict[str, Mirror] = {}

    def __enter__(self) -> Self:
        """Starts the trackers of `run.report_to`, in rank 0 only. A tracker's failure is reported, not raised."""
        names = () if int(os.environ.get("RANK", "0")) else dict.fromkeys(self.config.run.report_to)
        content = redacted(self.config.model_dump(mode="json"))
        for name in names:
            os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
            with self._let_go(name), self._printing_to_log(name):
                self.mirrors[name] = Mirror(name, self.run, content)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, mirror in list(self.mirrors.items()):
            with self._let_go(name), self._printing_to_log(name):
                mirror.log_scores()
                mirror.client.finish()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "train_runtime" in logs:  # the closing summary of the trainer is no step
            return
        for name, mirror in list(self.mirrors.items()):
            with self._let_go(name):
                mirror.log_scores()
                mirror.log(state.global_step, numbers(logs))

    @contextlib.contextmanager
    def _let_go(self, name: str) -> Iterator[None]:
        """Inside, an error of a tracker drops that tracker, with one warning; errors in writing the warning are ignored."""
        try:
            yield
        except (Exception, SystemExit) as error:
            mirror = self.mirrors.pop(name, None)
            reason = f"{type(error).__name__}: {error}"[:500].rstrip(".")
            message = redact(
                f"The tracker {name} failed and is left out from here on: {reason}. The run goes on; its own "
                "files have everything."
            )
            log.warning("the tracker %s failed", name, exc_info=error)
            with contextlib.suppress(RunError, RuntimeError):
                self.on_message(f"Warning: {message}")
                self.run.append_event(
                    "alert",
                    step=mirror.step if mirror else 0,
                    name=f"tracker {name}",
                    message=message,
                    severity="warning",
                )

    @contextlib.contextmanager
    def _printing_to_log(self, name: str) -> Iterator[None]:
        """Inside, what the tracker prints (addresses, advice) goes to trackers/NAME.log."""
        folder = self.run.path / "trackers"
        folder.mkdir(exist_ok=True)
        with (
            open(folder / f"{name}.log", "a", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            yield


def numbers(line: dict[str, Any]) -> Values:
    """The finite numbers of a metric line by name, without step and time, which trackers add themselves."""
    return {key: float(value) for key, value in line.items() if key not in ("step", "time") and is_number(value)}


def estimates(score: dict[str, Any]) -> Values:
    """Held-out scores as `heldout/NAME`, `heldout/NAME_low` and `heldout/NAME_high`."""
    values: Values = {}
    for name, estimate in score.items():
        if isinstance(estimate, dict) and is_number(estimate.get("value")):
            ends = {"value": "", "low": "_low", "high": "_high"}
            values |= {
                f"heldout/{name}{ends[end]}": float(estimate[end]) for end in ENDS if is_number(estimate.get(end))
            }
        elif name in ("completion_tokens_mean", "truncated_share") and is_number(estimate):
            values[f"heldout/{name}"] = float(estimate)
    return values
