"""One schema for YAML, the command line, Python and the web form.

    RunConfig
    ├── model         weights, precision, LoRA
    ├── data          prompts and references, and their split
    ├── reward        a preset, your own functions, or both
    ├── objective     recipe and hooks (resolved in kit.objective)
    ├── teacher       a model from which the policy learns, in addition to rewards
    ├── generation    sampling of completions
    ├── selection     choice of the groups to train on
    ├── optimisation  steps, batch, learning rate
    ├── evaluation    held-out score before, during and after training
    └── run           id, seed, folders, checkpoints, trackers

Unknown keys are refused with the nearest valid one. This module imports pydantic and yaml only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from kit.config.loading import apply_override, explain, leaves, read_yaml
from kit.config.sections import EMBEDDED as EMBEDDED
from kit.config.sections import EMBEDDED_MODELS as EMBEDDED_MODELS
from kit.config.sections import INSTALL_SMOLLM2 as INSTALL_SMOLLM2
from kit.config.sections import SMOLLM2 as SMOLLM2
from kit.config.sections import SMOLLM2_PACKAGE as SMOLLM2_PACKAGE
from kit.config.sections import DataConfig as DataConfig
from kit.config.sections import EvaluationConfig as EvaluationConfig
from kit.config.sections import GenerationConfig as GenerationConfig
from kit.config.sections import LoraConfig as LoraConfig
from kit.config.sections import ModelConfig as ModelConfig
from kit.config.sections import ObjectiveConfig as ObjectiveConfig
from kit.config.sections import OptimisationConfig as OptimisationConfig
from kit.config.sections import RewardConfig as RewardConfig
from kit.config.sections import RewardFunction as RewardFunction
from kit.config.sections import RunSection as RunSection
from kit.config.sections import Section as Section
from kit.config.sections import SelectionConfig as SelectionConfig
from kit.config.sections import TeacherConfig as TeacherConfig
from kit.errors import ConfigError
from kit.registry import did_you_mean

PRESET_FOLDER = Path(__file__).parent / "presets"


class RunConfig(Section):
    """The configuration of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    optimisation: OptimisationConfig = Field(default_factory=OptimisationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    run: RunSection = Field(default_factory=RunSection)

    @model_validator(mode="after")
    def _check_batch(self) -> RunConfig:
        batch, group = self.optimisation.batch_size, self.generation.num_generations
        if batch % group:
            below, above = batch - batch % group, batch + group - batch % group
            nearest = " or ".join(str(size) for size in (below, above) if size)
            raise ValueError(
                f"optimisation.batch_size: {batch} is no multiple of the group size {group} (generation.num_generations); "
                f"use {nearest}"
            )
        micro = self.optimisation.micro_batch_size
        if micro is not None and batch % micro:
            divisors = [size for size in range(1, batch + 1) if batch % size == 0]
            near = min(divisors, key=lambda size: (abs(size - micro), size))
            raise ValueError(
                f"optimisation.micro_batch_size: {micro} does not divide batch_size {batch}; use {near}, for example"
            )
        return self

    def to_yaml(self) -> str:
        """The configuration as YAML, including all defaults."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def preset_names() -> list[str]:
    """Names of the configurations that come with the kit."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def load_config(source: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Load and validate a configuration from a preset's name, a YAML file, a mapping or a configuration.

    `overrides` are `section.key=value` strings whose values are YAML (`objective.clip.eps_high=0.28`). Raises `ConfigError`
    with one line per fault.
    """
    if isinstance(source, RunConfig):
        tree, origin = source.model_dump(mode="json"), "the configuration"
    elif isinstance(source, Mapping):
        tree, origin = copy.deepcopy(dict(source)), "the configuration"
    else:
        path = find_config(source)
        tree, origin = read_yaml(path), path.name
    original = copy.deepcopy(tree)
    for override in overrides:
        apply_override(tree, override)
    _check_recipe_change(original, tree, overrides)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, origin, RunConfig)) from None


def non_defaults(tree: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value, default) of all values that differ from the default, except the run's id and folder.

    The default of a key that the schema does not have is the text `not set`.
    """
    defaults = dict(leaves(RunConfig().model_dump(mode="json")))
    rows = ((key, value, defaults.get(key, "not set")) for key, value in leaves(tree))
    return [row for row in rows if row[0] not in ("run.id", "run.root") and row[1] != row[2]]


def _check_recipe_change(original: dict[str, Any], changed: dict[str, Any], overrides: Sequence[str]) -> None:
    """Refuse a new recipe for a section that sets every hook, as that of a saved run: the hooks would override it."""
    old, new = original.get("objective"), changed.get("objective")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("recipe") == new.get("recipe"):
        return
    hooks = [name for name in ObjectiveConfig.model_fields if name != "recipe"]
    keys = {f"{override.partition('=')[0].strip()}." for override in overrides}
    winning = [name for name in hooks if not any(key.startswith(f"objective.{name}.") for key in keys)]
    if all(old.get(name) is not None for name in hooks) and winning and "objective." not in keys:
        recipe = new.get("recipe")
        raise ConfigError(
            f"objective.recipe={recipe} would not change {', '.join(winning)}: the configuration sets these hooks, as that of "
            "every saved run, and they override the recipe. Replace the complete section with "
            f"-o 'objective={{recipe: {recipe}}}', or override these hooks, too."
        )


def find_config(source: str | Path) -> Path:
    """The file of a path or of a preset's name. Raises `ConfigError` if there is none."""
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESET_FOLDER / f"{source}.yaml"
    if path.name == str(source) and preset.is_file():
        return preset
    raise ConfigError(
        f"There is no file '{source}' and no preset of that name.{did_you_mean(str(source), preset_names())} "
        f"Presets: {', '.join(preset_names())}. `grpo-kit init` writes a commented file to start from."
    )
