"""The same sweep on a Ray Tune cluster: the study stays here, trials train wherever Ray has room.

Tune asks the study for values (`Ask`), a trial on some node trains a normal run and reports its held-out scores, and the
study decides here whether it goes on; the wish to stop goes by the run's own control/stop file. So run.root must lie on a
disk that all nodes share; on one machine it does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, EnvironmentUnsupported, RunError
from kit.runs.store import RunDir
from kit.studies.sweep import describe, finish, run_trial, short, write_results
from kit.studies.sweep_config import SweepConfig, metric_of, trial_config
from kit.studies.sweep_study import Proposal, Result, Study

Tell = Callable[[str], None]
LOCAL = "local"
SWITCHES = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in a configuration are relative to the folder one starts from
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_AIR_NEW_OUTPUT": "0",  # our own lines say how it goes
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs keep their own records
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray is about to make its default, without the warning
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else, under `uv run`, each worker builds an environment anew
    "RAY_worker_niceness": "0",  # a trial is the work: at Ray's 15 it all but stands still beside any other busy process
}
"""Ray has these settings in the environment only; what is set there already stays."""


def carry_out_on_ray(sweep: SweepConfig, root: Path, address: str, tell: Tell = print) -> dict[str, Any]:
    """Makes the missing trials on a cluster. `address`: `local` starts one here, `auto` finds one, else its address.

    Raises `EnvironmentUnsupported` without Ray, `RunError` when the cluster cannot be reached or no trial has a score.
    """
    ray, tune = import_ray()
    study = Study(sweep, root.resolve())
    for run in study.retry_dead():
        tell(f"{run} had died; its values are tried again")
    if remaining := study.remaining():
        _connect(ray, sweep, address)
        try:
            _run(tune, study, sweep, remaining, tell)
        finally:
            if address == LOCAL:
                ray.shutdown()
        for run in study.retry_dead():
            tell(f"{run} has no result; its values are tried again next time")
    return finish(study)


def import_ray() -> tuple[Any, Any]:
    """Ray and Ray Tune. Raises `EnvironmentUnsupported` with the install command."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import tune
    except ImportError:
        raise EnvironmentUnsupported(
            "A sweep on a cluster needs Ray Tune. Install it with: uv sync --inexact --extra sweep --extra ray  "
            "(or: pip install 'grpo-kit[sweep,ray]'), or leave --ray out to run here."
        ) from None
    return ray, tune


def _connect(ray: Any, sweep: SweepConfig, address: str) -> None:
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        cores = max(1, round(sweep.resources.cpu * sweep.parallel))
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"The Ray cluster at '{address}' cannot be reached: {error}. Start one with: ray start --head, and give its address "
            "(or auto); local starts one on this machine for this sweep."
        ) from None


def _run(tune: Any, study: Study, sweep: SweepConfig, trials: int, tell: Tell) -> None:
    trainable = tune.with_resources(make_trainable(sweep, study.root), sweep.resources.model_dump())
    with tempfile.TemporaryDirectory(prefix="grpo-kit-ray-") as storage:  # Tune's own records; ours are the study's
        tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=make_searcher(tune, study, tell),
                num_samples=trials,
                max_concurrent_trials=sweep.parallel,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=study.name,
                storage_path=storage,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=0),
            ),
        ).fit()


def make_trainable(sweep: SweepConfig, root: Path) -> Callable[[dict[str, Any]], None]:
    """What a node does with a proposal: train the run, report scores on the way, and how it ended."""
    content, metric = sweep.model_dump(mode="json"), metric_of(sweep)

    def trial(proposal: dict[str, Any]) -> None:
        from ray import tune

        def report(step: int, value: float) -> bool:
            tune.report({"step": step, "score": value})
            return (RunDir(root / proposal["run"]).control / "stop").exists()

        try:
            config = trial_config(SweepConfig.model_validate(content), proposal["values"], proposal["run"], root)
            result = run_trial(config, metric, report)
        except ConfigError as error:
            result = Result("failed", reason=str(error))
        told = {"step": result.step, "score": result.value, "state": result.state, "reason": result.reason}
        tune.report(told | {"yardstick": json.dumps(result.yardstick)})

    return trial


def make_searcher(tune: Any, study: Study, tell: Tell) -> Any:
    """Tune's side of the study: proposals, decisions, results."""
    from ray.tune.search import Searcher

    class Ask(Searcher):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(metric="score", mode="max")
            self.proposals: dict[str, Proposal] = {}
            self.pruned: set[str] = set()

        def set_search_properties(self, *_: Any, **__: Any) -> bool:
            return True

        def suggest(self, trial_id: str) -> dict[str, Any]:
            proposal = self.proposals[trial_id] = study.ask()
            shown = ", ".join(f"{key.rpartition('.')[2]} {short(value)}" for key, value in proposal.values.items())
            tell(f"[{proposal.number + 1}] {proposal.run_id}: {shown}")
            return {"run": proposal.run_id, "values": proposal.values}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            if result.get("state") is None and trial_id not in self.pruned:
                proposal = self.proposals[trial_id]
                if study.report(proposal, result["step"], result["score"]):
                    self.pruned.add(trial_id)
                    RunDir(study.root / proposal.run_id).write_text("control/stop", "pruned by the sweep\n")

        def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
            proposal, record = self.proposals.pop(trial_id), result or {}
            state = record.get("state")
            if error or state is None:
                study.give_up(proposal)  # the node or the actor died: its values are tried again
                tell(f"    {proposal.run_id}: lost")
                return
            if state == "stopped":
                state = "pruned" if trial_id in self.pruned else "failed"
            reason, measured = str(record.get("reason") or ""), json.loads(record.get("yardstick") or "{}")
            ended = Result(state, record.get("score"), int(record.get("step") or 0), reason, measured)
            ended = study.tell(proposal, ended)
            tell(f"    {proposal.run_id}: {describe(ended)}")
            write_results(study)

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the study is on disk already."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing: the study is on disk already."""

    return Ask()
