"""One trial: a normal run, watched for held-out scores while it trains, and asked to stop when it will not win."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.config import RunConfig
from kit.errors import KitError, RunError
from kit.evaluation.selection import course, metric_key, read_result, value_of
from kit.runs.child import STOPPED
from kit.runs.curves import last_step, result_of, step_of
from kit.runs.store import RunDir

POLL_SECONDS = 0.5
Report = Callable[[int, float], bool]
"""Called with step and score; True asks for the trial to be ended."""


@dataclass(frozen=True)
class Result:
    """How a trial ended: `complete`, `pruned`, `failed`, or `stopped` by somebody. The score is the last one seen."""

    state: str
    value: float | None = None
    step: int = 0
    reason: str = ""
    yardstick: dict[str, Any] = field(default_factory=dict)
    """What it was measured by (`yardstick`)."""


class Watch:
    """Reads the evaluations of a running trial as they appear and passes each to `report` once."""

    def __init__(self, run: RunDir, metric: str, report: Report) -> None:
        self.run, self.metric, self.report = run, metric, report
        self.seen = -1
        self.pruned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"watch-{run.id}", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        with suppress(KitError):
            self.look()  # what came after the last look counts for the judgement of others

    def look(self) -> None:
        """Reports scores that are new, and asks the run to stop when `report` wants it to."""
        for result in course(self.run):
            value = score(result, self.metric)
            if result["step"] <= self.seen or value is None:
                continue
            self.seen = result["step"]
            unwanted = bool(self.seen) and self.report(self.seen, value)
            if unwanted and not self.pruned and not self._over.is_set():
                self.pruned = True
                self.run.write_text("control/stop", "pruned by the sweep\n")

    def _loop(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self.look()
            except KitError:  # the directory is not there yet, or a file is being looked at too early
                continue


def score(result: Any, metric: str) -> float | None:
    """The score that a sweep raises, of one evaluation."""
    return value_of(result, metric_key(metric, int(result.get("k") or 1), checked="greedy_accuracy" in result))


def run_trial(config: RunConfig, metric: str, report: Report, *, quiet: bool = True) -> Result:
    """Trains a trial to its end and says how it went; a trial that fails is a result, too."""
    from kit.api import launch as api

    run = RunDir(Path(config.run.root) / str(config.run.id))
    with Watch(run, metric, report) as watch:
        try:
            _, outcome = api.launch(config, quiet=quiet)
        except KitError as error:
            return Result("failed", reason=str(error))
    if outcome.error is not None:
        return Result("failed", reason=str(outcome.error))
    try:
        scores = final_scores(run)
    except RunError as error:
        return Result("failed", reason=str(error))
    step, value = int(scores.get("step") or 0), score(scores, metric)
    if outcome.code == STOPPED:
        return Result("pruned" if watch.pruned else "stopped", value, step)
    if value is None:
        return Result("failed", reason=f"run {run.id} ended without the held-out score '{metric}'")
    return Result("complete", value, step, yardstick=yardstick(scores))


def final_scores(run: RunDir) -> dict[str, Any]:
    """The evaluation of the run's result; empty where there is none. Raises `RunError` for a file that cannot be read."""
    paths = {path.stem: path for path in run.eval.glob("*.json") if step_of(path.stem, 0) is not None}
    evaluations = {name: read_result(path) for name, path in paths.items()}
    name = result_of(evaluations, last_step(run.metrics()))
    if name is None:
        return {}
    return {"step": step_of(name, last_step(run.metrics()))} | evaluations[name]


def yardstick(scores: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial was measured by: who says what is right, and on which problems. Empty where it does not say."""
    ids = (scores.get("per_problem") or {}).get("id")
    if not ids:
        return {}
    digest = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
    return {"checker": scores.get("checker"), "problems": len(ids), "hash": digest}
