"""The YAML of a sweep: what is searched, how, and how many trials. Pydantic and yaml only.

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
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from kit.config import RunConfig, Section, load_config
from kit.config.loading import explain, read_yaml
from kit.errors import ConfigError, ObjectiveError
from kit.evaluation.checker import check_metric
from kit.studies.arms import check_objective

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")
Scalar = str | int | float | bool | None


class Uniform(Section):
    """Real numbers, all equally likely, or at equal distances."""

    type: Literal["uniform"]
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    step: Annotated[float, Field(gt=0)] | None = None
    """Distance of the values; null: any number."""


class LogUniform(Section):
    """Positive numbers, every order of magnitude equally likely."""

    type: Literal["loguniform"]
    low: Annotated[float, Field(gt=0)]
    """Smallest value."""
    high: Annotated[float, Field(gt=0)]
    """Largest value."""


class Integer(Section):
    """Whole numbers."""

    type: Literal["int"]
    low: int
    """Smallest value."""
    high: int
    """Largest value."""
    step: Annotated[int, Field(ge=1)] = 1
    """Distance of the values."""
    log: bool = False
    """Every order of magnitude equally likely; not together with step."""


class Categorical(Section):
    """One of some values, which may be mappings such as a hook with its hyper-parameters."""

    type: Literal["categorical"] = "categorical"
    choices: Annotated[list[Any], Field(min_length=1)]
    """The values."""


Range = Annotated[Uniform | LogUniform | Integer | Categorical, Field(discriminator="type")]


class SamplerConfig(Section):
    """Who proposes the next values."""

    name: Literal["tpe", "random", "grid"] = "tpe"
    """Tree-structured Parzen estimator (Bergstra et al. 2011), chance, or every combination."""
    seed: int = 0
    """Seed of its proposals."""
    startup_trials: Annotated[int, Field(ge=1)] = 8
    """Trials that tpe draws by chance before it begins to learn."""


class PrunerConfig(Section):
    """Who ends trials that will not win, by their held-out scores in between. Needs evaluation.every."""

    name: Literal["median", "hyperband", "none"] = "none"
    """`median`: below the median of the others at that step. `hyperband`: successive halving (arXiv 1603.06560)."""
    startup_trials: Annotated[int, Field(ge=0)] = 4
    """median: trials that must have ended before any is ended early."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """median: optimiser steps of a trial that are never judged."""
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    """hyperband: one in so many goes on at each rung."""


class Resources(Section):
    """What a trial takes of a Ray cluster."""

    cpu: Annotated[float, Field(gt=0)] = 1
    """Cores."""
    gpu: Annotated[float, Field(ge=0)] = 0
    """GPUs; 1 where a trial trains on one."""


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
    """What is searched: a range for each `section.key`."""
    parallel: Annotated[int, Field(ge=1)] = 1
    """Trials at a time, on a Ray cluster; on this machine always one."""
    resources: Resources = Field(default_factory=Resources)

    @field_validator("space", mode="before")
    @classmethod
    def _lists_are_choices(cls, space: Any) -> Any:
        if not isinstance(space, Mapping):
            return space
        plain = {key: {"choices": of_key} if isinstance(of_key, list) else of_key for key, of_key in space.items()}
        return {
            key: {"type": "categorical"} | of_key if isinstance(of_key, dict) and "choices" in of_key else of_key
            for key, of_key in plain.items()
        }

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError("a sweep's name has 1 to 48 lower-case letters, digits and dashes, no dash at either end")
        return value

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> SweepConfig:
        for key, of_key in self.space.items():
            if not isinstance(of_key, Categorical) and of_key.low > of_key.high:
                raise ValueError(f"space.{key}: low {of_key.low:g} is above high {of_key.high:g}")
            if isinstance(of_key, Integer) and of_key.log and (of_key.step != 1 or of_key.low < 1):
                raise ValueError(f"space.{key}: with log, low must be 1 or more and step 1")
            endless = isinstance(of_key, LogUniform) or (isinstance(of_key, Uniform) and of_key.step is None)
            if self.sampler.name == "grid" and endless:
                raise ValueError(f"space.{key}: a grid needs a list of values, an int range, or uniform with a step")
        return self


def load_sweep(path: str | Path, *, only_look: bool = False) -> SweepConfig:
    """A sweep from its file, every key of it checked against the configuration, or `only_look`. Raises `ConfigError`."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}'. A sweep is described by a YAML file: see docs/sweep.md.")
    try:
        sweep = SweepConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(explain(error, path.name, SweepConfig)) from None
    if sweep.name is None:
        stem = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:48].strip("-")
        sweep.name = stem or "sweep"
    if not only_look:
        check(sweep)
    return sweep


def check(sweep: SweepConfig) -> None:
    """Refuses keys that do not exist or may not be searched, before anything runs. Raises `ConfigError`."""
    base = base_config(sweep)
    for key in sweep.space:
        _check_yardstick(key, base, metric_of(sweep))
    check_metric(metric_of(sweep), base, "metric")
    for key, of_key in sweep.space.items():  # each alone: a combination may be wrong where every value is right
        _check_key(sweep, key, of_key)
    if not base.evaluation.after:
        raise ConfigError("A sweep needs the held-out score after training: set evaluation.after to true.")
    if sweep.pruner.name != "none" and not base.evaluation.every:
        raise ConfigError(
            f"pruner {sweep.pruner.name} looks at held-out scores during training, and there are none: set evaluation.every "
            "under overrides (optimiser steps between scores), or pruner: {name: none}."
        )


def _check_yardstick(key: str, base: RunConfig, metric: str) -> None:
    """Raises `ConfigError` for a key that changes what trials are measured by, so that scores would say nothing."""
    section, _, rest = key.partition(".")
    if section == "run" and rest in ("", "id", "root"):
        raise ConfigError(f"space.{key}: the sweep sets it for every trial.")
    if (section, rest) == ("run", "seed"):
        raise ConfigError(
            f"space.{key} would search for a lucky seed, which is no better with another one. Set it under overrides."
        )
    if section == "evaluation":
        raise ConfigError(f"space.{key} would measure trials by different yardsticks; set it under overrides.")
    if section == "data":
        raise ConfigError(
            f"space.{key} would hold out other problems in each trial, which are different yardsticks; set it under overrides."
        )
    if section == "reward" and rest.partition(".")[0] in ("", "preset", "params", "functions"):
        if base.evaluation.checker is None:
            raise ConfigError(
                f"space.{key} would have each trial judged by its own reward, which are different yardsticks. Set "
                "evaluation.checker under overrides to a preset that says what is right (grpo-kit reward list)."
            )
        if metric == "greedy_reward":
            raise ConfigError(
                f"space.{key}: greedy rewards of different rewards are not on one scale; choose another metric."
            )


def metric_of(sweep: SweepConfig) -> str:
    """The held-out score to raise."""
    return base_config(sweep).evaluation.metric if sweep.metric == "auto" else sweep.metric


def _check_key(sweep: SweepConfig, key: str, of_key: Uniform | LogUniform | Integer | Categorical) -> None:
    """Raises `ConfigError` when there is no such key, or when no value of a range can be used by itself."""
    values = of_key.choices if isinstance(of_key, Categorical) else [of_key.low, of_key.high]
    faults = []
    for value in values:
        try:
            check_objective(trial_config(sweep, {key: value}, "t", Path("runs")), [key])
        except (ConfigError, ObjectiveError) as error:
            faults.append(str(error))
    if len(faults) == len(values):
        raise ConfigError(f"space.{key}: no value of it can be used. {faults[0]}")


def base_config(sweep: SweepConfig) -> RunConfig:
    """The configuration that all trials share. Raises `ConfigError`."""
    return load_config(sweep.config, sweep.overrides)


def trial_config(sweep: SweepConfig, values: Mapping[str, Any], run_id: str, root: Path) -> RunConfig:
    """The configuration of one trial. Raises `ConfigError` for values that do not go together."""
    changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    names = [f"run.id={json.dumps(run_id)}", f"run.root={json.dumps(str(root))}"]
    return load_config(sweep.config, [*sweep.overrides, *changes, *names])
