"""The process that mirrors a run into one tracker: it reads what the run writes, and whatever befalls it stays in it.

`python -m kit.runner.tracker_process` is started by `kit.runner.trackers`, one process a tracker. The first line of its
standard input is the request; when that input ends, so has the run. It answers with JSON lines: `busy` before each call
of the tracker, `sent` with the last step after it, `failed` with the reason when there is no point in going on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from kit.errors import RunError
from kit.runs.files import read_lines, write_atomic
from kit.runs.metrics import ENDS, is_number, step_of
from kit.runs.secrets import redact

PROJECT = "grpo-kit"
POLL_SECONDS = 0.5
ORPHAN_SECONDS = 30.0
"""Seconds that are left when the run's process has died without a word."""
Values = dict[str, float]


class Client(Protocol):
    """One run in one tracker. Any method may raise; that ends the mirror and nothing else."""

    id: str | None
    """What finds this run again, for a tracker that goes by more than its name."""

    def log(self, step: int, values: Values) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """Which run is mirrored: its name and directory, its configuration without secrets, and where it was before."""

    name: str
    folder: Path
    config: dict[str, Any]
    resumed: bool
    id: str | None


class Trackio:
    """https://github.com/gradio-app/trackio: in files of this user (TRACKIO_DIR), or on a Space if TRACKIO_SPACE_ID says so."""

    id: str | None = None

    def __init__(self, target: Target) -> None:
        import trackio

        self._module = trackio
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=target.name,
            config=target.config,
            resume="allow" if target.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Values) -> None:
        self._module.log(values, step=step)

    def finish(self) -> None:
        self._module.finish()


class Wandb:
    """https://docs.wandb.ai; the run's own files lie in its directory."""

    def __init__(self, target: Target) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=target.name,
            id=target.id,
            resume="allow" if target.id else None,
            config=target.config,
            dir=str(target.folder),
        )
        self._run.define_metric("*", step_metric="step")  # a held-out score may arrive after a later step's line
        self.id: str | None = str(self._run.id)

    def log(self, step: int, values: Values) -> None:
        self._run.log({**values, "step": step})

    def finish(self) -> None:
        self._run.finish()


class TensorBoard:
    """Event files in the run's directory: `tensorboard --logdir runs`. A resumed run adds a file of its own."""

    id: str | None = None

    def __init__(self, target: Target) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(target.folder / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(target.config, indent=2, ensure_ascii=False)}\n```")

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class MLflow:
    """https://mlflow.org: where MLFLOW_TRACKING_URI says, else in ./mlruns."""

    def __init__(self, target: Target) -> None:
        import mlflow

        self._module = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = mlflow.start_run(run_id=target.id, run_name=None if target.id else target.name)
        self.id: str | None = str(run.info.run_id)
        if not target.id:
            mlflow.log_dict(target.config, "config.json")

    def log(self, step: int, values: Values) -> None:
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def finish(self) -> None:
        self._module.end_run()


CLIENTS: dict[str, Callable[[Target], Client]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


class Source:
    """What a run has written since one last looked: lines of metrics, and held-out scores."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.after = folder, after
        self._scored: set[str] = set()
        self._size = -1

    def news(self) -> Iterator[tuple[int, Values]]:
        """(step, values) of steps behind `after` that were not told before, in order."""
        found = [*self._lines(), *self._scores()]
        yield from sorted(found, key=lambda item: item[0])

    def _lines(self) -> list[tuple[int, Values]]:
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == self._size:
            return []
        self._size = size
        lines = [line for line in read_lines(path) if int(line.get("step") or 0) > self.after]
        self.after = max([self.after, *(int(line["step"]) for line in lines)])
        return [(int(line["step"]), numbers(line)) for line in lines]

    def _scores(self) -> list[tuple[int, Values]]:
        found = []
        for path in sorted((self.folder / "eval").glob("*.json")):
            if path.stem in self._scored or (path.stem != "after" and step_of(path.stem, 0) is None):
                continue
            self._scored.add(path.stem)
            score = json.loads(path.read_text(encoding="utf-8"))
            step = score.get("step")
            step = int(step) if is_number(step) else step_of(path.stem, self.after) or 0
            found.append((step, estimates(score)))
        return found


def numbers(line: dict[str, Any]) -> Values:
    """The finite numbers of a line of metrics under their own names; step and clock are the tracker's business."""
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


def mirror(request: dict[str, Any], answer: Callable[..., None], ended: Callable[[], bool]) -> None:
    """Mirrors until the run has ended and everything was sent. What a tracker raises goes through."""
    folder, name = Path(request["run_dir"]), request["tracker"]
    memory = folder / "trackers" / f"{name}.json"
    known = json.loads(memory.read_text(encoding="utf-8")) if memory.is_file() else {}
    answer(busy="start")
    client = CLIENTS[name](Target(folder.name, folder, request["config"], bool(known), known.get("id")))
    source, sent = Source(folder, int(known.get("step", 0))), int(known.get("step", 0))
    source._scored = set(known.get("scores", []))
    answer(sent=sent)
    last_look = False
    while not last_look:
        last_look = ended()
        for step, values in source.news():
            answer(busy="log")
            client.log(step, values)
            sent = max(sent, step)
            answer(sent=sent)
        state = {"id": client.id, "step": sent, "scores": sorted(source._scored)}
        if state != known:
            known = state
            write_atomic(memory, json.dumps(state))
    answer(busy="finish")
    client.finish()
    answer(sent=sent, done=True)


def run_ended() -> bool:
    """Waits a little; True when the standard input says so, or has ended, as it does with the process that writes it."""
    ready, _, _ = select.select([0], [], [], POLL_SECONDS)
    if ready:
        os.read(0, 64)
    return bool(ready)


def leave_after(parent: int) -> None:
    """Ends this process a while after the one that started it, whatever the tracker is at."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main() -> int:
    """The whole life of the process. Ctrl-C is not for it: the run ends in order, and then this does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trackers print goes to the log, not among the answers

    def answer(**fields: Any) -> None:
        with suppress(OSError):  # the run's process has gone; what is left is sent all the same
            answers.write(json.dumps(fields) + "\n")
            answers.flush()

    threading.Thread(target=leave_after, args=(os.getppid(),), daemon=True).start()
    size = int(os.read(0, 16))  # unbuffered: what follows is looked at by `select`
    text = b""
    while len(text) < size:
        text += os.read(0, size - len(text))
    try:
        mirror(json.loads(text), answer, run_ended)
    except (Exception, SystemExit) as error:
        answer(failed=redact(f"{type(error).__name__}: {error}")[:500])
        if not isinstance(error, (RunError, SystemExit)):
            raise
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what a tracker left behind (threads, exit handlers) may not hold anything up
