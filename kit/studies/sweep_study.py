"""The memory of a sweep: an Optuna study in an SQLite file, which a killed sweep finds again."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, EnvironmentUnsupported, RunError
from kit.runs.process import create_time, is_alive
from kit.runs.store import ALIVE, RunDir
from kit.studies.sweep_config import Categorical, Integer, SweepConfig, Uniform, base_config

ATTEMPTS = 3
"""How often the values of a trial whose process died are tried, the first time included."""
FOLDER, DATABASE, PLAN = "sweeps", "study.db", "sweep.json"
MAY_GROW = ("trials", "parallel", "resources")


@dataclass(frozen=True)
class Result:
    """How a trial ended: `complete`, `pruned`, `failed`, or `stopped` by somebody. The score is the last one seen."""

    state: str
    value: float | None = None
    step: int = 0
    reason: str = ""
    yardstick: dict[str, Any] = field(default_factory=dict)
    """What it was measured by (`yardstick`)."""


@dataclass(frozen=True)
class Proposal:
    """Values to try, and the id of the run that tries them."""

    number: int
    run_id: str
    values: dict[str, Any]
    trial: Any


class Study:
    """Asks for values, is told results. Raises `EnvironmentUnsupported` without Optuna."""

    def __init__(self, sweep: SweepConfig, root: Path, *, only_look: bool = False) -> None:
        """Makes the study or goes on with it; `only_look`: reads one that is there, as it was claimed, and writes nothing."""
        optuna = import_optuna()
        assert sweep.name is not None, "load_sweep() gives every sweep a name"
        self.folder, self.differs = folder_of(root, sweep.name), list[str]()
        if only_look:
            sweep, self.differs = _as_claimed(sweep, self.folder / PLAN)
        self.sweep, self.root, self.name, self.optuna = sweep, root, str(sweep.name), optuna
        self.distributions = {key: _distribution(optuna, of_key) for key, of_key in sweep.space.items()}
        if only_look:
            self.study = optuna.load_study(storage=f"sqlite:///{self.folder / DATABASE}", study_name=self.name)
            return
        new = not (self.folder / DATABASE).is_file()
        if new and (taken := root / f"{sweep.name}-t0000").exists():
            raise RunError(f"{taken} is there already, of an earlier sweep '{sweep.name}'. Give this one another name.")
        self._claim()
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.folder / DATABASE}",
            study_name=sweep.name,
            direction="maximize",
            load_if_exists=True,
            pruner=_pruner(optuna, sweep),
        )
        self.study.sampler = self._sampler()
        if new and sweep.sampler.name == "grid":
            for values in self._grid():
                self.study.enqueue_trial(values)

    def ask(self) -> Proposal:
        """The next values, noted as running before they are handed out."""
        trial = self.study.ask(self.distributions)
        run_id = f"{self.name}-t{trial.number:04d}"
        trial.set_user_attr("run", run_id)
        trial.set_user_attr("worker", {"pid": os.getpid(), "created": create_time(), "host": socket.gethostname()})
        values = {key: _decoded(self.sweep.space[key], value) for key, value in trial.params.items()}
        return Proposal(trial.number, run_id, values, trial)

    def report(self, proposal: Proposal, step: int, value: float) -> bool:
        """Notes a score during training; True when the trial should end."""
        proposal.trial.report(value, step)
        return bool(proposal.trial.should_prune())

    def tell(self, proposal: Proposal, result: Result) -> Result:
        """Notes how a trial ended, and returns that: a trial measured by another yardstick than the first has failed."""
        result = self._measured_alike(proposal, result)
        states = self.optuna.trial.TrialState
        proposal.trial.set_user_attr("step", result.step)
        if result.reason:
            proposal.trial.set_user_attr("reason", result.reason[:500])
        if result.state == "complete":
            self.study.tell(proposal.trial, result.value)
        elif result.state == "pruned":
            self.study.tell(proposal.trial, state=states.PRUNED)
        else:
            self.study.tell(proposal.trial, state=states.FAIL)
        return result

    def _measured_alike(self, proposal: Proposal, result: Result) -> Result:
        if result.state != "complete" or not result.yardstick:
            return result
        first = self.study.user_attrs.get("yardstick")
        if first is None:
            self.study.set_user_attr("yardstick", result.yardstick | {"run": proposal.run_id})
            return result
        faults = []
        if first["checker"] != result.yardstick["checker"]:
            faults.append(f"what is right was said by {result.yardstick['checker']}, there by {first['checker']}")
        if first["hash"] != result.yardstick["hash"]:
            faults.append(f"the {result.yardstick['problems']} held-out problems are not its {first['problems']}")
        if not faults:
            return result
        reason = f"its score cannot be compared with that of {first['run']}: {'; '.join(faults)}"
        return Result("failed", step=result.step, reason=reason)

    def give_up(self, proposal: Proposal) -> None:
        """A trial that was interrupted: noted as failed, its values tried again when the sweep goes on."""
        self._fail(proposal.number, "interrupted")

    def retry_dead(self) -> list[str]:
        """Trials noted as running whose sweep has died, noted as failed and put in the queue again; their runs' ids."""
        dead = [trial for trial in self._trials("RUNNING") if not self._lives(trial)]
        for trial in dead:
            run = RunDir(self.root / str(trial.user_attrs.get("run")))
            if run.path.is_dir() and run.status()["state"] in ALIVE:  # a trainer that outlived its sweep
                run.write_text("control/stop", "its sweep died\n")
            self._fail(trial.number, "its process died")
        return [str(trial.user_attrs.get("run")) for trial in dead]

    def remaining(self) -> int:
        """Trials still to be made. Failed ones count as made, those that are tried again aside."""
        trials = self.study.get_trials(deepcopy=False)
        made = [t for t in trials if t.state.name != "WAITING" and not t.user_attrs.get("again")]
        wanted = self.sweep.trials
        if self.sweep.sampler.name == "grid":
            wanted = min(wanted, len(self._grid()))
        return max(0, wanted - len(made))

    def rows(self) -> list[dict[str, Any]]:
        """One record a trial, in their order; what waits is left out."""
        return [self._row(trial) for trial in self.study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    def importances(self) -> dict[str, float]:
        """Share of the scores' variance that each key explains (fANOVA, Hutter et al. 2014); empty below 4 trials."""
        complete = self._trials("COMPLETE")
        if len(complete) < 4 or len({trial.value for trial in complete}) < 2 or len(self.distributions) < 2:
            return {}
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        try:
            found = get_param_importances(self.study, evaluator=FanovaImportanceEvaluator(seed=0))
        except ImportError:
            return {}
        return {key: float(share) for key, share in found.items()}

    def best_run(self) -> str | None:
        """The id of the run with the best score; None before there is one."""
        complete = self._trials("COMPLETE")
        return str(max(complete, key=lambda trial: trial.value).user_attrs["run"]) if complete else None

    def _row(self, trial: Any) -> dict[str, Any]:
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
        last = max(trial.intermediate_values.items(), default=(None, None))
        seconds = trial.duration.total_seconds() if trial.duration is not None else None
        return {
            "trial": trial.number,
            "run": trial.user_attrs.get("run"),
            "state": names[trial.state.name],
            "value": trial.value if trial.value is not None else last[1],
            "step": trial.user_attrs.get("step") or last[0],
            "params": {key: _decoded(self.sweep.space[key], value) for key, value in trial.params.items()},
            "seconds": seconds,
            "reason": trial.user_attrs.get("reason", ""),
        }

    def _trials(self, state: str) -> list[Any]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name == state]

    def _lives(self, trial: Any) -> bool:
        worker = trial.user_attrs.get("worker")
        if not worker:  # killed between asking and writing itself down
            return False
        if worker["host"] != socket.gethostname():
            run = RunDir(self.root / str(trial.user_attrs.get("run")))
            return run.path.is_dir() and run.status()["state"] in ALIVE
        return is_alive(worker["pid"], worker["created"])

    def _fail(self, number: int, reason: str) -> None:
        trial = self.study.get_trials(deepcopy=False)[number]
        attempt = int(trial.user_attrs.get("attempt", 1))
        again = attempt < ATTEMPTS and bool(trial.params)
        storage, key = self.study._storage, trial._trial_id  # a frozen trial of another process has no public setter
        storage.set_trial_user_attr(key, "reason", reason)
        # Without values (killed while they were drawn) there is nothing to repeat: another trial takes its place.
        storage.set_trial_user_attr(key, "again", again or not trial.params)
        self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
        if again:
            self.study.enqueue_trial(trial.params, user_attrs={"attempt": attempt + 1})

    def _sampler(self) -> Any:
        """Seeded by the number of trials, too: a sweep that goes on does not draw the first values again."""
        samplers, wanted = self.optuna.samplers, self.sweep.sampler
        seed = wanted.seed + 1000 * len(self.study.get_trials(deepcopy=False))
        if wanted.name == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=wanted.startup_trials)
        return samplers.RandomSampler(seed=seed)

    def _grid(self) -> list[dict[str, Any]]:
        """Every combination, in an order drawn by the seed, so that a part of the grid is a fair part."""
        combinations = itertools.product(*(_values(of_key) for of_key in self.distributions.values()))
        points = [dict(zip(self.distributions, values, strict=True)) for values in combinations]
        random.Random(self.sweep.sampler.seed).shuffle(points)
        return points

    def _claim(self) -> None:
        """Files what is searched. Raises `ConfigError` when a sweep of that name searches something else."""
        from kit.runs.files import write_atomic

        content = _content(self.sweep)
        path = self.folder / PLAN
        if path.is_file() and (earlier := json.loads(path.read_text(encoding="utf-8"))) != content:
            changed = [key for key in content if earlier.get(key) != content[key]]
            raise ConfigError(
                f"There is a sweep '{self.name}' already with another {', '.join(changed)}; only {', '.join(MAY_GROW)} may "
                f"change as it goes on. Give this one another name, or remove {self.folder} and its runs."
            )
        write_atomic(path, json.dumps(content, indent=2) + "\n")


def _content(sweep: SweepConfig) -> dict[str, Any]:
    """What is searched: what may not change under one name."""
    content = _searched(sweep)
    return content | {"base": base_config(sweep).model_dump(mode="json")}


def _searched(sweep: SweepConfig) -> dict[str, Any]:
    """The sweep's own part of it."""
    content: dict[str, Any] = json.loads(sweep.model_dump_json(exclude=set(MAY_GROW)))
    return content


def _as_claimed(sweep: SweepConfig, path: Path) -> tuple[SweepConfig, list[str]]:
    """The sweep as it was when it was started, and what the file has changed since."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}. It says what the sweep '{sweep.name}' searches.") from error
    now = _searched(sweep)
    try:
        now = _content(sweep)
    except ConfigError:  # the configuration that it names is gone or wrong by now
        now["base"] = None
    grown = {key: value for key, value in sweep.model_dump(mode="json").items() if key in MAY_GROW}
    claimed = SweepConfig.model_validate({key: value for key, value in earlier.items() if key != "base"} | grown)
    return claimed, [key for key in now if earlier.get(key) != now[key]]


def folder_of(root: Path, name: str) -> Path:
    """Where a sweep of that name is filed, beside its runs."""
    return root / FOLDER / name


def import_optuna() -> Any:
    """Optuna, told to be quiet. Raises `EnvironmentUnsupported` with the install command."""
    try:
        import optuna
    except ImportError:
        raise EnvironmentUnsupported(
            "A sweep needs Optuna. Install it with: uv sync --inexact --extra sweep  (or: pip install 'grpo-kit[sweep]')"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, of_key: Any) -> Any:
    distributions = optuna.distributions
    if isinstance(of_key, Categorical):
        return distributions.CategoricalDistribution([_encoded(choice) for choice in of_key.choices])
    if isinstance(of_key, Integer):
        return distributions.IntDistribution(of_key.low, of_key.high, log=of_key.log, step=of_key.step)
    if isinstance(of_key, Uniform):
        return distributions.FloatDistribution(of_key.low, of_key.high, step=of_key.step)
    return distributions.FloatDistribution(of_key.low, of_key.high, log=True)


def _encoded(choice: Any) -> Any:
    """A choice as Optuna keeps it: plain values as they are, mappings and lists as JSON."""
    return choice if choice is None or isinstance(choice, (str, int, float, bool)) else json.dumps(choice)


def _decoded(of_key: Any, value: Any) -> Any:
    if not isinstance(of_key, Categorical):
        return value
    return next((choice for choice in of_key.choices if _encoded(choice) == value), value)


def _values(distribution: Any) -> list[Any]:
    """All values of a distribution that has finitely many."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    count = round((distribution.high - distribution.low) / distribution.step)
    return [distribution.low + place * distribution.step for place in range(count + 1)]


def _pruner(optuna: Any, sweep: SweepConfig) -> Any:
    wanted = sweep.pruner
    if wanted.name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=wanted.startup_trials, n_warmup_steps=wanted.warmup_steps)
    if wanted.name == "hyperband":
        base = base_config(sweep)
        return optuna.pruners.HyperbandPruner(
            min_resource=base.evaluation.every,
            max_resource=base.optimisation.steps,
            reduction_factor=wanted.reduction_factor,
        )
    return optuna.pruners.NopPruner()
