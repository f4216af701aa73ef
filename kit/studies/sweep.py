"""Search over configuration keys with Optuna: `grpo-kit sweep sweep.yaml`.

A sweep file looks like this:

    config: quickstart                      # a preset or a file, as for `grpo-kit train`
    overrides: [optimisation.steps=20]
    trials: 12
    sampler: {name: tpe, seed: 0}
    pruner: {name: median}
    space:
      optimisation.learning_rate: {type: loguniform, low: 1.0e-5, high: 1.0e-3}
      objective.clip.eps_high: {type: uniform, low: 0.2, high: 0.4}
      model.lora.rank: {type: int, low: 4, high: 32, log: true}
      objective.recipe: [dapo, gspo]

Each trial is a normal run, made one after the other. A thread reads the held-out scores of the running trial and asks it to
stop when the pruner decides so. The study lies in an SQLite file, so the same command continues a killed sweep.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from kit import launch as launching
from kit.config import RunConfig, Section, load_config
from kit.config.loading import explain, read_yaml
from kit.errors import ConfigError, EnvironmentUnsupported, KitError, ObjectiveError, RunError, refuse
from kit.evaluation.checker import check_metric
from kit.evaluation.results import course, metric_key, value_of
from kit.runs.files import to_json, write_atomic
from kit.runs.lock import try_lock
from kit.runs.metrics import result_of
from kit.runs.store import ALIVE, RunDir
from kit.runs.worker import STOPPED
from kit.studies.arms import check_objective, stopped_by_hand

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")
ATTEMPTS = 3
"""Largest number of attempts for the values of a trial whose process died."""
POLL_SECONDS = 0.5
FOLDER, DATABASE, TABLE, BEST = "sweeps", "study.db", "table.json", "best.yaml"


# --- the sweep file ---------------------------------------------------------------------------------------------------


class Range(Section):
    """The values of one key: numbers between two ends, or one of several choices. Optuna checks how they go together."""

    type: Literal["uniform", "loguniform", "int", "categorical"] = "categorical"
    """Real numbers, real numbers of which every order of magnitude is equally likely, whole numbers, or choices."""
    low: float = 0.0
    """Smallest value."""
    high: float = 1.0
    """Largest value."""
    step: float | None = None
    """uniform, int: distance of the values; null: any number."""
    log: bool = False
    """int: every order of magnitude equally likely; not together with step."""
    choices: list[Any] = Field(default_factory=list)
    """categorical: the values, which may be mappings such as a hook with its hyper-parameters."""

    def samples(self) -> list[Any]:
        """The choices, or the two ends."""
        return self.choices if self.type == "categorical" else [self.low, self.high]

    def distribution(self, optuna: Any) -> Any:
        """The same as Optuna's distribution. Raises `ValueError` for values that do not go together."""
        distributions = optuna.distributions
        if self.type == "categorical":
            return distributions.CategoricalDistribution([_encoded(choice) for choice in self.choices])
        if self.type == "int":
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return distributions.FloatDistribution(self.low, self.high, log=self.type == "loguniform", step=self.step)


class SamplerConfig(Section):
    """How the next values are proposed."""

    name: Literal["tpe", "random"] = "tpe"
    """Tree-structured Parzen estimator (Bergstra et al. 2011), or random values."""
    seed: int = 0
    """Seed of its proposals."""
    startup_trials: Annotated[int, Field(ge=1)] = 8
    """Trials that tpe draws at random before it begins to learn."""


class PrunerConfig(Section):
    """How trials that will not win are ended early, by their held-out scores in between. Needs evaluation.every."""

    name: Literal["median", "hyperband", "none"] = "none"
    """`median`: below the median of the others at that step. `hyperband`: successive halving (arXiv 1603.06560)."""
    startup_trials: Annotated[int, Field(ge=0)] = 4
    """median: trials that must have ended before any is ended early."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """median: optimiser steps of a trial that are never judged."""
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    """hyperband: one in so many goes on at each rung."""


class SweepConfig(Section):
    """Everything that decides a sweep."""

    config: str | dict[str, Any] = "quickstart"
    """A preset's name, a YAML file, or the configuration itself."""
    overrides: list[str] = Field(default_factory=list)
    """`section.key=value` for every trial."""
    name: str | None = None
    """Name of the sweep and beginning of its runs' ids; null: that of the file."""
    trials: Annotated[int, Field(ge=1)] = 20
    """Trials in all, those of earlier starts included."""
    metric: str = "auto"
    """The held-out score to raise; auto: what evaluation.metric says."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    pruner: PrunerConfig = Field(default_factory=PrunerConfig)
    space: Annotated[dict[str, Range], Field(min_length=1)]
    """What is searched: a range or a list of choices for each `section.key`."""

    @field_validator("space", mode="before")
    @classmethod
    def _lists_are_choices(cls, space: Any) -> Any:
        if not isinstance(space, Mapping):
            return space
        return {key: {"choices": values} if isinstance(values, list) else values for key, values in space.items()}

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError("a sweep's name has 1 to 48 lower-case letters, digits and dashes, no dash at either end")
        return value


def load_sweep(path: str | Path) -> SweepConfig:
    """Read a sweep from its file. Raises `ConfigError`."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}'. A sweep is described by a YAML file: see docs/sweep.md.")
    try:
        sweep = SweepConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(explain(error, path.name, SweepConfig)) from None
    if sweep.name is None:
        sweep.name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:48].strip("-") or "sweep"
    return sweep


def check(sweep: SweepConfig) -> dict[str, Any]:
    """Optuna's distribution of each key. Raises `ConfigError` for what cannot be searched, before anything runs."""
    optuna = import_optuna()
    base = base_config(sweep)
    metric = metric_of(sweep)
    own_reward = base.evaluation.checker is None or metric == "greedy_reward"
    distributions = {}
    for key, values in sweep.space.items():
        section, _, rest = key.partition(".")
        judged = section == "reward" and rest.partition(".")[0] in ("", "preset", "params", "functions")
        refuse(
            ConfigError,
            (
                section in ("run", "evaluation", "data"),
                f"space.{key} would measure the trials by different yardsticks (held-out problems, seeds, folders).",
                "Set it under overrides.",
            ),
            (
                judged and own_reward,
                f"space.{key} would judge each trial by its own reward, which are different yardsticks.",
                "Set evaluation.checker under overrides to a preset that says what is right (grpo-kit reward list), and a "
                "metric other than greedy_reward.",
            ),
        )
        faults = []
        for value in values.samples():
            try:
                check_objective(trial_config(sweep, {key: value}, "t", Path("runs")), [key])
            except (ConfigError, ObjectiveError) as error:
                faults.append(str(error))
        if len(faults) == len(values.samples()):  # a combination of usable values may still be wrong
            raise ConfigError(f"space.{key}: no value of it can be used. {' '.join(faults[:1])}")
        try:
            distributions[key] = values.distribution(optuna)
        except ValueError as error:
            raise ConfigError(f"space.{key}: {error}") from None
    check_metric(metric, base, "metric")
    refuse(
        ConfigError,
        (
            not base.evaluation.after,
            "A sweep needs the held-out score after training.",
            "Set evaluation.after to true.",
        ),
        (
            sweep.pruner.name != "none" and not base.evaluation.every,
            f"pruner {sweep.pruner.name} looks at held-out scores during training, and there are none.",
            "Set evaluation.every under overrides (optimiser steps between scores), or pruner: {name: none}.",
        ),
    )
    return distributions


def metric_of(sweep: SweepConfig) -> str:
    """The held-out score to raise."""
    return base_config(sweep).evaluation.metric if sweep.metric == "auto" else sweep.metric


def base_config(sweep: SweepConfig) -> RunConfig:
    """The configuration that all trials share. Raises `ConfigError`."""
    return load_config(sweep.config, sweep.overrides)


def trial_config(sweep: SweepConfig, values: Mapping[str, Any], run_id: str, root: Path) -> RunConfig:
    """The configuration of one trial. Raises `ConfigError` for values that do not go together."""
    changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    names = [f"run.id={json.dumps(run_id)}", f"run.root={json.dumps(str(root))}"]
    return load_config(sweep.config, [*sweep.overrides, *changes, *names])


# --- the study --------------------------------------------------------------------------------------------------------


def carry_out(
    sweep: SweepConfig, root: Path, tell: Callable[[str], None] = print, *, quiet: bool = True
) -> dict[str, Any]:
    """Make the missing trials, one after the other, and return what `collect` does; continues an existing study.

    Raises `ConfigError` for a sweep that cannot be searched, `KeyboardInterrupt` on Ctrl-C (the next start tries the
    trial in progress again), `RunError` when no trial has a score or another process makes this sweep.
    """
    optuna = import_optuna()
    ranges = check(sweep)
    states, metric = optuna.trial.TrialState, metric_of(sweep)
    with _alone(_folder(sweep, root)):
        study = _open_study(optuna, sweep, root)
        for trial in study.get_trials(states=[states.RUNNING]):
            run = RunDir(root / _run_id(study, trial))
            if run.path.is_dir() and run.status()["state"] in ALIVE:  # a trainer that outlived its sweep
                run.write_text("control/stop", "its sweep died\n")
            _try_again(study, trial)
            tell(f"{run.id} had died; its values are tried again")
        while True:
            trials, replaced = study.get_trials(deepcopy=False), _replaced(study)
            # Failed trials count as made, except those that are tried again.
            made = [each for each in trials if each.state.name != "WAITING" and each.number not in replaced]
            if len(made) >= sweep.trials:
                break
            trial = study.ask(ranges)
            values = _values_of(sweep, trial.params)
            run_id = _run_id(study, trial)
            shown = ", ".join(f"{key.rpartition('.')[2]} {short(value)}" for key, value in values.items())
            tell(f"[{trial.number + 1}] {run_id}: {shown}")
            state, value, step, reason = "failed", None, 0, ""
            try:
                state, value, step = make_trial(trial_config(sweep, values, run_id, root), metric, trial, quiet=quiet)
            except KitError as error:
                reason = str(error)
            except BaseException:
                _try_again(study, trial)
                raise
            trial.set_user_attr("step", step)
            trial.set_user_attr("reason", reason[:500])
            of_optuna = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
            study.tell(trial, value if state == "complete" else None, state=of_optuna)
            score_text = "" if value is None else f" {value:.4f} at step {step}"
            tell(f"    {state}{score_text}{f': {reason}' if reason else ''}")
            _write_results(study, sweep, root)
        results = _write_results(study, sweep, root)
    if results["best"] is None:
        reasons = sorted({row["reason"] for row in results["trials"] if row["reason"]})
        raise RunError(
            f"No trial of sweep '{sweep.name}' has a score. "
            + (f"Reasons: {'; '.join(reasons[:3])} " if reasons else "")
            + f"The runs lie in {root}; each one's log.txt says what went wrong."
        )
    return results


def look(sweep: SweepConfig, root: Path) -> dict[str, Any]:
    """The results so far; trains and writes nothing. Raises `RunError` when there is no such sweep."""
    optuna = import_optuna()
    database = _folder(sweep, root) / DATABASE
    if not database.is_file():
        raise RunError(f"There is no sweep '{sweep.name}' in {root} yet. Start it without --show.")
    return collect(optuna.load_study(storage=f"sqlite:///{database}", study_name=sweep.name), sweep, root)


def import_optuna() -> Any:
    """Import Optuna with its log lines off. Raises `EnvironmentUnsupported` with the install command."""
    try:
        import optuna
    except ImportError:
        raise EnvironmentUnsupported(
            "A sweep needs Optuna. Install it with: uv sync --inexact --extra sweep  (or: pip install 'grpo-kit[sweep]')"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the sweep's lock, so that a trial noted as running is known to be dead. Raises `RunError`."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = try_lock(folder / "lock")
    if handle is None:
        raise RunError(f"Another process makes the trials of this sweep ({folder}). Follow it with --show.")
    try:
        yield
    finally:
        os.close(handle)


def _folder(sweep: SweepConfig, root: Path) -> Path:
    return root / FOLDER / str(sweep.name)


def _run_id(study: Any, trial: Any) -> str:
    return f"{study.study_name}-t{trial.number:04d}"


def _open_study(optuna: Any, sweep: SweepConfig, root: Path) -> Any:
    """Create the study or continue it. Raises `ConfigError` when a sweep of that name searches something else."""
    folder, pruner, base = _folder(sweep, root), sweep.pruner, base_config(sweep)
    if not (folder / DATABASE).is_file() and (first := root / f"{sweep.name}-t0000").exists():
        raise RunError(f"{first} is there already, of an earlier sweep '{sweep.name}'. Give this one another name.")
    pruners, samplers = optuna.pruners, optuna.samplers
    chosen = pruners.NopPruner()
    if pruner.name == "median":
        chosen = pruners.MedianPruner(pruner.startup_trials, pruner.warmup_steps)
    elif pruner.name == "hyperband":
        chosen = pruners.HyperbandPruner(base.evaluation.every, base.optimisation.steps, pruner.reduction_factor)
    study = optuna.create_study(
        storage=f"sqlite:///{folder / DATABASE}",
        study_name=sweep.name,
        direction="maximize",
        load_if_exists=True,
        pruner=chosen,
    )
    content = json.loads(sweep.model_dump_json(exclude={"trials"})) | {"base": base.model_dump(mode="json")}
    earlier = study.user_attrs.get("searched", content)
    if changed := [key for key in content if earlier.get(key) != content[key]]:
        raise ConfigError(
            f"There is a sweep '{sweep.name}' already with another {', '.join(changed)}; only trials may change as it goes on. "
            f"Give this one another name, or remove {folder} and its runs."
        )
    study.set_user_attr("searched", content)
    # The number of trials is part of the seed: a sweep that goes on does not draw the first values again.
    seed = sweep.sampler.seed + 1000 * len(study.trials)
    study.sampler = samplers.RandomSampler(seed=seed)
    if sweep.sampler.name == "tpe":
        study.sampler = samplers.TPESampler(seed=seed, n_startup_trials=sweep.sampler.startup_trials)
    return study


def _encoded(choice: Any) -> Any:
    """A choice as Optuna stores it: plain values as they are, mappings and lists as JSON."""
    return choice if choice is None or isinstance(choice, (str, int, float, bool)) else json.dumps(choice)


def _values_of(sweep: SweepConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a trial with mappings and lists decoded."""
    return {
        key: next((choice for choice in sweep.space[key].choices if _encoded(choice) == value), value)
        for key, value in params.items()
    }


def _try_again(study: Any, trial: Any) -> None:
    """Note an interrupted trial as failed and put its values in the queue again, at most `ATTEMPTS` times in all."""
    replaces = [*trial.user_attrs.get("replaces", []), trial.number]
    study.tell(trial.number, state=import_optuna().trial.TrialState.FAIL)
    if len(replaces) < ATTEMPTS:
        study.enqueue_trial(trial.params, user_attrs={"replaces": replaces})


def _replaced(study: Any) -> set[int]:
    """Numbers of the interrupted trials whose values were put in the queue again."""
    return {number for trial in study.get_trials(deepcopy=False) for number in trial.user_attrs.get("replaces", [])}


# --- one trial --------------------------------------------------------------------------------------------------------


def make_trial(config: RunConfig, metric: str, trial: Any, *, quiet: bool = True) -> tuple[str, float | None, int]:
    """Train a trial to its end. Returns its state (complete or pruned), its score and the step of the score.

    `trial` is Optuna's: it hears of every held-out score, and says when the run is to stop. Raises `KitError` for a trial
    that failed, and `KeyboardInterrupt` when it was ended by Ctrl-C.
    """
    run = RunDir(Path(config.run.root) / str(config.run.id))
    over, pruned, reported = threading.Event(), threading.Event(), set[int]()

    def report_scores() -> None:
        for result in course(run):
            step, value = result["step"], score(result, metric)
            if step > max(reported, default=0) and value is not None:
                reported.add(step)
                trial.report(value, step)
                if trial.should_prune() and not over.is_set():
                    pruned.set()
                    run.write_text("control/stop", "pruned by the sweep\n")

    def follow() -> None:
        while not over.wait(POLL_SECONDS):
            with suppress(KitError):  # the directory is not there yet, or a file is only half written
                report_scores()

    thread = threading.Thread(target=follow, name=f"watch-{run.id}", daemon=True)
    thread.start()
    try:
        outcome = launching.launch(config, quiet=quiet)
    finally:
        over.set()
        thread.join()
    with suppress(KitError):  # scores written since the last look count when other trials are judged
        report_scores()
    if outcome.error is not None:
        raise outcome.error
    evaluations = run.evaluations()
    name = result_of(evaluations)
    final = {} if name is None else evaluations[name]
    step, value = int(final.get("step") or 0), score(final, metric)
    if outcome.code == STOPPED and pruned.is_set():
        return "pruned", value, step
    if outcome.code == STOPPED and not stopped_by_hand(run):
        raise KeyboardInterrupt
    if outcome.code == STOPPED or value is None:
        reason = "stopped by hand" if outcome.code == STOPPED else f"it ended without the held-out score '{metric}'"
        raise RunError(f"{run.id}: {reason}")
    return "complete", value, step


def score(result: Any, metric: str) -> float | None:
    """The score that a sweep raises, of one evaluation."""
    return value_of(result, metric_key(metric, int(result.get("k") or 1), checked="greedy_accuracy" in result))


# --- results ----------------------------------------------------------------------------------------------------------


def _write_results(study: Any, sweep: SweepConfig, root: Path) -> dict[str, Any]:
    """Write table.json, and best.yaml once there is a best trial; return what the table holds."""
    results, folder = collect(study, sweep, root), _folder(sweep, root)
    write_atomic(folder / TABLE, to_json(results, indent=2) + "\n")
    if best := results["best"]:
        with suppress(KitError):  # the run was removed: best.yaml stays as it is
            config = load_config(root / best["run"] / "config.yaml")
            config.run.id = None
            lines = [f"# The best trial of a sweep: run {best['run']}, held-out score {best['value']:.4f}."]
            lines += [f"#   {key}: {value}" for key, value in best["params"].items()]
            write_atomic(folder / BEST, "\n".join(lines) + "\n\n" + config.to_yaml())
    return results


def collect(study: Any, sweep: SweepConfig, root: Path) -> dict[str, Any]:
    """The results as plain values, ready for JSON; writes nothing."""
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    replaced, rows = _replaced(study), []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "WAITING":
            continue
        last_step_reported, last_value = max(trial.intermediate_values.items(), default=(None, None))
        again = trial.number in replaced
        row = {
            "trial": trial.number,
            "run": _run_id(study, trial),
            "state": names[trial.state.name],
            "value": last_value if trial.value is None else trial.value,
            "step": trial.user_attrs.get("step") or last_step_reported,
            "params": _values_of(sweep, trial.params),
            "seconds": None if trial.duration is None else trial.duration.total_seconds(),
            "reason": "interrupted; tried again" if again else trial.user_attrs.get("reason", ""),
        }
        rows.append(row)
    return {
        "kind": "sweep",
        "name": sweep.name,
        "folder": str(_folder(sweep, root)),
        "metric": sweep.metric,
        "best": max((row for row in rows if row["state"] == "complete"), key=lambda row: row["value"], default=None),
        "trials": rows,
    }


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, the best first; then pruned ones by their last score, and failures."""
    keys = list(dict.fromkeys(key for row in results["trials"] for key in row["params"]))
    order = {"complete": 0, "pruned": 1, "running": 2, "failed": 3}
    ranked = sorted(results["trials"], key=lambda row: (order[row["state"]], -(row["value"] or 0.0), row["trial"]))
    rows = [
        [
            str(row["run"]),
            row["state"],
            "-" if row["value"] is None else f"{row['value']:.4f}",
            "-" if row["step"] is None else str(row["step"]),
            *(short(row["params"].get(key)) for key in keys),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f} s",
            row["reason"].partition("\n")[0][:80],
        ]
        for row in ranked
    ]
    return ["run", "state", "score", "step", *keys, "time", "note"], rows


def short(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
